"""Bodies that add a table of positions by themselves: decoders, and encoders with decoders, of text or sound."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models import moved
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    VoxtralEncoder,
    VoxtralEncoderConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import hf_posenc
from hf_posenc.errors import OptionError, PositionError
from hf_posenc.patches import context

BART = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 24,
    "init_std": 0.3, "pad_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None, "scale_embedding": True,
}  # fmt: skip
SOUND = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_source_positions": 10,
    "max_target_positions": 24, "num_mel_bins": 5, "init_std": 0.3, "pad_token_id": 1, "bos_token_id": 2,
    "eos_token_id": 2, "decoder_start_token_id": 3,
}  # fmt: skip
# The embeddings are narrower than the layers.
OPT = {
    "vocab_size": 60, "hidden_size": 32, "ffn_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 24, "word_embed_proj_dim": 16, "init_std": 0.3,
}  # fmt: skip
KINDS = {"bart": (BartForConditionalGeneration, BartConfig, BART), "opt": (OPTForCausalLM, OPTConfig, OPT)}
KINDS["whisper"] = (WhisperForConditionalGeneration, WhisperConfig, SOUND)


def make(name: str) -> Any:
    kind, config, sizes = KINDS[name]
    torch.manual_seed(0)
    return kind(config(**sizes)).eval()


def inputs(name: str, length: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60, (2, length), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(2, 5, 20, generator=generator), "decoder_input_ids": ids}
    return {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if name == "bart" else {})


@torch.no_grad()
def logits(model: PreTrainedModel, call: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**call).logits
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_table_is_taken_over_and_generation_goes_on(name: str) -> None:
    stock, call = make(name), inputs(name)
    model = hf_posenc.patch(make(name), "learned")
    assert hf_posenc.plan(stock, "learned").start == "exact"
    assert torch.equal(logits(model, call), logits(stock, call))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "wpe" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
    assert not torch.allclose(logits(model, call), logits(stock, call))
    with hf_posenc.disabled(model):
        assert torch.equal(logits(model, call), logits(stock, call))
    prompt = {key: value for key, value in call.items() if key != "decoder_input_ids"}
    made = [
        model.generate(
            **prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False, num_beams=2, pad_token_id=1, use_cache=cached
        )
        for cached in (True, False)
    ]
    assert torch.equal(*made)


def test_a_kept_table_has_an_end_and_counts_by_itself() -> None:
    call = inputs("bart")
    kept = hf_posenc.patch(make("bart"), "kerple", native="keep")
    whole = logits(kept, call)
    places = torch.arange(9)[None]
    assert torch.equal(whole, logits(kept, call | {"position_ids": places}))
    with pytest.raises(PositionError, match="counts the rows of its own table by itself"):
        logits(kept, call | {"position_ids": places + 3})
    with pytest.raises(PositionError, match="Position 29 is beyond the model's own table of 24 positions"):
        logits(kept, inputs("bart", 30))
    hf_posenc.set_strength(kept, native=0.5)
    assert not torch.allclose(whole, logits(kept, call))
    hf_posenc.drop_native(kept)
    assert logits(kept, inputs("bart", 30)).isfinite().all()
    assert torch.allclose(logits(kept, call), logits(kept, call | {"position_ids": places + 3}), atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_reach_a_scheme_in_every_stack(name: str) -> None:
    model = hf_posenc.patch(make(name).train(), "kerple")
    model(**inputs(name)).logits.square().sum().backward()
    found = {key: parameter.grad for key, parameter in model.named_parameters() if "bias_p" in key}
    assert len(found) == (1 if name == "opt" else 2)
    assert all(gradient is not None and bool(gradient.any()) for gradient in found.values())
    hf_posenc.unpatch(model)


def encoder_of_sound() -> Any:
    """Return an encoder whose forward gives its layers no keywords, and sound for it."""
    sizes = {key: value for key, value in SOUND.items() if "decoder" not in key and "target" not in key}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 40}
    torch.manual_seed(0)
    return VoxtralEncoder(VoxtralEncoderConfig(**sizes)).eval(), torch.randn(2, 5, 20)


@pytest.mark.parametrize("scheme", ["learned", "kerple", "tape"])
def test_layers_without_keywords_find_the_context_of_their_body(scheme: str) -> None:
    stock, sound = encoder_of_sound()
    keep = {} if scheme == "learned" else {"native": "keep"}
    model = hf_posenc.patch(encoder_of_sound()[0], scheme, **keep)
    with torch.no_grad():
        before = stock(sound).last_hidden_state
        torch.testing.assert_close(model(sound).last_hidden_state, before, atol=1e-5, rtol=1e-5)
        assert context.RUNNING.context is None
        other = moved(model, 0.5)(sound).last_hidden_state
        assert (other - before).abs().max() > 1e-4
        with ThreadPoolExecutor(2) as pool:
            assert all(torch.equal(found.last_hidden_state, other) for found in pool.map(model, [sound] * 4))
        with hf_posenc.disabled(model):
            assert torch.equal(model(sound).last_hidden_state, before)
        model = hf_posenc.patch(encoder_of_sound()[0], scheme)
        without = model(sound).last_hidden_state
        moved(model.requires_grad_(True), 1.0, only="embed_positions")  # gone, though the forward reads its rows
        assert torch.equal(model(sound).last_hidden_state, without)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    with pytest.raises(OptionError, match="gives its layers no keywords"):
        model(sound)
