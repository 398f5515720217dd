"""A share of the model's own rotation under a scheme: the fastest pairs go on turning, the others stop."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, SAME, TINY, logits, stock, tokens
from test_native import ROTATING, body_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, LlamaConfig, LlamaForCausalLM

import hf_posenc
from hf_posenc import CheckpointError, OptionError
from hf_posenc.attention.engine import recorded
from hf_posenc.patches import record
from hf_posenc.patches.cache import NAMES
from hf_posenc.patches.rotary import set_rope

TABLES = [name for name in (*ARCHITECTURES, *TINY) if name not in ROTATING]


def slowed(model: Any, share: float) -> Any:
    """A copy of a stock model whose slow pairs were stopped by hand."""
    model = copy.deepcopy(model)
    for name, buffer in body_of(model).rotary_emb.named_buffers():
        if name.endswith("inv_freq"):
            buffer[round(share * len(buffer)) :] = 0
    return model


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, **SAME)


@pytest.mark.parametrize(("architecture", "share"), [*((name, 0.5) for name in ROTATING), ("llama", 0.25)])
def test_nope_over_a_share_is_the_stock_model_whose_slow_pairs_were_stopped(architecture: str, share: float) -> None:
    model, ids = stock(architecture).eval(), tokens(architecture, 2, 24)
    expected, whole = logits(slowed(model, share), architecture, ids), logits(model, architecture, ids)
    assert (expected - whole).abs().max() > 1e-4, "the share changes nothing here"
    close(logits(hf_posenc.patch(model, "nope", native=share), architecture, ids), expected)
    with hf_posenc.disabled(model):
        assert torch.equal(logits(model, architecture, ids), whole)
    assert torch.equal(logits(hf_posenc.unpatch(model), architecture, ids), whole)


@pytest.mark.parametrize("architecture", ROTATING)
def test_a_share_is_cached_saved_and_loaded(architecture: str, tmp_path: Path) -> None:
    model, ids = hf_posenc.patch(stock(architecture).eval(), "kerple", native=0.5), tokens(architecture, 2, 12)
    expected = logits(model, architecture, ids)
    model.save_pretrained(tmp_path)
    assert re.search(r"over \d+ of \d+ rotary pairs", (tmp_path / "README.md").read_text(encoding="utf-8"))
    auto = AutoModelForCausalLM if model.can_generate() else AutoModelForMaskedLM
    model = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(model, architecture, ids), expected)
    if model.can_generate():
        first = model(ids[:, :7], use_cache=True)
        name = next(name for name in NAMES if name in first)
        close(model(ids[:, 7:], **{name: first[name]}).logits, expected[:, 7:])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("strength", [1.0, 0.5, 0.0])
def test_pairs_that_stand_still_keep_the_factor_of_the_rotation_at_its_strength(
    rope: dict[str, Any], strength: float
) -> None:
    model, ids = stock("llama").eval(), tokens("llama", 1, 24)
    set_rope(model, rope)
    cut = hf_posenc.patch(copy.deepcopy(model), "nope", native=0.5)
    whole = hf_posenc.patch(model, "nope", native="keep")
    body = body_of(whole)
    body.rotary_emb.inv_freq[len(body.rotary_emb.inv_freq) // 2 :] = 0
    for each in (cut, whole):
        hf_posenc.set_strength(each, native=strength)
    close(logits(cut, "llama", ids), logits(whole, "llama", ids))


def test_autocast_takes_the_executor_that_it_takes_without_the_rotation() -> None:
    found = []
    for native in (0.5, "remove"):
        model = hf_posenc.patch(stock("llama"), "kerple", native=native)
        with recorded() as used, torch.autocast("cpu", torch.bfloat16):
            model(tokens("llama", 1, 48))
        found.append(set(used))
    assert found[0] == found[1]


def test_the_whole_share_is_keep_and_none_is_remove() -> None:
    model = stock("llama")
    assert hf_posenc.plan(model, "kerple", native=1.0) == hf_posenc.plan(model, "kerple", native="keep")
    assert hf_posenc.plan(model, "kerple", native=0.0).native == "remove"


def test_fast_keeps_the_pairs_that_turn_sixteen_times_within_the_trained_length() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=128, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16,
        max_position_embeddings=8192, rope_theta=100_000.0,
    )  # fmt: skip
    # The frequencies of SmolLM2: pair i turns round in 2 pi 100,000 ** (i / 32) tokens, at most 512 up to i = 12.
    assert hf_posenc.plan(config, "kerple", native="fast").native == "13 of 32 rotary pairs"


def test_each_type_of_layer_has_a_share_of_its_own() -> None:
    model, ids = stock("gemma3").eval(), tokens("gemma3", 1, 24)
    kinds = [*dict.fromkeys(model.config.layer_types)]
    assert len(kinds) == 2
    shares = dict(zip(kinds, (1.0, 0.5), strict=True))
    expected = slowed(model, 1.0)
    frequencies = getattr(body_of(expected).rotary_emb, f"{kinds[1]}_inv_freq")
    frequencies[len(frequencies) // 2 :] = 0
    hf_posenc.patch(model, "nope", native=shares)
    close(logits(model, "gemma3", ids), logits(expected, "gemma3", ids))
    assert hf_posenc.verify(model).groups[0][1].count("rotary pairs") == 1
    with pytest.raises(OptionError, match="types of layers"):
        hf_posenc.patch(model, "nope", native={"full_attention": 0.5})


NAN = float("nan")


@pytest.mark.parametrize("native", [1.5, -0.1, True, "half", NAN, None, [0.5], {"": "x"}, {"": 5}, {"": NAN}], ids=str)
def test_what_is_no_share_is_refused(native: Any) -> None:
    model = stock("llama")
    with pytest.raises(OptionError, match="expected 'remove'"):
        hf_posenc.patch(model, "kerple", native=native)
    assert type(model) is LlamaForCausalLM


@pytest.mark.parametrize("native", [0.5, "fast"])
@pytest.mark.parametrize("architecture", TABLES)
def test_a_model_without_rotation_has_no_share(architecture: str, native: Any) -> None:
    with pytest.raises(OptionError, match="a share of the rotary pairs"):
        hf_posenc.patch(stock(architecture), "nope", native=native)


@pytest.mark.parametrize("native", [1.5, "half", True, {}, {"full_attention": 2}, {"full_attention": "x"}], ids=str)
def test_a_damaged_share_is_refused_on_loading(native: Any) -> None:
    config = hf_posenc.patch(stock("llama"), "kerple", native=0.5).config
    config.posenc["groups"][0]["native"] = native
    with pytest.raises(CheckpointError, match=r"groups\.0\.native"):
        record.from_config(config)


def test_an_export_rotates_the_share(tmp_path: Path) -> None:
    model, ids = hf_posenc.patch(stock("llama").eval(), "nope", native=0.5), tokens("llama", 1, 24)
    hf_posenc.export_stock(model, tmp_path / "stock")
    close(
        logits(LlamaForCausalLM.from_pretrained(tmp_path / "stock").eval(), "llama", ids), logits(model, "llama", ids)
    )
