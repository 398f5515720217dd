"""Masks and positions of every form: each is right, as its plain form is, or is refused in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from grid import once
from models import SAME, auto, inputs, moved, stock, tokens
from torch import Tensor

import hf_posenc
from hf_posenc import PosencError
from hf_posenc.errors import DirectionError, OptionError, PositionError, ShapeError
from hf_posenc.patches.body import FUNCTION_ARGUMENTS

ROWS, LENGTH = 2, 7
ONES = torch.ones(ROWS, LENGTH, dtype=torch.long)
PLACES = torch.arange(LENGTH)[None]
SEEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
ADDED = torch.where(SEEN, 0.0, -torch.inf)

WRONG: dict[str, dict[str, tuple[type[PosencError], Any]]] = {
    "attention_mask": {
        "list": (ShapeError, ONES.tolist()),
        "numpy": (ShapeError, ONES.numpy()),
        "number": (ShapeError, 1),
        "sparse": (ShapeError, ONES.to_sparse()),
        "1-D": (ShapeError, ONES[0]),
        "3-D": (ShapeError, SEEN[0].expand(ROWS, -1, -1)),
        "5-D": (ShapeError, SEEN[None]),
        "complex": (ShapeError, ONES.to(torch.complex64)),
        "negative": (ShapeError, -ONES),
        "half": (ShapeError, 0.5 * ONES),
        "NaN": (ShapeError, ONES * torch.nan),
        "short": (PositionError, ONES[:, 1:]),
        "rows": (PositionError, ONES[:1].expand(3, -1)),
        "empty": (PositionError, ONES[:, :0]),
        "numbers that fall": (PositionError, 3 - ONES.cumsum(1) // 4),
        "4-D integers to be added": (ShapeError, torch.where(SEEN, 0, -10_000)),
        "4-D NaN": (ShapeError, ADDED * torch.nan),
        "4-D infinity": (ShapeError, -ADDED),
        "4-D floating ones": (ShapeError, SEEN.float()),
        "4-D rows": (ShapeError, SEEN.expand(3, -1, -1, -1)),
        "4-D heads": (ShapeError, SEEN.expand(1, 3, -1, -1)),
        "4-D short": (ShapeError, SEEN[..., 1:]),
    },
    "position_ids": {
        "list": (ShapeError, PLACES.tolist()),
        "numpy": (ShapeError, np.arange(LENGTH)[None]),
        "sparse": (ShapeError, PLACES.to_sparse()),
        "float": (PositionError, PLACES.float()),
        "bool": (PositionError, PLACES > 0),
        "complex": (PositionError, PLACES.to(torch.complex64)),
        "negative": (PositionError, PLACES - 1),
        "huge": (PositionError, PLACES + 2**40),
        "1-D": (PositionError, PLACES[0]),
        "3-D": (PositionError, PLACES.expand(3, ROWS, -1)),
        "rows": (PositionError, PLACES.expand(3, -1)),
        "short": (PositionError, PLACES[:, 1:]),
        "empty": (PositionError, PLACES[:, :0]),
    },
    "input_ids": {"list": (ShapeError, ONES.tolist()), "numpy": (ShapeError, ONES.numpy())},
}
RIGHT: dict[str, dict[str, Tensor]] = {
    "attention_mask": {
        **{str(dtype): ONES.to(dtype) for dtype in (torch.bool, torch.uint8, torch.int8, torch.half, torch.double)},
        "twos": 2 * ONES,
        "longer": torch.nn.functional.pad(ONES, (0, 2)),
        "with a gradient": ONES.float().requires_grad_(),
        **{f"4-D {dtype}": ADDED.to(dtype) for dtype in (torch.half, torch.bfloat16, torch.double)},
        "4-D integers": SEEN.long(),
        "4-D smallest": torch.where(SEEN, 0.0, torch.finfo(torch.half).min),
    },
    "position_ids": {str(dtype): PLACES.to(dtype) for dtype in (torch.uint8, torch.int8, torch.int32)},
}


def forward(model: Any, architecture: str, **given: Any) -> Tensor:
    call = inputs(architecture, tokens(architecture, ROWS, LENGTH))
    if auto(architecture).__name__ == "AutoModelForSeq2SeqLM":
        given = {f"decoder_{name}": value for name, value in given.items()}
    return model(**{**call, **given}).logits


def cases(table: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [(name, form) for name, forms in table.items() for form in forms]


@pytest.mark.parametrize(("name", "form"), cases(WRONG))
@pytest.mark.parametrize("architecture", once(["llama", "gpt2", "t5", "bert", "roberta", "modernbert", "gemma3"]))
def test_what_makes_no_sense_is_refused_in_one_line(architecture: str, name: str, form: str) -> None:
    error, value = WRONG[name][form]
    model = hf_posenc.patch(stock(architecture), "alibi")
    with pytest.raises(error) as caught:
        forward(model, architecture, **{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "form"), cases(RIGHT))
@pytest.mark.parametrize("architecture", once(["llama", "gpt2", "t5", "gemma3"]))
def test_other_forms_are_as_the_plain_one(architecture: str, name: str, form: str) -> None:
    model = moved(hf_posenc.patch(stock(architecture), "fire"), 0.3)
    got, want = forward(model, architecture, **{name: RIGHT[name][form]}), forward(model, architecture)
    torch.testing.assert_close(got, want, **SAME)


@pytest.mark.parametrize("name", [*sorted(FUNCTION_ARGUMENTS - {"cache", "kwargs"}), "is_causal"])
@pytest.mark.parametrize("architecture", once(["llama", "bert", "gpt2", "t5", "modernbert", "vit", "gpt_oss"]))
def test_keywords_of_attention_functions_are_refused(architecture: str, name: str) -> None:
    """Stock modules hand them on, and sdpa adds a `position_bias` or hides keys where it reads one."""
    model = hf_posenc.patch(stock(architecture), "alibi")
    value = auto(architecture).__name__ != "AutoModelForCausalLM" if name == "is_causal" else 0.5
    with pytest.raises((DirectionError, OptionError), match=name):
        model(**inputs(architecture, tokens(architecture, ROWS, LENGTH)), **{name: value})
