"""Per-token state follows the keys of a cache through everything that is done to it, and takes the planned bytes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from models import CACHE
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, LlamaForCausalLM, LlamaModel, StaticCache
from transformers.cache_utils import StaticLayer

import hf_posenc
from hf_posenc import CacheError
from hf_posenc.patches import cache

CONFIG = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, head_dim=4, num_key_value_heads=1)
# Of one kind of state, only the last tokens are kept.
HISTORY = 3


def fill(target: Any, first: int, count: int, layers: tuple[int, ...] = (0, 1), rows: int = 2) -> dict[str, Tensor]:
    """Add tokens whose keys and state all carry the token's number plus 100 times its row."""
    number = torch.arange(first, first + count)[None] + 100 * torch.arange(rows)[:, None]  # [B, new]
    k = number[:, None, :, None].expand(rows, 1, count, 4).float()
    state = {"positions": number, "gates": number[..., None].repeat(1, 1, 3).double()}
    recent = {"shift": number[..., None, None].repeat(1, 1, 2, 1).half()}
    for layer in layers:
        keys, values, state_of_all = cache.update(target, layer, k, -k, state, recent, HISTORY)
    assert torch.equal(values, -keys)
    assert torch.equal(keys[:, 0, :, 0].long(), state_of_all["positions"])
    return state_of_all


def check(target: Any, rows: list[list[int]], recent: int = HISTORY, layers: tuple[int, ...] = (0, 1)) -> None:
    """Compare what layers hold with the numbers of their tokens, the last of which are remembered, too."""
    for layer in layers:
        held: Any = cache.self_attention(target).layers[layer]
        length, number = len(rows[0]), torch.tensor(rows)
        assert torch.equal(held.keys[:, 0, :length, 0], number.float())
        assert torch.equal(held.token_state["positions"][:, :length], number)
        assert torch.equal(held.token_state["gates"][:, :length], number[..., None].repeat(1, 1, 3).double())
        kept = min(recent, length)
        expected = number[:, length - kept :, None, None].repeat(1, 1, 2, 1).half()
        assert torch.equal(held.recent_state["shift"], expected)
        assert held.recent_state["shift"].dtype == torch.float16
        last = {name: tensor.flatten(1)[:, 0].tolist() for name, tensor in past(target, layer).items()}
        names = ("gates", "shift") if kept else ("gates",)
        assert last == {name: number[:, -1].tolist() for name in names if length}


def past(target: Any, layer: int) -> dict[str, Tensor]:
    return cache.past(target, layer, torch.device("cpu"))


def numbers(*tokens: int, rows: tuple[int, ...] = (0, 1)) -> list[list[int]]:
    return [[100 * row + token for token in tokens] for row in rows]


@pytest.fixture(params=["with_config", "without_config", "encoder_decoder"])
def dynamic(request: pytest.FixtureRequest) -> Any:
    if request.param == "without_config":
        return DynamicCache()
    own = DynamicCache(config=CONFIG)
    return own if request.param == "with_config" else EncoderDecoderCache(own, DynamicCache(config=CONFIG))


def test_state_follows_the_keys_of_a_growing_cache(dynamic: Any) -> None:
    assert cache.past(None, 0, torch.device("cpu")) == {}
    assert past(dynamic, 1) == {}
    for first, count in ((0, 1), (1, 1), (2, 6), (8, 1)):
        fill(dynamic, first, count)
        check(dynamic, numbers(*range(first + count)))
    # A view of all tokens would hold their memory.
    shift = cache.self_attention(dynamic).layers[0].recent_state["shift"]
    assert shift.untyped_storage().nbytes() == 2 * HISTORY * 2 * 2
    dynamic.crop(-2)
    check(dynamic, numbers(*range(7)), recent=1)
    fill(dynamic, 50, 1)
    check(dynamic, numbers(*range(7), 50), recent=2)
    dynamic.reorder_cache(torch.tensor([1, 0]))
    check(dynamic, numbers(*range(7), 50, rows=(1, 0)), recent=2)
    dynamic.batch_repeat_interleave(2)
    check(dynamic, numbers(*range(7), 50, rows=(1, 1, 0, 0)), recent=2)
    dynamic.batch_select_indices(torch.tensor([3, 0]))
    check(dynamic, numbers(*range(7), 50), recent=2)
    twins = [copy.deepcopy(dynamic), pickle.loads(pickle.dumps(dynamic))]
    cache.self_attention(dynamic).reset()
    assert past(dynamic, 1) == {}
    fill(dynamic, 7, 2)
    check(dynamic, numbers(7, 8))
    for twin in twins:
        fill(twin, 60, 1)
        check(twin, numbers(*range(7), 50, 60))


@pytest.mark.parametrize("removed", [3, 7])
def test_a_crop_beyond_what_is_remembered_is_refused_before_any_layer_changes(dynamic: Any, removed: int) -> None:
    fill(dynamic, 0, 8)
    with pytest.raises(CacheError, match=f"Cannot take {removed} tokens back .* of the last 3 only"):
        dynamic.crop(-removed)
    check(dynamic, numbers(*range(8)))


@pytest.mark.parametrize(("held", "removed"), [(8, 8), (8, 9), (HISTORY + 1, HISTORY + 1), (2, 2)])
def test_a_crop_of_all_tokens_leaves_nothing(dynamic: Any, held: int, removed: int) -> None:
    fill(dynamic, 0, held)
    dynamic.crop(-removed)
    assert past(dynamic, 0) == {}
    fill(dynamic, 30, 1)
    check(dynamic, numbers(30))


def test_state_follows_the_keys_of_a_static_cache() -> None:
    target = StaticCache(config=CONFIG, max_cache_len=16)
    assert past(target, 0) == {}
    for first, count in ((0, 2), (2, 5), (7, 1)):
        found = fill(target, first, count)
        assert {tensor.shape[1] for tensor in found.values()} == {16}
        check(target, numbers(*range(first + count)))
    target.reorder_cache(torch.tensor([1, 1]))
    check(target, numbers(*range(8), rows=(1, 1)))
    if hasattr(StaticLayer, "crop"):
        target.crop(-2)
        fill(target, 50, 1)
        check(target, [[*range(100, 106), number] for number in (50, 150)], recent=2)
    target.reset()
    # Zeros are what schemes take for no past.
    assert not any(tensor.any() for tensor in past(target, 1).values())
    fill(target, 40, 4)
    check(target, numbers(*range(40, 44)))


def test_state_is_offloaded_and_fetched_with_the_keys() -> None:
    target = DynamicCache(config=CONFIG)
    fill(target, 0, 5)
    layer: Any = target.layers[0]
    moved: list[str] = []

    class Watched(Tensor):
        def to(self, device: Any, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
            moved.append(str(device))
            return self

    for state in (layer.token_state, layer.recent_state):
        for name, tensor in state.items():
            state[name] = tensor.as_subclass(Watched)  # type: ignore[arg-type]
    layer.offload()
    layer.prefetch()
    assert moved == ["cpu"] * 3 + [str(layer.device)] * 3
    fill(target, 5, 1)
    check(target, numbers(*range(6)))


def test_a_cache_changed_past_its_methods_is_noticed() -> None:
    target = DynamicCache(config=CONFIG)
    fill(target, 0, 4)
    target.layers[0].keys = target.layers[0].keys[:, :, :2]
    target.layers[0].values = target.layers[0].values[:, :, :2]
    with pytest.raises(CacheError, match="holds 3 tokens but the positions of 5"):
        fill(target, 4, 1)


def small_llama(scheme: str, **options: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8}
    config = LlamaConfig(**shape, num_hidden_layers=2, vocab_size=20)
    return hf_posenc.patch(LlamaForCausalLM(config).eval(), scheme, **options)


@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_packed_sequences_do_not_go_on_from_a_cache_until_it_is_reset(static: bool) -> None:
    model, ids = small_llama("kerple"), torch.arange(12)[None]
    target = StaticCache(model.config, max_cache_len=12) if static else DynamicCache(config=model.config)
    model(ids, position_ids=torch.arange(6).repeat(2)[None], **{CACHE: target})
    with pytest.raises(CacheError, match="holds packed sequences"):
        model(ids[:, :1], position_ids=torch.tensor([[6]]), **{CACHE: target})
    target.reset()
    found = model(ids, **{CACHE: target}).logits
    torch.testing.assert_close(found, model(ids, use_cache=False).logits)


@torch.no_grad()
def test_layers_share_positions_until_they_hold_different_ones() -> None:
    torch.manual_seed(0)
    model = hf_posenc.patch(LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "vocab_size": 40})).eval(), "kerple")
    ids, held = torch.randint(40, (2, 9)), DynamicCache()
    steps = (ids[:, :5], ids[:, 5:6], ids[:, 6:7])
    for step in steps:
        model(input_ids=step, **{CACHE: held})
    first, second = (layer.token_state["positions"] for layer in held.layers)  # type: ignore[attr-defined]
    assert first is second
    assert first.tolist() == 2 * [[*range(7)]]
    held.reorder_cache(torch.tensor([1, 0]))
    # What one layer alone lost, the others keep.
    held.layers[1].crop(-2)
    model(input_ids=ids[:, 7:8], **{CACHE: held})
    first, second = (layer.token_state["positions"] for layer in held.layers)  # type: ignore[attr-defined]
    assert (first[0].tolist(), second[0].tolist()) == ([*range(8)], [*range(5), 7])


@pytest.mark.parametrize("layers", [[0, 1], [1]])
@torch.no_grad()
def test_a_scheme_goes_on_after_a_crop(layers: list[int]) -> None:
    model, ids = small_llama("fox_pro", shift_history=4, layers=layers), torch.arange(10)[None]
    target = DynamicCache(config=model.config)
    model(ids, **{CACHE: target})
    target.crop(-3)
    model(ids[:, 7:], **{CACHE: target})
    for each in (target, copy.deepcopy(target)):
        with pytest.raises(CacheError, match="Cannot take 4 tokens back"):
            each.crop(-4)
        assert {layer.keys.shape[2] for layer in each.layers} == {10}
    target.crop(-2)
    again = model(ids[:, 8:], **{CACHE: target}).logits
    torch.testing.assert_close(again, model(ids, use_cache=False).logits[:, 8:])


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@torch.no_grad()
def test_the_name_of_older_transformers_is_known() -> None:
    model, ids = small_llama("fire"), torch.arange(10)[None]
    target = DynamicCache(config=model.config)
    parts = [model(ids[:, part], past_key_values=target).logits for part in (slice(0, 6), slice(6, 10))]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids, use_cache=False).logits)


# -- bytes -------------------------------------------------------------------------------------------------------------

SHAPES: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2,
    "intermediate_size": 8, "vocab_size": 16, "max_position_embeddings": 512, "dtype": "bfloat16",
}  # fmt: skip
TOKENS, ROWS = 70, 2

CASES = [(name, *way) for name in hf_posenc.schemes() for way in (("remove", "dynamic"), ("keep", "static"))]


@pytest.fixture(scope="module")
def wide() -> LlamaModel:
    torch.manual_seed(0)
    return LlamaModel(LlamaConfig(**SHAPES)).to(torch.bfloat16).eval()


def extra_bytes(target: Any) -> int:
    kept = [t for layer in target.layers for t in (*layer.token_state.values(), *layer.recent_state.values())]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


@pytest.mark.parametrize(("name", "native", "kind"), CASES)
def test_planned_bytes_are_held_bytes(wide: LlamaModel, name: str, native: str, kind: str) -> None:
    plan = hf_posenc.plan(wide, name, native=native)
    hf_posenc.patch(wide, name, native=native)
    config = wide.config
    target = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=TOKENS)
    try:
        with torch.no_grad():
            wide(torch.arange(TOKENS).remainder(16).expand(ROWS, -1), **{CACHE: target})
    finally:
        hf_posenc.unpatch(wide)
    assert extra_bytes(target) == ROWS * (TOKENS * plan.cache_bytes_per_token + plan.cache_bytes_per_sequence)
    positions = 8 * SHAPES["num_hidden_layers"]
    names = {name for layer in target.layers for name in (*layer.token_state, *layer.recent_state)}
    nothing = plan.cache_bytes_per_token == positions and not plan.cache_bytes_per_sequence
    assert nothing == (names == {"positions"})
