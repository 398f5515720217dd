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

from hf_posenc.attention.call import Call
from hf_posenc.attention.gpu import tiles
from hf_posenc.attention.gpu.tiles import (
    Shape,
    add_rows,
    dot,
    keys_of,
    last_block,
    load_rows,
    start,
    store_rows,
    two_sum,
)
from hf_posenc.structures import Stick

# The logarithm of what is next to nothing: float32 does not see it among weights that sum to one.
_NOTHING = tl.constexpr(-40.0)


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
def _forward(
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
def _backward(
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


def run(scan: Stick, call: Call) -> Tensor:
    """Return the output `[B, H, Q, D]`."""
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
        _forward[shape.grid](
            *tiles.matrices(q, k, v, out), bias if has_bias else left, left, first_taking,
            **shape.arguments, CURRENT=current, HAS_BIAS=has_bias,
        )  # fmt: skip
        rest = left[..., 0].exp()
        ctx.shape, ctx.current = shape, current
        ctx.save_for_backward(q, k, v, bias, left, rest, first_taking)
        return out, rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, of_rest: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, left, rest, first_taking = ctx.saved_tensors
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        dbias = None if bias is None else torch.zeros_like(bias)
        biases = (left, left) if bias is None else (bias, dbias)
        # Without pipelining: tiles of the next keys would not fit next to these.
        _backward[ctx.shape.grid](
            *tiles.matrices(q, k, v, tiles.rowwise(grad), dq, dk, dv), *biases, left, (of_rest * rest).contiguous(),
            first_taking, **ctx.shape.arguments, CURRENT=ctx.current, HAS_BIAS=bias is not None, num_warps=8,
            num_stages=1,
        )  # fmt: skip
        return None, None, dq, dk.to(k.dtype), dv.to(v.dtype), dbias
