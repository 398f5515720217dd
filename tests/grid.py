"""Which cases of a product run when: by default, with the grid in CI (`grid`), or on demand (`slow`).

The code is M schemes and N architectures, so the tests are M + N. A test is written over its whole product, and this
file says which of its cases run. No mark depends on the order of tests.

- Schemes on architectures: by default the pairs before the bar in PAIRS, in the grid those behind it, on demand the
  rest. A set of options is in the grid, on the first architecture that it meets.
- Schemes in several forms (layouts, masks, dtypes): by default each in the first form, and TYPICAL ones in all. The
  rest is in the grid; of those with options, which are most, a fourth, by the checksum of their names.
- Models in several forms: by default each in the first form. TYPICAL ones in all forms are in the grid, the rest runs
  on demand.
- What is done to a scheme as a whole, whatever it computes, is the same for all with its seams. A test of that is
  marked `generic`: it runs with FIRSTS, and with the other schemes on demand.
- A test that is marked `grid` itself runs there with pairs before the bar, with each scheme in its first form, or with
  TYPICAL models. The rest runs on demand.
- A test of a few schemes or models is about these, and runs as it stands.

Pairs before the bar whose scheme is TYPICAL are marked `seams`, too: they show whether another transformers behaves.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import composites
import pytest
from models import ARCHITECTURES, TINY

import hf_posenc
from hf_posenc.scheme import Scheme

# Where a value is among the parameters of a test: the name of one, and the place in it if it is a tuple.
Place = tuple[str, int]
Row = dict[Place, Any]
# Files whose subject is what transformers itself does with caches.
TRANSFORMERS = {"test_cache"}
# More schemes or models than these are all of them.
FEW = 10
# Of so many forms, a set of options meets one in the grid.
_DRAWN = 4

# Architectures that a scheme meets: by default | with the grid.
PAIRS = {
    # One scheme for each set of seams.
    "alibi":           "llama bert qwen3         | gpt2 t5",
    "attention_sinks": "gpt2 gpt_oss             | t5",
    "comrope_ap":      "t5 phi3                  | llama vit",
    "cope":            "llama modernbert mixtral | t5",
    "disentangled":    "gpt2 roberta mistral     | t5",
    "fox_pro":         "t5 gemma3                | gpt2",
    "gated_output":    "llama gpt_neox           | t5",
    "near":            "t5                       | llama",
    "first_key":       "llama                    | t5 bert",
    "kv_shift":        "t5 llama                 | gpt2",
    "learned":         "gpt2 umt5 gemma          | llama vit",
    "nope":            "t5 smollm3               | llama bert",
    "selective_rope":  "llama qwen2 mt5          | t5 gemma3",
    "shaw":            "gpt2 vit                 | llama",
    "stick_breaking":  "t5 gemma2                | llama",
    "tape":            "llama qwen3_moe          | gpt2 bert vit",
    "xpos":            "gpt2 olmo2               | llama",
    # The others use nothing else of an architecture.
    "cape":            "t5",
    "comrope_ld":      "gpt2                     | vit",
    "fire":            "gpt2                     | llama bert",
    "fire_s":          "t5",
    "fope":            "llama",
    "fox":             "gpt2",
    "grape_a":         "gpt2",
    "inkling":         "llama                    | t5 bert",
    "kerple":          "t5",
    "liere":           "gpt2                     | vit",
    "log_temperature": "t5",
    "path":            "t5 llama                 | gpt2",
    "pope":            "gpt2                     | llama t5",
    "repo":            "llama",
    "rope":            "gpt2                     | vit",
    "rope2d":          "t5                       | vit",
    "sandwich":        "llama",
    "sinusoidal":      "t5",
    "t5":              "gpt2",
    "t5_clipped":      "t5",
    "transformer_xl":  "gpt2",
}  # fmt: skip

_SEAMS = (
    "embed", "project", "recall", "score", "weigh", "mix", "carry", "finish", "feed", "make_common", "history",
)  # fmt: skip


def _seams(name: str) -> tuple[bool, ...]:
    """Return which seams a scheme overrides."""
    scheme = hf_posenc.schemes()[name].cls
    return tuple(getattr(scheme, seam) is not getattr(Scheme, seam) for seam in _SEAMS)


SAMPLE = {scheme: row.split("|")[0].split() for scheme, row in PAIRS.items()}
WITH_GRID = {scheme: row.replace("|", "").split() for scheme, row in PAIRS.items()}
# The first scheme of the table for each set of seams.
FIRSTS = frozenset({_seams(name): name for name in reversed(PAIRS)}.values())
# And a model for each way that one is written: read from its code, with windows, by hand, of several.
TYPICAL = {*FIRSTS, "llama", "gemma3", "bert", "gpt2", "t5", "llava", "encoder_decoder"}


def once(values: Iterable[Any], more: int | None = None) -> list[Any]:
    """Return parameters of a test that takes seconds: by default it runs with the first of them.

    With the grid it runs with all others, or with so many `more` and with the rest on demand.
    """
    first, *others = values
    rows = [other if isinstance(other, tuple) else (other,) for other in others]
    many = len(rows) if more is None else more
    return [
        first,
        *(pytest.param(*row, marks=pytest.mark.grid) for row in rows[:many]),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in rows[many:]),
    ]


def mark(items: list[pytest.Item]) -> None:
    """Mark the cases of every test that has all schemes or all models among its parameters."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.stem in TRANSFORMERS:
            item.add_marker(pytest.mark.seams)
        if hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        rows = [_values(case) for case in cases]
        schemes = _column(rows, hf_posenc.schemes(), FEW)
        models = _column(rows, {*ARCHITECTURES, *TINY, *composites.KINDS}, 1 if schemes else FEW)
        if schemes or models:
            _mark_test(cases, [_Subject.of(row, schemes, models) for row in rows])


class _Subject(NamedTuple):
    """The scheme of a case and the model that it runs on, each empty if the test does not cross them, and options."""

    scheme: str
    model: str
    options: str

    @classmethod
    def of(cls, row: Row, schemes: Place | None, models: Place | None) -> _Subject:
        # A dictionary beside models alone says what is done with them: they are the same ones in another form.
        options = [str(value) for value in row.values() if isinstance(value, dict) and value] if schemes else []
        return cls(row.get(schemes, ""), row.get(models, ""), "".join(options))


def _mark_test(cases: list[pytest.Item], subjects: list[_Subject]) -> None:
    models: dict[tuple[str, str], set[str]] = {}
    for one in subjects:
        models.setdefault((one.scheme, one.options), set()).add(one.model)
    met: set[tuple[str, str]] = set()
    for case, one in zip(cases, subjects, strict=True):
        subject = (one.scheme or one.model, one.options)
        first = subject not in met
        met.add(subject)
        late = case.get_closest_marker("grid") is not None
        if case.get_closest_marker("generic") and one.scheme and one.scheme not in FIRSTS:
            when = "slow"
        elif one.scheme and len(models[subject]) > 1:
            when = _when_paired(one, first and not late, late)
        else:
            when = _when_alone(one, first, late, case.name)
        if when:
            case.add_marker(when)
        elif one.model and one.scheme in FIRSTS and not late:
            case.add_marker(pytest.mark.seams)


def _when_paired(one: _Subject, first: bool, late: bool) -> str:
    """Return the mark of a case of a scheme that meets several models. `late` are those that a test marks itself."""
    if one.options:
        return "grid" if first else "slow"
    if one.model in SAMPLE.get(one.scheme, ()):
        return ""
    return "grid" if one.model in WITH_GRID.get(one.scheme, ()) and not late else "slow"


def _when_alone(one: _Subject, first: bool, late: bool, name: str) -> str:
    """Return the mark of a case of a scheme or model in one of several forms."""
    typical = (one.scheme or one.model) in TYPICAL and not one.options
    if late:
        return "" if typical or (first and one.scheme) else "slow"
    if first or (one.scheme and typical):
        return ""
    drawn = not one.options or zlib.crc32(name.encode()) % _DRAWN == 0
    return "grid" if typical or (one.scheme and drawn) else "slow"


def _values(case: pytest.Item) -> Row:
    """Return the values of a case by parameter, and by place within a parameter that is a tuple."""
    rows = {name: value if isinstance(value, tuple) else (value,) for name, value in case.callspec.params.items()}
    return {(name, place): value for name, row in rows.items() for place, value in enumerate(row)}


def _column(rows: list[Row], names: Iterable[str], few: int) -> Place | None:
    """Return which values are nothing but such names, and more than a few of them."""
    for key in rows[0]:
        found = {value.partition("+")[0] if isinstance(value := row.get(key), str) else "" for row in rows}
        if len(found) > few and found <= {*names}:
            return key
    return None
