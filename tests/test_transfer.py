"""Fits of schemes to what attention wrote in the stock model."""

from __future__ import annotations

import copy
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from grid import once
from models import DECODERS, checkpoint, stacks_for, stock, tokens
from rich.console import Console

import hf_posenc
from hf_posenc.errors import NotPatchedError, OptionError, ShapeError
from hf_posenc.recipes import storage
from hf_posenc.recipes.data.text import builtin_text
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.loading import load_tiny_llama
from hf_posenc.recipes.runs import run
from hf_posenc.recipes.training import fit_bias
from hf_posenc.recipes.training.transfer import AttentionTransfer, transfer
from hf_posenc.scheme import Scheme

pytestmark = pytest.mark.usefixtures("plain_pictures")


def patched(architecture: str, name: str, **options: Any) -> Any:
    return hf_posenc.patch(stock(architecture), name, **stacks_for(architecture, name), **options)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    new = {id(p) for module in model.modules() if isinstance(module, Scheme) for p in module.parameters()}
    return {name: p.detach().clone() for name, p in model.named_parameters() if id(p) not in new}


def transferable() -> list[tuple[str, str]]:
    """Return the schemes that have weights in attention as they come, on what has an encoding there."""
    geometry = hf_posenc.Geometry(heads=2, kv_heads=2, head_dim=8, hidden_size=16, max_positions=64, last=False)
    made = {name: hf_posenc.build(name, geometry) for name in hf_posenc.schemes()}
    found = [name for name, scheme in made.items() if not scheme.overrides("embed") and list(scheme.parameters())]
    return [(architecture, name) for architecture in ("llama", "t5") for name in found]


@pytest.mark.parametrize(("architecture", "name"), transferable())
def test_only_the_scheme_changes_and_attention_gets_no_further_away(architecture: str, name: str) -> None:
    model = patched(architecture, name).train()
    model.get_output_embeddings().eval()
    frozen = model.get_input_embeddings().weight.requires_grad_(False)
    before, trained = weights_of(model), [p.requires_grad for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    drawn = torch.get_rng_state()

    def look(step: int) -> None:
        # At each step, for a fit that leads away is taken back, and other weights with it.
        after = weights_of(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())

    found = transfer(model, tokens(architecture, 9, 21), steps=4, batch_size=3, progress=look)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert sum(found.after) <= sum(found.before)
    look(4)
    assert [p.requires_grad for p in model.parameters()] == trained
    assert not frozen.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert [module.training for module in model.modules()] == modes
    # Nothing of the fit stays on the modules, and the stock model is still under it.
    ids = tokens(architecture, 2, 11)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if architecture == "t5" else {})
    with torch.no_grad(), hf_posenc.disabled(model.eval()):
        torch.testing.assert_close(model(**inputs).logits, stock(architecture).eval()(**inputs).logits)


@pytest.mark.parametrize(
    ("name", "projections"),
    once([("disentangled", False), ("transformer_xl", False), ("cape", False), ("inkling", True)]),
)
def test_attention_gets_nearer(name: str, projections: bool) -> None:
    model = hf_posenc.patch(checkpoint("llama"), name)
    found = transfer(model, tokens("llama", 32, 33), steps=60, projections=projections)
    assert sum(found.after) < 0.6 * sum(found.before)
    assert len(found.after) == len(found.before) == checkpoint("llama").config.num_hidden_layers


@pytest.mark.parametrize("rate", [0.3, 1e4, 1e12])
def test_a_fit_that_leads_away_is_taken_back(rate: float, caplog: pytest.LogCaptureFixture) -> None:
    """On held-out windows, where it fits those that it is given (0.3); also one that ends in what is no number."""
    torch.manual_seed(0)
    model = patched("llama", "shaw")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, tokenizer = load_tiny_llama()
    text = torch.tensor(tokenizer(builtin_text("train")[:10_000])["input_ids"][: 4 * 64]).view(4, 64)
    odd = torch.randint(40, 43, (12, 64), generator=torch.Generator().manual_seed(0))
    found = transfer(model, torch.cat([odd, text]), steps=12, batch_size=4, learning_rate=rate)
    assert all(after <= before for after, before in zip(found.after, found.before, strict=True))
    if rate > 1:
        assert found.after == found.before
        assert not found.accepted
        assert [record.message for record in caplog.records] == [found.sentence]
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert rate > 1 or transfer(model, odd, steps=12, batch_size=4, learning_rate=rate).accepted


def test_a_fit_that_is_broken_off_leaves_the_model_as_it_was() -> None:
    model = patched("llama", "shaw").train()
    before, trained = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]

    def stop(step: int) -> None:
        assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer(model, tokens("llama", 4, 17), steps=5, progress=stop)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == trained
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training and not module._forward_hooks for module in model.modules())


def distance(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return AttentionTransfer(model, projections=False).distances([{"input_ids": ids, **options}])


@pytest.mark.parametrize("architecture", ["llama", *(name for name in DECODERS if "sliding_window" in DECODERS[name])])
def test_skipped_positions_are_read_by_the_original_too_as_far_as_it_was_trained(architecture: str) -> None:
    attention = AttentionTransfer(hf_posenc.patch(stock(architecture), "rope"))
    ids, trained = tokens(architecture, 2, 12), stock(architecture).config.max_position_embeddings

    def read(gap: int) -> dict[str, torch.Tensor]:
        places = torch.arange(12) + gap * (torch.arange(12) >= 5)
        with torch.no_grad():
            return attention(ids, attention_mask=torch.ones_like(ids), position_ids=places.expand_as(ids))

    whole, apart, beyond = read(0), read(trained - 12), read(trained - 11)
    assert not torch.equal(apart["sizes"], whole["sizes"])
    assert float(apart["loss"]) < 1e-9
    assert torch.equal(beyond["sizes"], whole["sizes"])


@pytest.mark.parametrize("architecture", ["gemma3", "mistral"])
def test_without_a_copy_the_original_has_the_same_windows_behind_a_gap(architecture: str) -> None:
    model, ids = patched(architecture, "kerple"), tokens(architecture, 2, 12)
    places = (torch.arange(12) + 100 * (torch.arange(12) >= 5)).expand_as(ids)
    given = {"attention_mask": torch.ones_like(ids), "position_ids": places}
    with torch.no_grad():
        own, copied = (AttentionTransfer(model, projections=both)(ids, **given) for both in (False, True))
    torch.testing.assert_close(own["sizes"], copied["sizes"])


@pytest.mark.parametrize("name", ["shaw", "fire"])
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    model = patched("llama", name)
    # The same document twice, so that both have the distances of one alone.
    document = tokens("llama", 1, 20)
    packed, positions = document.repeat(1, 2), torch.arange(20).repeat(2)[None]
    apart = distance(model, document)
    torch.testing.assert_close(distance(model, packed, position_ids=positions), apart)
    assert not torch.allclose(distance(model, packed), apart)


@pytest.mark.parametrize(
    ("architecture", "name", "said"),
    [
        ("llama", "alibi", "no weights"),
        ("llama", "learned", "acts on the inputs of the model"),
        ("gpt2", "kerple", "adds its own encoding to what it reads"),
    ],
)
def test_what_cannot_be_fitted(architecture: str, name: str, said: str) -> None:
    model = patched(architecture, name)
    trained = [p.requires_grad for p in model.parameters()]
    with pytest.raises(OptionError, match=said):
        transfer(model, tokens(architecture, 4, 17), steps=1)
    assert [p.requires_grad for p in model.parameters()] == trained


def test_bad_input() -> None:
    ids = tokens("llama", 4, 17)
    with pytest.raises(NotPatchedError, match="is not patched"):
        transfer(stock("llama"), ids)
    with pytest.raises(OptionError, match="all are frozen"):
        transfer(patched("llama", "shaw").requires_grad_(False), ids)
    model = patched("llama", "fire")
    for wrong in (ids[0], ids[:, :1], ids[:0], ids.tolist(), ids.float()):
        with pytest.raises(ShapeError, match="expected \\[windows, tokens\\]"):
            transfer(model, wrong)
    for token in (-1, 10**6):
        with pytest.raises(ShapeError, match=f"transfer: ids has token {token}; expected 0 to "):
            transfer(model, ids.masked_fill(ids == ids[1, 1], token))
    wrong: Any
    for name, least in (("steps", 1), ("batch_size", 1), ("seed", 0), ("learning_rate", None)):
        for wrong in (-1, math.nan, math.inf, "x", [], True, 10**309, *((least - 1, 2.5) if least else (0.0,))):
            with pytest.raises(OptionError, match=rf"^transfer\({name}=.*: expected a (whole number|positive)[^\n]*$"):
                transfer(model, ids, **{name: wrong})


@pytest.mark.grid
def test_a_run_says_that_its_start_was_not_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter((1.0, 2.0))
    monkeypatch.setattr(fit_bias, "_loss", lambda *given: next(losses))
    small = ["training.steps=1", "training.length=64", "evaluation.contexts=[64]", "evaluation.windows=2"]
    recipe = read_recipe("swap", ["scheme=kerple", *small, "training.batch_size=2", "distillation={}"])
    console = Console(record=True, width=200, file=io.StringIO())
    run.train(recipe, tmp_path / "out", console=console)
    record = json.loads((tmp_path / "out" / storage.RUN).read_text(encoding="utf-8"))
    sentence = record["fit"]["sentence"]
    assert record["fit"]["accepted"] is False
    assert "not changed" in sentence
    assert "from 1 to 2" in sentence
    assert sentence in console.export_text()
    assert "fit" not in record["start"]
    assert sentence in record["cautions"]
