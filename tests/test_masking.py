"""Hidden keys, and the backward passes by hand that small calls do without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_posenc.ops import masking
from hf_posenc.ops.counting import values_at_counts
from hf_posenc.ops.masking import fill_hidden_, softmax_of_seen
from hf_posenc.ops.stick import broken

CAUSAL = torch.ones(3, 5, dtype=torch.bool).tril(2)[None, None]
PADDED = CAUSAL & (torch.arange(5) > torch.tensor([[0], [2]]))[:, None, None]
MASKS = {
    "all": torch.ones(1, 1, 3, 5, dtype=torch.bool),
    "causal": CAUSAL,
    "padded": PADDED,
    "padding only": (torch.arange(5) > 1).expand(2, 1, 1, 5),
    "none in a row": CAUSAL & (torch.arange(3) != 1)[:, None],
    "by head": torch.rand(2, 2, 3, 5, generator=torch.Generator().manual_seed(0)) < 0.7,
}


@pytest.fixture(params=[0, 2**16], ids=["by hand", "by autograd"])
def by_hand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(masking, "_WORTH_IT", request.param)
    return request.param == 0


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("keep", MASKS.values(), ids=MASKS)
def test_hidden_keys_are_filled(keep: Tensor, by_hand: bool) -> None:
    x = numbers(2, 2, 3, 5)
    x = x.where(keep, torch.nan)
    want = x.masked_fill(~keep, -7.0)
    assert fill_hidden_(x, keep, -7.0) is x
    assert torch.equal(x, want)
    assert fill_hidden_(x, None, 1.0) is x


@pytest.mark.parametrize("keep", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("what", ["softmax", "counts", "counts, table", "stick"])
def test_gradients_and_theirs_are_right(what: str, keep: Tensor, by_hand: bool) -> None:
    functions: dict[str, tuple[Callable[..., Tensor | tuple[Tensor, ...]], tuple[Tensor, ...]]] = {
        "softmax": (lambda x: softmax_of_seen(x, keep), (numbers(2, 2, 3, 5),)),
        "counts": (lambda x, at: values_at_counts(x, at, keep), (numbers(2, 2, 3, 5), numbers(2, 2, 3, 3, seed=1))),
        "counts, table": (lambda at: values_at_counts(numbers(2, 2, 3, 5), at, keep), (numbers(2, 2, 3, 3, seed=1),)),
        "stick": (lambda x: broken(x, keep.expand(*keep.shape[:2], 3, 5)), (numbers(2, 2, 3, 5),)),
    }
    function, inputs = functions[what]
    inputs = tuple(x.requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("keep", MASKS.values(), ids=MASKS)
def test_both_ways_agree(keep: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[Tensor]:
        found = []
        for function, shapes in (
            (lambda x: softmax_of_seen(x, keep), [(2, 2, 3, 5)]),
            (lambda x, at: values_at_counts(x, at, keep), [(2, 2, 3, 5), (2, 2, 3, 3)]),
            (lambda x: torch.cat(broken(x, keep.expand(*keep.shape[:2], 3, 5)), -1), [(2, 2, 3, 5)]),
        ):
            inputs = [numbers(*shape, seed=7).float().requires_grad_() for shape in shapes]
            output = function(*inputs)
            gradient = numbers(*output.shape, seed=8).float()
            for _ in range(2):  # what was kept for the first must do for the second
                found += [output, *torch.autograd.grad(output, inputs, gradient, retain_graph=True)]
        return found

    plain = results()
    monkeypatch.setattr(masking, "_WORTH_IT", 0)
    for got, want in zip(results(), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
