"""Hidden keys: their numbers, and gradients past them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_posenc.ops.counting import values_at_counts
from hf_posenc.ops.masking import fill_hidden_, softmax_of_seen
from hf_posenc.ops.stick import broken

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
    functions: list[tuple[Callable[..., Tensor | tuple[Tensor, ...]], tuple[Tensor, ...]]] = [
        (lambda x: softmax_of_seen(x, keep), (numbers(2, 2, 3, 5),)),
        (lambda x, at: values_at_counts(x, at, keep), (numbers(2, 2, 3, 5), numbers(2, 2, 3, 3, seed=1))),
        (lambda x: broken(x, keep.expand(*keep.shape[:2], 3, 5)), (numbers(2, 2, 3, 5),)),
    ]
    for function, inputs in functions:
        assert torch.autograd.gradcheck(function, tuple(x.requires_grad_() for x in inputs))
