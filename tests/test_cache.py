"""Per-token state follows the keys of a cache through everything that is done to it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_posenc import CacheError, cache

CONFIG = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, head_dim=4, num_key_value_heads=1)


def _fill(target: Any, layer: int, first: int, count: int, rows: int = 2) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Add tokens whose keys, positions and extra state all carry the token's number plus 100 times its row."""
    number = torch.arange(first, first + count)[None] + 100 * torch.arange(rows)[:, None]  # [B, new]
    k = number[:, None, :, None].expand(rows, 1, count, 4).float()
    state = {"positions": number, "gates": number[..., None].repeat(1, 1, 3).double()}
    return cache.update(target, layer, k, -k, state)


def _agree(keys: Tensor, state: dict[str, Tensor], length: int | None = None) -> None:
    number = keys[:, 0, :length, 0]
    assert torch.equal(state["positions"][:, :length], number.long())
    assert torch.equal(state["gates"][:, :length], number[..., None].repeat(1, 1, 3).double())
    assert state["gates"].dtype == torch.float64


@pytest.fixture(params=["with_config", "without_config", "encoder_decoder"])
def dynamic(request: pytest.FixtureRequest) -> Any:
    if request.param == "without_config":
        return DynamicCache()
    own = DynamicCache(config=CONFIG)
    return own if request.param == "with_config" else EncoderDecoderCache(own, DynamicCache(config=CONFIG))


def test_growth(dynamic: Any) -> None:
    for layer in range(2):
        _fill(dynamic, layer, 0, 5)
        keys, values, state = _fill(dynamic, layer, 5, 1)
        assert keys.shape[2] == 6
        assert torch.equal(values, -keys)
        _agree(keys, state)


def test_crop_then_growth(dynamic: Any) -> None:
    for layer in range(2):
        _fill(dynamic, layer, 0, 6)
    dynamic.crop(-2)
    keys, _, state = _fill(dynamic, 0, 50, 3)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 50, 51, 52]
    _agree(keys, state)


def test_reorder(dynamic: Any) -> None:
    for layer in range(2):
        _fill(dynamic, layer, 0, 4)
    dynamic.reorder_cache(torch.tensor([1, 1]))
    keys, _, state = _fill(dynamic, 1, 4, 1)
    assert keys[:, 0, 0, 0].tolist() == [100, 100]
    _agree(keys, state)


def test_repeat_and_select(dynamic: Any) -> None:
    for layer in range(2):
        _fill(dynamic, layer, 0, 4)
    dynamic.batch_repeat_interleave(2)
    keys, _, state = cache.update(dynamic, 0, torch.zeros(4, 1, 0, 4), torch.zeros(4, 1, 0, 4), _empty(4))
    assert keys[:, 0, 1, 0].tolist() == [1, 1, 101, 101]
    _agree(keys, state)
    dynamic.batch_select_indices(torch.tensor([3, 0]))
    keys, _, state = cache.update(dynamic, 0, torch.zeros(2, 1, 0, 4), torch.zeros(2, 1, 0, 4), _empty(2))
    assert keys[:, 0, 1, 0].tolist() == [101, 1]
    _agree(keys, state)


def _empty(rows: int) -> dict[str, Tensor]:
    return {
        "positions": torch.zeros(rows, 0, dtype=torch.long),
        "gates": torch.zeros(rows, 0, 3, dtype=torch.float64),
    }


def test_reset_and_copies(dynamic: Any) -> None:
    for layer in range(2):
        _fill(dynamic, layer, 0, 4)
    twins = [copy.deepcopy(dynamic), pickle.loads(pickle.dumps(dynamic))]
    own = dynamic.self_attention_cache if isinstance(dynamic, EncoderDecoderCache) else dynamic
    own.reset()
    keys, _, state = _fill(dynamic, 0, 7, 2)
    assert keys.shape[2] == 2
    _agree(keys, state)
    for twin in twins:
        keys, _, state = _fill(twin, 0, 4, 1)
        assert keys.shape[2] == 5
        _agree(keys, state)


def test_static_growth_reorder_and_reset() -> None:
    target = StaticCache(config=CONFIG, max_cache_len=8)
    for layer in range(2):
        _fill(target, layer, 0, 3)
        keys, _, state = _fill(target, layer, 3, 2)
        assert keys.shape[2] == state["positions"].shape[1] == 8
        _agree(keys, state, 5)
    target.reorder_cache(torch.tensor([1, 0]))
    keys, _, state = _fill(target, 0, 5, 1)
    assert keys[:, 0, 1, 0].tolist() == [101, 1]
    _agree(keys, state, 5)
    target.reset()
    keys, _, state = _fill(target, 0, 30, 4)
    _agree(keys, state, 4)


def test_offloaded_layers_keep_their_state_with_their_keys() -> None:
    target = DynamicCache(config=CONFIG)
    _fill(target, 0, 0, 4)
    layer: Any = target.layers[0]
    layer.offload()
    assert {tensor.device for tensor in layer.token_state.values()} == {layer.keys.device}
    layer.prefetch()
    keys, _, state = _fill(target, 0, 4, 1)
    _agree(keys, state)


def test_a_layer_that_cannot_hold_state_is_refused_before_it_changes() -> None:
    target = DynamicCache(config=CONFIG)
    target.layers[0] = DynamicSlidingWindowLayer(sliding_window=4)
    with pytest.raises(CacheError, match="DynamicSlidingWindowLayer cannot hold"):
        _fill(target, 0, 0, 3)
    assert target.layers[0].get_seq_length() == 0


def test_a_cache_filled_by_another_model_is_refused() -> None:
    target = DynamicCache(config=CONFIG)
    target.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 0)
    with pytest.raises(CacheError, match="holds 3 tokens without their positions"):
        _fill(target, 0, 3, 1)


def test_a_cache_changed_past_its_methods_is_noticed() -> None:
    target = DynamicCache(config=CONFIG)
    _fill(target, 0, 0, 4)
    target.layers[0].keys = target.layers[0].keys[:, :, :2]
    target.layers[0].values = target.layers[0].values[:, :, :2]
    with pytest.raises(CacheError, match="holds 3 tokens but the positions of 5"):
        _fill(target, 0, 4, 1)
