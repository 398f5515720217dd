"""Hidden keys: their numbers, and gradients past them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hf_posenc
from hf_posenc.operands import Block, Positions
from hf_posenc.ops import fill_hidden_, softmax_of_seen
from hf_posenc.schemes.cope import CoPE, between
from hf_posenc.schemes.stick_breaking import StickBreaking

CAUSAL = torch.ones(3, 5, dtype=torch.bool).tril(2)[None, None]
MASKS = {
    "all": torch.ones(1, 1, 3, 5, dtype=torch.bool),
    "padded": CAUSAL & (torch.arange(5) > torch.tensor([[0], [2]]))[:, None, None],
    "none in a row": CAUSAL & (torch.arange(3) != 1)[:, None],
    "by head": torch.rand(2, 2, 3, 5, generator=torch.Generator().manual_seed(0)) < 0.7,
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("keep", MASKS.values(), ids=MASKS)
def test_hidden_keys_are_filled_and_pass_no_gradient(keep: Tensor) -> None:
    x = numbers(2, 2, 3, 5).where(keep, torch.nan)
    want = x.masked_fill(~keep, -7.0)
    assert fill_hidden_(x, keep, -7.0) is x
    assert torch.equal(x, want)
    assert fill_hidden_(x, None, 1.0) is x
    geometry = hf_posenc.Geometry(heads=2, kv_heads=2, head_dim=4, hidden_size=8)
    cope, stick = CoPE(geometry, npos=3), StickBreaking(geometry)
    block = Block(Positions(torch.arange(5, 8)[None], torch.arange(5)[None]), 7, keep)
    functions: list[tuple[Callable[..., Tensor | tuple[Tensor, ...]], tuple[Tensor, ...]]] = [
        (lambda x: softmax_of_seen(x, keep), (numbers(2, 2, 3, 5),)),
        (lambda x, at: between(at, cope.count(x, x, x, block)), (numbers(2, 2, 3, 5), numbers(2, 2, 3, 3, seed=1))),
        (lambda x: stick.break_stick(x, block), (numbers(2, 2, 3, 5),)),
    ]
    for function, inputs in functions:
        assert torch.autograd.gradcheck(function, tuple(x.requires_grad_() for x in inputs))
