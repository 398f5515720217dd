"""CoPE and stick-breaking, which walk over keys: official values, a loop straight from the paper, numerics."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from models import moved
from official import about, golden
from torch import Tensor

from hf_posenc import Geometry, Positions, Scheme, attend, build
from hf_posenc.operands import Block

pytestmark = pytest.mark.usefixtures("several_blocks")

FILES = {"cope": "cope", "stick_breaking": "sba"}
DTYPES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bf16"}
every_executor = pytest.mark.parametrize("executor", ["dense", "blocks"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# -- the official code -------------------------------------------------------------------------------------------------


def official(
    name: str, case: str, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Scheme, dict[str, Tensor]]:
    """The scheme of a golden with its parameters, and the golden's tensors, operands in `dtype`."""
    facts = about(FILES[name])["cases"][case]
    given = {key: golden(FILES[name])[f"{case}/{key}"] for key in facts["tensors"]}
    if name == "cope":
        options |= {"npos": given["pos_emb"].shape[-1], "scale_position_logits": facts.get("scale_pos_by_sqrt_d", True)}
        options |= {"separate_keys": "k_cope" in given, "value_gates": case.startswith("val_gates")}
    else:
        options |= {"attend_current": facts["attend_current"]}
    shape = Geometry(heads=4, kv_heads=given["k"].shape[1], head_dim=8, hidden_size=32)
    scheme = build(name, shape, **options).to(torch.promote_types(dtype, torch.float32))
    # The hidden states below are the golden's keys of gates, so that the projection of the scheme has nothing to do.
    learned = {"gate_proj.weight": torch.eye(32), "gate_proj.bias": torch.zeros(32)}
    learned |= {key.replace("norm_", "norm."): value for key, value in given.items()}
    scheme.load_state_dict({key: learned[key] for key in scheme.state_dict()})
    return scheme, given | {key: given[key].to(dtype) for key in ("q", "q_last", "k", "v", "k_cope") if key in given}


def run(scheme: Scheme, given: dict[str, Tensor], **call: Any) -> Any:
    """Attend as the case says: all queries or the last, with its padding, its own keys for gates."""
    places = torch.arange(given["k"].shape[2])[None].expand(2, -1)
    if "attention_mask" in given:
        call["mask"] = given["attention_mask"]
        places = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    if "k_cope" in given:
        call["hidden"] = given["k_cope"].transpose(1, 2).flatten(2)
    q = given.get("q_last", given.get("q"))
    at = {"query_positions": places[:, -q.shape[2] :], "key_positions": places}
    return attend(scheme, q, given["k"], given["v"], **at, **call)


def compare(name: str, got: Tensor, given: dict[str, Tensor], what: str) -> None:
    """Compare `[B, H, Q, ...]` in the rows that are no padding."""
    atol = about(FILES[name])["tolerance"][DTYPES[got.dtype]]
    rows = given["attention_mask"].bool() if "attention_mask" in given else slice(None)
    got, want = (x.double().transpose(1, 2)[rows] for x in (got, given[what]))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


CASES = [
    (name, case) for name in FILES for case, facts in about(FILES[name])["cases"].items() if "attn" in facts["tensors"]
]
CASES.remove(("cope", "bidirectional_official_npos5_div"))
# In bfloat16 logits of 200 are off by 0.5 before any weight is made of them.
ROUNDED = [(*case, dtype) for case in CASES for dtype in DTYPES if (case[1], dtype) != ("large_logits", torch.bfloat16)]


@every_executor
@pytest.mark.parametrize(("name", "case", "dtype"), ROUNDED, ids=str)
def test_outputs(name: str, case: str, dtype: torch.dtype, executor: str) -> None:
    scheme, given = official(name, case, dtype)
    output = run(scheme, given, executor=executor)
    assert output.dtype == dtype
    compare(name, output, given, "out")
    if executor == "dense":
        _, weights = run(scheme, given, need_weights=True)
        # The golden may leave the own key out.
        compare(name, weights[..., : given["attn"].shape[-1]], given, "attn")


@every_executor
def test_unmasked_official_cope_is_a_query_that_sees_every_key(executor: str) -> None:
    """The official encoder counts to the end of the sequence: a causal layer whose queries all stand there."""
    scheme, given = official("cope", "bidirectional_official_npos5_div")
    at = {"query_positions": torch.full((1, 13), 12), "key_positions": torch.arange(13)[None]}
    compare("cope", attend(scheme, given["q"], given["k"], given["v"], executor=executor, **at), given, "out")
    block = Block(Positions(*at.values()), 12)
    compare(
        "cope", scheme.count(given["q"] @ given["k"].mT * 8**-0.5, given["q"], given["k"], block), given, "positions"
    )


@every_dtype
@every_executor
def test_the_rest_of_a_stick(executor: str, dtype: torch.dtype) -> None:
    for case in ("default", "attend_current", "gqa"):
        scheme, given = official("stick_breaking", case, dtype, remainder="self")
        compare("stick_breaking", run(scheme, given, executor=executor), given, "out_rem_v")
    scheme, given = official("stick_breaking", "lm_engine_head_bias_groupnorm", dtype, remainder="head_bias")
    flat = run(scheme, given, executor=executor).transpose(1, 2).flatten(2)
    compare("stick_breaking", flat, given, "out_pre_o_proj")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    """Those of a stick as the dense reference computes them, since the official ones are of the rest, too."""
    scheme, given = official("cope", "grad_npos5_div", dtype)
    leaves = {f"d{key}": given[key].requires_grad_() for key in "qkv"} | {"dpos_emb": scheme.pos_emb}
    gradients = torch.autograd.grad(run(scheme, given), list(leaves.values()), given["do"].to(dtype))
    stick, broken = official("stick_breaking", "grad_default", dtype)
    operands = [broken[key].requires_grad_() for key in "qkv"]
    places = torch.arange(13)[None]
    logits = operands[0] @ operands[1].mT * 8**-0.5
    weights, rest = stick.break_stick(logits, Block(Positions(places, places), 12, places <= places.mT))
    upstream = [broken[key].to(dtype) for key in ("do", "drem")]
    others = torch.autograd.grad([weights @ operands[2], rest[..., 0]], operands, upstream)
    got = dict(zip(leaves, gradients, strict=True)), dict(zip(leaves, others, strict=False))
    for name, values, found in (("cope", given, got[0]), ("stick_breaking", broken, got[1])):
        for what, gradient in found.items():
            atol = about(FILES[name])["tolerance"][DTYPES[dtype]]
            torch.testing.assert_close(gradient.double(), values[what], rtol=0, atol=atol)


# -- loops over keys ---------------------------------------------------------------------------------------------------


def random_scheme(name: str, options: dict[str, Any], *, causal: bool = True) -> Scheme:
    torch.manual_seed(0)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 4, "hidden_size": 7, "max_positions": 81, "scale": 0.3}
    return moved(build(name, Geometry(**sizes, causal=causal), **options), 1.0).double()


def random_operands(length: int, seed: int = 1) -> list[Tensor]:
    """Queries, keys, values and hidden states."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, length, 4), (2, 2, length, 4), (2, 2, length, 4), (2, length, 7))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def packed_and_padded() -> tuple[Tensor, Tensor]:
    """Positions `[2, 13]` and visibility `[2, 13, 13]`: documents; padding, jumps and holes."""
    document = torch.tensor([0] * 5 + [1] + [2] * 7)
    rows = [*range(5), 0, *range(7)], [0, 0, 0, 0, 0, 1, 2, 9, 10, 40, 41, 300, 1000]
    holes = torch.rand(13, 13, generator=torch.Generator().manual_seed(4)) < 0.2
    second = (torch.arange(13) >= 4) & (~holes | torch.eye(13).bool())
    return torch.tensor(rows), torch.stack((document[:, None] == document, second))


def gates_in_a_loop(scheme: Scheme, given: list[Tensor], seen: np.ndarray, added: np.ndarray) -> np.ndarray:
    """CoPE one query, one key and one gate at a time. `seen[b, i, j]`; keys count in their order."""
    geometry, options = scheme.geometry, scheme.options()
    tables = [table.detach().numpy()[0] for table in (scheme.pos_emb, scheme.pos_emb_right) if table is not None]
    q, k, v, hidden = given
    gate_keys = v if options["value_gates"] else k
    if options["separate_keys"]:
        projected = hidden @ scheme.gate_proj.weight.detach().T + scheme.gate_proj.bias.detach()
        gate_keys = projected.unflatten(-1, (2, 4)).transpose(1, 2)
    q, k, v, gate_keys = (x.numpy() for x in (q, k, v, gate_keys))
    output = np.zeros_like(q)

    def at(vector: np.ndarray, table: np.ndarray, position: float) -> float:
        low, high = math.floor(position), math.ceil(position)
        share = position - low
        return float((1 - share) * (vector @ table[:, low]) + share * (vector @ table[:, high]))

    for b, h, i in itertools.product(range(2), range(4), range(13)):
        x = q[b, h, i]
        gates = 1 / (1 + np.exp(-geometry.scale * (gate_keys[b, h // 2] @ x))) * seen[b, i]
        raised = np.zeros(13)
        for j in np.flatnonzero(seen[b, i]):
            passed = gates[j : i + 1] if j <= i else gates[i + 1 : j + 1]
            extra = at(x, tables[int(j > i)], min(passed.sum(), options["npos"] - 1))
            extra *= geometry.scale if options["scale_position_logits"] else 1.0
            raised[j] = math.exp(geometry.scale * float(x @ k[b, h // 2, j]) + extra + added[b, i, j])
        output[b, h, i] = raised @ v[b, h // 2] / max(raised.sum(), 1e-300)
    return output


STICKS: list[dict[str, Any]] = [
    {},
    {"remainder": "self", "start_bias": True},
    {"remainder": "head_bias", "attend_current": True, "start_bias": True},
]


@pytest.mark.parametrize(
    "options",
    [
        {"npos": 3},
        {"npos": 20},
        {"npos": 4, "scale_position_logits": False},
        {"npos": 4, "separate_keys": True},
        {"npos": 4, "value_gates": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_cope_is_a_loop_over_gates(causal: bool, options: dict[str, Any]) -> None:
    """On all tokens and on the last six, with a mask that is added to the logits."""
    scheme, given = random_scheme("cope", options, causal=causal), random_operands(13)
    positions, visible = packed_and_padded()
    added = torch.randn(2, 13, 13, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    seen = visible & torch.ones(13, 13).tril().bool() if causal else visible
    want = gates_in_a_loop(scheme, given, seen.numpy(), added.numpy())
    # A row of padding, which does not see itself, means nothing.
    real = visible.diagonal(dim1=1, dim2=2)[:, None].expand(2, 4, 13).numpy()
    mask = added.masked_fill(~visible, float("-inf"))[:, None]
    for rows, executor in itertools.product((slice(0, 13), slice(7, 13)), ("dense", "blocks")):
        at = {"query_positions": positions[:, rows], "key_positions": positions, "mask": mask[:, :, rows]}
        got = attend(scheme, given[0][:, :, rows], *given[1:3], hidden=given[3], executor=executor, **at)
        some = real[:, :, rows]
        np.testing.assert_allclose(got.detach().numpy()[some], want[:, :, rows][some], rtol=0, atol=1e-12)


# -- numerics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_touch_the_count(dtype: torch.dtype) -> None:
    """Position 300 of open gates, which bfloat16 cannot tell from 301, is counted exactly."""
    scheme = build("cope", Geometry(heads=1, kv_heads=1, head_dim=4, hidden_size=4), npos=1000)
    q = k = torch.ones(1, 1, 600, 4, dtype=dtype) * 10
    places = torch.arange(600)[None]
    block = Block(Positions(places, places), 599, places <= places.mT)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        scheme.pos_emb[0].copy_(torch.arange(1000.0).expand(4, -1))
        product = torch.full((1, 1, 600, 600), 200.0)
        assert torch.equal(scheme.count(product, q, k, block)[0, 0, -1], 600 - torch.arange(600.0))
        raised = scheme.score(product, q, k, block)[0, 0, -1] - 200
    assert raised.dtype == torch.float32
    torch.testing.assert_close(raised, 0.5 * 40 * (600 - torch.arange(600.0)), rtol=1e-6, atol=0)


@every_executor
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1.0, 200.0, 1e30])
def test_gradients_of_a_stick_are_finite_at_any_size(size: float, dtype: torch.dtype, executor: str) -> None:
    for options in STICKS:
        scheme = random_scheme("stick_breaking", options).to(dtype)
        q, k, v, _ = (x.to(dtype) for x in random_operands(9))
        leaves = [x.requires_grad_() for x in (q * size**0.5, k * size**0.5, v)]
        at = {"query_positions": torch.arange(9)[None], "key_positions": torch.arange(9)[None]}
        output = attend(scheme, *leaves, executor=executor, **at)
        assert output.isfinite().all()
        for gradient in torch.autograd.grad(output.square().sum(), [*leaves, *scheme.parameters()]):
            assert gradient.isfinite().all()


def test_the_rest_does_not_cancel_and_weights_are_normal_numbers_or_zero() -> None:
    """30 keys that take 0.9 each leave 1e-30, which one minus the sum of weights would have as 0."""
    scheme, places = random_scheme("stick_breaking", {}).float(), torch.arange(1000)[None]
    block = Block(Positions(places[:, 30:31], places[:, :31]), 30)
    weights, rest = scheme.break_stick(torch.full((1, 4, 1, 31), math.log(9)), block)
    torch.testing.assert_close(rest, torch.full_like(rest, 1e-30), rtol=1e-4, atol=0)
    torch.testing.assert_close(weights[0, 0, 0, -3:], torch.tensor([0.09, 0.9, 0.0]), rtol=1e-5, atol=0)
    logits = torch.full((1, 4, 1, 1000), 0.1, requires_grad=True)
    weights, _ = scheme.break_stick(logits, Block(Positions(places[:, -1:], places), 999))
    assert not weights[..., 0].any()
    assert 1 < weights[weights > 0].min() / torch.finfo(torch.float32).tiny < 100
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    assert gradient.isfinite().all()


def test_cope_declares_the_bytes_of_its_own_keys() -> None:
    shape = Geometry(heads=4, kv_heads=2, head_dim=8, hidden_size=32)
    assert build("cope", shape, separate_keys=True).facts(element=2).state_bytes == (2 * 8 * 2, 0)
    assert build("cope", shape).facts(element=2).state_bytes == (0, 0)
