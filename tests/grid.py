"""The grid: cases that repeat what another case of the same test shows.

Tests are M + N, as the product is. A test that crosses schemes with architectures or the like runs one scheme for each
set of seams with all of them (one in six of the trained and random models), and every other scheme (or set of options)
with one of them, in turn; of tests of whole models, every other scheme meets a third. The rest is marked `grid`. What
runs for a set of seams is marked `seams`, too: that is enough to see whether another transformers behaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

import hf_posenc
from hf_posenc.scheme import Scheme

# Files whose tests cross schemes with other things.
CROSSED = {
    "test_adapters", "test_attend", "test_cache", "test_checkpoints_on_disk", "test_device_map",
    "test_engine", "test_families", "test_fitting", "test_in_use", "test_masks_and_positions", "test_matching",
    "test_matrix", "test_packing", "test_pages", "test_peft", "test_strength", "test_trl", "test_vit",
}  # fmt: skip
# Files whose subject is what transformers itself does with caches, checkpoints and its own symbols.
TRANSFORMERS = {"test_cache", "test_checkpoints", "test_public"}
# Of these every scheme takes part in every test: they are about schemes.
ALONE = {"test_attend", "test_engine"}
# Tests on the trained checkpoints of three architectures, of which one in turn, and behind them on random models of
# others: one in six. Of other schemes with these three, the grid has one in so many: each pair meets some tests.
TRAINED = 3
OTHER_PAIRS = {"test_matrix": 6, "test_strength": 12}
# Further architectures, on which only one scheme for each set of seams runs; of many, one in five by default.
ONE_MORE = {"test_families", "test_vit"}

# Of these files, whose products would take half an hour, one case of the grid in so many runs with it. The others are
# `slow`: they run on demand.
SAMPLED = {
    "test_composites": 6, "test_derivatives": 4, "test_first_use": 10, "test_keys_ahead": 4,
    "test_masks_and_positions": 6, "test_packing": 4, "test_targets": 24, "test_warnings": 9,
}  # fmt: skip

# Of these files, which cross schemes and forms of input, one default case in so many stays; the others go to the grid.
THINNED = {
    "test_composites": 2, "test_data": 2, "test_derivatives": 3, "test_keys_ahead": 3, "test_masks_and_positions": 3,
    "test_native": 4, "test_packing": 2, "test_reloading": 2, "test_targets": 4,
}  # fmt: skip

_SEAMS = (
    "embed", "project", "recall", "score", "weigh", "mix", "carry", "finish", "feed", "make_common", "history",
)  # fmt: skip


def _seams(name: str) -> tuple[bool, ...]:
    scheme = hf_posenc.schemes()[name].cls
    return tuple(getattr(scheme, seam) is not getattr(Scheme, seam) for seam in _SEAMS)


# One scheme for each set of seams: the others use nothing else of an architecture or of transformers.
FIRSTS = frozenset({_seams(name): name for name in reversed(hf_posenc.schemes())}.values())


def once(values: Iterable[Any]) -> list[Any]:
    """Return parameters of a test that takes seconds: by default it runs with the first of them."""
    first, *others = values
    rows = (other if isinstance(other, tuple) else (other,) for other in others)
    return [first, *(pytest.param(*row, marks=pytest.mark.grid) for row in rows)]


def _subject(case: pytest.Item) -> tuple[str, str] | None:
    """Return the scheme of a case and its options, or `None`."""
    values = dict(case.callspec.params)
    # "t5" is the name of an architecture, too.
    name = values.get("scheme") or next((v[1] for v in values.values() if isinstance(v, tuple) and len(v) > 1), None)
    name = name or values.get("name")
    if not isinstance(name, str) or name.partition("+")[0] not in hf_posenc.schemes():
        return None
    parts = [part for value in values.values() for part in (value if isinstance(value, tuple) else (value,))]
    return name, str([part for part in parts if isinstance(part, dict)])


def mark(items: list[pytest.Item]) -> list[pytest.Item]:
    """Mark the cases of the grid; take out, and return, what other pairs of a scheme and an architecture show."""
    tests: dict[str, dict[tuple[str, str] | None, list[pytest.Item]]] = {}
    left_out: list[pytest.Item] = []
    for item in items:
        if item.path.stem in TRANSFORMERS:
            item.add_marker(pytest.mark.seams)
        if hasattr(item, "callspec") and item.path.stem in CROSSED:
            tests.setdefault(item.nodeid.partition("[")[0], {}).setdefault(_subject(item), []).append(item)
    for turn, subjects in enumerate(tests.values()):
        if None in subjects:
            continue  # not a test of schemes
        met: set[str] = set()
        for number, ((name, _), cases) in enumerate(subjects.items()):
            file = cases[0].path.stem
            if name in FIRSTS and name not in met:
                trained = TRAINED if file in OTHER_PAIRS else 0
                few = [*cases[:trained][number % 3 :][:1], *cases[trained + number % 5 :: 6 if trained else 5]]
                few = few if trained or len(cases) > 5 else cases
                for case in cases:
                    case.add_marker(pytest.mark.seams if case in few else pytest.mark.grid)
            else:
                absent = file in ONE_MORE or (file not in ALONE and (turn + number) % 3)
                rare = OTHER_PAIRS.get(file, 1) if len(cases) > 2 else 1
                for place, case in enumerate(cases):
                    if absent or place != number % len(cases):
                        case.add_marker(pytest.mark.grid)
                        if (turn + number + place) % rare:
                            left_out.append(case)
            met.add(name)
    for file, count in SAMPLED.items():
        cases = [item for item in items if item.path.stem == file and item.get_closest_marker("grid")]
        for number, case in enumerate(cases):
            if number % count:
                case.add_marker(pytest.mark.slow)
    for file, count in THINNED.items():
        cases = [item for item in items if item.path.stem == file and hasattr(item, "callspec")]
        for number, case in enumerate(case for case in cases if not case.get_closest_marker("grid")):
            if number % count:
                case.add_marker(pytest.mark.grid)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    return left_out
