"""CoPE against the official code, against loops over tokens straight from the paper, and what follows from counting."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from models import inputs, moved, stock, tokens
from official import about, golden
from places import PLACES, same_as_loops
from torch import Tensor

import hf_posenc
from hf_posenc import Geometry, Positions, Scheme, attend, build
from hf_posenc.operands import Block

pytestmark = pytest.mark.usefixtures("several_blocks")

VALUES, ABOUT = golden("cope"), about("cope")
ATOL = {
    torch.float64: ABOUT["tolerance"]["float64"],
    torch.float32: ABOUT["tolerance"]["float32"],
    torch.bfloat16: ABOUT["tolerance"]["bf16"],
}
EXECUTORS = ("dense", "blocks")


# -- the official code -------------------------------------------------------------------------------------------------


def official(case: str, dtype: torch.dtype = torch.float64) -> tuple[Scheme, dict[str, Tensor]]:
    """The scheme of a golden with its table, and the golden's tensors, operands in `dtype`."""
    about = ABOUT["cases"][case]
    given = {name: VALUES[f"{case}/{name}"] for name in about["tensors"]}
    options: dict[str, Any] = {"scale_position_logits": about.get("scale_pos_by_sqrt_d", True)}
    if case.startswith("sep_key"):
        options["separate_keys"] = True
    if case.startswith("val_gates"):
        options["value_gates"] = True
    shape = {"heads": 4, "kv_heads": given["k"].shape[1], "head_dim": 8, "hidden_size": 32}
    scheme = build("cope", Geometry(**shape), npos=given["pos_emb"].shape[-1], **options)
    scheme.to(torch.promote_types(dtype, torch.float32))
    with torch.no_grad():
        scheme.pos_emb.copy_(given["pos_emb"])
        if scheme.gate_proj is not None:
            # The hidden states below are the golden's keys, so that the projection of the scheme has nothing to do.
            scheme.gate_proj.weight.copy_(torch.eye(32))
            scheme.gate_proj.bias.zero_()
    for name in ("q", "q_last", "k", "v", "k_cope"):
        if name in given:
            given[name] = given[name].to(dtype)
    return scheme, given


def run(scheme: Scheme, given: dict[str, Tensor], **call: Any) -> Any:
    """Attend as the case says: all queries or the last, with its padding, its own keys for gates."""
    length = given["k"].shape[2]
    places = torch.arange(length)[None].expand(2, -1)
    if "attention_mask" in given:
        call["mask"] = given["attention_mask"]
        places = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    if "k_cope" in given:
        call["hidden"] = given["k_cope"].transpose(1, 2).flatten(2)
    q = given.get("q_last", given.get("q"))
    return attend(
        scheme, q, given["k"], given["v"], query_positions=places[:, -q.shape[2] :], key_positions=places, **call
    )


def real_rows(given: dict[str, Tensor]) -> Tensor:
    """Which rows mean something: in the golden pads see themselves."""
    mask = given.get("attention_mask")
    return torch.ones(2, given["out"].shape[2], dtype=torch.bool) if mask is None else mask.bool()


CASES = [case for case in ABOUT["cases"] if not case.startswith(("grad", "bidirectional"))]


@pytest.mark.parametrize("dtype", ATOL, ids=str)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", CASES)
def test_outputs(case: str, executor: str, dtype: torch.dtype) -> None:
    scheme, given = official(case, dtype)
    rows = real_rows(given)
    output = run(scheme, given, executor=executor)
    assert output.dtype == dtype
    got, want = (x.double().transpose(1, 2)[rows] for x in (output, given["out"]))
    torch.testing.assert_close(got, want, rtol=0, atol=ATOL[dtype])
    if executor == "dense":
        _, weights = run(scheme, given, need_weights=True)
        got, want = (x.double().transpose(1, 2)[rows] for x in (weights, given["attn"]))
        torch.testing.assert_close(got, want, rtol=0, atol=ATOL[dtype])


@pytest.mark.parametrize("case", [case for case in CASES if "positions" in ABOUT["cases"][case]["tensors"]])
def test_positions(case: str) -> None:
    scheme, given = official(case)
    keep = torch.ones(13, 13).tril().bool()[None, None]
    if "attention_mask" in given:
        keep = keep & given["attention_mask"][:, None, None].bool()
    places = torch.arange(13)[None]
    product = given["q"] @ given["k"].mT * 8**-0.5
    got = scheme.count(product, given["q"], given["k"], Block(Positions(places, places), 12, keep))
    compared = keep.expand_as(got) & real_rows(given)[:, None, :, None]
    torch.testing.assert_close(got[compared], given["positions"][compared], rtol=0, atol=ATOL[torch.float64])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_unmasked_official_code_is_a_query_that_sees_every_key(executor: str) -> None:
    """The official encoder counts from each key to the end of the sequence, ours to the query.

    A causal layer whose queries all stand at the end does the same.
    """
    case = "bidirectional_official_npos5_div"
    scheme, given = official(case)
    at = {"query_positions": torch.full((1, 13), 12), "key_positions": torch.arange(13)[None]}
    got = attend(scheme, given["q"], given["k"], given["v"], executor=executor, **at)
    torch.testing.assert_close(got, given["out"], rtol=0, atol=ATOL[torch.float64])
    _, weights = attend(scheme, given["q"], given["k"], given["v"], need_weights=True, **at)
    torch.testing.assert_close(weights, given["attn"], rtol=0, atol=ATOL[torch.float64])
    block = Block(Positions(at["query_positions"], at["key_positions"]), 12)
    position = scheme.count(given["q"] @ given["k"].mT * 8**-0.5, given["q"], given["k"], block)
    torch.testing.assert_close(position, given["positions"], rtol=0, atol=ATOL[torch.float64])


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients(dtype: torch.dtype, executor: str) -> None:
    scheme, given = official("grad_npos5_div", dtype)
    operands = [given[name].requires_grad_() for name in "qkv"]
    output = run(scheme, given, executor=executor)
    torch.testing.assert_close(output.double(), given["out"], rtol=0, atol=ATOL[dtype])
    gradients = torch.autograd.grad(output, [*operands, scheme.pos_emb], given["do"].to(dtype))
    for name, gradient in zip(("dq", "dk", "dv", "dpos_emb"), gradients, strict=True):
        torch.testing.assert_close(
            gradient.double(), given[name], rtol=0, atol=ATOL[dtype], msg=lambda m, n=name: f"{n}: {m}"
        )


# -- loops over tokens -------------------------------------------------------------------------------------------------

VARIANTS: list[dict[str, Any]] = [
    {"npos": 3},
    {"npos": 20},
    {"npos": 4, "scale_position_logits": False},
    {"npos": 4, "separate_keys": True},
    {"npos": 4, "value_gates": True},
]


def random_scheme(options: dict[str, Any], *, causal: bool = True, scale: float = 0.3) -> Scheme:
    torch.manual_seed(0)
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 4, "hidden_size": 7}
    return moved(build("cope", Geometry(**shape, causal=causal, scale=scale), **options), 1.0).double()


def random_operands(length: int, seed: int = 1, batch: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and hidden states."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, 4, length, 4), (batch, 2, length, 4), (batch, 2, length, 4), (batch, length, 7))
    q, k, v, hidden = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v, hidden


def looped(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, seen: np.ndarray) -> np.ndarray:
    """CoPE one query, one key and one gate at a time. `seen[b, i, j]`; keys count in their order."""
    geometry, options = scheme.geometry, scheme.options()
    table = scheme.pos_emb.detach().numpy()[0]
    table_right = None if geometry.causal else scheme.pos_emb_right.detach().numpy()[0]
    gate_keys = v if options["value_gates"] else k
    if options["separate_keys"]:
        projected = hidden @ scheme.gate_proj.weight.detach().T + scheme.gate_proj.bias.detach()
        gate_keys = projected.unflatten(-1, (2, 4)).transpose(1, 2)
    q, k, v, gate_keys = (x.numpy() for x in (q, k, v, gate_keys))
    output = np.zeros_like(q)
    (batch, heads, length, _), keys = q.shape, k.shape[2]

    def at(vector: np.ndarray, embeddings: np.ndarray, position: float) -> float:
        position = min(position, options["npos"] - 1)
        low, high = math.floor(position), math.ceil(position)
        share = position - low
        return float((1 - share) * (vector @ embeddings[:, low]) + share * (vector @ embeddings[:, high]))

    for b, h, row in itertools.product(range(batch), range(heads), range(length)):
        i, group, x = keys - length + row, h // 2, q[b, h, row]

        def gate(t: int, b=b, i=i, group=group, x=x) -> float:
            return 1 / (1 + math.exp(-geometry.scale * float(x @ gate_keys[b, group, t]))) if seen[b, i, t] else 0.0

        raised = np.zeros(keys)
        for j in range(keys):
            if not seen[b, i, j]:
                continue
            if j <= i:
                extra = at(x, table, sum(gate(t) for t in range(j, i + 1)))
            else:
                extra = at(x, table_right, sum(gate(t) for t in range(i + 1, j + 1)))
            extra *= geometry.scale if options["scale_position_logits"] else 1.0
            raised[j] = math.exp(geometry.scale * float(x @ k[b, group, j]) + extra)
        if raised.any():
            output[b, h, row] = raised @ v[b, group] / raised.sum()
    return output


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_loops(options: dict[str, Any], causal: bool, place: str) -> None:
    scheme = random_scheme(options, causal=causal)
    q, k, v, hidden = random_operands(13)
    positions, visible = PLACES[place]()
    seen = visible & np.tri(13, dtype=bool) if causal else visible
    same_as_loops(scheme, (q, k, v), positions, visible, looped(scheme, q, k, v, hidden, seen), hidden=hidden)


# -- what follows from counting ----------------------------------------------------------------------------------------


def test_a_query_that_picks_every_token_counts_them() -> None:
    """Open gates make positions whole: i - j + 1 backwards, j - i ahead, up to the last of the table."""
    for causal in (True, False):
        scheme = random_scheme({"npos": 4}, causal=causal)
        q, k = (torch.ones(1, heads, 7, 4, dtype=torch.float64) * 20 for heads in (4, 2))
        places = torch.arange(7)[None]
        distance = places.mT - places
        keep = (distance >= 0)[None, None] if causal else None
        block = Block(Positions(places, places), 6, keep)
        got = scheme.count(q @ k.repeat_interleave(2, 1).mT, q, k, block)
        want = torch.where(distance >= 0, distance + 1, 0 if causal else -distance).clamp_max(3)
        torch.testing.assert_close(got, want.double().expand_as(got), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_touch_the_count(dtype: torch.dtype) -> None:
    """Position 300 of open gates, which bfloat16 cannot tell from 301, is counted exactly."""
    scheme = build("cope", Geometry(heads=1, kv_heads=1, head_dim=4, hidden_size=4), npos=1000)
    q = k = torch.ones(1, 1, 600, 4, dtype=dtype) * 10
    places = torch.arange(600)[None]
    block = Block(Positions(places, places), 599, torch.ones(600, 600).tril().bool()[None, None])
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), torch.no_grad():
            scheme.pos_emb[0].copy_(torch.arange(1000.0).expand(4, -1))
            product = torch.full((1, 1, 600, 600), 200.0)
            assert torch.equal(scheme.count(product, q, k, block)[0, 0, -1], 600 - torch.arange(600.0))
            raised = scheme.score(product, q, k, block)[0, 0, -1] - 200
        assert raised.dtype == torch.float32
        torch.testing.assert_close(raised, 0.5 * 40 * (600 - torch.arange(600.0)), rtol=1e-6, atol=0)


# -- in models ---------------------------------------------------------------------------------------------------------

architectures = pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])


def patched(architecture: str, options: dict[str, Any], **config: Any) -> Any:
    """A model whose tables are far from their start, where CoPE would be no position at all."""
    model = hf_posenc.patch(stock(architecture, **config), "cope", **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "pos_emb" in name:
                parameter.normal_(std=0.5 if architecture != "t5" else 0.1, generator=generator)
    return model


def schemes_in(model: Any) -> list[Scheme]:
    return [module for module in model.modules() if isinstance(module, Scheme)]


@architectures
@pytest.mark.parametrize("options", [{"npos": 6}, {"npos": 6, "value_gates": True}], ids=str)
def test_gates_beside_the_native_encoding_are_of_content(architecture: str, options: dict[str, Any]) -> None:
    """The weights of the first layer are those of the stock model, raised by CoPE of queries and keys as projected."""
    model = patched(architecture, {**options, "native": "keep"}, attn_implementation="eager")
    ids = tokens(architecture, 2, 13)
    attention = next(m for n, m in model.named_modules() if hasattr(m, "posenc_group") and "encoder.block" not in n)
    scheme = schemes_in(attention)[0]
    hidden = []
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: hidden.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        out = model(**inputs(architecture, ids), output_attentions=True, use_cache=False)
        q, k, v = attention.project_heads(hidden[0])
        before = stock(architecture, attn_implementation="eager")(
            # The encoder has changed too; hand the decoder's new one over.
            **({} if architecture != "t5" else {"encoder_outputs": (out.encoder_last_hidden_state,)}),
            **{n: x for n, x in inputs(architecture, ids).items() if architecture != "t5" or n != "input_ids"},
            output_attentions=True,
            use_cache=False,
        )
    got, native = ((o.decoder_attentions if architecture == "t5" else o.attentions)[0] for o in (out, before))
    scale, table = scheme.geometry.scale, scheme.pos_emb[0].detach()
    keys = (v if scheme.value_gates else k).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    gates = (scale * q @ keys.mT).sigmoid().tril()
    position = torch.stack([gates[..., j:].sum(-1) for j in range(13)], dim=-1).clamp_max(5)
    low, high = position.floor(), position.ceil()
    at = [(q @ table).gather(-1, x.long()) for x in (low, high)]
    want = native * (scale * torch.lerp(at[0], at[1], position - low)).exp()
    torch.testing.assert_close(got, want / want.sum(-1, keepdim=True), rtol=0, atol=1e-5)
    assert (got - native).abs().max() > 0.05


def test_what_is_cached() -> None:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "hidden_size": 32}
    for options, reads, state in (
        ({}, True, 0),
        ({"value_gates": True}, False, 0),
        ({"separate_keys": True}, False, 2 * 8 * 2),
    ):
        scheme = build("cope", Geometry(**shape), **options)
        assert (scheme.reads_keys, scheme.state_bytes(2)) == (reads, (state, 0))


def test_start() -> None:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 8, "hidden_size": 32}
    scheme = build("cope", Geometry(**shape), separate_keys=True)
    assert scheme.pos_emb.shape == (1, 8, 64)
    assert not scheme.pos_emb.any()
    assert scheme.starts_exact(native_kept=True)
    assert not scheme.starts_exact(native_kept=False)
    bound = 32**-0.5
    for parameter in scheme.gate_proj.parameters():
        assert 0.8 * bound < parameter.abs().max() <= bound
    assert build("cope", Geometry(**shape, causal=False)).pos_emb_right.shape == (1, 8, 64)
    assert build("cope", Geometry(**shape)).pos_emb_right is None
