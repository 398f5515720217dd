"""Softmax attention with a number per key and head added, see `structures.KeyBias`. Imports Triton.

Torch's `flex_attention` computes the same, but gathers the gradient of every number by as many atomic additions as
there are pairs; here a program owns a tile of keys, and sums up in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.attention.gpu import tiles
from hf_posenc.attention.gpu.tiles import Shape, dot, last_block, load_rows, merge, store_rows, visible


@triton.jit(do_not_specialize=tiles.SIZES)
def _forward(
    q, k, v, of_queries, of_keys, out, lse, query_positions, key_positions, keep,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row, query_batch,
    key_batch, keep_batch, keep_head, keep_row, keep_column,
    scale, heads, group, queries, keys, ahead,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # The last queries have most to do, and start first.
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    k += b * k_batch + h // group * k_head
    v += b * v_batch + h // group * v_head
    keep += b * keep_batch + h * keep_head
    of_keys += tl.program_id(1).to(tl.int64) * keys
    i = m * BM + tl.arange(0, BM)
    rows = tl.program_id(1).to(tl.int64) * queries + i
    query = tl.load(query_positions + b * query_batch + i, mask=i < queries, other=0)
    of_query = tl.load(of_queries + rows, mask=i < queries, other=0.0)
    q_tile = load_rows(q + b * q_batch + h * q_head, i, queries, q_row, D, BD)
    total = tl.zeros([BM, BD], dtype=tl.float32)
    highest = tl.full([BM], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([BM], dtype=tl.float32)
    for n in range(0, last_block(m, keys, ahead, BM, BN, RULE) + 1):
        j = n * BN + tl.arange(0, BN)
        key = tl.load(key_positions + b * key_batch + j, mask=j < keys, other=0)
        of_key = tl.load(of_keys + j, mask=j < keys, other=0.0)
        seen = visible(i, j, query, key, keep, keep_row, keep_column, queries, keys, ahead, RULE, KEEP)
        z = dot(q_tile, tl.trans(load_rows(k, j, keys, k_row, D, BD)), PRECISION) * scale
        # Both numbers are large, and their difference is not.
        logits = tl.where(seen, z + (of_key[None, :] - of_query[:, None]), float("-inf"))
        v_tile = load_rows(v, j, keys, v_row, D, BD)
        total, highest, sums = merge(total, highest, sums, logits, v_tile, PRECISION)
    # A query that sees nothing gets zeros, and weights of zero in the backward pass.
    empty = sums == 0.0
    sums = tl.where(empty, 1.0, sums)
    store_rows(out + b * out_batch + h * out_head, i, queries, out_row, total / sums[:, None], D, BD)
    tl.store(lse + rows, tl.where(empty, float("inf"), highest + tl.log(sums)), mask=i < queries)


@triton.jit
def _of_logits(
    q_tile, k_tile, v_tile, grad_tile, of_query, of_key, level, mean, seen,
    scale,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the weights of a tile, and the gradient of its logits."""
    z = dot(q_tile, tl.trans(k_tile), PRECISION) * scale + (of_key[None, :] - of_query[:, None])
    weights = tl.where(seen, tl.exp(z - level[:, None]), 0.0)
    return weights, weights * (dot(grad_tile, tl.trans(v_tile), PRECISION) - mean[:, None])


@triton.jit(do_not_specialize=tiles.SIZES)
def _backward_of_queries(
    q, k, v, of_queries, of_keys, grad, inner, lse, dq, d_of_queries, query_positions, key_positions, keep,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, grad_batch, grad_head, grad_row, dq_batch,
    dq_head, dq_row, query_batch, key_batch, keep_batch, keep_head, keep_row, keep_column,
    scale, heads, group, queries, keys, ahead,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    k += b * k_batch + h // group * k_head
    v += b * v_batch + h // group * v_head
    keep += b * keep_batch + h * keep_head
    of_keys += tl.program_id(1).to(tl.int64) * keys
    i = m * BM + tl.arange(0, BM)
    rows = tl.program_id(1).to(tl.int64) * queries + i
    query = tl.load(query_positions + b * query_batch + i, mask=i < queries, other=0)
    of_query = tl.load(of_queries + rows, mask=i < queries, other=0.0)
    level = tl.load(lse + rows, mask=i < queries, other=float("inf"))
    mean = tl.load(inner + rows, mask=i < queries, other=0.0)
    q_tile = load_rows(q + b * q_batch + h * q_head, i, queries, q_row, D, BD)
    grad_tile = load_rows(grad + b * grad_batch + h * grad_head, i, queries, grad_row, D, BD)
    total = tl.zeros([BM, BD], dtype=tl.float32)
    of_bias = tl.zeros([BM], dtype=tl.float32)
    for n in range(0, last_block(m, keys, ahead, BM, BN, RULE) + 1):
        j = n * BN + tl.arange(0, BN)
        key = tl.load(key_positions + b * key_batch + j, mask=j < keys, other=0)
        of_key = tl.load(of_keys + j, mask=j < keys, other=0.0)
        seen = visible(i, j, query, key, keep, keep_row, keep_column, queries, keys, ahead, RULE, KEEP)
        k_tile = load_rows(k, j, keys, k_row, D, BD)
        v_tile = load_rows(v, j, keys, v_row, D, BD)
        _weights, of_logits = _of_logits(
            q_tile, k_tile, v_tile, grad_tile, of_query, of_key, level, mean, seen, scale, PRECISION
        )
        of_bias -= tl.sum(of_logits, axis=1)
        total += dot((of_logits * scale).to(k_tile.dtype), k_tile, PRECISION)
    store_rows(dq + b * dq_batch + h * dq_head, i, queries, dq_row, total.to(q_tile.dtype), D, BD)
    # Zero but for rounding, which cancels that of the keys where gates are summed up.
    tl.store(d_of_queries + rows, of_bias, mask=i < queries)


@triton.jit(do_not_specialize=tiles.SIZES)
def _backward_of_keys(
    q, k, v, of_queries, of_keys, grad, inner, lse, dk, dv, d_of_keys, query_positions, key_positions, keep,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, grad_batch, grad_head, grad_row, dk_batch,
    dk_head, dk_row, query_batch, key_batch, keep_batch, keep_head, keep_row, keep_column,
    scale, heads, group, queries, keys, ahead,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # The first keys are seen by most queries, and start first.
    n = tl.program_id(0)
    groups = heads // group
    b = (tl.program_id(1) // groups).to(tl.int64)
    g = (tl.program_id(1) % groups).to(tl.int64)
    j = n * BN + tl.arange(0, BN)
    key = tl.load(key_positions + b * key_batch + j, mask=j < keys, other=0)
    k_tile = load_rows(k + b * k_batch + g * k_head, j, keys, k_row, D, BD)
    v_tile = load_rows(v + b * v_batch + g * v_head, j, keys, v_row, D, BD)
    total_k = tl.zeros([BN, BD], dtype=tl.float32)
    total_v = tl.zeros([BN, BD], dtype=tl.float32)
    first = 0
    if RULE == 1:
        first = tl.maximum(n * BN - ahead, 0) // BM
    for member in range(0, group):
        h = g * group + member
        row = b * heads + h
        of_key = tl.load(of_keys + row * keys + j, mask=j < keys, other=0.0)
        of_bias = tl.zeros([BN], dtype=tl.float32)
        for m in range(first, tl.cdiv(queries, BM)):
            i = m * BM + tl.arange(0, BM)
            inside = i < queries
            query = tl.load(query_positions + b * query_batch + i, mask=inside, other=0)
            of_query = tl.load(of_queries + row * queries + i, mask=inside, other=0.0)
            level = tl.load(lse + row * queries + i, mask=inside, other=float("inf"))
            mean = tl.load(inner + row * queries + i, mask=inside, other=0.0)
            q_tile = load_rows(q + b * q_batch + h * q_head, i, queries, q_row, D, BD)
            grad_tile = load_rows(grad + b * grad_batch + h * grad_head, i, queries, grad_row, D, BD)
            mine = keep + b * keep_batch + h * keep_head
            seen = visible(i, j, query, key, mine, keep_row, keep_column, queries, keys, ahead, RULE, KEEP)
            weights, of_logits = _of_logits(
                q_tile, k_tile, v_tile, grad_tile, of_query, of_key, level, mean, seen, scale, PRECISION
            )
            of_bias += tl.sum(of_logits, axis=0)
            total_k += dot(tl.trans((of_logits * scale).to(q_tile.dtype)), q_tile, PRECISION)
            total_v += dot(tl.trans(weights.to(grad_tile.dtype)), grad_tile, PRECISION)
        tl.store(d_of_keys + row * keys + j, of_bias, mask=j < keys)
    place = b * dk_batch + g * dk_head
    store_rows(dk + place, j, keys, dk_row, total_k.to(k_tile.dtype), D, BD)
    store_rows(dv + place, j, keys, dk_row, total_v.to(v_tile.dtype), D, BD)


def attend(shape: Shape, q: Tensor, k: Tensor, v: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Return the output `[B, H, Q, D]`.

    Args:
        shape: Shape of the call.
        q: `[B, H, Q, D]`.
        k: `[B, G, K, D]`.
        v: `[B, G, K, D]`.
        of_queries: Taken from the logits of each query, float32 `[B, H, Q]`.
        of_keys: Added to the logits of each key, float32 `[B, H, K]`.
    """
    output: Tensor = _Attend.apply(shape, q, k, v, of_queries, of_keys)
    return output


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Shape, q: Tensor, k: Tensor, v: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
        q, k, v = (tiles.rowwise(x) for x in (q, k, v))
        of_queries, of_keys = of_queries.contiguous(), of_keys.contiguous()
        # Not rounded: the backward pass takes sums of differences from it.
        out = q.new_empty(q.shape, dtype=torch.float32)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        _forward[shape.grid](
            q, k, v, of_queries, of_keys, out, lse, **tiles.strides(q=q, k=k, v=v, out=out), **shape.arguments,
        )  # fmt: skip
        ctx.shape = shape
        ctx.save_for_backward(q, k, v, of_queries, of_keys, out, lse)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, of_queries, of_keys, out, lse = ctx.saved_tensors
        shape: Shape = ctx.shape
        grad = tiles.rowwise(grad)
        inner = (grad.float() * out).sum(-1)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        d_of_queries, d_of_keys = torch.empty_like(of_queries), torch.empty_like(of_keys)
        given = (q, k, v, of_queries, of_keys, grad, inner, lse)
        read = tiles.strides(q=q, k=k, v=v, grad=grad)
        _backward_of_queries[shape.grid](*given, dq, d_of_queries, **read, **tiles.strides(dq=dq), **shape.arguments)
        blocks = triton.cdiv(k.shape[2], shape.arguments["BN"])
        _backward_of_keys[(blocks, len(k) * k.shape[1])](
            *given, dk, dv, d_of_keys, **read, **tiles.strides(dk=dk), **shape.arguments, num_stages=2
        )
        return None, dq, dk, dv, d_of_queries, d_of_keys
