"""FoX against the official code, against the paper's product of gates, and where it starts."""

from __future__ import annotations

import pytest
import torch
from forgetting import DTYPES, HEAD_DIM, HEADS, OfficialLayer, about, case, check
from torch import Tensor

from hf_posenc import Geometry, Positions, Scheme, attend, build
from hf_posenc.attention import executors
from hf_posenc.operands import Block, Tokens

SUMS = "log_forget_sums"


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


LAYERS = [name for name in about("fox")["cases"] if name.startswith("layer_")]


def layer(name: str, kind: str, backend: str = "eager") -> OfficialLayer:
    config = about("fox")["cases"][name]["config"]
    options = {} if not config else {"forget_gate": config["fgate_type"]}
    return OfficialLayer("fox", name, DTYPES[kind], backend, **options)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, backend: str, kind: str) -> None:
    layer(name, kind, backend).check_at_once()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_a_cache(name: str, cache: str, kind: str) -> None:
    layer(name, kind).check_decoding(cache)


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


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_sees_itself_without_any_penalty(causal: bool) -> None:
    """To the last bit: the difference of the sums is taken before a logit, thousands of times smaller, is added."""
    scheme, places = reads_gates(causal=causal).float(), Positions(count(64), count(64))
    x = torch.zeros(1, HEADS, 64, HEAD_DIM)
    hidden = -300 - torch.rand(1, 64, scheme.fgate_proj.in_features)
    made = scheme.project(Tokens(positions=places, hidden=hidden), x, x, x)
    logits = torch.randn(1, HEADS, 64, 64)
    got = scheme.score(logits, x, x, Block(places, reach=63, state=made.state, own=made.state))
    assert torch.equal(got.diagonal(dim1=2, dim2=3), logits.diagonal(dim1=2, dim2=3))


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


# -- where it starts ---------------------------------------------------------------------------------------------------


def geometry(**changes) -> Geometry:
    shape = {"heads": HEADS, "kv_heads": 2, "head_dim": HEAD_DIM, "hidden_size": 32, "max_positions": 50}
    return Geometry(**{**shape, **changes})


def log_gates_of(scheme: Scheme) -> Tensor:
    """What the gates of random tokens are at the start, float64 `[B, S, gates]`."""
    x = torch.zeros(2, 2, 9, HEAD_DIM, dtype=torch.float64)
    tokens = Tokens(positions=Positions(count(9), count(9)), hidden=torch.randn(2, 9, 32))
    sums = scheme.double().project(tokens, x, x, x).state[SUMS]
    return sums.diff(dim=1, prepend=torch.zeros_like(sums[:, :1]))


@pytest.mark.parametrize("gate", ["full", "bias_only", "fixed"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_horizon(gate: str, causal: bool) -> None:
    for shape, options, horizon in (
        (geometry(causal=causal), {}, 500.0),
        (geometry(causal=causal), {"horizon": 77}, 77),
        (geometry(causal=causal), {"horizon": 1e-3}, 1e-3),
        (geometry(causal=causal), {"horizon": 1e9}, 1e9),
        (geometry(causal=causal, max_positions=None), {}, 20480.0),
    ):
        scheme = build("fox", shape, forget_gate=gate, init="horizon", **options)
        assert scheme.options()["horizon"] == horizon
        got = log_gates_of(scheme)
        torch.testing.assert_close(got, torch.full_like(got, -1 / horizon), rtol=1e-5, atol=0)
        assert scheme.start_tolerance(native_kept=True) == (shape.max_positions or 2048) / horizon
        assert scheme.start_tolerance(native_kept=False) is None
        assert not scheme.starts_exact(native_kept=True)


def test_the_bound_of_the_start_holds_and_is_nearly_reached() -> None:
    scheme = build("fox", geometry(max_positions=200), init="horizon")
    hidden = torch.randn(1, 200, 32)
    x = torch.zeros(1, HEADS, 200, HEAD_DIM)
    places = Positions(count(200), count(200))
    made = scheme.project(Tokens(positions=places, hidden=hidden), x, x, x)
    bias = scheme.score(torch.zeros(1, HEADS, 200, 200), x, x, Block(places, 199, state=made.state, own=made.state))
    seen = torch.ones(200, 200).tril().bool()
    largest, bound = bias[..., seen].abs().max(), scheme.start_tolerance(native_kept=True)
    assert 0.99 * bound < largest <= bound


@pytest.mark.parametrize("gate", ["full", "bias_only", "fixed"])
def test_time_scales_by_head(gate: str) -> None:
    scheme = build("fox", geometry(), forget_gate=gate, init="timescale")
    times = -1 / log_gates_of(scheme)[0, 4]
    want = torch.tensor([2, 2 * 25 ** (1 / 3), 2 * 25 ** (2 / 3), 50], dtype=torch.float64)
    torch.testing.assert_close(times, want, rtol=1e-5, atol=0)
    assert scheme.start_tolerance(native_kept=True) is None
    # A model with a context shorter than the shortest time.
    assert build("fox", geometry(max_positions=1), init="timescale").options()["decay_time_max"] == 2.0


def test_the_official_start() -> None:
    scheme = build("fox", geometry(hidden_size=4096), init="official")
    assert scheme.fgate_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not scheme.fgate_proj.bias.any()
    assert scheme.start_tolerance(native_kept=True) is None
    for gate in ("full", "bias_only", "fixed"):
        options = build("fox", geometry(max_positions=8192), forget_gate=gate).options()
        assert (options["init"], options["decay_time_min"], options["decay_time_max"]) == ("timescale", 64.0, 8192.0)
    assert not build("fox", geometry(), forget_gate="bias_only", init="official").fgate_bias.any()
