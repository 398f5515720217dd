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

from hf_posenc.attention.gpu import tiles
from hf_posenc.attention.gpu.tiles import (
    Shape,
    add_rows,
    dot,
    last_block,
    load_rows,
    merge,
    store_rows,
    two_sum,
    visible,
)


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


@triton.jit(do_not_specialize=tiles.SIZES)
def _forward(
    q, k, v, gate_q, gate_k, bias, out, lse, counted, first_near, query_positions, key_positions, keep,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, gate_q_batch, gate_q_head, gate_q_row,
    gate_k_batch, gate_k_head, gate_k_row, out_batch, out_head, out_row, query_batch, key_batch, keep_batch,
    keep_head, keep_row, keep_column,
    scale, gate_scale, heads, group, queries, keys, ahead,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, N: tl.constexpr, OWN_GATES: tl.constexpr,
):  # fmt: skip
    # The last queries have most to do, and start first.
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    k += b * k_batch + h // group * k_head
    v += b * v_batch + h // group * v_head
    gate_k += b * gate_k_batch + h // group * gate_k_head
    keep += b * keep_batch + h * keep_head
    i = m * BM + tl.arange(0, BM)
    rows = tl.program_id(1).to(tl.int64) * queries + i
    query = tl.load(query_positions + b * query_batch + i, mask=i < queries, other=0)
    q_tile = load_rows(q + b * q_batch + h * q_head, i, queries, q_row, D, BD)
    gate_tile = q_tile
    if OWN_GATES:
        gate_tile = load_rows(gate_q + b * gate_q_batch + h * gate_q_head, i, queries, gate_q_row, D, BD)
    total = tl.zeros([BM, BD], dtype=tl.float32)
    highest = tl.full([BM], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([BM], dtype=tl.float32)
    # What was counted, in two parts: the backward pass takes it apart again, exactly.
    high = tl.where(i < queries, 0.0, 1.0 * N)
    low = tl.zeros([BM], dtype=tl.float32)
    n = last_block(m, keys, ahead, BM, BN, RULE)
    while (n >= 0) & (tl.min(high, 0) < N - 1):
        j = n * BN + tl.arange(0, BN)
        key = tl.load(key_positions + b * key_batch + j, mask=j < keys, other=0)
        seen = visible(i, j, query, key, keep, keep_row, keep_column, queries, keys, ahead, RULE, KEEP)
        z = dot(q_tile, tl.trans(load_rows(k, j, keys, k_row, D, BD)), PRECISION) * scale
        opening = z
        if OWN_GATES:
            gate_keys = load_rows(gate_k, j, keys, gate_k_row, D, BD)
            opening = dot(gate_tile, tl.trans(gate_keys), PRECISION) * gate_scale
        gates = tl.where(seen, tl.sigmoid(opening), 0.0)
        position = tl.minimum(tl.cumsum(gates, axis=1, reverse=True) + high[:, None], N - 1.0)
        added, _step, _index, _above = _between(bias, rows, position, seen, N)
        logits = tl.where(seen, z + added, float("-inf"))
        v_tile = load_rows(v, j, keys, v_row, D, BD)
        total, highest, sums = merge(total, highest, sums, logits, v_tile, PRECISION)
        high, lacking = two_sum(high, tl.sum(gates, axis=1))
        low += lacking
        n -= 1
    tl.store(first_near + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + m, n + 1)
    last = tl.load(bias + rows * N + N - 1, mask=i < queries, other=0.0)
    while n >= 0:
        j = n * BN + tl.arange(0, BN)
        key = tl.load(key_positions + b * key_batch + j, mask=j < keys, other=0)
        seen = visible(i, j, query, key, keep, keep_row, keep_column, queries, keys, ahead, RULE, KEEP)
        z = dot(q_tile, tl.trans(load_rows(k, j, keys, k_row, D, BD)), PRECISION) * scale
        logits = tl.where(seen, z + last[:, None], float("-inf"))
        v_tile = load_rows(v, j, keys, v_row, D, BD)
        total, highest, sums = merge(total, highest, sums, logits, v_tile, PRECISION)
        n -= 1
    # A query that sees nothing gets zeros, and weights of zero in the backward pass.
    empty = sums == 0.0
    sums = tl.where(empty, 1.0, sums)
    store_rows(out + b * out_batch + h * out_head, i, queries, out_row, total / sums[:, None], D, BD)
    tl.store(lse + rows, tl.where(empty, float("inf"), highest + tl.log(sums)), mask=i < queries)
    tl.store(counted + 2 * rows, high, mask=i < queries)
    tl.store(counted + 2 * rows + 1, low, mask=i < queries)


@triton.jit(do_not_specialize=tiles.SIZES)
def _backward(
    q, k, v, gate_q, gate_k, bias, grad, inner, lse, counted, first_near, dq, dk, dv, dgate_q, dgate_k, dbias,
    query_positions, key_positions, keep,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, gate_q_batch, gate_q_head, gate_q_row,
    gate_k_batch, gate_k_head, gate_k_row, grad_batch, grad_head, grad_row, dq_batch, dq_head, dq_row, dk_batch,
    dk_head, dk_row, query_batch, key_batch, keep_batch, keep_head, keep_row, keep_column,
    scale, gate_scale, heads, group, queries, keys, ahead,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, N: tl.constexpr, OWN_GATES: tl.constexpr,
):  # fmt: skip
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    k += b * k_batch + h // group * k_head
    v += b * v_batch + h // group * v_head
    gate_k += b * gate_k_batch + h // group * gate_k_head
    dk += b * dk_batch + h // group * dk_head
    dv += b * dk_batch + h // group * dk_head
    dgate_k += b * dk_batch + h // group * dk_head
    keep += b * keep_batch + h * keep_head
    i = m * BM + tl.arange(0, BM)
    inside = i < queries
    rows = tl.program_id(1).to(tl.int64) * queries + i
    query = tl.load(query_positions + b * query_batch + i, mask=inside, other=0)
    q_tile = load_rows(q + b * q_batch + h * q_head, i, queries, q_row, D, BD)
    gate_tile = q_tile
    if OWN_GATES:
        gate_tile = load_rows(gate_q + b * gate_q_batch + h * gate_q_head, i, queries, gate_q_row, D, BD)
    grad_tile = load_rows(grad + b * grad_batch + h * grad_head, i, queries, grad_row, D, BD)
    level = tl.load(lse + rows, mask=inside, other=float("inf"))
    mean = tl.load(inner + rows, mask=inside, other=0.0)
    last = tl.load(bias + rows * N + N - 1, mask=inside, other=0.0)
    total = tl.zeros([BM, BD], dtype=tl.float32)
    near = tl.load(first_near + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + m)

    # The keys that share the bias at the last number.
    of_last = tl.zeros([BM], dtype=tl.float32)
    for n in range(0, near):
        j = n * BN + tl.arange(0, BN)
        key = tl.load(key_positions + b * key_batch + j, mask=j < keys, other=0)
        seen = visible(i, j, query, key, keep, keep_row, keep_column, queries, keys, ahead, RULE, KEEP)
        k_tile = load_rows(k, j, keys, k_row, D, BD)
        v_tile = load_rows(v, j, keys, v_row, D, BD)
        logits = dot(q_tile, tl.trans(k_tile), PRECISION) * scale + last[:, None]
        weights = tl.where(seen, tl.exp(logits - level[:, None]), 0.0)
        of_logits = weights * (dot(grad_tile, tl.trans(v_tile), PRECISION) - mean[:, None])
        add_rows(dv, j, keys, dk_row, dot(tl.trans(weights.to(v_tile.dtype)), grad_tile, PRECISION), D, BD)
        of_last += tl.sum(of_logits, axis=1)
        of_product = (of_logits * scale).to(k_tile.dtype)
        total += dot(of_product, k_tile, PRECISION)
        add_rows(dk, j, keys, dk_row, dot(tl.trans(of_product), q_tile, PRECISION), D, BD)
    tl.atomic_add(dbias + rows * N + N - 1, of_last, mask=inside, sem="relaxed")

    # Those that count, the farthest first: a gate is part of the positions of its own key and of all farther ones.
    high = tl.load(counted + 2 * rows, mask=inside, other=0.0)
    low = tl.load(counted + 2 * rows + 1, mask=inside, other=0.0)
    farther = tl.zeros([BM], dtype=tl.float32)
    of_gate_q = tl.zeros([BM, BD], dtype=tl.float32)
    for n in range(near, last_block(m, keys, ahead, BM, BN, RULE) + 1):
        j = n * BN + tl.arange(0, BN)
        key = tl.load(key_positions + b * key_batch + j, mask=j < keys, other=0)
        seen = visible(i, j, query, key, keep, keep_row, keep_column, queries, keys, ahead, RULE, KEEP)
        k_tile = load_rows(k, j, keys, k_row, D, BD)
        v_tile = load_rows(v, j, keys, v_row, D, BD)
        z = dot(q_tile, tl.trans(k_tile), PRECISION) * scale
        opening = z
        gate_keys = k_tile
        if OWN_GATES:
            gate_keys = load_rows(gate_k, j, keys, gate_k_row, D, BD)
            opening = dot(gate_tile, tl.trans(gate_keys), PRECISION) * gate_scale
        gates = tl.where(seen, tl.sigmoid(opening), 0.0)
        high, lacking = two_sum(high, -tl.sum(gates, axis=1))
        low += lacking
        position = tl.cumsum(gates, axis=1, reverse=True) + tl.maximum(high + low, 0.0)[:, None]
        added, step, index, above = _between(bias, rows, tl.minimum(position, N - 1.0), seen, N)
        weights = tl.where(seen, tl.exp(z + added - level[:, None]), 0.0)
        of_logits = weights * (dot(grad_tile, tl.trans(v_tile), PRECISION) - mean[:, None])
        add_rows(dv, j, keys, dk_row, dot(tl.trans(weights.to(v_tile.dtype)), grad_tile, PRECISION), D, BD)
        place = dbias + rows[:, None] * N + index
        tl.atomic_add(place, of_logits * (1.0 - above), mask=seen, sem="relaxed")
        tl.atomic_add(place + 1, of_logits * above, mask=seen & (index < N - 1), sem="relaxed")
        of_position = of_logits * step
        of_gates = tl.cumsum(of_position, axis=1) + farther[:, None]
        farther += tl.sum(of_position, axis=1)
        of_opening = of_gates * gates * (1.0 - gates)
        if OWN_GATES:
            of_gate_product = (of_opening * gate_scale).to(k_tile.dtype)
            of_gate_q += dot(of_gate_product, gate_keys, PRECISION)
            add_rows(dgate_k, j, keys, dk_row, dot(tl.trans(of_gate_product), gate_tile, PRECISION), D, BD)
        else:
            of_logits += of_opening
        of_product = (of_logits * scale).to(k_tile.dtype)
        total += dot(of_product, k_tile, PRECISION)
        add_rows(dk, j, keys, dk_row, dot(tl.trans(of_product), q_tile, PRECISION), D, BD)
    store_rows(dq + b * dq_batch + h * dq_head, i, queries, dq_row, total.to(q_tile.dtype), D, BD)
    if OWN_GATES:
        of_gate_q = of_gate_q.to(gate_tile.dtype)
        store_rows(dgate_q + b * dq_batch + h * dq_head, i, queries, dq_row, of_gate_q, D, BD)


def count_gates(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, Tensor] | None, bias: Tensor, gate_scale: float
) -> Tensor:
    """Return the output `[B, H, Q, D]`.

    Args:
        shape: Shape of the call.
        q: `[B, H, Q, D]`.
        k: `[B, G, K, D]`.
        v: `[B, G, K, D]`.
        gates: Queries and keys, of the same shapes, by which gates open, where these are not `q` and `k`.
        bias: At whole numbers from 0 on, float32 `[B, H, Q, N]`.
        gate_scale: Factor on the products of `gates`.
    """
    gate_q, gate_k = gates or (None, None)
    output: Tensor = _CountGates.apply(shape, gate_scale, q, k, v, gate_q, gate_k, bias)
    return output


class _CountGates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shape: Shape,
        gate_scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate_q: Tensor | None,
        gate_k: Tensor | None,
        bias: Tensor,
    ) -> Tensor:
        own = gate_q is not None
        q, k, v = (tiles.rowwise(x) for x in (q, k, v))
        gate_q, gate_k = (
            other if x is None else tiles.rowwise(x.to(q.dtype)) for x, other in ((gate_q, q), (gate_k, k))
        )
        bias = bias.contiguous()
        # Not rounded: the backward pass takes sums of differences from it.
        out = q.new_empty(q.shape, dtype=torch.float32)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        counted = q.new_empty((*q.shape[:3], 2), dtype=torch.float32)
        blocks, programs = shape.grid
        first_near = q.new_empty((programs, blocks), dtype=torch.int32)
        _forward[shape.grid](
            q, k, v, gate_q, gate_k, bias, out, lse, counted, first_near,
            **tiles.strides(q=q, k=k, v=v, gate_q=gate_q, gate_k=gate_k, out=out), **shape.arguments,
            gate_scale=gate_scale, N=bias.shape[-1], OWN_GATES=own,
        )  # fmt: skip
        ctx.shape, ctx.gate_scale, ctx.own = shape, gate_scale, own
        ctx.save_for_backward(q, k, v, gate_q, gate_k, bias, out, lse, counted, first_near)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, gate_q, gate_k, bias, out, lse, counted, first_near = ctx.saved_tensors
        grad = tiles.rowwise(grad)
        dq, dgate_q = (torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(2))
        dk, dv, dgate_k = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v, gate_k))
        dbias = torch.zeros_like(bias)
        _backward[ctx.shape.grid](
            q,
            k,
            v,
            gate_q,
            gate_k,
            bias,
            grad,
            (grad.float() * out).sum(-1),
            lse,
            counted,
            first_near,
            dq,
            dk,
            dv,
            dgate_q,
            dgate_k,
            dbias,
            **tiles.strides(q=q, k=k, v=v, gate_q=gate_q, gate_k=gate_k, grad=grad, dq=dq, dk=dk),
            **ctx.shape.arguments,
            gate_scale=ctx.gate_scale,
            N=bias.shape[-1],
            OWN_GATES=ctx.own,
            num_warps=8,
            # Tiles of the next keys would not fit next to these, and Triton 3.9 fails to place their masks.
            num_stages=1,
        )
        of_gates = (dgate_q, dgate_k.to(k.dtype)) if ctx.own else (None, None)
        return None, None, dq, dk.to(k.dtype), dv.to(v.dtype), *of_gates, dbias
