"""Per-token state follows the keys of a cache through everything that is done to it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import DynamicIndexedLayer

import hf_posenc
from hf_posenc import CacheError
from hf_posenc.patches import cache

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


# Of the second kind of state, only the last tokens are kept.
HISTORY = 3


def _fill_recent(target: Any, layer: int, first: int, count: int, rows: int = 2) -> None:
    number = torch.arange(first, first + count)[None] + 100 * torch.arange(rows)[:, None]
    k = number[:, None, :, None].expand(rows, 1, count, 4).float()
    recent = {"shift": number[..., None, None].repeat(1, 1, 2, 1).half()}
    cache.update(target, layer, k, -k, {"positions": number, "sums": number}, recent, HISTORY)


def _remembered(target: Any, layer: int) -> list[list[float]]:
    own = target.self_attention_cache if isinstance(target, EncoderDecoderCache) else target
    kept = own.layers[layer].recent_state["shift"]
    assert kept.dtype == torch.float16
    assert kept.shape[2:] == (2, 1)
    return kept[:, :, 0, 0].tolist()


def _last(target: Any, layer: int) -> dict[str, list[float]]:
    found = cache.past(target, layer, torch.device("cpu"))
    assert all(tensor.shape[1] == 1 for tensor in found.values())
    return {name: tensor.flatten(1)[:, 0].tolist() for name, tensor in found.items()}


def test_recent_state_grows_to_its_history(dynamic: Any) -> None:
    assert cache.past(None, 0, torch.device("cpu")) == {}
    assert _last(dynamic, 1) == {}
    for first, count, kept in ((0, 1, [0]), (1, 1, [0, 1]), (2, 6, [5, 6, 7]), (8, 1, [6, 7, 8]), (9, 2, [8, 9, 10])):
        for layer in range(2):
            _fill_recent(dynamic, layer, first, count)
            assert _remembered(dynamic, layer) == [kept, [100 + number for number in kept]]
            assert _last(dynamic, layer) == {
                "sums": [kept[-1], 100 + kept[-1]],
                "shift": [kept[-1], 100 + kept[-1]],
            }
    own = dynamic.self_attention_cache if isinstance(dynamic, EncoderDecoderCache) else dynamic
    # A view of all tokens would hold their memory.
    assert own.layers[0].recent_state["shift"].untyped_storage().nbytes() == 2 * HISTORY * 2 * 2


def test_recent_state_is_cropped(dynamic: Any) -> None:
    for layer in range(2):
        _fill_recent(dynamic, layer, 0, 8)
    dynamic.crop(-2)
    assert _remembered(dynamic, 0) == _remembered(dynamic, 1) == [[5], [105]]
    assert _last(dynamic, 1) == {"sums": [5, 105], "shift": [5, 105]}
    _fill_recent(dynamic, 0, 6, 1)
    assert _remembered(dynamic, 0) == [[5, 6], [105, 106]]


@pytest.mark.parametrize("removed", [3, 7])
def test_a_crop_beyond_recent_state_is_refused_before_any_layer_changes(dynamic: Any, removed: int) -> None:
    for layer in range(2):
        _fill_recent(dynamic, layer, 0, 8)
    with pytest.raises(CacheError, match=f"Cannot take {removed} tokens back .* of the last 3 only"):
        dynamic.crop(-removed)
    own = dynamic.self_attention_cache if isinstance(dynamic, EncoderDecoderCache) else dynamic
    for layer in range(2):
        assert _remembered(dynamic, layer) == [[5, 6, 7], [105, 106, 107]]
        assert own.layers[layer].keys.shape[2] == own.layers[layer].token_state["positions"].shape[1] == 8


@pytest.mark.parametrize(("held", "removed"), [(8, 8), (8, 9), (HISTORY + 1, HISTORY + 1), (2, 2)])
def test_a_crop_of_all_tokens_leaves_nothing(dynamic: Any, held: int, removed: int) -> None:
    for layer in range(2):
        _fill_recent(dynamic, layer, 0, held)
    dynamic.crop(-removed)
    assert _remembered(dynamic, 0) == [[], []]
    assert _last(dynamic, 0) == {}
    _fill_recent(dynamic, 0, 30, 1)
    assert _remembered(dynamic, 0) == [[30], [130]]


def test_recent_state_follows_rows(dynamic: Any) -> None:
    for layer in range(2):
        _fill_recent(dynamic, layer, 0, 5)
    dynamic.reorder_cache(torch.tensor([1, 0]))
    assert _remembered(dynamic, 1) == [[102, 103, 104], [2, 3, 4]]
    dynamic.batch_repeat_interleave(2)
    assert _remembered(dynamic, 1) == [[102, 103, 104]] * 2 + [[2, 3, 4]] * 2
    dynamic.batch_select_indices(torch.tensor([3, 0]))
    assert _remembered(dynamic, 1) == [[2, 3, 4], [102, 103, 104]]
    twin = pickle.loads(pickle.dumps(copy.deepcopy(dynamic)))
    own = dynamic.self_attention_cache if isinstance(dynamic, EncoderDecoderCache) else dynamic
    own.reset()
    assert _last(dynamic, 1) == {}
    _fill_recent(dynamic, 1, 7, 1)
    assert _remembered(dynamic, 1) == [[7], [107]]
    assert _remembered(twin, 1) == [[2, 3, 4], [102, 103, 104]]


def test_recent_state_is_offloaded() -> None:
    target = DynamicCache(config=CONFIG)
    _fill_recent(target, 0, 0, 5)
    layer: Any = target.layers[0]
    moved: list[str] = []
    keep = layer.recent_state["shift"]

    class Watched(Tensor):
        def to(self, device: Any, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
            moved.append(str(device))
            return self

    layer.recent_state["shift"] = keep.as_subclass(Watched)  # type: ignore[arg-type]
    layer.offload()
    layer.prefetch()
    assert moved == ["cpu", str(layer.device)]
    assert _remembered(target, 0) == [[2, 3, 4], [102, 103, 104]]


def test_recent_state_of_a_static_cache() -> None:
    target = StaticCache(config=CONFIG, max_cache_len=16)
    assert _last(target, 0) == {}
    for first, count, kept in ((0, 2, [0, 1]), (2, 5, [4, 5, 6]), (7, 1, [5, 6, 7])):
        for layer in range(2):
            _fill_recent(target, layer, first, count)
            assert _remembered(target, layer) == [kept, [100 + number for number in kept]]
            assert _last(target, layer) == {
                "sums": [kept[-1], 100 + kept[-1]],
                "shift": [kept[-1], 100 + kept[-1]],
            }
    target.reorder_cache(torch.tensor([1, 1]))
    assert _last(target, 1) == {"sums": [107, 107], "shift": [107, 107]}
    target.reset()
    # Zeros are what schemes take for no past.
    assert _last(target, 1) == {"sums": [0, 0], "shift": [0, 0]}
    _fill_recent(target, 1, 40, 1)
    assert _last(target, 1) == {"sums": [40, 140], "shift": [40, 140]}


def test_a_layer_that_cannot_hold_state_is_refused_before_it_changes() -> None:
    target = DynamicCache(config=CONFIG)
    target.layers[0] = DynamicIndexedLayer()
    with pytest.raises(CacheError, match="DynamicIndexedLayer cannot hold"):
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


@pytest.mark.parametrize("static", [False, True])
def test_packed_sequences_do_not_go_on_from_a_cache_until_it_is_reset(static: bool) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8}
    model = hf_posenc.patch(LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, vocab_size=20)).eval(), "kerple")
    ids, config = torch.arange(12)[None], model.config
    cache = StaticCache(config, max_cache_len=12) if static else DynamicCache(config=config)
    with torch.no_grad():
        model(ids, position_ids=torch.arange(6).repeat(2)[None], past_key_values=cache)
        with pytest.raises(CacheError, match="holds packed sequences"):
            model(ids[:, :1], position_ids=torch.tensor([[6]]), past_key_values=cache)
        cache.reset()
        found = model(ids, past_key_values=cache).logits
        torch.testing.assert_close(found, model(ids, use_cache=False).logits)


def test_a_crop_that_a_scheme_cannot_follow_is_refused() -> None:
    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=3, vocab_size=20)).eval()
    hf_posenc.patch(model, "fox_pro", shift_history=4)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
        twin = copy.deepcopy(cache)
        with pytest.raises(CacheError, match="Cannot take 5 tokens back"):
            cache.crop(-5)
        assert [layer.get_seq_length() for layer in cache.layers] == [10] * 3
        cache.crop(-3)
        model(ids[:, 7:], past_key_values=cache)
        with pytest.raises(CacheError, match="Cannot take 4 tokens back"):
            cache.crop(-4)
        cache.crop(-2)
        again = model(ids[:, 8:], past_key_values=cache).logits
        torch.testing.assert_close(again, model(ids, use_cache=False).logits[:, 8:])
        assert [layer.get_seq_length() for layer in twin.layers] == [10] * 3
        twin.crop(-3)
        cache.reset()
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits)
