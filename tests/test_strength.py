"""Models on the way from their own encoding to a scheme: both ends, the middle, and the end of the way."""

from __future__ import annotations

import copy

import pytest
import torch
from grid import FIRSTS
from models import ARCHITECTURES, SAME, logits, moved, stacks_for, stock, tokens
from transformers import PreTrainedModel

import hf_posenc

# A blend acts on the seams that a scheme overrides.
CASES = [(architecture, name) for architecture in ARCHITECTURES for name in sorted(FIRSTS)]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, str, str]:
    architecture, name = request.param
    torch.manual_seed(1)
    model = hf_posenc.patch(stock(architecture), name, native="keep", **stacks_for(architecture, name))
    return moved(model), architecture, name


def test_both_ends_and_the_middle(
    case: tuple[PreTrainedModel, str, str],
) -> None:
    model, architecture, _ = case
    ids, original = tokens(architecture, 2, 21), stock(architecture)
    whole, before = logits(model, architecture, ids), logits(original, architecture, ids)
    hf_posenc.set_strength(model, native=0.5, scheme=0.25)
    half = logits(model, architecture, ids)
    assert all((half - end).abs().max() > 1e-4 for end in (whole, before))
    assert torch.equal(logits(copy.deepcopy(model), architecture, ids), half)
    with hf_posenc.disabled(model):
        assert torch.equal(logits(model, architecture, ids), before)
    hf_posenc.set_strength(model, native=1, scheme=0)
    torch.testing.assert_close(logits(model, architecture, ids), before, **SAME)
    assert torch.equal(logits(hf_posenc.unpatch(model), architecture, ids), before)


def test_the_end_of_the_way(case: tuple[PreTrainedModel, str, str]) -> None:
    model, architecture, name = case
    ids = tokens(architecture, 2, 21)
    hf_posenc.set_strength(model, native=0, scheme=1)
    before = logits(model, architecture, ids)
    hf_posenc.set_strength(model, native=0, scheme=1 - 1e-6)  # still blended
    torch.testing.assert_close(logits(model, architecture, ids), before, atol=1e-3, rtol=1e-3)
    hf_posenc.set_strength(model, native=0, scheme=1)
    kept = copy.deepcopy(model)
    hf_posenc.drop_native(model)
    torch.testing.assert_close(logits(model, architecture, ids), before, **SAME)
    direct = stock(architecture)
    options = hf_posenc.plan(direct, name, native="keep", **stacks_for(architecture, name)).options
    first = next(iter(options.values()))
    given = {key: value for key, value in first.items() if value is not None}
    if all(part == first for part in options.values()):
        hf_posenc.patch(direct, name, **given, **stacks_for(architecture, name))
        direct.load_state_dict(model.state_dict())
        assert torch.equal(logits(direct, architecture, ids), logits(model, architecture, ids))
        assert {n: p.requires_grad for n, p in direct.named_parameters()} == {
            n: p.requires_grad for n, p in model.named_parameters()
        }
        assert model.config.posenc == direct.config.posenc
    torch.testing.assert_close(logits(kept, architecture, ids), before)
    hf_posenc.verify(model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_without_a_scheme_take_no_part(architecture: str) -> None:
    """But for a table that enters before the first layer, which is there for all or for none."""
    model, ids = stock(architecture), tokens(architecture, 2, 21)
    hf_posenc.patch(model, "kerple", layers=[1], native="keep", gate=False)
    hf_posenc.set_strength(model, native=0)
    before = logits(model, architecture, ids)
    hf_posenc.drop_native(model)
    torch.testing.assert_close(logits(model, architecture, ids), before, **SAME)
