"""The grid: cases that repeat what another case of the same test shows.

Tests are M + N, as the product is. A test may cross schemes with other things: architectures, layouts, dtypes. The
default run keeps one scheme for each set of seams with all of them. Every other scheme, and every other set of options,
meets one of them, and the next scheme meets the next one. The rest is marked `grid`.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import hf_posenc
from hf_posenc.scheme import Scheme

# Files whose tests cross schemes with other things. The second is one more architecture, with only one scheme for each
# set of seams.
CROSSED = {
    "test_adapters", "test_attend", "test_cache_bytes", "test_checkpoints_on_disk", "test_device_map", "test_engine",
    "test_fitting", "test_heads",
    "test_in_use", "test_matching", "test_matrix", "test_peft", "test_strength", "test_trl",
}  # fmt: skip
ONE_MORE_ARCHITECTURE = {"test_vit"}
# test_attend.py and the schemes' own files test all options: here a set of them takes part in every third test.
OPTIONS_ELSEWHERE = {"test_matrix"}

_SEAMS = (
    "embed", "project", "recall", "score", "weigh", "mix", "carry", "finish", "feed", "make_common", "state_bytes",
)  # fmt: skip


def _seams(name: str) -> tuple[bool, ...]:
    scheme = hf_posenc.schemes()[name].cls
    return tuple(getattr(scheme, seam) is not getattr(Scheme, seam) for seam in _SEAMS)


# One scheme for each set of seams: the others use nothing else of an architecture or of transformers.
FIRSTS = frozenset({_seams(name): name for name in reversed(hf_posenc.schemes())}.values())


def _subject(case: pytest.Item) -> tuple[str, str] | None:
    """Return the scheme of a case and its options, or `None`."""
    values = dict(case.callspec.params)
    # "t5" is the name of an architecture, too.
    name = values.get("scheme") or next((v[1] for v in values.values() if isinstance(v, tuple) and len(v) > 1), None)
    name = name or values.get("name")
    if not isinstance(name, str) or name not in hf_posenc.schemes():
        return None
    parts = [part for value in values.values() for part in (value if isinstance(value, tuple) else (value,))]
    return name, str([part for part in parts if isinstance(part, dict)])


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of the grid."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.path.stem in CROSSED | ONE_MORE_ARCHITECTURE:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for turn, cases in enumerate(tests.values()):
        subjects: dict[tuple[str, str], list[pytest.Item]] = {}
        for case in cases:
            subject = _subject(case)
            if subject is None:
                break  # Not a test of schemes.
            subjects.setdefault(subject, []).append(case)
        else:
            for case in set(cases) - _kept(subjects, cases[0].path.stem, turn):
                case.add_marker(pytest.mark.grid)


def _kept(subjects: dict[tuple[str, str], list[pytest.Item]], file: str, turn: int) -> set[pytest.Item]:
    """Return the cases of a test that are no part of the grid, given its place among the tests."""
    kept: set[pytest.Item] = set()
    met: set[str] = set()
    for number, ((name, _), cases) in enumerate(subjects.items()):
        default = name not in met
        met.add(name)
        if default and name in FIRSTS:
            kept.update(cases)
        elif file not in ONE_MORE_ARCHITECTURE and (default or file not in OPTIONS_ELSEWHERE or number % 3 == turn % 3):
            kept.add(cases[number % len(cases)])
    return kept
