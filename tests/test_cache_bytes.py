"""What `plan` says of the cache is what a cache of that shape holds, on the shapes of Llama-3-8B."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaModel, StaticCache

import hf_posenc

# Two layers; hidden size, feed-forward and vocabulary are no matter here.
SHAPES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 8,
    "vocab_size": 16,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
TOKENS, ROWS = 70, 2

CASES = [(name, *way) for name in hf_posenc.schemes() for way in (("remove", "dynamic"), ("keep", "static"))]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    torch.manual_seed(0)
    return LlamaModel(LlamaConfig(**SHAPES)).to(torch.bfloat16).eval()


def extra_bytes(cache: Any) -> int:
    kept = [t for layer in cache.layers for t in (*layer.token_state.values(), *layer.recent_state.values())]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


@pytest.mark.parametrize(("name", "native", "kind"), CASES)
def test_planned_bytes_are_held_bytes(model: LlamaModel, name: str, native: str, kind: str) -> None:
    plan = hf_posenc.plan(model, name, native=native)
    hf_posenc.patch(model, name, native=native)
    config = model.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=TOKENS)
    try:
        with torch.no_grad():
            model(torch.arange(TOKENS).remainder(16).expand(ROWS, -1), past_key_values=cache)
    finally:
        hf_posenc.unpatch(model)
    assert extra_bytes(cache) == ROWS * (TOKENS * plan.cache_bytes_per_token + plan.cache_bytes_per_sequence)
    positions = 8 * SHAPES["num_hidden_layers"]
    names = {name for layer in cache.layers for name in (*layer.token_state, *layer.recent_state)}
    nothing = plan.cache_bytes_per_token == positions and not plan.cache_bytes_per_sequence
    assert nothing == (names == {"positions"})


def test_those_that_remember() -> None:
    """Per token and layer, without the positions."""
    config = LlamaConfig(**SHAPES)
    per_layer = {
        name: hf_posenc.plan(config, name).cache_bytes_per_token // SHAPES["num_hidden_layers"] - 8
        for name in hf_posenc.schemes()
    }
    known = {"fox": 4 * 32, "fox_pro": 4 * 32, "grape_a": 4 * 32, "path": 4 * 8 * 129, "tape": 2 * 32 * 128}
    assert {name: count for name, count in per_layer.items() if count} == {
        name: count for name, count in known.items() if name in per_layer
    }


def test_a_config_may_give_the_name_of_its_dtype() -> None:
    named, config = LlamaConfig(**SHAPES), LlamaConfig(**SHAPES)
    named.dtype, config.dtype = "float16", torch.float16
    assert hf_posenc.plan(named, "tape", native="keep") == hf_posenc.plan(config, "tape", native="keep")
    config.dtype = torch.float64
    assert hf_posenc.plan(named, "tape", native="keep") != hf_posenc.plan(config, "tape", native="keep")
