"""Softmax attention with a bias at what gates let through, see `structures.GateCount`. Imports Triton.

Near a query the gates of each key are added up, from tile to tile. Where all queries of a tile have counted to the
last number, farther keys share the bias there, and need no gates.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

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
from hf_posenc.structures import GateCount


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
def _forward(
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
def _backward(
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


def run(scan: GateCount, call: Call) -> Tensor:
    """Return the output `[B, H, Q, D]`."""
    q, k = call.content()
    gates = scan.keys(k, call.block(call.mask.keep))
    opening = (None, None) if gates is None else (q, gates)
    bias = scan.at(q, torch.empty(0, dtype=torch.float32, device=q.device))
    output: Tensor = _CountGates.apply(tiles.shape_of(call), scan.scale, call.q, call.k, call.v, *opening, bias)
    return output


class _CountGates(torch.autograd.Function):
    """Takes `gate_q` and `gate_k`, by which gates open, if not by `q` and `k`; and the bias `[B, H, Q, N]`."""

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
        _forward[shape.grid](*operands, bias, lse, counted, first_near, **shape.arguments, **ctx.constants)
        ctx.save_for_backward(q, k, v, gate_q, gate_k, bias, out, lse, counted, first_near)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, gate_q, gate_k, bias, out, lse, counted, first_near = ctx.saved_tensors
        dq, dgate_q = (torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(2))
        dk, dv, dgate_k = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v, gate_k))
        dbias = torch.zeros_like(bias)
        operands = tiles.matrices(q, k, v, gate_q, gate_k, tiles.rowwise(grad), dq, dk, dv, dgate_q, dgate_k)
        inner = (grad.float() * out).sum(-1)
        # Without pipelining: tiles of the next keys would not fit next to these, and Triton 3.9 fails to place their
        # masks.
        _backward[ctx.shape.grid](
            *operands, bias, dbias, inner, lse, counted, first_near, **ctx.shape.arguments, **ctx.constants,
            num_warps=8, num_stages=1,
        )  # fmt: skip
        of_gates = (dgate_q, dgate_k.to(k.dtype)) if ctx.constants["OWN_GATES"] else (None, None)
        return None, None, dq, dk.to(k.dtype), dv.to(v.dtype), *of_gates, dbias
