"""Shaw's vectors, DeBERTa's disentangled attention and Transformer-XL: the official codes, and what they promise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, logits, moved, new_parameters, stock, tokens
from official import about, golden, load, near, randn
from torch import Tensor

import hf_posenc
from hf_posenc import Geometry, Positions, Scheme, attend, build
from hf_posenc.operands import Block, Tokens
from hf_posenc.schemes.disentangled import log_buckets
from hf_posenc.schemes.transformer_xl import TransformerXL

pytestmark = pytest.mark.usefixtures("several_blocks")

NAMES = ("shaw", "disentangled", "transformer_xl")
VALUES = {name: golden(name) for name in NAMES}
STATED = {name: about(name)["atol"] for name in NAMES}
# The goldens are float64; float32 rounds sums of 8 products of numbers of size 1.
FLOAT32 = 2e-6
EXECUTORS = ("dense", "blocks")
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def tolerance(name: str, dtype: torch.dtype) -> float:
    return STATED[name] if dtype == torch.float64 else FLOAT32


def logits_of(scheme: Scheme, q: Tensor, k: Tensor, query: Tensor, key: Tensor, host: Any = None) -> Tensor:
    """What a scheme makes of the scaled products of queries and keys, `[B, H, Q, K]`."""
    places = Positions(query[None], key[None])
    made = scheme.project(Tokens(positions=places, common=scheme.common, host=host), q, k, k)
    repeated = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    plain = q @ repeated.mT * scheme.geometry.scale
    block = Block(places, reach=int(max(query.max(), key.max())), values=k, tables=made.tables)
    return scheme.score(plain, made.q, made.k, block)


def check_golden(
    name: str,
    case: str,
    scheme: Scheme,
    operands: tuple[Tensor, ...],
    *,
    rows: slice = slice(None),
    stored_rows: slice = slice(None),
    host: Any = None,
) -> None:
    """Compare logits, weights and output of some query rows with a golden, by every executor."""
    q, k, v = operands
    values, atol = VALUES[name], tolerance(name, q.dtype)
    key = torch.arange(k.shape[2])
    q, query = q[:, :, rows], key[rows]
    want = {kind: values[f"{case}.{kind}"][:, :, stored_rows] for kind in ("logits", "probs", "out")}
    seen = key[None] <= query[:, None] if scheme.geometry.causal else torch.ones(len(query), len(key)).bool()
    got = logits_of(scheme, q, k, query, key, host)
    assert got.dtype == q.dtype
    near(f"{name} {case} logits", got[..., seen], want["logits"][..., seen], atol)
    at = {"query_positions": query[None], "key_positions": key[None], "host": host}
    _, weights = attend(scheme, q, k, v, need_weights=True, **at)
    near(f"{name} {case} probs", weights, want["probs"], atol)
    for executor in EXECUTORS:
        near(f"{name} {case} out", attend(scheme, q, k, v, executor=executor, **at), want["out"], atol)


def geometry(direction: str = "causal", **changes: Any) -> Geometry:
    shape = {"heads": 3, "kv_heads": 3, "head_dim": 8, "hidden_size": 24, **changes}
    return Geometry(causal=direction == "causal", **shape)


# -- Shaw et al. -------------------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("case", ["causal_11x11", "bidir_11x11", "causal_offset_2x11"])
def test_shaw_is_the_official_code(case: str, dtype: torch.dtype) -> None:
    values = VALUES["shaw"]
    scheme = build("shaw", geometry(case.split("_")[0]), max_distance=3).to(dtype)
    load(scheme, {name: values[name] for name in ("rel_k", "rel_v")})
    rows = slice(9, 11) if "offset" in case else slice(None)
    check_golden("shaw", case, scheme, tuple(values[name].to(dtype) for name in "qkv"), rows=rows)


# -- DeBERTa -----------------------------------------------------------------------------------------------------------


def deberta(case: str, direction: str, dtype: torch.dtype) -> tuple[Scheme, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """The scheme of a golden, and the query and key projections of its layer."""
    prefix = f"{case}.param."
    values = {
        key.removeprefix(prefix): value for key, value in VALUES["disentangled"].items() if key.startswith(prefix)
    }
    options: dict[str, Any] = {"max_distance": 4}
    if case == "bucket_shared":
        options = {"max_distance": 8, "buckets": 4, "share_att_key": True, "share_bias": True}
    scheme = build("disentangled", geometry(direction), scale="deberta", **options).to(dtype)
    own = {key: value for key, value in values.items() if key.startswith("pos_")}
    load(scheme, {**own, "common.rel_embeddings": VALUES["disentangled"][f"{case}.rel_embeddings"]})

    def host(x: Tensor) -> tuple[Tensor, Tensor]:
        def heads(name: str) -> Tensor:
            projected = x @ values[f"{name}.weight"].to(x).T + values[f"{name}.bias"].to(x)
            return projected.view(*x.shape[:2], 3, 8).transpose(1, 2)

        return heads("query_proj"), heads("key_proj")

    return scheme, host


@every_dtype
@pytest.mark.parametrize("rows", [slice(None), slice(9, 11)], ids=["all", "offset"])
@pytest.mark.parametrize("direction", ["causal", "bidir"])
@pytest.mark.parametrize("case", ["plain", "bucket_shared"])
def test_disentangled_is_the_official_code(case: str, direction: str, rows: slice, dtype: torch.dtype) -> None:
    scheme, host = deberta(case, direction, dtype)
    operands = tuple(VALUES["disentangled"][f"{case}.{name}"].to(dtype) for name in "qkv")
    # The queries and keys of the golden are those of its projections.
    q, k = host(VALUES["disentangled"][f"{case}.x"].to(dtype))
    near(case, q, operands[0].double(), tolerance("disentangled", dtype))
    near(case, k, operands[1].double(), tolerance("disentangled", dtype))
    check_golden("disentangled", f"{case}.{direction}", scheme, operands, rows=rows, stored_rows=rows, host=host)


def test_disentangled_buckets_are_the_official_ones_also_beyond_the_last() -> None:
    rel, want = (VALUES["disentangled"][f"bucket256_512.{name}"] for name in ("rel", "bucket"))
    assert rel.abs().max() > 512
    assert torch.equal(log_buckets(rel, 256, 512), want)
    scheme = build("disentangled", geometry("bidir"), max_distance=512, buckets=256)
    assert torch.equal(scheme.rows[512 - rel.clamp(-512, 512)], (want + 256).clamp(0, 511))
    assert (scheme.rows.min(), scheme.rows.max()) == (0, 511)


# -- Transformer-XL ----------------------------------------------------------------------------------------------------


def backwards(monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    """Make W_r go to the queries, or to all distances in reach."""
    distances = TransformerXL._distances
    many = 2**62
    monkeypatch.setattr(
        TransformerXL, "_distances", lambda self, places, pairs: None if chosen else distances(self, places, many)
    )


@every_dtype
@pytest.mark.parametrize("way", ["chosen", "table", "backwards"])
@pytest.mark.parametrize("untie", [False, True])
@pytest.mark.parametrize("case", ["causal_11x11", "causal_offset_2x11"])
def test_transformer_xl_is_the_official_code(
    case: str, untie: bool, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "chosen":
        backwards(monkeypatch, way == "backwards")
    values = VALUES["transformer_xl"]
    scheme = build("transformer_xl", geometry(), untie=untie).to(dtype)
    where = "" if untie else "common."
    biases = {f"{where}{name}": values[name] for name in ("r_w_bias", "r_r_bias")}
    load(scheme, {"r_net.weight": values["r_net_weight"], **biases})
    rows = slice(9, 11) if "offset" in case else slice(None)
    check_golden("transformer_xl", case, scheme, tuple(values[name].to(dtype) for name in "qkv"), rows=rows)
    q = values["q"].to(dtype)[:, :, rows]
    places = torch.arange(11)[None]
    made = scheme.project(Tokens(positions=Positions(places[:, rows], places), common=scheme.common), q, q, q).tables
    if way == "table":
        rising = made["positions_by_distance"][:, :11].flip(1)
        near("W_r R", rising, values["pos_key"], tolerance("transformer_xl", dtype))
    assert ("positions_by_distance" in made) == (way == "table" or (way == "chosen" and rows == slice(None)))


def test_transformer_xl_far_positions_in_float32() -> None:
    """Angles at position 1,000,000 need more than float32; sums of products of sines do not."""
    scheme = moved(build("transformer_xl", geometry(), init="zero"), 0.3)
    exact = copy.deepcopy(scheme).double()
    q, k = randn(1, 3, 3, 8), randn(1, 3, 4, 8, seed=1)
    key = 1_000_000 + torch.arange(4)
    got = logits_of(scheme, q.float(), k.float(), key[1:], key)
    want = logits_of(exact, q, k, key[1:] - 1_000_000, key - 1_000_000).detach()
    near("far", got, want, 3e-5)


# -- in models ---------------------------------------------------------------------------------------------------------


MOVED: list[tuple[str, dict[str, Any]]] = [
    ("shaw", {"max_distance": 5}),
    ("disentangled", {"max_distance": 5}),
    ("disentangled", {"max_distance": 5, "share_att_key": True}),
    ("transformer_xl", {}),
    ("cope", {"npos": 6}),
]


def patched(architecture: str, name: str, options: dict[str, Any], native: str) -> Any:
    return moved(hf_posenc.patch(stock(architecture), name, native=native, **options), seed=3)


@pytest.mark.parametrize(("name", "options"), MOVED, ids=str)
def test_beside_rotary_positions_a_shift_changes_nothing(name: str, options: dict[str, Any]) -> None:
    """It would, if queries or keys met these tables as the rotation left them."""
    model = patched("llama", name, options, "keep")
    ids, positions = tokens("llama", 1, 19), torch.arange(19)[None]
    before = logits(stock("llama"), "llama", ids)
    with torch.no_grad():
        here, there = (
            model(ids, position_ids=places, use_cache=False).logits for places in (positions, positions + 37)
        )
    assert (here - before).abs().max() > 0.05
    torch.testing.assert_close(there, here, rtol=0, atol=5e-4)


@pytest.mark.parametrize("share_bias", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_projections_are_the_layers_own(architecture: str, share_bias: bool) -> None:
    options = {"max_distance": 7, "share_att_key": True, "share_bias": share_bias}
    shared = patched(architecture, "disentangled", options, "remove")
    own = patched(architecture, "disentangled", {"max_distance": 7}, "remove")
    targets = new_parameters(own)
    with torch.no_grad():
        for name, value in new_parameters(shared).items():
            targets[name].copy_(value)
        for module in own.modules():
            if not hasattr(module, "posenc_group") or not hasattr(module, "hf_posenc"):
                continue
            scheme = module.hf_posenc
            width = scheme.geometry.hidden_size
            unit = torch.cat([torch.eye(width), torch.zeros(1, width)])[None]
            for projection, part in zip(
                (scheme.pos_query_proj, scheme.pos_key_proj), module.project_heads(unit)[:2], strict=True
            ):
                # From [1, heads, E + 1, D], the last row being the bias.
                rows = part[0].repeat_interleave(scheme.geometry.heads // part.shape[1], 0).transpose(0, 1).flatten(1)
                projection.weight.copy_((rows[:-1] - rows[-1]).T)
                projection.bias.copy_(rows[-1] if share_bias else torch.zeros_like(rows[-1]))
    ids = tokens(architecture, 2, 17)
    got, want = (logits(model, architecture, ids) for model in (shared, own))
    torch.testing.assert_close(got, want, rtol=0, atol=5e-4)
    plain = hf_posenc.patch(stock(architecture), "nope")
    assert (got - logits(plain, architecture, ids)).abs().max() > 0.05
