"""Models on the way from their own encoding to a scheme: both ends, the middle, and the end of the way."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, SAME, auto, inputs, logits, loss, moved, new_parameters, stacks_for, stock, tokens
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc.attention import blocks

CASES = [(architecture, name) for architecture in ARCHITECTURES for name in hf_posenc.schemes()]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, str, str]:
    architecture, name = request.param
    torch.manual_seed(1)
    model = hf_posenc.patch(stock(architecture), name, native="keep", **stacks_for(architecture, name))
    return moved(model), architecture, name


def test_without_any_of_the_scheme_it_is_the_stock_model(case: tuple[PreTrainedModel, str, str]) -> None:
    model, architecture, _ = case
    ids = tokens(architecture, 2, 21)
    hf_posenc.set_strength(model, native=1, scheme=0)
    torch.testing.assert_close(logits(model, architecture, ids), logits(stock(architecture), architecture, ids), **SAME)


def test_the_end_of_the_way(case: tuple[PreTrainedModel, str, str]) -> None:
    model, architecture, name = case
    ids = tokens(architecture, 2, 21)
    hf_posenc.set_strength(model, native=0, scheme=1)
    before = logits(model, architecture, ids)
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


def test_half_way_is_saved_and_loaded(case: tuple[PreTrainedModel, str, str], tmp_path: Path) -> None:
    model, architecture, _ = case
    ids = tokens(architecture, 2, 15)
    ends = [logits(model, architecture, ids)]
    hf_posenc.set_strength(model, native=0.5, scheme=0.25)
    half = logits(model, architecture, ids)
    hf_posenc.set_strength(model, native=0, scheme=1)
    ends.append(logits(model, architecture, ids))
    assert all((half - end).abs().max() > 1e-4 for end in ends)
    hf_posenc.set_strength(model, native=0.5, scheme=0.25)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(auto(architecture).from_pretrained(tmp_path), architecture, ids), half)
    assert torch.equal(logits(copy.deepcopy(model), architecture, ids), half)
    with hf_posenc.disabled(model):
        assert torch.equal(logits(model, architecture, ids), logits(stock(architecture), architecture, ids))
    hf_posenc.unpatch(model)
    assert torch.equal(logits(model, architecture, ids), logits(stock(architecture), architecture, ids))
    assert not [key for module in model.modules() for key in vars(module) if "posenc" in key]


def test_half_way_everything_learns_on_any_executor(
    case: tuple[PreTrainedModel, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, architecture, _ = case
    ids = tokens(architecture, 2, 37)
    hf_posenc.set_strength(model, native=0.5, scheme=0.5)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss(model, architecture, ids).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted = gradients()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(wanted) == trained
    assert not [name for name in new_parameters(model) if name in trained and not wanted[name].any()]
    monkeypatch.setattr(blocks, "_DENSE_LOGITS", 0)
    monkeypatch.setattr(blocks, "rows_per_block", lambda *sizes: 16)
    for name, gradient in gradients().items():
        torch.testing.assert_close(
            gradient, wanted[name], atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_half_way_the_cache_is_right(case: tuple[PreTrainedModel, str, str]) -> None:
    model, architecture, _ = case
    ids = tokens(architecture, 2, 11)
    hf_posenc.set_strength(model, native=0.5, scheme=0.5)
    call: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "min_new_tokens": 6}
    without = model.generate(ids, use_cache=False, do_sample=False, **call)
    assert torch.equal(model.generate(ids, do_sample=False, **call), without)


def test_half_way_packed_rows_equal_separate_rows(case: tuple[PreTrainedModel, str, str]) -> None:
    model, architecture, _ = case
    ids, lengths = tokens(architecture, 1, 20), (9, 11)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    hf_posenc.set_strength(model, native=0.5, scheme=0.5)
    call = {**inputs(architecture, ids), "position_ids": positions}
    if architecture == "t5":
        call |= {"decoder_input_ids": ids, "decoder_position_ids": positions}
    with torch.no_grad():
        packed = model(**call, use_cache=False).logits
    for row, part in zip(packed.split(lengths, dim=1), ids.split(lengths, dim=1), strict=True):
        torch.testing.assert_close(row, logits(model, architecture, part, torch.ones_like(part)), **SAME)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_without_a_scheme_take_no_part(architecture: str) -> None:
    """But for a table that enters before the first layer, which is there for all or for none."""
    model, ids = stock(architecture), tokens(architecture, 2, 21)
    hf_posenc.patch(model, "kerple", layers=[1], native="keep", gate=False)
    hf_posenc.set_strength(model, native=0)
    before = logits(model, architecture, ids)
    hf_posenc.drop_native(model)
    torch.testing.assert_close(logits(model, architecture, ids), before, **SAME)


def test_patching_again_starts_at_full_strength() -> None:
    model = hf_posenc.patch(stock("llama"), "alibi", native="keep", gate=False)
    hf_posenc.set_strength(model, native=0.5, scheme=0.5)
    hf_posenc.patch(model, "alibi", native="keep", gate=False)
    ids = tokens("llama", 1, 9)
    fresh = hf_posenc.patch(stock("llama"), "alibi", native="keep", gate=False)
    assert torch.equal(logits(model, "llama", ids), logits(fresh, "llama", ids))
    assert model.config.posenc == fresh.config.posenc
