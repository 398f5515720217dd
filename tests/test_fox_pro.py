"""FoX (Pro) against the official code; what both FoX schemes do with sequences and caches."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from forgetting import DTYPES, HEAD_DIM, HEADS, WIDTH, OfficialLayer, about, new_cache, small_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Cache, LlamaModel

import hf_posenc
from hf_posenc import CacheError, Geometry, build

few_examples = settings(max_examples=10, deadline=None, derandomize=True)
PLAIN = {name: False for name in ("output_gate", "output_norm", "qk_norm", "k_shift", "v_shift")}

# -- the official code -------------------------------------------------------------------------------------------------

OFFICIAL_NAMES = {
    "use_output_gate": "output_gate",
    "use_output_norm": "output_norm",
    "qk_norm": "qk_norm",
    "qk_norm_share_param_across_head": "share_qk_norm",
    "use_k_shift": "k_shift",
    "use_v_shift": "v_shift",
    "ogate_act": "gate_activation",
}
CASES = list(about("fox_pro")["cases"])


def layer(name: str, kind: str, backend: str = "eager") -> OfficialLayer:
    # The case with grouped queries names no config: it has every part.
    config = about("fox_pro")["cases"][name].get("config")
    given = {} if config is None else {OFFICIAL_NAMES[key]: value for key, value in config.items()}
    options = given if config is None else {**PLAIN, **given}
    return OfficialLayer("fox_pro", name, DTYPES[kind], backend, **options)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_layers(name: str, backend: str, kind: str) -> None:
    layer(name, kind, backend).check_at_once()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "pro_gqa"])
def test_layers_with_a_cache(name: str, cache: str, kind: str) -> None:
    layer(name, kind).check_decoding(cache)


# -- sequences and caches ----------------------------------------------------------------------------------------------

LENGTH, HISTORY = 17, 5
SCHEMES = ["fox", "fox_pro"]
both = pytest.mark.parametrize("scheme", SCHEMES)


@functools.cache
def model_of(scheme: str) -> LlamaModel:
    return small_llama(scheme, **({"shift_history": HISTORY} if scheme == "fox_pro" else {}))


def inputs(rows: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def run(scheme: str, hidden: Tensor, cache: Cache | None = None, **call: Any) -> Tensor:
    model = model_of(scheme)
    output: Tensor = model(
        inputs_embeds=hidden, past_key_values=cache, use_cache=cache is not None, **call
    ).last_hidden_state
    return output


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def chunks(found: set[int], length: int = LENGTH) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *sorted(found), length]))


@both
@given(
    real=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=4),
    given_positions=st.booleans(),
    seed=st.integers(0, 10**6),
)
@few_examples
def test_padding_inside_of_a_row_changes_nothing(
    scheme: str, real: list[tuple[int, int]], given_positions: bool, seed: int
) -> None:
    """A batch whose chunks are padded on the right, as in a conversation; padding may be given any position."""
    hidden = inputs(2, 4 * len(real), seed)
    keep = torch.stack([torch.cat([torch.arange(4) < n for n in row]) for row in zip(*real, strict=True)])
    positions = (keep.long().cumsum(-1) - 1).clamp_min(0)
    if given_positions:
        anything = torch.randint(0, 30, keep.shape, generator=torch.Generator().manual_seed(seed))
        positions = torch.where(keep, positions, anything)
    cache, parts = new_cache(model_of(scheme), "dynamic"), []
    for start in range(0, 4 * len(real), 4):
        now = slice(start, start + 4)
        call = {"position_ids": positions[:, now]} if given_positions else {}
        parts.append(run(scheme, hidden[:, now], cache, attention_mask=keep[:, : start + 4].long(), **call))
    for row, output in enumerate(torch.cat(parts, dim=1)):
        if keep[row].any():
            same(output[keep[row]], run(scheme, hidden[row, keep[row]][None])[0])


@both
@given(held=st.integers(2, 12), removed=st.data(), more=st.integers(1, 5), again=st.integers(0, 4))
@few_examples
def test_what_was_taken_back_was_never_there(scheme: str, held: int, removed: Any, more: int, again: int) -> None:
    """Crop, go on, crop once more."""
    model, hidden = model_of(scheme), inputs()
    count = removed.draw(st.integers(1, min(held, HISTORY) - 1) | st.just(held))
    left = held - count
    cache = new_cache(model, "dynamic")
    run(
        scheme,
        inputs(seed=1)[:, :held] if not left else torch.cat([hidden[:, :left], inputs(seed=1)[:, :count]], 1),
        cache,
    )
    cache.crop(-count)
    got = run(scheme, hidden[:, left : left + more], cache)
    want = run(scheme, hidden[:, : left + more])
    same(got, want[:, left:])
    again = min(again, more - 1)
    cache.crop(-again)
    got = run(scheme, hidden[:, left + more - again : left + more], cache) if again else want[:, :0]
    same(got, want[:, left + more - again :])


@both
@given(found=st.integers(1, LENGTH - 1), beams=st.lists(st.integers(0, 2), min_size=3, max_size=3))
@few_examples
def test_rows_of_a_cache_move_with_all_they_hold(scheme: str, found: int, beams: list[int]) -> None:
    model, hidden = model_of(scheme), inputs(3)
    want = run(scheme, hidden)[:, found:]

    def filled(kind: str, rows: int = 3) -> Cache:
        cache = new_cache(model, kind)
        run(scheme, hidden[:rows, :found], cache)
        return cache

    order = torch.tensor(beams)
    for kind in ("dynamic", "static"):
        cache = filled(kind)
        cache.reorder_cache(order)
        same(run(scheme, hidden[order, found:], cache), want[order])
    cache = filled("dynamic")
    cache.batch_select_indices(order[:2])
    same(run(scheme, hidden[order[:2], found:], cache), want[order[:2]])
    cache = filled("dynamic", 2)
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([0, 0, 1, 1])
    same(run(scheme, hidden[rows, found:], cache), want[rows])
    cache = filled("static")
    cache.reset()
    same(run(scheme, hidden[:, found:], cache), run(scheme, hidden[:, found:]))


def everything(cache: Cache) -> list[Tensor]:
    return [
        tensor.clone()
        for held in cache.layers
        for tensor in (held.keys, held.values, *held.token_state.values(), *held.recent_state.values())
    ]


@pytest.mark.parametrize("removed", [HISTORY, HISTORY + 1, 11])
def test_a_crop_beyond_what_is_remembered_is_refused_before_anything_changes(removed: int) -> None:
    model, hidden = model_of("fox_pro"), inputs()
    cache = new_cache(model, "dynamic")
    run("fox_pro", hidden[:, :12], cache)
    before = everything(cache)
    with pytest.raises(
        CacheError, match=f"Cannot take {removed} tokens back from a cache that .* the last {HISTORY} only"
    ):
        cache.crop(-removed)
    assert all(torch.equal(a, b) for a, b in zip(everything(cache), before, strict=True))
    same(run("fox_pro", hidden[:, 12:], cache), run("fox_pro", hidden)[:, 12:])


def test_plain_fox_can_go_back_as_far_as_you_like() -> None:
    hidden, cache = inputs(), new_cache(model_of("fox"), "dynamic")
    run("fox", hidden[:, :12], cache)
    cache.crop(-11)
    same(run("fox", hidden[:, 1:], cache), run("fox", hidden)[:, 1:])
    assert not any(held.recent_state for held in cache.layers)


# -- options -----------------------------------------------------------------------------------------------------------


def geometry(**changes) -> Geometry:
    return Geometry(**{"heads": HEADS, "kv_heads": 2, "head_dim": HEAD_DIM, "hidden_size": WIDTH, **changes})


def test_parts_that_are_off_have_no_parameters_and_keep_nothing() -> None:
    shapes = {
        "k_shift": {"k_shift_proj.weight": (2, WIDTH)},
        "v_shift": {"v_shift_proj.weight": (2, WIDTH)},
        "qk_norm": {"q_norm.weight": (HEADS * HEAD_DIM,), "k_norm.weight": (2 * HEAD_DIM,)},
        "output_norm": {"o_norm.weight": (HEADS * HEAD_DIM,)},
        "output_gate": {"ogate_proj.weight": (HEADS * HEAD_DIM, WIDTH)},
    }
    for part, parameters in shapes.items():
        scheme = build("fox_pro", geometry(), **{**PLAIN, part: True})
        got = {name: tuple(value.shape) for name, value in scheme.named_parameters() if "fgate" not in name}
        assert got == parameters
        assert scheme.history == (64 if part in ("k_shift", "v_shift") else 0)
        assert scheme.start_tolerance(native_kept=True) is None
        assert "must be trained" in scheme.cautions(native_kept=True)[0]
    shared = build("fox_pro", geometry(), share_qk_norm=True)
    assert shared.q_norm.weight.shape == shared.k_norm.weight.shape == (HEAD_DIM,)
    nothing = build("fox_pro", geometry(), **PLAIN, init="horizon")
    assert nothing.start_tolerance(native_kept=True) == pytest.approx(0.1)
    assert nothing.cautions(native_kept=True) == []


def test_the_start() -> None:
    scheme = build("fox_pro", geometry(hidden_size=4096))
    for linear in (scheme.k_shift_proj, scheme.v_shift_proj, scheme.ogate_proj):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert linear.bias is None
    for norm in (scheme.q_norm, scheme.k_norm, scheme.o_norm):
        assert torch.equal(norm.weight, torch.ones_like(norm.weight))
    # A model that does not scale its logits: norms must not make them larger than those of the official code.
    unscaled = build("fox_pro", geometry(scale=1.0))
    torch.testing.assert_close(unscaled.q_norm.weight, torch.full((HEADS * HEAD_DIM,), HEAD_DIM**-0.5))
    assert hf_posenc.schemes()["fox_pro"].start == "break"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_output_gate_is_computed_in_the_models_dtype(dtype: torch.dtype) -> None:
    """Its weights, as many as those of the layer's own projections, stay in float32; products of them would be slow."""
    scheme, seen = build("fox_pro", geometry()), []
    scheme.ogate_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    output = scheme.finish(torch.randn(1, HEADS, 3, HEAD_DIM, dtype=dtype), torch.randn(1, 3, WIDTH, dtype=dtype))
    assert seen == [output.dtype] == [dtype]
