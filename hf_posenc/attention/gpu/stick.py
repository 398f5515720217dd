"""Stick-breaking attention, see `structures.Stick`: one kernel for each direction. Imports Triton.

What is left of a stick is carried as a logarithm from tile to tile. Where nothing to speak of is left for any query
of a tile, its program ends.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.attention.gpu import tiles
from hf_posenc.attention.gpu.tiles import Shape, add_rows, dot, last_block, load_rows, store_rows, two_sum, visible

# The logarithm of what is next to nothing: float32 does not see it among weights that sum to one.
_NOTHING = tl.constexpr(-40.0)


@triton.jit
def _logits(q, k, bias, h, scale, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr):
    z = dot(q, tl.trans(k), PRECISION) * scale
    if HAS_BIAS:
        z += tl.load(bias + h)
    return z


@triton.jit
def _softplus(z):
    """Return `log(1 + exp(z))`, exact where it is small too: many small ones are added up."""
    small = tl.exp(-tl.abs(z))
    one_more = 1.0 + small
    excess = one_more - 1.0
    log1p = tl.where(excess == 0.0, small, tl.log(one_more) * (small / tl.where(excess == 0.0, 1.0, excess)))
    return tl.maximum(z, 0.0) + log1p


@triton.jit
def _taking(seen, query, key, CURRENT: tl.constexpr):
    """Return which keys break a piece off: those before the query, or up to it."""
    distance = query[:, None] - key[None, :]
    return seen & (distance >= (0 if CURRENT else 1))


@triton.jit(do_not_specialize=tiles.SIZES)
def _forward(
    q, k, v, bias, out, left_out, first_taking, query_positions, key_positions, keep,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row, query_batch,
    key_batch, keep_batch, keep_head, keep_row, keep_column,
    scale, heads, group, queries, keys, ahead,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, CURRENT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    # The last queries have most to do, and start first.
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    k += b * k_batch + h // group * k_head
    v += b * v_batch + h // group * v_head
    keep += b * keep_batch + h * keep_head
    i = m * BM + tl.arange(0, BM)
    query = tl.load(query_positions + b * query_batch + i, mask=i < queries, other=0)
    q_tile = load_rows(q + b * q_batch + h * q_head, i, queries, q_row, D, BD)
    total = tl.zeros([BM, BD], dtype=tl.float32)
    left = tl.where(i < queries, 0.0, 2 * _NOTHING)
    # What rounding takes from it: the backward pass takes the sum apart again.
    lacking = tl.zeros([BM], dtype=tl.float32)
    n = last_block(m, keys, ahead, BM, BN, RULE)
    while (n >= 0) & (tl.max(left, 0) > _NOTHING):
        j = n * BN + tl.arange(0, BN)
        key = tl.load(key_positions + b * key_batch + j, mask=j < keys, other=0)
        z = _logits(q_tile, load_rows(k, j, keys, k_row, D, BD), bias, h, scale, HAS_BIAS, PRECISION)
        seen = visible(i, j, query, key, keep, keep_row, keep_column, queries, keys, ahead, RULE, KEEP)
        taking = _taking(seen, query, key, CURRENT)
        passed = tl.where(taking, -_softplus(z), 0.0)
        log_weight = z + tl.cumsum(passed, axis=1, reverse=True) + left[:, None]
        weight = tl.where(taking, tl.exp(log_weight), 0.0)
        v_tile = load_rows(v, j, keys, v_row, D, BD)
        total += dot(weight.to(v_tile.dtype), v_tile, PRECISION)
        left, by_rounding = two_sum(left, tl.sum(passed, axis=1))
        lacking += by_rounding
        n -= 1
    store_rows(out + b * out_batch + h * out_head, i, queries, out_row, total.to(q_tile.dtype), D, BD)
    place = tl.program_id(1).to(tl.int64) * queries + i
    tl.store(left_out + 2 * place, left, mask=i < queries)
    tl.store(left_out + 2 * place + 1, lacking, mask=i < queries)
    tl.store(first_taking + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + m, n + 1)


@triton.jit(do_not_specialize=tiles.SIZES)
def _backward(
    q, k, v, bias, grad, left_in, of_left, first_taking, dq, dk, dv, dbias, query_positions, key_positions, keep,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, grad_batch, grad_head, grad_row, dq_batch,
    dq_head, dq_row, dk_batch, dk_head, dk_row, query_batch, key_batch, keep_batch, keep_head, keep_row, keep_column,
    scale, heads, group, queries, keys, ahead,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RULE: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, CURRENT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    k += b * k_batch + h // group * k_head
    v += b * v_batch + h // group * v_head
    dk += b * dk_batch + h // group * dk_head
    dv += b * dk_batch + h // group * dk_head
    keep += b * keep_batch + h * keep_head
    i = m * BM + tl.arange(0, BM)
    query = tl.load(query_positions + b * query_batch + i, mask=i < queries, other=0)
    q_tile = load_rows(q + b * q_batch + h * q_head, i, queries, q_row, D, BD)
    grad_tile = load_rows(grad + b * grad_batch + h * grad_head, i, queries, grad_row, D, BD)
    place = tl.program_id(1).to(tl.int64) * queries + i
    left = tl.load(left_in + 2 * place, mask=i < queries, other=0.0)
    lacking = tl.load(left_in + 2 * place + 1, mask=i < queries, other=0.0)
    # What the sum over all passed keys gets from the rest and from the weights of farther keys.
    farther = tl.load(of_left + place, mask=i < queries, other=0.0)
    total = tl.zeros([BM, BD], dtype=tl.float32)
    total_bias = tl.zeros([BM], dtype=tl.float32)
    first = tl.load(first_taking + tl.program_id(1).to(tl.int64) * tl.num_programs(0) + m)
    for n in range(first, last_block(m, keys, ahead, BM, BN, RULE) + 1):
        j = n * BN + tl.arange(0, BN)
        key = tl.load(key_positions + b * key_batch + j, mask=j < keys, other=0)
        k_tile = load_rows(k, j, keys, k_row, D, BD)
        z = _logits(q_tile, k_tile, bias, h, scale, HAS_BIAS, PRECISION)
        seen = visible(i, j, query, key, keep, keep_row, keep_column, queries, keys, ahead, RULE, KEEP)
        taking = _taking(seen, query, key, CURRENT)
        passed = tl.where(taking, -_softplus(z), 0.0)
        left, by_rounding = two_sum(left, -tl.sum(passed, axis=1))
        lacking += by_rounding
        log_weight = z + tl.cumsum(passed, axis=1, reverse=True) + (left + lacking)[:, None]
        weight = tl.where(taking, tl.exp(log_weight), 0.0)
        v_tile = load_rows(v, j, keys, v_row, D, BD)
        add_rows(dv, j, keys, dk_row, dot(tl.trans(weight.to(v_tile.dtype)), grad_tile, PRECISION), D, BD)
        of_log = weight * dot(grad_tile, tl.trans(v_tile), PRECISION)
        # A key passes on what is left to itself, too, and to all farther ones.
        of_passed = tl.cumsum(of_log, axis=1) + farther[:, None]
        farther += tl.sum(of_log, axis=1)
        of_z = tl.where(taking, of_log - tl.sigmoid(z) * of_passed, 0.0)
        total_bias += tl.sum(of_z, axis=1)
        of_product = (of_z * scale).to(k_tile.dtype)
        total += dot(of_product, k_tile, PRECISION)
        add_rows(dk, j, keys, dk_row, dot(tl.trans(of_product), q_tile, PRECISION), D, BD)
    store_rows(dq + b * dq_batch + h * dq_head, i, queries, dq_row, total.to(q_tile.dtype), D, BD)
    if HAS_BIAS:
        tl.atomic_add(dbias + h, tl.sum(total_bias, axis=0), sem="relaxed")


def break_stick(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, current: bool
) -> tuple[Tensor, Tensor]:
    """Return the weighted values `[B, H, Q, D]` and what is left of each stick, float32 `[B, H, Q]`.

    Args:
        shape: Shape of the call.
        q: `[B, H, Q, D]`.
        k: `[B, G, K, D]`.
        v: `[B, G, K, D]`.
        bias: Bias on the scaled logits, float32 `[H]`.
        current: Whether a query's own key takes a piece.
    """
    output: tuple[Tensor, Tensor] = _BreakStick.apply(shape, current, q, k, v, bias)
    return output


class _BreakStick(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shape: Shape, current: bool, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (tiles.rowwise(x) for x in (q, k, v))
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        left = q.new_empty((*q.shape[:3], 2), dtype=torch.float32)
        blocks, programs = shape.grid
        first_taking = q.new_empty((programs, blocks), dtype=torch.int32)
        _forward[shape.grid](
            q, k, v, left if bias is None else bias, out, left, first_taking, **tiles.strides(q=q, k=k, v=v, out=out),
            **shape.arguments, CURRENT=current, HAS_BIAS=bias is not None,
        )  # fmt: skip
        rest = left[..., 0].exp()
        ctx.shape, ctx.current = shape, current
        ctx.save_for_backward(q, k, v, bias, left, rest, first_taking)
        return out, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_rest: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, left, rest, first_taking = ctx.saved_tensors
        grad = tiles.rowwise(grad)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        dbias = rest if bias is None else torch.zeros_like(bias)
        _backward[ctx.shape.grid](
            q,
            k,
            v,
            rest if bias is None else bias,
            grad,
            left,
            (of_rest * rest).contiguous(),
            first_taking,
            dq,
            dk,
            dv,
            dbias,
            **tiles.strides(q=q, k=k, v=v, grad=grad, dq=dq, dk=dk),
            **ctx.shape.arguments,
            CURRENT=ctx.current,
            HAS_BIAS=bias is not None,
            num_warps=8,
            # Tiles of the next keys would not fit next to these.
            num_stages=1,
        )
        return None, None, dq, dk.to(k.dtype), dv.to(v.dtype), None if bias is None else dbias
