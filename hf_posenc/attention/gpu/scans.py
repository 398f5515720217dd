"""Scans of the keys from the last to the first: one kernel for each direction. Imports Triton.

A stick is carried as the logarithm of what is left of it, from tile to tile. Where nothing to speak of is left for any
query of a tile, its program ends; see `forms.Stick`.

Gates are added up near a query, from tile to tile. Where all queries of a tile have counted to the last number, farther
keys share the bias there, and need no gates; see `forms.GateCount`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.gpu import tiles
from hf_posenc.attention.gpu.tiles import (
    Shape,
    add_rows,
    dot,
    keys_of,
    last_block,
    load_rows,
    merge,
    start,
    store_rows,
    two_sum,
)
from hf_posenc.derivatives import first_order
from hf_posenc.forms import GateCount, Stick

# The logarithm of what is next to nothing: float32 does not see it among weights that sum to one.
_NOTHING = tl.constexpr(-40.0)


# -- a stick ---------------------------------------------------------------------------------------------------------


@triton.jit
def _softplus(z):
    """Return `log(1 + exp(z))`, exact where it is small too: many small ones are added up."""
    small = tl.exp(-tl.abs(z))
    one_more = 1.0 + small
    excess = one_more - 1.0
    log1p = tl.where(excess == 0.0, small, tl.log(one_more) * (small / tl.where(excess == 0.0, 1.0, excess)))
    return tl.maximum(z, 0.0) + log1p


@triton.jit
def _taken(
    q, k, bias, h, query, key, seen, scale, T: tl.constexpr, CURRENT: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Return the logits of a tile, which keys break a piece off, and the logarithm of what each passes on."""
    z = dot(q, tl.trans(k), T) * scale
    if HAS_BIAS:
        z += tl.load(bias + h)
    taking = seen & (query[:, None] - key[None, :] >= (0 if CURRENT else 1))
    return z, taking, tl.where(taking, -_softplus(z), 0.0)


@triton.jit(do_not_specialize=("sizes",))
def _stick_forward(
    q, k, v, out, bias, left_out, first_taking, hidden, sizes, scale,
    T: tl.constexpr, CURRENT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    m, b, h, i, rows, query = start(hidden, sizes, T)
    g = h // sizes.group
    q_tile = load_rows(q, b, h, i, sizes.queries, T)
    total = tl.zeros([T.BM, T.BD], dtype=tl.float32)
    left = tl.where(i < sizes.queries, 0.0, 2 * _NOTHING)
    # What rounding takes from it: the backward pass takes the sum apart again.
    lacking = tl.zeros([T.BM], dtype=tl.float32)
    n = last_block(m, sizes, T)
    while (n >= 0) & (tl.max(left, 0) > _NOTHING):
        j, key, seen = keys_of(n, b, h, i, query, hidden, sizes, T)
        k_tile = load_rows(k, b, g, j, sizes.keys, T)
        z, taking, passed = _taken(q_tile, k_tile, bias, h, query, key, seen, scale, T, CURRENT, HAS_BIAS)
        log_weight = z + tl.cumsum(passed, axis=1, reverse=True) + left[:, None]
        weight = tl.where(taking, tl.exp(log_weight), 0.0)
        v_tile = load_rows(v, b, g, j, sizes.keys, T)
        total += dot(weight.to(v_tile.dtype), v_tile, T)
        left, by_rounding = two_sum(left, tl.sum(passed, axis=1))
        lacking += by_rounding
        n -= 1
    store_rows(out, b, h, i, sizes.queries, total.to(q_tile.dtype), T)
    tl.store(left_out + 2 * rows, left, mask=i < sizes.queries)
    tl.store(left_out + 2 * rows + 1, lacking, mask=i < sizes.queries)
    tl.store(first_taking + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + m, n + 1)


@triton.jit(do_not_specialize=("sizes",))
def _stick_backward(
    q, k, v, grad, dq, dk, dv, bias, dbias, left_in, of_left, first_taking, hidden, sizes, scale,
    T: tl.constexpr, CURRENT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    m, b, h, i, rows, query = start(hidden, sizes, T)
    g = h // sizes.group
    q_tile = load_rows(q, b, h, i, sizes.queries, T)
    grad_tile = load_rows(grad, b, h, i, sizes.queries, T)
    left = tl.load(left_in + 2 * rows, mask=i < sizes.queries, other=0.0)
    lacking = tl.load(left_in + 2 * rows + 1, mask=i < sizes.queries, other=0.0)
    # What the sum over all passed keys gets from the rest and from the weights of farther keys.
    farther = tl.load(of_left + rows, mask=i < sizes.queries, other=0.0)
    total = tl.zeros([T.BM, T.BD], dtype=tl.float32)
    total_bias = tl.zeros([T.BM], dtype=tl.float32)
    first = tl.load(first_taking + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + m)
    for n in range(first, last_block(m, sizes, T) + 1):
        j, key, seen = keys_of(n, b, h, i, query, hidden, sizes, T)
        k_tile = load_rows(k, b, g, j, sizes.keys, T)
        z, taking, passed = _taken(q_tile, k_tile, bias, h, query, key, seen, scale, T, CURRENT, HAS_BIAS)
        left, by_rounding = two_sum(left, -tl.sum(passed, axis=1))
        lacking += by_rounding
        log_weight = z + tl.cumsum(passed, axis=1, reverse=True) + (left + lacking)[:, None]
        weight = tl.where(taking, tl.exp(log_weight), 0.0)
        v_tile = load_rows(v, b, g, j, sizes.keys, T)
        add_rows(dv, b, g, j, sizes.keys, dot(tl.trans(weight.to(v_tile.dtype)), grad_tile, T), T)
        of_log = weight * dot(grad_tile, tl.trans(v_tile), T)
        # A key passes on what is left to itself, too, and to all farther ones.
        of_passed = tl.cumsum(of_log, axis=1) + farther[:, None]
        farther += tl.sum(of_log, axis=1)
        of_z = tl.where(taking, of_log - tl.sigmoid(z) * of_passed, 0.0)
        total_bias += tl.sum(of_z, axis=1)
        of_product = (of_z * scale).to(k_tile.dtype)
        total += dot(of_product, k_tile, T)
        add_rows(dk, b, g, j, sizes.keys, dot(tl.trans(of_product), q_tile, T), T)
    store_rows(dq, b, h, i, sizes.queries, total.to(q_tile.dtype), T)
    if HAS_BIAS:
        tl.atomic_add(dbias + h, tl.sum(total_bias, axis=0), sem="relaxed")


def break_stick(scan: Stick, call: Call) -> Tensor:
    v, bias = call.v, None if scan.bias is None else scan.bias.float()
    found: tuple[Tensor, Tensor] = _BreakStick.apply(tiles.shape_of(call), scan.current, call.q, call.k, v, bias)
    output, rest = found
    if scan.rest is not None:
        values = scan.rest.float()[:, None]
    elif scan.rest_to_own:
        length, before = call.queries, call.keys - call.queries
        if call.mask.keep is not None:
            rest = rest * call.mask.keep.expand(*call.mask.keep.shape[:2], length, -1).diagonal(before, -2, -1)
        values = v[:, :, before:].repeat_interleave(call.q.shape[1] // v.shape[1], dim=1)
    else:
        return output
    return output + (rest[..., None] * values).to(output)


class _BreakStick(torch.autograd.Function):
    """Gives the weighted values `[B, H, Q, D]` and what is left of each stick, float32 `[B, H, Q]`."""

    @staticmethod
    def forward(
        ctx: Any, shape: Shape, current: bool, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (tiles.rowwise(x) for x in (q, k, v))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        left = q.new_empty((*q.shape[:3], 2), dtype=torch.float32)
        first_taking = q.new_empty(shape.grid[::-1], dtype=torch.int32)
        has_bias = bias is not None
        _stick_forward[shape.grid](
            *tiles.matrices(q, k, v, out), bias if has_bias else left, left, first_taking,
            **shape.arguments, CURRENT=current, HAS_BIAS=has_bias,
        )  # fmt: skip
        rest = left[..., 0].exp()
        ctx.shape, ctx.current = shape, current
        ctx.save_for_backward(q, k, v, bias, left, rest, first_taking)
        return out, rest

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, of_rest: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, left, rest, first_taking = ctx.saved_tensors
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        dbias = None if bias is None else torch.zeros_like(bias)
        biases = (left, left) if bias is None else (bias, dbias)
        # Without pipelining: tiles of the next keys would not fit next to these.
        _stick_backward[ctx.shape.grid](
            *tiles.matrices(q, k, v, tiles.rowwise(grad), dq, dk, dv), *biases, left, (of_rest * rest).contiguous(),
            first_taking, **ctx.shape.arguments, CURRENT=ctx.current, HAS_BIAS=bias is not None, num_warps=8,
            num_stages=1,
        )  # fmt: skip
        return None, None, dq, dk.to(k.dtype), dv.to(v.dtype), dbias


# -- gates -----------------------------------------------------------------------------------------------------------


@triton.jit
def _between(bias, rows, position, seen, N: tl.constexpr):
    """Return the bias at a position, the step from the whole number below to the next, that number, and the rest."""
    below = tl.floor(position)
    index = below.to(tl.int32)
    place = rows[:, None] * N + index
    first = tl.load(bias + place, mask=seen, other=0.0)
    step = tl.load(bias + place + 1, mask=seen & (index < N - 1), other=0.0)
    step = tl.where(index < N - 1, step - first, 0.0)
    return first + (position - below) * step, step, index, position - below


@triton.jit(do_not_specialize=("sizes",))
def _count_forward(
    q, k, v, gate_q, gate_k, out, bias, lse, counted, first_near, hidden, sizes, scale, gate_scale,
    T: tl.constexpr, N: tl.constexpr, OWN_GATES: tl.constexpr,
):  # fmt: skip
    m, b, h, i, rows, query = start(hidden, sizes, T)
    g = h // sizes.group
    q_tile = load_rows(q, b, h, i, sizes.queries, T)
    gate_tile = q_tile
    if OWN_GATES:
        gate_tile = load_rows(gate_q, b, h, i, sizes.queries, T)
    total = tl.zeros([T.BM, T.BD], dtype=tl.float32)
    highest = tl.full([T.BM], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([T.BM], dtype=tl.float32)
    # What was counted, in two parts: the backward pass takes it apart again, exactly.
    high = tl.where(i < sizes.queries, 0.0, 1.0 * N)
    low = tl.zeros([T.BM], dtype=tl.float32)
    n = last_block(m, sizes, T)
    while (n >= 0) & (tl.min(high, 0) < N - 1):
        j, _key, seen = keys_of(n, b, h, i, query, hidden, sizes, T)
        z = dot(q_tile, tl.trans(load_rows(k, b, g, j, sizes.keys, T)), T) * scale
        opening = z
        if OWN_GATES:
            opening = dot(gate_tile, tl.trans(load_rows(gate_k, b, g, j, sizes.keys, T)), T) * gate_scale
        gates = tl.where(seen, tl.sigmoid(opening), 0.0)
        position = tl.minimum(tl.cumsum(gates, axis=1, reverse=True) + high[:, None], N - 1.0)
        added, _step, _index, _above = _between(bias, rows, position, seen, N)
        logits = tl.where(seen, z + added, float("-inf"))
        total, highest, sums = merge(total, highest, sums, logits, load_rows(v, b, g, j, sizes.keys, T), T)
        high, lacking = two_sum(high, tl.sum(gates, axis=1))
        low += lacking
        n -= 1
    tl.store(first_near + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + m, n + 1)
    last = tl.load(bias + rows * N + N - 1, mask=i < sizes.queries, other=0.0)
    while n >= 0:
        j, _key, seen = keys_of(n, b, h, i, query, hidden, sizes, T)
        z = dot(q_tile, tl.trans(load_rows(k, b, g, j, sizes.keys, T)), T) * scale
        logits = tl.where(seen, z + last[:, None], float("-inf"))
        total, highest, sums = merge(total, highest, sums, logits, load_rows(v, b, g, j, sizes.keys, T), T)
        n -= 1
    # A query that sees nothing gets zeros, and weights of zero in the backward pass.
    empty = sums == 0.0
    sums = tl.where(empty, 1.0, sums)
    store_rows(out, b, h, i, sizes.queries, total / sums[:, None], T)
    tl.store(lse + rows, tl.where(empty, float("inf"), highest + tl.log(sums)), mask=i < sizes.queries)
    tl.store(counted + 2 * rows, high, mask=i < sizes.queries)
    tl.store(counted + 2 * rows + 1, low, mask=i < sizes.queries)


@triton.jit(do_not_specialize=("sizes",))
def _count_backward(
    q, k, v, gate_q, gate_k, grad, dq, dk, dv, dgate_q, dgate_k, bias, dbias, inner, lse, counted, first_near, hidden,
    sizes, scale, gate_scale, T: tl.constexpr, N: tl.constexpr, OWN_GATES: tl.constexpr,
):  # fmt: skip
    m, b, h, i, rows, query = start(hidden, sizes, T)
    g = h // sizes.group
    inside = i < sizes.queries
    q_tile = load_rows(q, b, h, i, sizes.queries, T)
    gate_tile = q_tile
    if OWN_GATES:
        gate_tile = load_rows(gate_q, b, h, i, sizes.queries, T)
    grad_tile = load_rows(grad, b, h, i, sizes.queries, T)
    level = tl.load(lse + rows, mask=inside, other=float("inf"))
    mean = tl.load(inner + rows, mask=inside, other=0.0)
    last = tl.load(bias + rows * N + N - 1, mask=inside, other=0.0)
    total = tl.zeros([T.BM, T.BD], dtype=tl.float32)
    near = tl.load(first_near + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + m)

    # The keys that share the bias at the last number.
    of_last = tl.zeros([T.BM], dtype=tl.float32)
    for n in range(0, near):
        j, _key, seen = keys_of(n, b, h, i, query, hidden, sizes, T)
        k_tile = load_rows(k, b, g, j, sizes.keys, T)
        v_tile = load_rows(v, b, g, j, sizes.keys, T)
        logits = dot(q_tile, tl.trans(k_tile), T) * scale + last[:, None]
        weights = tl.where(seen, tl.exp(logits - level[:, None]), 0.0)
        of_logits = weights * (dot(grad_tile, tl.trans(v_tile), T) - mean[:, None])
        add_rows(dv, b, g, j, sizes.keys, dot(tl.trans(weights.to(v_tile.dtype)), grad_tile, T), T)
        of_last += tl.sum(of_logits, axis=1)
        of_product = (of_logits * scale).to(k_tile.dtype)
        total += dot(of_product, k_tile, T)
        add_rows(dk, b, g, j, sizes.keys, dot(tl.trans(of_product), q_tile, T), T)
    tl.atomic_add(dbias + rows * N + N - 1, of_last, mask=inside, sem="relaxed")

    # Those that count, the farthest first: a gate is part of the positions of its own key and of all farther ones.
    high = tl.load(counted + 2 * rows, mask=inside, other=0.0)
    low = tl.load(counted + 2 * rows + 1, mask=inside, other=0.0)
    farther = tl.zeros([T.BM], dtype=tl.float32)
    of_gate_q = tl.zeros([T.BM, T.BD], dtype=tl.float32)
    for n in range(near, last_block(m, sizes, T) + 1):
        j, _key, seen = keys_of(n, b, h, i, query, hidden, sizes, T)
        k_tile = load_rows(k, b, g, j, sizes.keys, T)
        v_tile = load_rows(v, b, g, j, sizes.keys, T)
        z = dot(q_tile, tl.trans(k_tile), T) * scale
        opening = z
        gate_keys = k_tile
        if OWN_GATES:
            gate_keys = load_rows(gate_k, b, g, j, sizes.keys, T)
            opening = dot(gate_tile, tl.trans(gate_keys), T) * gate_scale
        gates = tl.where(seen, tl.sigmoid(opening), 0.0)
        high, lacking = two_sum(high, -tl.sum(gates, axis=1))
        low += lacking
        position = tl.cumsum(gates, axis=1, reverse=True) + tl.maximum(high + low, 0.0)[:, None]
        added, step, index, above = _between(bias, rows, tl.minimum(position, N - 1.0), seen, N)
        weights = tl.where(seen, tl.exp(z + added - level[:, None]), 0.0)
        of_logits = weights * (dot(grad_tile, tl.trans(v_tile), T) - mean[:, None])
        add_rows(dv, b, g, j, sizes.keys, dot(tl.trans(weights.to(v_tile.dtype)), grad_tile, T), T)
        place = dbias + rows[:, None] * N + index
        tl.atomic_add(place, of_logits * (1.0 - above), mask=seen, sem="relaxed")
        tl.atomic_add(place + 1, of_logits * above, mask=seen & (index < N - 1), sem="relaxed")
        of_position = of_logits * step
        of_gates = tl.cumsum(of_position, axis=1) + farther[:, None]
        farther += tl.sum(of_position, axis=1)
        of_opening = of_gates * gates * (1.0 - gates)
        if OWN_GATES:
            of_gate_product = (of_opening * gate_scale).to(k_tile.dtype)
            of_gate_q += dot(of_gate_product, gate_keys, T)
            add_rows(dgate_k, b, g, j, sizes.keys, dot(tl.trans(of_gate_product), gate_tile, T), T)
        else:
            of_logits += of_opening
        of_product = (of_logits * scale).to(k_tile.dtype)
        total += dot(of_product, k_tile, T)
        add_rows(dk, b, g, j, sizes.keys, dot(tl.trans(of_product), q_tile, T), T)
    store_rows(dq, b, h, i, sizes.queries, total.to(q_tile.dtype), T)
    if OWN_GATES:
        store_rows(dgate_q, b, h, i, sizes.queries, of_gate_q.to(gate_tile.dtype), T)


def count_gates(scan: GateCount, call: Call) -> Tensor:
    q, k = call.content()
    gates = scan.keys(k, call.block(call.mask.keep))
    opening = (None, None) if gates is None else (q, gates)
    bias = scan.at(q, torch.empty(0, dtype=torch.float32, device=q.device))
    output: Tensor = _CountGates.apply(tiles.shape_of(call), scan.scale, call.q, call.k, call.v, *opening, bias)
    return output


class _CountGates(torch.autograd.Function):
    """Takes `gate_q` and `gate_k`, by which gates open, if not by `q` and `k`; and the bias at whole numbers from 0 on,
    float32 `[B, H, Q, N]`.
    """

    @staticmethod
    def forward(
        ctx: Any, shape: Shape, gate_scale: float, q: Tensor, k: Tensor, v: Tensor, gate_q: Tensor | None,
        gate_k: Tensor | None, bias: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.shape, ctx.constants = shape, {"N": bias.shape[-1], "OWN_GATES": gate_q is not None}
        ctx.constants["gate_scale"] = gate_scale
        q, k, v = (tiles.rowwise(x) for x in (q, k, v))
        gate_q = q if gate_q is None else tiles.rowwise(gate_q.to(q.dtype))
        gate_k = k if gate_k is None else tiles.rowwise(gate_k.to(q.dtype))
        bias = bias.contiguous()
        # Not rounded: the backward pass takes sums of differences from it.
        out = q.new_empty(q.shape, dtype=torch.float32)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        counted = q.new_empty((*q.shape[:3], 2), dtype=torch.float32)
        first_near = q.new_empty(shape.grid[::-1], dtype=torch.int32)
        operands = tiles.matrices(q, k, v, gate_q, gate_k, out)
        _count_forward[shape.grid](*operands, bias, lse, counted, first_near, **shape.arguments, **ctx.constants)
        ctx.save_for_backward(q, k, v, gate_q, gate_k, bias, out, lse, counted, first_near)
        return out.to(q.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, gate_q, gate_k, bias, out, lse, counted, first_near = ctx.saved_tensors
        dq, dgate_q = (torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(2))
        dk, dv, dgate_k = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v, gate_k))
        dbias = torch.zeros_like(bias)
        operands = tiles.matrices(q, k, v, gate_q, gate_k, tiles.rowwise(grad), dq, dk, dv, dgate_q, dgate_k)
        inner = (grad.float() * out).sum(-1)
        # Without pipelining: tiles of the next keys would not fit next to these, and Triton 3.9 fails to place their
        # masks.
        _count_backward[ctx.shape.grid](
            *operands, bias, dbias, inner, lse, counted, first_near, **ctx.shape.arguments, **ctx.constants,
            num_warps=8, num_stages=1,
        )  # fmt: skip
        of_gates = (dgate_q, dgate_k.to(k.dtype)) if ctx.constants["OWN_GATES"] else (None, None)
        return None, None, dq, dk.to(k.dtype), dv.to(v.dtype), *of_gates, dbias
