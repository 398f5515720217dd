"""The network of pairs, a few pairs after the other, against all of them at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hf_posenc.schemes.families import layers
from hf_posenc.schemes.families.layers import PairNetwork


@pytest.mark.parametrize(
    ("batch", "rows", "pairs", "channels", "width", "slope", "residual"),
    [
        (1, 1, 1, 1, 1, 0.0, False),
        (1, 1, 23, 2, 5, 0.01, True),
        (5, 5, 17, 3, 50, 0.01, False),
        # One row of the second input stands for the whole batch.
        (5, 1, 23, 2, 7, 0.0, True),
        (3, 1, 9, 1, 31, 0.01, False),
        (4, 4, 2, 3, 13, 0.0, True),
    ],
)
def test_a_few_pairs_after_the_other_give_the_same_output_and_gradients(
    batch: int, rows: int, pairs: int, channels: int, width: int, slope: float, residual: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Or the pairs here would be few enough for one go.
    monkeypatch.setattr(layers, "_IN_CACHE", 40)
    network = PairNetwork(2 * channels, width, channels, negative_slope=slope, residual=residual).double()
    inputs = [torch.randn(n, channels, pairs, dtype=torch.float64, requires_grad=True) for n in (batch, rows)]
    first, second = network.layers
    given = torch.cat([x.expand(batch, -1, -1) for x in inputs], dim=1).mT
    hidden = F.leaky_relu(F.linear(given, first.weight, first.bias), slope)
    want = F.linear(hidden, second.weight, second.bias).mT + (sum(inputs) if residual else 0)
    got = network(*inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    grad, targets = torch.randn_like(want), [*network.parameters(), *inputs]
    for found, wanted in zip(
        torch.autograd.grad(got, targets, grad), torch.autograd.grad(want, targets, grad), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert not network.is_silent()
    network.silence()
    assert network.is_silent()
    assert residual or not network(*inputs).any()
