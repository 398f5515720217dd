"""2D-RoPE, FoPE, xPos, and RoPE on every rope type of transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from grid import once
from official import about, golden
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_posenc
from hf_posenc import Geometry, Positions, Scheme, attend, build
from hf_posenc.errors import OptionError
from hf_posenc.operands import Tokens
from hf_posenc.ops import rotate_neighbours
from hf_posenc.schemes.rope import RoPE

PRECISE = [torch.float64, torch.float32]


def geometry(heads: int = 4, kv_heads: int | None = None, head_dim: int = 16, **changes: Any) -> Geometry:
    return Geometry(heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim, hidden_size=32, scale=1.0, **changes)


def rotated(
    scheme: Scheme, q: Tensor, k: Tensor, positions: Tensor, coords: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What a scheme makes of queries and keys at positions `[S]` or coordinates `[S, n]`."""
    at = Positions(positions[None], positions[None], *(2 * [None if coords is None else coords[None]]))
    projected = scheme.project(Tokens(positions=at), q, k, k)
    assert projected.v is k
    assert projected.q.dtype == q.dtype
    return projected.q, projected.k


def random_qk(heads: int = 4, kv_heads: int = 4, length: int = 9, head_dim: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, length, head_dim), (2, kv_heads, length, head_dim))
    q, k = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q, k


# -- rope2d ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize("place", ["grid4x4", "base", "offset", "long"])
@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_rope2d_is_the_official_one(kind: str, place: str, dtype: torch.dtype) -> None:
    values = golden(f"rope2d_{kind}")
    scheme = build("rope2d", geometry(), kind=kind, init="official")
    if kind == "mixed":
        scheme.load_state_dict({"freqs": values["freqs"]})
    # As the json says in words.
    atol = 1e-12 if dtype == torch.float64 else 3e-2 if place == "long" else 2e-5
    coords = values[f"{place}.coords_xy"]
    q, k = (values[f"{place}.{name}_in"].to(dtype) for name in "qk")
    got = rotated(scheme, q, k, torch.arange(len(coords)), coords.to(dtype))
    for name, value in zip("qk", got, strict=True):
        torch.testing.assert_close(value.double(), values[f"{place}.{name}"], rtol=0, atol=atol)
    if dtype == torch.float64:
        torch.testing.assert_close(got[0] @ got[1].mT, values[f"{place}.logits"], rtol=0, atol=16 * atol)


def test_rope2d_axial_gives_the_models_frequencies_to_the_axes_in_turn() -> None:
    frequencies = torch.tensor([1.0, 0.5, 0.25, 0.125])
    scheme = build("rope2d", geometry(head_dim=8, inv_freq=frequencies), kind="axial")
    x = torch.zeros(1, 4, 1, 8, dtype=torch.float64)
    x[..., :4] = 1
    got, _ = rotated(scheme, x, x, torch.zeros(1, dtype=torch.long), torch.tensor([[3.0, 10.0]]).double())
    angles = torch.tensor([3.0, 5.0, 0.75, 1.25]).double()
    torch.testing.assert_close(got[0, 0, 0], torch.cat((angles.cos(), angles.sin())))


def test_rope2d_adds_learned_frequencies_of_each_kv_head_to_the_models() -> None:
    frequencies = torch.tensor([1.0, 0.5])
    scheme = build("rope2d", geometry(heads=4, kv_heads=2, head_dim=4, inv_freq=frequencies))
    learned = torch.randn(2, 2, 2)
    scheme.load_state_dict({"freqs": learned})
    x = torch.zeros(1, 4, 1, 4, dtype=torch.float64)
    x[..., :2] = 1
    got, _ = rotated(scheme, x, x[:, :2], torch.zeros(1, dtype=torch.long), torch.tensor([[3.0, 7.0]]).double())
    for head in range(4):
        angles = 3 * (frequencies + learned[0, head // 2]) + 7 * learned[1, head // 2]
        torch.testing.assert_close(got[0, head, 0].float(), torch.cat((angles.cos(), angles.sin())))


# -- fope --------------------------------------------------------------------------------------------------------------

FOPE_CASES: dict[str, dict[str, Any]] = {
    "A_N64": {"max_length": 64},
    "B_N4096": {"max_length": 4096},
    "C_N4096_dim32": {"max_length": 4096, "fourier_dim": 32},
}


@pytest.mark.parametrize("dtype", PRECISE)
@pytest.mark.parametrize("pad", ["official_pad1", "paper_pad0"])
@pytest.mark.parametrize("place", ["base", "offset", "long"])
@pytest.mark.parametrize("case", FOPE_CASES)
def test_fope_is_the_official_one(case: str, place: str, pad: str, dtype: torch.dtype) -> None:
    values = golden("fope")
    layout = {"official_layout": True, "clip": True, "official_sin_pad": pad == "official_pad1"}
    scheme = build("fope", geometry(), **layout, **FOPE_CASES[case]).double()
    step_eye = torch.tensor(about("fope")["hyper"][case]["step_eye"]).double()
    scheme.load_state_dict({name: values[f"{case}.{name}"] - step_eye for name in ("sin_coef", "cos_coef")})
    atol = 1e-12 if dtype == torch.float64 else 5e-2 if place == "long" else 2e-5
    got = rotated(scheme, values["q"].to(dtype), values["k"].to(dtype), values[f"{case}.{place}.positions"])
    for name, value in zip("qk", got, strict=True):
        torch.testing.assert_close(value.double(), values[f"{case}.{place}.{pad}.{name}"], rtol=0, atol=atol)
    if dtype == torch.float64:
        torch.testing.assert_close(got[0] @ got[1].mT, values[f"{case}.{place}.{pad}.logits"], rtol=0, atol=1e-11)


FREQUENCIES = 1e4 ** -(torch.arange(8) / 8)


def fope(**options: Any) -> Scheme:
    torch.manual_seed(0)
    return build("fope", geometry(kv_heads=2, inv_freq=FREQUENCIES, rotary_scaling=1.25), **options)


def test_fope_annealing_ends_at_the_whole_scheme_and_is_saved() -> None:
    options = {"sigma": 0.3, "clip": True, "max_length": 100}
    whole, annealed = fope(**options), fope(anneal=True, **options)
    q, k = random_qk(kv_heads=2)
    positions = torch.arange(9) * 17
    start, end = (rotated(scheme, q, k, positions)[0] for scheme in (annealed, whole))
    annealed.anneal_to(0.5)
    half = rotated(annealed, q, k, positions)[0]
    assert min((half - start).abs().max(), (half - end).abs().max()) > 0.01
    annealed.anneal_to(1)
    torch.testing.assert_close(rotated(annealed, q, k, positions)[0], end, rtol=0, atol=1e-14)
    again = fope(anneal=True, **options)
    again.load_state_dict(annealed.state_dict())
    assert torch.equal(rotated(again, q, k, positions)[0], rotated(annealed, q, k, positions)[0])
    with pytest.raises(OptionError, match="expected a number from 0 to 1"):
        annealed.anneal_to(1.5)
    with pytest.raises(OptionError, match="anneal=False"):
        whole.anneal_to(0.5)


def test_fope_mixes_all_frequencies_into_every_pair() -> None:
    scheme = fope().double()
    with torch.no_grad():
        for coefficients in scheme.parameters():
            coefficients.normal_()
    x = torch.zeros(1, 4, 1, 16, dtype=torch.float64)
    x[..., :8] = 1
    got, _ = rotated(scheme, x, x[:, :2], torch.tensor([21]))
    angles = 21 * FREQUENCIES.double()
    for head in range(4):
        for coefficients, function, part in (
            (scheme.cos_coef, torch.cos, got[0, head, 0, :8]),
            (scheme.sin_coef, torch.sin, got[0, head, 0, 8:]),
        ):
            weights = torch.eye(8) + coefficients.detach()[head // 2]
            want = torch.stack([(function(angles) * weights[:, pair]).sum() for pair in range(8)])
            torch.testing.assert_close(part, 1.25 * want)


@pytest.mark.parametrize("part", [slice(0, 6), slice(1, 7)], ids=["odd strides", "odd offset"])
def test_neighbours_turn_wherever_they_are_in_memory(part: slice) -> None:
    x = torch.randn(2, 3, 1, 5, 7, dtype=torch.float64).transpose(1, 3)[..., part].requires_grad_()
    cos, sin = torch.randn(2, 1, 5, 1, 1, 3, dtype=torch.float64).requires_grad_()
    u, w = x[..., 0::2], x[..., 1::2]
    want = torch.stack((u * cos - w * sin, w * cos + u * sin), dim=-1).flatten(-2)
    got = rotate_neighbours(x, cos, sin)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    for mine, expected in zip(*(torch.autograd.grad(y, (x, cos, sin), weight) for y in (got, want)), strict=True):
        torch.testing.assert_close(mine, expected)


# -- xpos --------------------------------------------------------------------------------------------------------------


def xpos_logits(q: Tensor, k: Tensor, positions: Tensor, scale_base: float, amount: float = 1.0) -> Tensor:
    """The definition, pair by pair, in float64: `[B, H, S, S]`, for equal numbers of heads."""
    width = q.shape[-1]
    distance = (positions[:, None] - positions[None, :]).double()
    logits = torch.zeros(*q.shape[:3], len(positions), dtype=torch.float64)
    for pair in range(width // 2):
        x, y = (torch.complex(z[..., 2 * pair], z[..., 2 * pair + 1]) for z in (q, k))
        turned = x[..., :, None] * y[..., None, :].conj() * torch.exp(1j * distance * 1e4 ** (-2 * pair / width))
        zeta = (2 * pair + 0.4 * width) / (1.4 * width)
        logits += turned.real * zeta ** (amount * distance.clamp_min(0) / scale_base)
    return logits.masked_fill(distance < 0, float("-inf"))


def weights_of(scheme: Scheme, q: Tensor, k: Tensor, positions: Tensor, executor: str | None) -> Tensor:
    identity = torch.eye(q.shape[2], q.shape[3], dtype=q.dtype).expand_as(k)
    at = {"query_positions": positions[None], "key_positions": positions[None]}
    return attend(scheme, q, k, identity, executor=executor, **at)[..., : q.shape[2]]


@pytest.mark.parametrize("executor", ["dense", "blocks", None])
@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(9),
        torch.arange(9) * 3000,
        torch.tensor([0, 1, 2, 50_000, 50_001, 90_000, 90_003, 200_000, 200_001]),
        torch.arange(9) + 1_000_000,
    ],
    ids=["near", "spread", "jumps", "far"],
)
def test_xpos_is_its_definition_at_any_position(positions: Tensor, executor: str) -> None:
    scheme, (q, k) = build("xpos", geometry()), random_qk()
    assert scheme.layout == "interleaved"
    want = xpos_logits(q, k, positions, 512.0).softmax(-1)
    torch.testing.assert_close(weights_of(scheme, q, k, positions, executor), want, rtol=0, atol=1e-9)
    operands = [x.float().requires_grad_() for x in (q, k)]
    single = weights_of(scheme, *operands, positions, executor)
    assert all(x.isfinite().all() for x in (single, *torch.autograd.grad(single.square().sum(), operands)))
    # In float32 the angles are off by up to 0.06 at a million; nothing else is.
    torch.testing.assert_close(single.double(), want, rtol=0, atol=0.2 if int(positions.max()) >= 10**6 else 0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", [0, 1_000_000], ids=["near", "far"])
def test_xpos_as_products_is_its_definition_as_far_as_it_goes(start: int, dtype: torch.dtype) -> None:
    # The first query's factor is e^-40 times the last one's.
    scheme, (q, k) = build("xpos", geometry()), random_qk()
    positions = start + torch.tensor([0, 1, 2, 50, 8000, 8001, 16_000, 16_340, 16_346])
    want = weights_of(scheme, q.to(dtype), k.to(dtype), positions, "dense").double()
    got = weights_of(scheme, q.to(dtype), k.to(dtype), positions, "sdpa")
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0, atol=max(1e-9, 8 * torch.finfo(dtype).eps))


@pytest.mark.parametrize(("last", "executor"), [(16_347, "sdpa"), (16_348, "dense")])
def test_xpos_goes_as_products_as_far_as_float32_holds_them(last: int, executor: str) -> None:
    scheme = build("xpos", geometry())
    heads, groups, width = scheme.geometry.heads, scheme.geometry.kv_heads, scheme.geometry.head_dim
    q, k = torch.randn(1, heads, 40, width), torch.randn(1, groups, 40, width)
    places = torch.cat((torch.arange(39), torch.tensor([last])))[None]
    at = {"query_positions": places, "key_positions": places}
    with hf_posenc.attention.recorded() as found:
        attend(scheme, q, k, k, **at)
        attend(scheme, q[:, :, -1:], k, k, query_positions=places[:, -1:], key_positions=places)
    # A step of decoding is faster by itself.
    assert found == [executor, "dense"]
    if executor != "sdpa":
        with pytest.raises(hf_posenc.OptionError, match="too far apart"):
            attend(scheme, q, k, k, executor="sdpa", **at)


def test_xpos_is_the_official_one_within_its_range() -> None:
    """torchscale scales queries by zeta^((p - c) / base) and keys by the inverse, c being the middle of the input."""
    (q, k), width, positions = random_qk(), 16, torch.arange(9)
    zeta = (torch.arange(0, width, 2, dtype=torch.float64) + 0.4 * width) / (1.4 * width)
    power = (positions - len(positions) // 2).double()[:, None] / 20.0
    angles = positions[:, None] * 1e4 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)

    def turn(x: Tensor, scale: Tensor) -> Tensor:
        cos, sin = ((part * scale).repeat_interleave(2, dim=-1) for part in (angles.cos(), angles.sin()))
        every_two = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos + every_two * sin

    official = turn(q, zeta**power) @ turn(k, zeta**-power).mT
    torch.testing.assert_close(official.tril(), xpos_logits(q, k, positions, 20.0).tril().nan_to_num(neginf=0.0))
    got = weights_of(build("xpos", geometry(), scale_base=20.0), q, k, positions, "dense")
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    torch.testing.assert_close(got, official.masked_fill(hidden, float("-inf")).softmax(-1))


def test_xpos_fades_as_far_as_it_is_annealed() -> None:
    own = 1e4 ** -(torch.arange(8) / 8)
    scheme, (q, k) = (
        build("xpos", geometry(inv_freq=own), layout="interleaved", anneal=True, scale_base=20.0),
        random_qk(),
    )
    positions = torch.arange(9) * 4
    assert build("xpos", geometry(inv_freq=own), anneal=True).facts(native_kept=False).exact
    for progress in (0.0, 0.3, 1.0):
        scheme.anneal_to(progress)
        want = xpos_logits(q, k, positions, 20.0, progress).softmax(-1)
        torch.testing.assert_close(weights_of(scheme, q, k, positions, "dense"), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("executor", ["dense", "blocks"])
def test_xpos_by_blocks_sees_two_of_them(executor: str) -> None:
    (q, k), positions = random_qk(), torch.tensor([0, 1, 2, 3, 4, 5, 6, 40, 41])
    want = xpos_logits(q, k, positions, 512.0)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    seen[4:7, :2] = False  # blocks of two positions: those of 4 and 5 see 2 to 5, that of 6 sees 4 to 6
    seen[6, 2:4] = False
    seen[7:, :7] = False
    got = weights_of(build("xpos", geometry(), block_length=2), q, k, positions, executor)
    torch.testing.assert_close(got, want.masked_fill(~seen, float("-inf")).softmax(-1), rtol=0, atol=1e-9)
    assert not build("xpos", geometry(), block_length=2, gate=True).facts(native_kept=True).exact


# -- rope on all rope types --------------------------------------------------------------------------------------------

LONG = 131_072
ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 32.0, "original_max_position_embeddings": LONG // 32},
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + 2.0 * i for i in range(8)],
        "factor": 32.0,
        "original_max_position_embeddings": LONG,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "proportional": {"partial_rotary_factor": 0.5, "factor": 2.0},
}


def small_llama(kind: str, limit: int = LONG) -> LlamaForCausalLM:
    """A Llama of a rope type whose logits are about 5 at most.

    Args:
        kind: The type.
        limit: The length from which on "dynamic" and "longrope" change their frequencies.
    """
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPE_TYPES[kind]}
    if kind == "longrope":
        rope["original_max_position_embeddings"] = limit
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=limit if kind == "dynamic" else LONG,
        initializer_range=0.15,
        rope_parameters=rope,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def logits_at(model: PreTrainedModel, first: int, length: int = 13) -> Tensor:
    """Logits `[S, V]` of a sequence whose positions begin at `first`."""
    ids = torch.arange(length)[None] % 60
    with torch.no_grad():
        return model(ids, position_ids=torch.arange(first, first + length)[None], use_cache=False).logits[0]


def start_error(rope_type: str, first: int, scheme: str = "rope", *, limit: int = LONG, **options: Any) -> float:
    """Return the largest difference between the logits of a model before and after patching it."""
    patched = logits_at(hf_posenc.patch(small_llama(rope_type, limit), scheme, **options), first)
    return float((patched - stock_logits(rope_type, first, limit)).abs().max())


@functools.cache
def stock_logits(kind: str, first: int, limit: int) -> Tensor:
    found = logits_at(small_llama(kind, limit), first)
    assert found.abs().max() > 1
    return found


# Schemes that start as the model's own rotation. Those of blocks compute angles in float64, the stock model in float32.
STARTS: list[tuple[str, dict[str, Any]]] = [
    ("rope", {}),
    ("rope2d", {}),
    ("rope2d", {"kind": "axial"}),
    ("fope", {}),
    ("fope", {"anneal": True, "sigma": 0.3, "clip": True, "max_length": 100}),
    ("xpos", {"anneal": True}),
    *((name, {"block_size": size}) for name in ("liere", "comrope_ap", "comrope_ld") for size in (2, 8)),
]


@pytest.mark.parametrize("first", once([100_000, 0]))
@pytest.mark.parametrize("kind", once(sorted(ROPE_TYPES, reverse=True)))
def test_the_start_is_exact_on_every_rope_type(kind: str, first: int) -> None:
    for scheme, options in STARTS:
        of_angles = 2 * first * torch.finfo(torch.float32).eps if "block_size" in options else 0
        assert start_error(kind, first, scheme, **options) < 1e-5 + of_angles


@torch.no_grad()
def test_layers_share_angles_only_where_they_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(30).view(2, 15)
    for options in ({}, {"theta": 50.0}, {"proportion": 0.5}, {"gate": True}):
        model = small_llama("default")
        for layer, own in enumerate(({}, options)):
            hf_posenc.patch(model, "rope", layers=[layer], **own)
        for name, parameter in model.named_parameters():
            if "gate" in name:
                parameter.fill_(0.7)
        together = model(ids).logits
        with monkeypatch.context() as alone:
            alone.setattr(RoPE, "alike", lambda self: None)
            assert torch.equal(model(ids).logits, together)


def test_frequencies_that_change_are_frozen_with_a_caution() -> None:
    for kind in ("dynamic", "longrope"):
        assert start_error(kind, 1_000, limit=2048) < 1e-5
        assert start_error(kind, 4_000, limit=2048) > 1e-2, "the model has changed its own, rope has not"
        warnings = hf_posenc.plan(small_llama(kind, 2048), "rope").warnings
        assert any("beyond 2048 tokens; rope keeps those used up to there" in warning for warning in warnings)
        for scheme in ("rope2d", "fope", "xpos"):
            cautions = hf_posenc.plan(small_llama(kind, 2048), scheme).warnings
            assert any(f"beyond 2048 tokens; {scheme} keeps" in warning for warning in cautions)
    for kind in ROPE_TYPES.keys() - {"dynamic", "longrope"}:
        assert not any("frequencies" in warning for warning in hf_posenc.plan(small_llama(kind), "rope").warnings)


def test_the_long_frequencies_of_longrope_can_be_frozen() -> None:
    for first in (4_000, 100_000):
        assert start_error("longrope", first, limit=2048, freeze="long") < 1e-5
    assert start_error("longrope", 0, limit=2048, freeze="long") > 1e-2
    plan = hf_posenc.plan(small_llama("longrope", 2048), "rope", freeze="long")
    assert plan.start == "break"
    assert any("rope keeps those used beyond" in warning for warning in plan.warnings)
    for kind, options in (("dynamic", {}), ("default", {}), ("longrope", {"theta": 500.0})):
        with pytest.raises(OptionError, match="freeze='long': expected 'short', unless the model has a second set"):
            hf_posenc.plan(small_llama(kind, 2048), "rope", freeze="long", **options)


@pytest.mark.parametrize("scheme", ["rope", "xpos", "rope2d", "fope"])
def test_beside_a_kept_rotation_that_lengthens_queries_nothing_changes(scheme: str) -> None:
    for kind in ("yarn", "longrope"):
        model = small_llama(kind)
        before = logits_at(model, 7)
        after = logits_at(hf_posenc.patch(model, scheme, native="keep"), 7)
        torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
