"""Stick-breaking against the official code, against loops over keys from the paper, and what its walk implies."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from models import inputs, moved, stacks_for, stock, tokens
from official import about, golden
from places import PLACES, same_as_loops
from torch import Tensor

import hf_posenc
from hf_posenc import Geometry, Positions, Scheme, attend, build
from hf_posenc.operands import Block

pytestmark = pytest.mark.usefixtures("several_blocks")

VALUES, ABOUT = golden("sba"), about("sba")
ATOL = {
    torch.float64: ABOUT["tolerance"]["float64"],
    torch.float32: ABOUT["tolerance"]["float32"],
    torch.bfloat16: ABOUT["tolerance"]["bf16"],
}
EXECUTORS = ("dense", "blocks")


# -- the official code -------------------------------------------------------------------------------------------------


def official(case: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Scheme, dict[str, Tensor]]:
    """The scheme of a golden, and the golden's tensors, operands in `dtype`."""
    about = ABOUT["cases"][case]
    given = {name: VALUES[f"{case}/{name}"] for name in about["tensors"]}
    shape = {"heads": 4, "kv_heads": given["k"].shape[1], "head_dim": 8, "hidden_size": 32}
    scheme = build("stick_breaking", Geometry(**shape), attend_current=about["attend_current"], **options)
    scheme.to(torch.promote_types(dtype, torch.float32))
    for name in ("q", "q_last", "k", "v"):
        if name in given:
            given[name] = given[name].to(dtype)
    return scheme, given


def run(scheme: Scheme, given: dict[str, Tensor], **call: Any) -> Any:
    """Attend as the case says: all queries or the last, with its padding."""
    places, mask = places_of(given)
    q = given.get("q_last", given.get("q"))
    at = {"query_positions": places[:, -q.shape[2] :], "key_positions": places, "mask": mask}
    return attend(scheme, q, given["k"], given["v"], **at, **call)


def places_of(given: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    mask = given.get("attention_mask")
    if mask is None:
        return torch.arange(given["k"].shape[2])[None].expand(2, -1), None
    return (mask.cumsum(-1) - 1).clamp_min(0), mask


def real_rows(given: dict[str, Tensor]) -> Tensor:
    """Which rows mean something, bool `[B, Q]`."""
    mask = given.get("attention_mask")
    return torch.ones(2, given["rem"].shape[2], dtype=torch.bool) if mask is None else mask.bool()


def compare(got: Tensor, want: Tensor, rows: Tensor, atol: float) -> None:
    """Compare `[B, H, Q, ...]` in the given rows `[B, Q]`."""
    got, want = (x.double().transpose(1, 2)[rows] for x in (got, want))
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


CASES = [case for case in ABOUT["cases"] if "attn" in ABOUT["cases"][case]["tensors"]]
DTYPES = pytest.mark.parametrize("dtype", ATOL, ids=str)
# In bfloat16 logits of 200 are off by 0.5 before any weight is made of them.
ROUNDED = [(case, dtype) for case in CASES for dtype in ATOL if (case, dtype) != ("large_logits", torch.bfloat16)]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("case", "dtype"), ROUNDED, ids=str)
def test_outputs(case: str, executor: str, dtype: torch.dtype) -> None:
    scheme, given = official(case, dtype)
    rows = real_rows(given)
    output = run(scheme, given, executor=executor)
    assert output.dtype == dtype
    compare(output, given["out"], rows, ATOL[dtype])
    if executor == "dense":
        _, weights = run(scheme, given, need_weights=True)
        if case == "decode_last":
            assert not weights[..., -1].any()  # the golden leaves the own key out
            weights = weights[..., :-1]
        compare(weights, given["attn"], rows, ATOL[dtype])


@pytest.mark.parametrize("case", CASES)
def test_remainder(case: str) -> None:
    scheme, given = official(case)
    q, (places, mask) = given.get("q_last", given.get("q")), places_of(given)
    at = Positions(places[:, -q.shape[2] :], places)
    keep = None if mask is None else mask[:, None, None].bool()
    product = q @ given["k"].repeat_interleave(4 // given["k"].shape[1], dim=1).mT * 8**-0.5
    weights, rest = scheme.break_stick(product, Block(at, 12, keep))
    compare(rest[..., 0], given["rem"], real_rows(given), ATOL[torch.float64])
    torch.testing.assert_close(weights.sum(-1, keepdim=True) + rest, torch.ones_like(rest), rtol=0, atol=1e-12)


@DTYPES
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", [case for case in CASES if "out_rem_v" in ABOUT["cases"][case]["tensors"]])
def test_remainder_to_the_own_key(case: str, executor: str, dtype: torch.dtype) -> None:
    scheme, given = official(case, dtype, remainder="self")
    compare(run(scheme, given, executor=executor), given["out_rem_v"], real_rows(given), ATOL[dtype])


@DTYPES
@pytest.mark.parametrize("executor", EXECUTORS)
def test_remainder_to_a_vector_per_head(executor: str, dtype: torch.dtype) -> None:
    scheme, given = official("lm_engine_head_bias_groupnorm", dtype, remainder="head_bias")
    with torch.no_grad():
        scheme.head_bias.copy_(given["head_bias"])
        scheme.norm.weight.copy_(given["norm_weight"])
        scheme.norm.bias.copy_(given["norm_bias"])
    output = run(scheme, given, executor=executor)
    assert output.dtype == dtype
    got = output.transpose(1, 2).flatten(2).double()
    torch.testing.assert_close(got, given["out_pre_o_proj"], rtol=0, atol=ATOL[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_norm_rounds_once(dtype: torch.dtype) -> None:
    scheme = random_scheme({"remainder": "head_bias"}).float()
    output = torch.randn(2, 4, 300, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(scheme.finish(output, None), scheme.finish(output.float(), None).to(dtype))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients(dtype: torch.dtype, executor: str) -> None:
    """Of the output, and of the remainder, which a vector of ones per head lets out of an executor."""
    _, given = official("grad_default", dtype)
    operands = [given[name].requires_grad_() for name in "qkv"]
    shape = {"heads": 4, "kv_heads": 4, "head_dim": 8, "hidden_size": 32}
    scheme = Loose(Geometry(**shape), remainder="head_bias").to(dtype)
    with torch.no_grad():
        scheme.head_bias.fill_(1)
    output, rest = run(scheme, given, executor=executor).split((8, 8), dim=-1)
    torch.testing.assert_close(output.double(), given["out"], rtol=0, atol=ATOL[dtype])
    torch.testing.assert_close(rest[..., 0].double(), given["rem"], rtol=0, atol=ATOL[dtype])
    upstream = [given["do"].to(dtype), given["drem"].to(dtype)]
    gradients = torch.autograd.grad([output, rest[..., 0]], operands, upstream)
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        torch.testing.assert_close(
            gradient.double(), given[name], rtol=0, atol=ATOL[dtype], msg=lambda m, n=name: f"{n}: {m}"
        )


class Loose(type(build("stick_breaking", Geometry(heads=1, kv_heads=1, head_dim=1, hidden_size=1)))):
    """Hands the output and the part of the remainder out side by side, without the norm."""

    def mix(self, weights: Tensor, v: Tensor, block: Block) -> Tensor:
        none = torch.zeros_like(v)
        keys = weights.clone()
        keys[..., -1] = 0
        rest = torch.cat([torch.zeros_like(weights[..., :-1]), weights[..., -1:]], dim=-1)
        return torch.cat([super().mix(keys, v, block), super().mix(rest, none, block)], dim=-1)

    def finish(self, output: Tensor, hidden: Tensor | None) -> Tensor:
        return output


# -- loops over keys ---------------------------------------------------------------------------------------------------

VARIANTS: list[dict[str, Any]] = [
    {},
    {"attend_current": True},
    {"remainder": "self", "start_bias": True},
    {"remainder": "head_bias"},
    {"remainder": "head_bias", "attend_current": True, "start_bias": True},
]
variants = pytest.mark.parametrize("options", VARIANTS, ids=str)


def random_scheme(options: dict[str, Any], **shape: Any) -> Scheme:
    torch.manual_seed(0)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 4, "hidden_size": 16, "max_positions": 81, "scale": 0.3}
    geometry = Geometry(**{**sizes, **shape})
    return moved(build("stick_breaking", geometry, **options), 1.0).double()


def random_operands(length: int, seed: int = 1, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, 4, length, 4), (batch, 2, length, 4), (batch, 2, length, 4))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def looped(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, seen: np.ndarray, added: np.ndarray | float = 0.0
) -> np.ndarray:
    """Break a stick for each query, key by key from the nearest. `seen[b, i, j]`, a float mask `added[b, i, j]`."""
    geometry, options = scheme.geometry, scheme.options()
    values = {name: value.numpy() for name, value in scheme.state_dict().items()}
    q, k, v = (x.detach().numpy() for x in (q, k, v))
    output = np.zeros_like(q)
    (batch, heads, length, _), keys = q.shape, k.shape[2]
    added = np.broadcast_to(added, (batch, keys, keys))
    for b, h, row in itertools.product(range(batch), range(heads), range(length)):
        i, group, x = keys - length + row, h // 2, q[b, h, row]
        stick, got = 1.0, np.zeros(q.shape[-1])
        for j in range(i if options["attend_current"] else i - 1, -1, -1):
            if not seen[b, i, j]:
                continue
            z = geometry.scale * float(x @ k[b, group, j]) + added[b, i, j]
            if options["start_bias"]:
                z += values["logit_bias"][h]
            share = 1 / (1 + math.exp(-z))
            got += stick * share * v[b, group, j]
            stick *= 1 - share
        if options["remainder"] == "self":
            got += stick * v[b, group, i] * seen[b, i, i]
        if options["remainder"] == "head_bias":
            got += stick * values["head_bias"][h]
            width = len(got)
            got = (got - got.mean()) / math.sqrt(got.var() + 1e-5)
            got = got * values["norm.weight"][h * width :][:width] + values["norm.bias"][h * width :][:width]
        output[b, h, row] = got
    return output


@pytest.mark.parametrize("place", PLACES)
@variants
def test_loops(options: dict[str, Any], place: str) -> None:
    scheme = random_scheme(options)
    q, k, v = random_operands(13)
    positions, seen = PLACES[place]()
    same_as_loops(scheme, (q, k, v), positions, seen, looped(scheme, q, k, v, seen))


@pytest.mark.parametrize("executor", EXECUTORS)
@variants
def test_a_float_mask_is_added_to_the_logits(options: dict[str, Any], executor: str) -> None:
    scheme = random_scheme(options)
    q, k, v = random_operands(9)
    added = torch.randn(2, 9, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    seen = torch.ones(2, 9, 9, dtype=torch.bool)
    seen[0, :, 2], seen[1, 3:, 1] = False, False
    mask = added.clone()
    mask[0, :, 2], mask[1, 3:, 1] = torch.finfo(torch.float64).min, float("-inf")
    at = {"query_positions": torch.arange(9)[None], "key_positions": torch.arange(9)[None], "mask": mask[:, None]}
    q = q.requires_grad_()
    got = attend(scheme, q, k, v, executor=executor, **at)
    want = looped(scheme, q, k, v, seen.numpy(), added.numpy())
    np.testing.assert_allclose(got.detach().numpy(), want, rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(got.sum(), q)
    assert gradient.isfinite().all()


# -- what the walk implies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1.0, 200.0, 1e30])
def test_gradients_are_finite_at_any_size(size: float, dtype: torch.dtype, executor: str) -> None:
    for options in VARIANTS:
        scheme = random_scheme(options).to(dtype)
        operands = [(x * size**0.5).to(dtype).requires_grad_() for x in random_operands(9)]
        operands[2] = operands[2].detach().div(size**0.5).requires_grad_()
        at = {"query_positions": torch.arange(9)[None], "key_positions": torch.arange(9)[None]}
        output = attend(scheme, *operands, executor=executor, **at)
        assert output.isfinite().all()
        for gradient in torch.autograd.grad(output.square().sum(), [*operands, *scheme.parameters()]):
            assert gradient.isfinite().all()


def test_the_remainder_does_not_cancel() -> None:
    """30 keys that take 0.9 each leave 1e-30, which one minus the sum of weights would have as 0."""
    scheme = random_scheme({}).float()
    places = torch.arange(31)[None]
    block = Block(Positions(places[:, -1:], places), 30)
    weights, rest = scheme.break_stick(torch.full((1, 4, 1, 31), math.log(9)), block)
    torch.testing.assert_close(rest, torch.full_like(rest, 1e-30), rtol=1e-4, atol=0)
    torch.testing.assert_close(weights[0, 0, 0, -3:], torch.tensor([0.09, 0.9, 0.0]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_are_normal_numbers_or_zero(dtype: torch.dtype) -> None:
    places = torch.arange(1000)[None]
    logits = torch.full((1, 4, 1, 1000), 0.1, dtype=dtype, requires_grad=True)
    weights, _ = random_scheme({}).break_stick(logits, Block(Positions(places[:, -1:], places), 999))
    assert not weights[..., 0].any()
    assert weights[weights > 0].min() > torch.finfo(dtype).tiny
    assert weights[weights > 0].min() < 100 * torch.finfo(dtype).tiny
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    assert gradient.isfinite().all()


def test_the_first_token() -> None:
    """It attends to nothing, to itself, or to its heads' vectors."""
    q, k, v = random_operands(1)
    at = {"query_positions": torch.tensor([[0]]), "key_positions": torch.tensor([[0]])}
    assert not attend(random_scheme({}), q, k, v, **at).any()
    assert torch.equal(attend(random_scheme({"remainder": "self"}), q, k, v, **at), v.repeat_interleave(2, dim=1))
    scheme = random_scheme({"remainder": "head_bias"})
    got = attend(scheme, q, k, v, **at)
    assert torch.equal(got[0], got[1])
    output, weights = attend(scheme, q, k, v, need_weights=True, **at)
    assert torch.equal(output, got)
    assert weights.shape == (2, 4, 1, 1)
    assert not weights.any()


@pytest.mark.parametrize("remainder", ["drop", "self", "head_bias"])
def test_sums_of_weights_are_as_declared(remainder: str) -> None:
    scheme = random_scheme({"remainder": remainder})
    at = {"query_positions": torch.arange(9)[None], "key_positions": torch.arange(9)[None]}
    _, weights = attend(scheme, *random_operands(9), need_weights=True, **at)
    assert scheme.weights_sum_to_one() == torch.allclose(weights.sum(-1), torch.ones(2, 4, 9, dtype=torch.float64))
    assert (weights.sum(-1) <= 1 + 1e-12).all()


# -- starts ------------------------------------------------------------------------------------------------------------


def test_reach_at_the_start() -> None:
    """A head whose logits are zero gives a key T tokens back 1 / e of what it gives the nearest."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 4, "hidden_size": 16}
    for longest, want in ((4096, [8.0, 64.0, 512.0, 4096.0]), (None, [1024 ** (h / 4) for h in (1, 2, 3, 4)])):
        scheme = build("stick_breaking", Geometry(**shape, max_positions=longest), start_bias=True)
        torch.testing.assert_close(scheme.logit_bias.neg().exp().tolist(), want, rtol=1e-5, atol=0)
    places = torch.arange(4098)[None]
    scheme = build("stick_breaking", Geometry(**shape, max_positions=4096), start_bias=True)
    q, k = torch.zeros(1, 4, 1, 4), torch.zeros(1, 2, 4098, 4)
    at = {"query_positions": places[:, -1:], "key_positions": places, "need_weights": True}
    _, weights = attend(scheme, q, k, k, **at)
    for head, reach in enumerate((8, 64, 512, 4096)):
        near, far = weights[0, head, 0, 4096], weights[0, head, 0, 4096 - reach]
        assert (far / near).item() == pytest.approx(math.exp(-1), rel=0.07)
    _, weights = attend(build("stick_breaking", Geometry(**shape)), q, k, k, **at)
    torch.testing.assert_close(weights[0, 0, 0, -4:], torch.tensor([0.125, 0.25, 0.5, 0.0]))


def test_start_is_a_break() -> None:
    for options in VARIANTS:
        scheme = build("stick_breaking", Geometry(heads=4, kv_heads=2, head_dim=4, hidden_size=16), **options)
        assert not any(scheme.starts_exact(native_kept=kept) for kept in (False, True))
        text = " ".join(scheme.cautions(native_kept=False))
        assert "no softmax" in text
        assert ("do not sum to 1" in text) == (options.get("remainder") != "self")
        assert ("start_bias=True" in text) == ("start_bias" not in options)
        if scheme.head_bias is not None:
            assert not scheme.head_bias.any()
            assert (scheme.norm.weight == 1).all()
            assert not scheme.norm.bias.any()
    assert any("no softmax" in warning for warning in hf_posenc.plan(stock("llama"), "stick_breaking").warnings)


# -- in models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("options", [{}, {"remainder": "head_bias"}, {"native": "keep"}], ids=str)
def test_first_layer_of_a_model(options: dict[str, Any], architecture: str) -> None:
    """Its weights are those of the loops, on the logits of the stock model's weights, where its encoding is kept."""
    stacks = stacks_for(architecture, "stick_breaking")
    model = hf_posenc.patch(stock(architecture, attn_implementation="eager"), "stick_breaking", **stacks, **options)
    ids = tokens(architecture, 2, 13)
    attention = next(m for m in model.modules() if hasattr(m, "posenc_group"))
    scheme = next(m for m in attention.modules() if isinstance(m, Scheme))
    hidden = []
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: hidden.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    kind = "decoder_attentions" if architecture == "t5" else "attentions"
    call = {**inputs(architecture, ids), "output_attentions": True, "use_cache": False}
    with torch.no_grad():
        got = getattr(model(**call), kind)[0]
        q, k, _ = (x.double() for x in attention.project_heads(hidden[0]))
        stocks = stock(architecture, attn_implementation="eager")
        native = getattr(stocks(**call), kind)[0].double()
    z = scheme.geometry.scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
    if options.get("native") == "keep":
        # Softmax forgets a constant per row; the product with the first key, which T5's bias and no rotation changes,
        # or the row's own key, which a rotation leaves alone, gives it back.
        known = z.diagonal(dim1=-2, dim2=-1)
        if architecture == "t5":
            table = next(p for n, p in stocks.named_parameters() if "decoder" in n and "relative_attention_bias" in n)
            known = known + table[0].double()[:, None]
        z = native.log() + (known - native.diagonal(dim1=-2, dim2=-1).log())[..., None]
    beta = z.sigmoid().tril(-1)
    left = torch.stack([(1 - beta[..., j + 1 :]).prod(-1) for j in range(13)], dim=-1)
    torch.testing.assert_close(got.double(), beta * left, rtol=0, atol=2e-5)
