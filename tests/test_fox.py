"""FoX and FoX (Pro) against the official code, as layers of a small Llama; their sequences, caches and starts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from grid import once
from hypothesis import given as cases
from hypothesis import settings
from hypothesis import strategies as st
from models import CACHE, moved
from official import about, golden
from torch import Tensor, nn
from transformers import Cache, DynamicCache, LlamaConfig, LlamaModel

import hf_posenc
from hf_posenc import Geometry, Positions, Scheme, attend, build
from hf_posenc.attention import executors
from hf_posenc.operands import Tokens

few_examples = settings(max_examples=10, deadline=None, derandomize=True)
SUMS = "log_forget_sums"
WIDTH, HEADS, HEAD_DIM = 32, 4, 8
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}


def case(scheme: str, name: str) -> dict[str, Tensor]:
    """Return the tensors of one golden."""
    return {key.removeprefix(f"{name}/"): value for key, value in golden(scheme).items() if key.startswith(f"{name}/")}


def check(scheme: str, got: Tensor, want: Tensor) -> None:
    """Compare at the tolerance that the json states for the dtype; goldens are float64."""
    kind = next(kind for kind, dtype in DTYPES.items() if dtype == got.dtype)
    atol = about(scheme)["tolerance"][kind]
    # A bfloat16 is rounded in proportion to its size.
    torch.testing.assert_close(got.double(), want, rtol=atol if kind == "bf16" else 0, atol=atol)


def small_llama(
    scheme: str, *, kv_heads: int = 2, layers: int = 2, backend: str = "sdpa", seed: int = 0, **options: Any
) -> LlamaModel:
    """Return a patched Llama in float64, the parameters of its scheme away from their start."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    config = LlamaConfig(**sizes, num_key_value_heads=kv_heads, num_hidden_layers=layers, vocab_size=7)
    config.initializer_range = 0.3
    config._attn_implementation = backend
    torch.manual_seed(seed)
    return moved(hf_posenc.patch(LlamaModel(config), scheme, **options), 0.3).double()


class OfficialLayer:
    """One attention layer with the weights of a golden, inside a Llama that hands it hidden states as they are."""

    def __init__(self, scheme: str, name: str, dtype: torch.dtype, backend: str = "eager", **options: Any) -> None:
        self.scheme, self.given = scheme, case(scheme, name)
        self.mask = self.given.get("attention_mask")
        # Rows of padding are compared nowhere.
        self.real = torch.ones(2, 13, dtype=torch.bool) if self.mask is None else self.mask.bool()
        weights = {key.removeprefix("param."): value for key, value in self.given.items() if key.startswith("param.")}
        kv_heads = next(value for key, value in weights.items() if key.startswith("k_proj.")).shape[0] // HEAD_DIM
        self.model = small_llama(scheme, kv_heads=kv_heads, layers=1, backend=backend, **options)
        self.model.layers[0].input_layernorm = nn.Identity()
        attention = self.model.layers[0].self_attn
        attention.load_state_dict({_our_name(key): value for key, value in weights.items()})
        self.model.to(dtype)
        attention.register_forward_hook(lambda module, args, output: self._results.append(output))
        self._results: list[Any] = []

    @torch.no_grad()
    def check(self) -> None:
        """Compare outputs `[B, S, E]`, and weights `[B, H, S, K]` if there are any, of all tokens at once."""
        hidden = self.given["hidden_states"].to(self.model.dtype)
        self.model(inputs_embeds=hidden, attention_mask=self.mask, use_cache=False)
        [(output, weights)] = self._results
        check(self.scheme, output[self.real], self.given["out"][self.real])
        assert (weights is None) == (self.model.config._attn_implementation != "eager")
        if weights is not None:
            check(self.scheme, weights.transpose(1, 2)[self.real], self.given["attn"].transpose(1, 2)[self.real])


def _our_name(official: str) -> str:
    """Translate the name of an official weight to that in a patched attention module."""
    for projection in ("k_proj", "v_proj"):
        if official == f"{projection}.shift_proj.weight":
            return f"hf_posenc.{projection[0]}_shift_proj.weight"
        if official == f"{projection}.linear.weight":
            return f"{projection}.weight"
    if official in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"):
        return official
    return f"hf_posenc.{official.replace('output_norm', 'o_norm')}"


def reads_gates(*, causal: bool = True, kv_heads: int = HEADS) -> Scheme:
    """A FoX whose hidden states are the logits of its gates."""
    gates = HEADS if causal else 2 * HEADS
    shape = Geometry(heads=HEADS, kv_heads=kv_heads, head_dim=HEAD_DIM, hidden_size=gates, causal=causal)
    scheme = build("fox", shape).double()
    scheme.load_state_dict({"fgate_proj.weight": torch.eye(gates), "fgate_proj.bias": torch.zeros(gates)})
    return scheme


def logits_of(given: dict[str, Tensor]) -> Tensor:
    """The hidden states `[B, S, gates]` that lead to the gates of a golden."""
    if "fgate_logit" in given:
        return given["fgate_logit"].transpose(1, 2)
    sides = [given[name] for name in ("log_fgate", "log_fgate_left", "log_fgate_right") if name in given]
    log_gates = torch.cat(sides, dim=1).transpose(1, 2)
    return log_gates - (-log_gates.expm1()).log()


def count(length: int) -> Tensor:
    return torch.arange(length)[None]


# -- the official code -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("executor", ["dense", "blocks"])
@pytest.mark.parametrize(
    "name", ["mha", "gqa", "left_pad", "decode_last", "decode_chunk3", "bidirectional_xtransformers"]
)
def test_given_gates(name: str, executor: str, kind: str) -> None:
    given, dtype = case("fox", name), DTYPES[kind]
    q = next(given[key] for key in ("q", "q_last", "q_last3") if key in given).to(dtype)
    k, v = given["k"].to(dtype), given["v"].to(dtype)
    mask = given.get("attention_mask")
    scheme = reads_gates(causal="bidirectional" not in name, kv_heads=k.shape[1])
    keys, queries = k.shape[2], q.shape[2]
    # Gates are given in full: they are made of hidden states in float32 at least.
    at = {"query_positions": count(keys)[:, -queries:], "key_positions": count(keys), "hidden": logits_of(given)}
    output = attend(scheme, q, k, v, mask=mask, executor=executor, **at)
    real = slice(None) if mask is None else mask.bool()
    check("fox", output.transpose(1, 2)[real], given["out"].transpose(1, 2)[real])
    _, weights = attend(scheme, q, k, v, mask=mask, need_weights=True, **at)
    check("fox", weights.transpose(1, 2)[real], given["attn"].transpose(1, 2)[real])


@pytest.mark.parametrize("kind", ["float64", "float32"])
@pytest.mark.parametrize("executor", ["dense", "blocks"])
def test_gradients(executor: str, kind: str) -> None:
    given = case("fox", "grad")
    operands = (given["q"], given["k"], given["v"], logits_of(given))
    q, k, v, hidden = (x.to(DTYPES[kind], copy=True).requires_grad_() for x in operands)
    scheme = reads_gates().to(DTYPES[kind])
    at = {"query_positions": count(13), "key_positions": count(13), "hidden": hidden}
    output = attend(scheme, q, k, v, executor=executor, **at)
    check("fox", output.detach(), given["out"])
    output.backward(given["do"].to(output))
    check("fox", q.grad, given["dq"])
    check("fox", k.grad, given["dk"])
    check("fox", v.grad, given["dv"])
    check("fox", hidden.grad.transpose(1, 2), given["dfgate_logit"])


OFFICIAL_NAMES = {
    "fgate_type": "forget_gate",
    "use_output_gate": "output_gate",
    "use_output_norm": "output_norm",
    "qk_norm": "qk_norm",
    "qk_norm_share_param_across_head": "share_qk_norm",
    "use_k_shift": "k_shift",
    "use_v_shift": "v_shift",
    "ogate_act": "gate_activation",
}
PLAIN = {name: False for name in ("output_gate", "output_norm", "qk_norm", "k_shift", "v_shift")}
LAYERS = [
    *(("fox", name) for name in about("fox")["cases"] if name.startswith("layer_")),
    *(("fox_pro", name) for name in about("fox_pro")["cases"]),
]


def layer(scheme: str, name: str, kind: str, backend: str = "eager") -> OfficialLayer:
    # The case with grouped queries names no config: it has every part.
    config = about(scheme)["cases"][name].get("config")
    options = {OFFICIAL_NAMES[key]: value for key, value in (config or {}).items() if key in OFFICIAL_NAMES}
    if scheme == "fox_pro" and config is not None:
        options = {**PLAIN, **options}
    return OfficialLayer(scheme, name, DTYPES[kind], backend, **options)


@pytest.mark.parametrize("kind", once(DTYPES))
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("scheme", "name"), LAYERS)
def test_layers(scheme: str, name: str, backend: str, kind: str) -> None:
    layer(scheme, name, kind, backend).check()


@pytest.mark.parametrize("gate", ["fixed", "bias_only", "full"])
@pytest.mark.parametrize(("shortest", "longest"), [(2, 1024), (4, 64)])
def test_official_time_scales(shortest: int, longest: int, gate: str) -> None:
    want = case("fox", f"init_fixed_T{shortest}_{longest}")["fgate_bias"]
    options = {"init": "timescale", "decay_time_min": float(shortest), "decay_time_max": float(longest)}
    for causal in (True, False):
        shape = Geometry(heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, hidden_size=32, causal=causal)
        scheme = build("fox", shape, forget_gate=gate, **options)
        got = scheme.fgate_proj.bias if gate == "full" else scheme.fgate_bias
        # Theirs is float32 arithmetic.
        torch.testing.assert_close(got.double(), want.repeat(1 if causal else 2), rtol=2e-6, atol=0)
        assert isinstance(got, torch.nn.Parameter) == (gate != "fixed")
        assert gate != "full" or not scheme.fgate_proj.weight.any()


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
        inputs_embeds=hidden, **{CACHE: cache}, use_cache=cache is not None, **call
    ).last_hidden_state
    return output


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@both
@cases(
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
    cache, parts = DynamicCache(config=model_of(scheme).config), []
    for start in range(0, 4 * len(real), 4):
        now = slice(start, start + 4)
        call = {"position_ids": positions[:, now]} if given_positions else {}
        parts.append(run(scheme, hidden[:, now], cache, attention_mask=keep[:, : start + 4].long(), **call))
    for row, output in enumerate(torch.cat(parts, dim=1)):
        if keep[row].any():
            same(output[keep[row]], run(scheme, hidden[row, keep[row]][None])[0])


@both
@cases(held=st.integers(2, 12), removed=st.data(), more=st.integers(1, 5), again=st.integers(0, 4))
@few_examples
def test_what_was_taken_back_was_never_there(scheme: str, held: int, removed: Any, more: int, again: int) -> None:
    """Crop, go on, crop once more."""
    model, hidden = model_of(scheme), inputs()
    count = removed.draw(st.integers(1, min(held, HISTORY) - 1) | st.just(held))
    left = held - count
    cache = DynamicCache(config=model.config)
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


# -- numerics ----------------------------------------------------------------------------------------------------------


def test_gates_that_forget_everything() -> None:
    """Sums of -80,000: their exponential is zero, and the difference of neighbours is still exact enough."""
    scheme = reads_gates().float()
    hidden = torch.full((1, 256, HEADS), -300.0, requires_grad=True)
    q = torch.zeros(1, HEADS, 256, HEAD_DIM)
    v = torch.randn(1, HEADS, 256, HEAD_DIM, requires_grad=True)
    for executor in executors(scheme):
        at = {"query_positions": count(256), "key_positions": count(256), "hidden": hidden}
        output = attend(scheme, q, q, v, executor=executor, **at)
        torch.testing.assert_close(output, v, rtol=0, atol=0)
        (gradient,) = torch.autograd.grad(output.square().sum(), hidden)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_whatever_the_model_is(dtype: torch.dtype) -> None:
    shape = Geometry(heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, hidden_size=32)
    scheme = build("fox", shape, init="official").to(dtype)
    hidden = torch.randn(1, 4000, 32).to(dtype)
    x = torch.zeros(1, HEADS, 4000, HEAD_DIM)
    tokens = Tokens(positions=Positions(count(4000), count(4000)), hidden=hidden)
    exact = scheme.double().project(tokens, x.double(), x.double(), x.double()).state[SUMS]
    assert exact.dtype == torch.float64
    scheme.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = scheme.project(tokens, x.to(dtype), x.to(dtype), x.to(dtype)).state[SUMS]
    assert half.dtype == torch.float32
    assert exact.min() < -2500
    # Half the spacing of float32 at 4,000, and the rounding of the logits.
    torch.testing.assert_close(half.double(), exact, rtol=0, atol=5e-4)
