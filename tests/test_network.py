"""The network of pairs, a few pairs after the other, against all of them at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.schemes.families import layers
from hf_posenc.schemes.families.layers import PairNetwork


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Or the pairs here would be few enough for one go.
    monkeypatch.setattr(layers, "_IN_CACHE", 40)


def operands(
    batch: int, rows: int, pairs: int, channels: int, width: int, slope: float, residual: bool = True
) -> tuple[PairNetwork, list[Tensor]]:
    """A network with inputs of which the last may have one row for the whole batch."""
    torch.manual_seed(0)
    network = PairNetwork(2 * channels, width, channels, negative_slope=slope, residual=residual).double()
    inputs = [torch.randn(size, channels, pairs, dtype=torch.float64) for size in (batch, rows)]
    return network, [x.requires_grad_() for x in inputs]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 5),
    shared=st.booleans(),
    pairs=st.integers(1, 23),
    channels=st.integers(1, 3),
    width=st.integers(1, 50),
    slope=st.sampled_from([0.0, 0.01]),
    residual=st.booleans(),
)
def test_a_few_pairs_after_the_other_give_the_same_output_and_gradients(
    batch: int, shared: bool, pairs: int, channels: int, width: int, slope: float, residual: bool
) -> None:
    network, inputs = operands(batch, 1 if shared else batch, pairs, channels, width, slope, residual)
    first, second = network.layers
    weights = [first.weight, first.bias, second.weight, second.bias]
    given = torch.cat([x.expand(batch, -1, -1) for x in inputs], dim=1).mT
    hidden = F.leaky_relu(F.linear(given, first.weight, first.bias), slope)
    want = F.linear(hidden, second.weight, second.bias).mT + (sum(inputs) if residual else 0)
    got = network(*inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    grad = torch.randn_like(want)
    targets = [*weights, *inputs]
    for found, wanted in zip(
        torch.autograd.grad(got, targets, grad), torch.autograd.grad(want, targets, grad), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_silent_network_says_nothing() -> None:
    network, inputs = operands(1, 1, 9, 2, 5, 0.0, residual=False)
    assert not network.is_silent()
    network.silence()
    assert network.is_silent()
    assert not network(*inputs).any()
