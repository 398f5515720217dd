"""Values of the official implementations, each at the tolerance that its json states.

A bias is compared twice: as what `score` adds to zero logits, where a constant per row cannot hide, and as the weights
that `attend` makes of it, by every executor.
"""

import re
from typing import Any, NamedTuple

import pytest
import torch
from official import about, golden, load
from torch import Tensor

from hf_posenc import Geometry, Positions, Scheme, attend, build
from hf_posenc.attention import executors
from hf_posenc.operands import Block, Tokens
from hf_posenc.schemes.families.additive import Buckets

EXECUTORS = ("dense", "blocks")
# Softmax and the matrix products around it round, even where the bias itself is exact.
ROUNDING = 1e-14


def geometry(heads: int, direction: str = "causal", **changes) -> Geometry:
    shape = {"kv_heads": heads, "head_dim": 8, "hidden_size": 32, "scale": 1.0, **changes}
    return Geometry(heads=heads, causal=direction == "causal", **shape)


def bias_of(scheme: Scheme, query: Tensor, key: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """What a scheme adds to logits of zero, `[H, Q, K]`."""
    heads, width = scheme.geometry.heads, scheme.geometry.head_dim
    q = torch.zeros(1, heads, len(query), width, dtype=dtype)
    k = torch.zeros(1, scheme.geometry.kv_heads, len(key), width, dtype=dtype)
    block = Block(Positions(query[None], key[None]), reach=int(max(query.max(), key.max())))
    return scheme.score(torch.zeros(1, heads, len(query), len(key), dtype=dtype), q, k, block)[0]


def weights_of(build_with, query: Tensor, key: Tensor, logits: Tensor, executor: str) -> Tensor:
    """The weights `[H, Q, K]` that an executor makes of logits and a scheme: values are the rows of the identity."""
    heads, keys = logits.shape[0], len(key)
    scheme = build_with(head_dim=keys)
    identity = torch.eye(keys, dtype=torch.float64).expand(1, heads, keys, keys)
    at = {"query_positions": query[None], "key_positions": key[None], "executor": executor}
    output = attend(scheme, logits[None], identity, identity, **at)
    if executor == "dense":
        again, weights = attend(scheme, logits[None], identity, identity, need_weights=True, **at)
        assert torch.equal(again, output)
        assert torch.equal(weights, output)
    return output[0]


def check_bias(build_with, want: Tensor, query: Tensor, key: Tensor, *, causal: bool, atol: float) -> None:
    """Compare the bias of the scheme that `build_with(**geometry changes)` makes, and the weights it leads to."""
    seen = key[None] <= query[:, None] if causal else torch.ones(len(query), len(key), dtype=torch.bool)
    got = bias_of(build_with(), query, key)
    assert got.shape == want.shape
    torch.testing.assert_close(got[:, seen], want[:, seen], rtol=0, atol=atol)
    # Once more with so many rows that a table of all distances is smaller than the matrix: another path in the code.
    times = 2 * int(max(query.max(), key.max())) // seen.numel() + 2
    got = bias_of(build_with(), query.repeat(times), key).unflatten(1, (times, -1))
    torch.testing.assert_close(got[..., seen], want[:, None, seen].expand(-1, times, -1), rtol=0, atol=atol)
    weights = want.masked_fill(~seen, float("-inf")).softmax(-1)
    for executor in EXECUTORS:
        got = weights_of(build_with, query, key, torch.zeros_like(want), executor)
        torch.testing.assert_close(got, weights, rtol=0, atol=max(atol, ROUNDING))


def case(suffix: str, positions_long: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key positions of a golden, from the end of its name."""
    if suffix.endswith("7x7"):
        return torch.arange(7), torch.arange(7)
    if suffix.endswith("offset_2x11"):
        return torch.tensor([9, 10]), torch.arange(11)
    if suffix.endswith("11x11"):
        return torch.arange(11), torch.arange(11)
    assert suffix.endswith("long"), suffix
    return positions_long, positions_long


# -- additive biases ---------------------------------------------------------------------------------------------------


class Bias(NamedTuple):
    """A bias of a golden: its name there, and the scheme that has it, with the golden's names of its parameters."""

    scheme: str
    file: str
    want: str
    heads: int
    options: dict[str, Any] = {}
    parameters: dict[str, str] = {}

    def build(self, dtype: torch.dtype = torch.float64, **changes: Any) -> Scheme:
        direction = "bidir" if re.search("bidir|full", self.want) else "causal"
        scheme = build(self.scheme, geometry(self.heads, direction, **changes), **self.options).to(dtype)
        stored = {name: golden(self.file)[where] for name, where in self.parameters.items()}
        return load(scheme, stored) if stored else scheme


def kerple(kernel: str, stored: str, want: str) -> Bias:
    names = {name: f"{kernel}.{name}_{stored}" for name in ("bias_a", "bias_p")}
    return Bias("kerple", "kerple", f"{kernel}.{want}", 4, {"kernel": kernel}, names)


def fire(variant: str, want: str, scheme: str = "fire") -> Bias:
    start = f"{variant}.param."
    names = {key.removeprefix(start): key for key in golden("fire") if key.startswith(start)}
    return Bias(scheme, "fire", f"{variant}.{want}", 4, {"normalizer": "query"}, names)


PLACES = ("causal_7x7", "offset_2x11", "long", "bidir_7x7")
SANDWICH = [
    *(("paper", 0, place) for place in PLACES),
    *(("start1", 1, place) for place in ("causal_7x7", "long")),
    *(("nemo", 1, place) for place in ("causal_7x7", "bidir_7x7")),  # NeMo counts t from 1 and shifts by d / 2
]
BIASES = [
    *(Bias("alibi", "alibi", f"bias_{place}_h{heads}", heads) for place in PLACES for heads in (8, 12)),
    *(
        Bias("t5", "t5_rpe", f"bias_{way}_{place}", 6, {}, {"weight": f"weight_{way}"})
        for way in ("causal", "bidir")
        for place in ("7x7", "offset_2x11", "long")
    ),
    *(
        Bias("t5_clipped", "t5_clipped", f"bias_{place}", 6, {"max_distance": 4}, {"r": table})
        for place, table in (("causal_7x7", "r"), ("causal_offset_2x11", "r"), ("bidir_7x7", "r_bidir"))
    ),
    *(
        kerple(kernel, stored, f"bias_{place}")
        for kernel in ("log", "power")
        for stored in ("raw", "clamped")
        for place in PLACES
    ),
    *(
        Bias("sandwich", "sandwich", f"{source}.h{heads}_d{dim}.bias_{place}", heads, {"dim": dim, "freq_start": start})
        for source, start, place in SANDWICH
        for heads, dim in ((4, 16), (12, 128))
    ),
    *(
        fire(variant, f"bias_{place}", scheme)
        for variant in ("default", "smallL")
        for place in ("causal_7x7", "offset_2x11", "long", "paper_full_7x7")
        for scheme in ("fire", "fire_s")
    ),
]


@pytest.mark.parametrize("bias", BIASES, ids=lambda bias: f"{bias.scheme}-{bias.want}-{len(bias.parameters)}")
def test_bias(bias: Bias) -> None:
    values, atol = golden(bias.file), about(bias.file)["atol"]
    place = re.sub("_h[0-9]+$", "", bias.want)
    query, key = case(place, values.get("positions_long", torch.empty(0)))
    causal = bias.build().geometry.causal
    atol = atol["float64"] if isinstance(atol, dict) else atol
    check_bias(bias.build, values[bias.want], query, key, causal=causal, atol=atol)


# -- alibi -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 7, 8, 12, 16, 20, 25, 32, 40])
def test_alibi_slopes(heads: int) -> None:
    want = golden("alibi")[f"slopes_h{heads}"]
    got = -bias_of(build("alibi", geometry(heads)).double(), torch.tensor([1]), torch.tensor([0]))
    torch.testing.assert_close(got[:, 0, 0], want, rtol=0, atol=about("alibi")["atol"])


# -- nope, learned, sinusoidal -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", [None, "dense", "blocks", "sdpa"])
def test_nope(executor: str | None) -> None:
    values, atol = golden("nope"), about("nope")["atol"]
    scheme = build("nope", geometry(3, scale=None)).double()
    q, k, v = (values[name] for name in "qkv")
    positions = torch.arange(7)[None]
    at = {"query_positions": positions, "key_positions": positions}
    output = attend(scheme, q, k, v, executor=executor, **at)
    torch.testing.assert_close(output, values["causal.out"], rtol=0, atol=atol)
    if executor in (None, "dense"):
        _, weights = attend(scheme, q, k, v, need_weights=True, executor=executor, **at)
        torch.testing.assert_close(weights, values["causal.probs"], rtol=0, atol=atol)


def test_learned_is_gpt2s_embedding_also_when_left_padded() -> None:
    values = golden("learned_ape")
    positions, width = values["position_ids"], values["wpe"].shape[1]
    assert positions[0].tolist() != positions[1].tolist()
    scheme = build("learned", geometry(2, hidden_size=width), num_positions=len(values["wpe"])).double()
    load(scheme, {"wpe.weight": values["wpe"]})
    got = scheme.embed(values["wte"][values["input_ids"]], positions)
    torch.testing.assert_close(got, values["hidden_in"], rtol=0, atol=about("learned_ape")["atol"])


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize(("freq", "layout"), [("paper", "interleaved"), ("paper", "concat"), ("t2t", "concat")])
def test_sinusoidal(freq: str, layout: str, width: int) -> None:
    values = golden("sinusoidal")
    scheme = build("sinusoidal", geometry(2, hidden_size=width), freq=freq, layout=layout).double()
    inputs = torch.zeros(1, len(values["positions"]), width, dtype=torch.float64)
    got = scheme.embed(inputs, values["positions"][None])[0]
    want = values[f"{freq}_{layout}_d{width}"]
    torch.testing.assert_close(got, want, rtol=0, atol=about("sinusoidal")["atol"])


# -- t5 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["causal", "bidir"])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (16, 64), (64, 256), (8, 20), (32, 2048)])
def test_t5_buckets(buckets: int, far: int, direction: str) -> None:
    values = golden("t5_rpe")
    distance = -values["rel_for_bucket"]  # theirs is key minus query
    got = Buckets(num_buckets=buckets, max_distance=far, causal=direction == "causal")(distance)
    assert torch.equal(got, values[f"bucket_nb{buckets}_md{far}_{direction}"])


# -- kerple ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_kerple_gradient_passes_through_the_bounds(kernel: str) -> None:
    values, atol = golden("kerple"), about("kerple")["atol"]
    raw = {name: values[f"{kernel}.{name}_raw"] for name in ("bias_a", "bias_p")}
    clamped = {name: values[f"{kernel}.{name}_clamped"] for name in ("bias_a", "bias_p")}
    assert any(not torch.equal(raw[name], clamped[name]) for name in raw)  # the golden is of the case in question
    scheme = kerple(kernel, "raw", "").build()
    bias = bias_of(scheme, torch.arange(7), torch.arange(7))
    # The official code is causal: keys ahead have no bias there.
    (bias * values[f"{kernel}.gradcheck_upstream"]).tril().sum().backward()
    for name, value in raw.items():
        parameter = scheme.get_parameter(name)
        torch.testing.assert_close(parameter.grad, values[f"{kernel}.grad_{name}"], rtol=0, atol=atol)
        assert torch.equal(parameter, value)  # the official code overwrites it


def test_kerple_three_parameters() -> None:
    values, atol = golden("kerple"), about("kerple")["atol"]
    x, want, positions = values["3para.x"], values["3para.logits_7x7"], torch.arange(7)
    stored = {name: values[f"3para.{name}"] for name in ("bias_a", "bias_p", "wei_a", "wei_p")}

    def build_with(**changes) -> Scheme:
        return load(build("kerple", geometry(4, **changes), kernel="power", weighted=True).double(), stored)

    block = Block(Positions(positions[None], positions[None]), reach=6)
    scheme = build_with(head_dim=7)
    identity = torch.eye(7, dtype=torch.float64).expand(1, 4, 7, 7)
    seen = torch.ones(7, 7).tril().bool()
    got = scheme.score(x[None], x[None], identity, block)[0]
    torch.testing.assert_close(got[:, seen], want[:, seen], rtol=0, atol=atol)
    weights = want.masked_fill(~seen, float("-inf")).softmax(-1)
    for executor in EXECUTORS:
        got = weights_of(build_with, positions, positions, x, executor)
        torch.testing.assert_close(got, weights, rtol=0, atol=atol)


# -- fire --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["default", "smallL"])
@pytest.mark.parametrize("name", ["causal_11x11", "long"])
def test_fire_in_float32(name: str, variant: str) -> None:
    values, atol = golden("fire"), about("fire")["atol"]["official_f32"]
    query, key = case(name, values["positions_long"])
    got = bias_of(fire(variant, "").build(torch.float32), query, key, torch.float32)
    assert got.dtype == torch.float32
    seen = key[None] <= query[:, None]
    want = values[f"{variant}.official_f32.bias_{name}"]
    torch.testing.assert_close(got[:, seen], want[:, seen], rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", ["default", "smallL"])
def test_fire_gradients(variant: str, dtype: torch.dtype) -> None:
    values, atol = golden("fire"), about("fire")["atol"]["official_f32"]
    scheme, positions = fire(variant, "").build(dtype), torch.arange(11)
    bias = bias_of(scheme, positions, positions, dtype)
    (bias * values[f"{variant}.grad_upstream_11x11"]).sum().backward()
    for name, parameter in scheme.named_parameters():
        want = values[f"{variant}.grad.{name}"].reshape(parameter.shape).to(dtype)
        torch.testing.assert_close(parameter.grad, want, rtol=0, atol=atol)
    assert "init_L" not in dict(scheme.named_parameters())


# -- rope --------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "half": {"layout": "half"},
    "interleaved": {"layout": "interleaved"},
    "partial8": {"layout": "half", "rotary_dim": 8},
}
# As the json says in words: float64, then float32 at each place.
ROPE_ATOL = {torch.float64: {"base": 1e-12, "offset": 1e-12, "long": 1e-12}}
ROPE_ATOL[torch.float32] = {"base": 2e-5, "offset": 2e-5, "long": 3e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("frequencies", ["given", "own"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["base", "offset", "long"])
def test_rope(place: str, layout: str, frequencies: str, dtype: torch.dtype) -> None:
    values, atol = golden("rope"), ROPE_ATOL[dtype][place]
    given = values["partial8.inv_freq" if layout == "partial8" else "inv_freq"]
    shape = {"head_dim": 16, "inv_freq": given if frequencies == "given" else None}
    scheme = build("rope", geometry(4, "bidir", **shape), **LAYOUTS[layout])
    q, k = values["q"].to(dtype), values["k"].to(dtype)
    positions = values[f"{place}.positions"][None]
    projected = scheme.project(Tokens(positions=Positions(positions, positions)), q, k, k)
    for got, name in ((projected.q, "q"), (projected.k, "k")):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), values[f"{place}.{layout}.{name}"], rtol=0, atol=atol)
    assert projected.v is k
    logits = values[f"{place}.{layout}.logits"]
    # The stated tolerance is for one channel; a logit (not scaled here) sums 16 products of them.
    atol *= 1 if dtype == torch.float64 else 16**0.5
    torch.testing.assert_close((projected.q @ projected.k.mT).double(), logits, rtol=0, atol=atol)
    identity = torch.eye(13, 16, dtype=dtype).expand(2, 4, 13, 16)  # values are as wide as keys
    for executor in executors(scheme):
        at = {"query_positions": positions, "key_positions": positions, "executor": executor}
        weights = attend(scheme, q, k, identity, **at)[..., :13]
        torch.testing.assert_close(weights.double(), logits.softmax(-1), rtol=0, atol=atol)


def unit_rotation(scheme: Scheme, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosines and sines that a half-layout rotation uses, each `[S, D]` as transformers lays them out."""
    width = scheme.geometry.head_dim
    first = torch.zeros(1, 1, positions.shape[1], width, dtype=dtype)
    first[..., : width // 2] = 1
    turned = scheme.project(Tokens(positions=Positions(positions, positions)), first, first, first).q[0, 0]
    cos, sin = turned.chunk(2, dim=-1)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


# -- rope types --------------------------------------------------------------------------------------------------------

ROPE_TYPES = ["default", "linear", "dynamic", "yarn", "yarn_mscale_notrunc", "longrope", "llama3", "proportional"]
# As the json says in words.
ROPE_TYPES_ATOL, ROPE_TYPES_ATOL_FAR, FAR = 1e-5, 1e-2, 5000


def rope_type(name: str, frequencies: str = "inv_freq") -> Scheme:
    values = golden("rope_types")
    scaling = values[f"{name}.attention_scaling"].item()
    assert scaling == about("rope_types")["hyper"][name]["attention_scaling"]
    given = values[f"{name}.{frequencies}"]
    return build("rope", geometry(1, head_dim=64, inv_freq=given, rotary_scaling=scaling))


@pytest.mark.parametrize("name", ROPE_TYPES)
def test_rope_types(name: str) -> None:
    values, scheme = golden("rope_types"), rope_type(name)
    positions = values[f"{name}.positions"]
    near = positions[0] <= FAR
    for got, part in zip(unit_rotation(scheme, positions), ("cos", "sin"), strict=True):
        want = values[f"{name}.{part}"][0]
        torch.testing.assert_close(got[near], want[near], rtol=0, atol=ROPE_TYPES_ATOL)
        torch.testing.assert_close(got[~near], want[~near], rtol=0, atol=ROPE_TYPES_ATOL_FAR)


def test_proportional_rope_by_an_option() -> None:
    values, about_it = golden("rope_types"), about("rope_types")["hyper"]["proportional"]["rope_parameters"]
    options = {"theta": about_it["rope_theta"], "proportion": about_it["partial_rotary_factor"]}
    scheme = build("rope", geometry(1, head_dim=64), **options)
    torch.testing.assert_close(scheme.frequencies(torch.zeros(1)), values["proportional.inv_freq"], rtol=1e-6, atol=0)
    own = build("rope", geometry(1, head_dim=64, inv_freq=values["default.inv_freq"]), proportion=0.25)
    assert torch.equal(own.frequencies(torch.zeros(1))[:8], values["default.inv_freq"][:8])
    assert not own.frequencies(torch.zeros(1))[8:].any()
    assert not own.facts(native_kept=False).exact


@pytest.mark.parametrize(
    ("name", "frequencies"),
    [
        *(("dynamic", f"inv_freq_len{length}") for length in (2048, 2049, 4096, 8192)),
        *(("longrope", f"inv_freq_len{length}") for length in (4096, 4097)),
    ],
)
def test_rope_with_the_frequencies_of_a_length(name: str, frequencies: str) -> None:
    scheme = rope_type(name, frequencies)
    given = golden("rope_types")[f"{name}.{frequencies}"].double()
    positions = torch.tensor([[0, 1, 7, 100, 2047, 8191]])
    angles = positions[0, :, None] * torch.cat((given, given))
    for got, want in zip(unit_rotation(scheme, positions, torch.float64), (angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(got, want * scheme.geometry.rotary_scaling, rtol=0, atol=1e-12)


# -- grape_a -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [4, 6])
def test_grape_a(heads: int) -> None:
    values, atol, places = golden("grape_a"), about("grape_a")["atol"], torch.arange(11)[None]
    k, want, seen = values[f"h{heads}.k"], values[f"h{heads}.bias"], torch.ones(11, 11).tril().bool()
    scheme = load(
        build("grape_a", geometry(heads)).double(), {name: values[f"h{heads}.{name}"] for name in ("omega", "u")}
    )
    state = scheme.project(Tokens(positions=Positions(places, places)), k, k, k).state
    block = Block(Positions(places, places), reach=10, state=state)
    got = scheme.score(torch.zeros_like(want), k, k, block)
    torch.testing.assert_close(got[..., seen], want[..., seen], rtol=0, atol=atol)
    weights = (k @ k.mT + want).masked_fill(~seen, float("-inf")).softmax(-1)
    for executor in executors(scheme):
        got = attend(scheme, k, k, k, query_positions=places, key_positions=places, executor=executor)
        torch.testing.assert_close(got, weights @ k, rtol=0, atol=10 * atol)


# -- path --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [4, 5, 64])
def test_path(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_posenc.schemes.path._CHUNK", chunk)
    values, places = golden("path"), torch.arange(13)[None]
    q, k, v = (values[name] for name in "qkv")
    seen, scheme = torch.ones(13, 13).tril().bool(), build("path", geometry(4, kv_heads=2, scale=8**-0.5)).double()
    state = {
        "reflection_directions": values["w"].transpose(1, 2),
        "reflection_strengths": values["beta"].transpose(1, 2),
    }
    block = Block(Positions(places, places), reach=12, keep=seen[None, None], state=state)
    logits = scheme.score(8**-0.5 * q @ k.repeat_interleave(2, 1).mT, q, k, block)
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    torch.testing.assert_close(weights, values["attn"], rtol=0, atol=about("path")["atol"])
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), values["out"], rtol=0, atol=about("path")["atol"])


# -- rope2d ------------------------------------------------------------------------------------------------------------


def test_interleaved_mrope() -> None:
    values, coords = golden("mrope"), golden("mrope")["coords"]
    first, *others = about("mrope")["mrope_section"]
    assert first > others[0] == others[1]
    shape = geometry(1, head_dim=36, inv_freq=values["inv_freq"])
    scheme = build("rope2d", shape, kind="axial", axes=3, section=others[0]).double()
    places = torch.arange(7)[None].expand(2, -1)
    for got, want in zip(
        scheme.factors(places, coords, torch.float64), (values["angles"].cos(), values["angles"].sin()), strict=True
    ):
        torch.testing.assert_close(got[:, 0], want, rtol=0, atol=about("mrope")["atol"])
    text = build("rope", shape).double().factors(places, None, torch.float64)
    for got, want in zip(scheme.factors(places, None, torch.float64), text, strict=True):
        torch.testing.assert_close(got, want.expand_as(got), rtol=0, atol=1e-12)


# -- rotations by content ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["repo", "selective_rope"])
def test_rotation_by_content(name: str) -> None:
    values, atol = golden(name), about(name)["atol"]
    shape = geometry(3, hidden_size=values["hidden"].shape[-1])
    scheme = build(name, shape, **about(name).get("options", {"init": "official"})).double()
    load(scheme, {key: values[key] for key in scheme.state_dict()})
    places = torch.arange(values["q"].shape[2])[None]
    tokens = Tokens(positions=Positions(places, places), hidden=values["hidden"])
    got = scheme.project(tokens, values["q"], values["k"], values["k"])
    torch.testing.assert_close(got.q, values["turned_q"], rtol=0, atol=atol)
    torch.testing.assert_close(got.k, values["turned_k"], rtol=0, atol=atol)


# -- curves that queries mix, and polar numbers ------------------------------------------------------------------------


def test_inkling() -> None:
    values, about_it, places = golden("inkling"), about("inkling"), torch.arange(11)[None]
    shape = geometry(4, kv_heads=2, hidden_size=values["hidden"].shape[-1], scale=about_it["scale"])
    rank, extent = values["proj"].shape
    scheme = build("inkling", shape, rank=rank, extent=extent).double()
    load(scheme, {name: values[name] for name in scheme.state_dict()})
    q, k, v, hidden = (values[name] for name in ("q", "k", "v", "hidden"))
    own = scheme.project(Tokens(positions=Positions(places, places), hidden=hidden), q, k, v).own
    for first in (0, 9):  # the last queries alone, as with a cache
        rows = {name: x[:, first:] for name, x in own.items()}
        block = Block(Positions(places[:, first:], places), reach=10, own=rows)
        got = scheme.score(torch.zeros_like(values["bias"][:, :, first:]), q[:, :, first:], k, block)
        seen = places.T[first:] >= places
        torch.testing.assert_close(
            got[..., seen], values["bias"][:, :, first:][..., seen], rtol=0, atol=about_it["atol"]
        )
        for executor in executors(scheme):
            at = {"query_positions": places[:, first:], "key_positions": places, "executor": executor}
            got = attend(scheme, q[:, :, first:], k, v, hidden=hidden, **at)
            torch.testing.assert_close(got, values["out"][:, :, first:], rtol=0, atol=about_it["atol"])


@pytest.mark.parametrize(("case", "theta"), [("zero", 10000.0), ("uniform", 500.0)])
def test_pope(case: str, theta: float) -> None:
    """The official code adds the phases to keys, and holds them between -2 pi and 0."""
    values, atol, places = golden("pope"), about("pope")["atol"], torch.arange(11)[None]
    q, k, v, polar_q, polar_k, phases = (
        values[f"{case}.{name}"] for name in ("q", "k", "v", "polar_q", "polar_k", "phases")
    )
    shape = geometry(4, head_dim=6, scale=6**-0.5)
    scheme = load(build("pope", shape, theta=theta).double(), {"phases": phases.clamp(-2 * torch.pi, 0)})
    block, want = Block(Positions(places, places), reach=10), 6**-0.5 * polar_q @ polar_k.mT
    got = scheme.score(torch.zeros_like(want), q, k, block)
    torch.testing.assert_close(got, want, rtol=0, atol=atol)
    for executor in executors(scheme):
        got = attend(scheme, q, k, v, query_positions=places, key_positions=places, executor=executor)
        torch.testing.assert_close(got, values[f"{case}.out"], rtol=0, atol=atol)


# -- add-ons -----------------------------------------------------------------------------------------------------------


def test_log_temperature() -> None:
    values, atol = golden("log_temperature"), about("log_temperature")["atol"]
    q, places = values["llama4.q"], torch.arange(40)[None]
    scheme = build("log_temperature", geometry(3), **about("log_temperature")["options"]).double()
    got = scheme.project(Tokens(positions=Positions(places, places)), q, q, q).q
    torch.testing.assert_close(got, values["llama4.scaled"], rtol=0, atol=atol["llama4"])
    stored = {"slopes": values["slopes"], "offsets": values["offsets"]}
    for form, names in {"ssmax": ["slopes"], "affine": ["slopes", "offsets"]}.items():

        def build_with(form: str = form, names: list[str] = names, **changes) -> Scheme:
            scheme = build("log_temperature", geometry(3, **changes), temperature=form).double()
            return load(scheme, {name: stored[name] for name in names})

        places = torch.arange(9)
        for executor in (*EXECUTORS, "sdpa"):
            got = weights_of(build_with, places, places, values["logits"], executor)
            torch.testing.assert_close(got, values[f"{form}.weights"], rtol=0, atol=atol["ssmax"])


def test_gated_output() -> None:
    values = golden("gated_output")
    shape = geometry(3, kv_heads=1, hidden_size=24)
    scheme = build("gated_output", shape, gate_per="channel", gate_start="official").double()
    load(scheme, {"gate_proj.weight": values["gate_proj.weight"]})
    got = scheme.finish(values["plain"], values["hidden"])
    torch.testing.assert_close(got, values["gated"], rtol=0, atol=about("gated_output")["atol"])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_attention_sinks(executor: str) -> None:
    values, places = golden("attention_sinks"), torch.arange(9)[None]
    scheme = load(build("attention_sinks", geometry(4, kv_heads=2, scale=None)).double(), {"sinks": values["sinks"]})
    at = {"query_positions": places, "key_positions": places, "executor": executor}
    got = attend(scheme, values["q"], values["k"], values["v"], **at)
    torch.testing.assert_close(got, values["output"], rtol=0, atol=about("attention_sinks")["atol"])
