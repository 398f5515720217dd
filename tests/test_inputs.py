"""The steps from the arguments of a forward to its new tokens, each alone: mask, samples, positions, sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc.patches.context import Request, read, resolve_positions, same_sequence, sequences

PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
NUMBERED = torch.tensor([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]])
RESTARTED = torch.tensor([[0, 1, 0, 1, 2]])


def request(past: int = 0, given: Tensor | None = None, **call: Any) -> Request:
    return read(call, torch.zeros(2, 5 - past, dtype=torch.long), past, given)


@pytest.mark.parametrize(
    ("given", "positions"),
    [
        ({}, [[0, 1, 2, 3, 4]]),
        ({"past": 2}, [[2, 3, 4]]),
        ({"attention_mask": PADDED}, [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]),
        ({"attention_mask": PADDED, "past": 2}, [[0, 1, 2], [2, 3, 4]]),
        ({"attention_mask": NUMBERED}, [[0, 1, 0, 1, 1], [0, 1, 2, 3, 4]]),
        ({"attention_mask": PADDED, "given": RESTARTED}, [[0, 1, 0, 1, 2]]),
        ({"seq_idx": torch.tensor([[0, 0, 1, 1, 1]] * 2)}, [[0, 1, 0, 1, 2]]),
    ],
)
def test_positions_are_those_given_or_counted(given: dict[str, Any], positions: list[list[int]]) -> None:
    assert resolve_positions(request(**given)).tolist() == positions


def test_padding_and_packing_are_read_from_the_mask() -> None:
    assert request(attention_mask=PADDED).real.equal(PADDED == 1)
    assert request(attention_mask=torch.ones(2, 5)).real is None
    assert not request(attention_mask=PADDED).may_be_packed()
    numbered = request(attention_mask=NUMBERED)
    assert numbered.may_be_packed()
    assert not request(attention_mask=torch.ones(2, 1, 5, 5).bool(), given=RESTARTED).may_be_packed()
    numbers = sequences(resolve_positions(numbered), numbered.real, numbered.samples)
    assert numbers.equal(NUMBERED)
    seen = same_sequence(numbers, numbers, causal=True, float_dtype=None)
    assert seen[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0] * 4 + [1],
    ]
