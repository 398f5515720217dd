"""Schemes that only add a bias: blocks of rows go through the fused kernel, each with its part of the bias.

No bias of size Q x K ever exists. Where the distance of two tokens is the difference of their slots, the bias of a
block is a view of a table that overlaps itself, and costs nothing; see `TableBias`.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.call import FEWEST_QUERIES, Call, Executor
from hf_posenc.attention.cpu import kernel
from hf_posenc.attention.cpu.biases import AnyBias, BlockBias, TableBias
from hf_posenc.attention.cpu.piecewise import PiecewiseBias
from hf_posenc.attention.cpu.products import ProductsBias
from hf_posenc.derivatives import first_order
from hf_posenc.forms import Bias, ContentBias, DistanceTable, PiecewiseLinear
from hf_posenc.ops import grouped_matmul
from hf_posenc.scheme import Scheme

# Numbers of a matrix that should be in cache at once, in the backward pass of a bias that learns.
_IN_CACHE = 2**18
_LOG2_E = math.log2(math.e)
# Products with numbers too small for the usual form of float32 take many CPUs a hundred times as long: steep slopes
# and gates would spend nearly all of the backward pass on weights that count for nothing (see `_LEAST`). The kernel
# does not drop them, so biases that differ by so much (natural logarithms) do without it there.
STEEP = 75.0
# A weight of less than 2 to this is taken for 0 there, also in double precision.
_LEAST = -64.0


class Fused(Executor):
    """Blocks of rows through the fused kernel, each with its part of the bias."""

    name = "fused"

    def knows(self, scheme: Scheme, device: torch.device) -> bool:
        return device.type == "cpu" and scheme.added() is not None and kernel.works()

    def pays(self, call: Call) -> bool:
        return call.queries >= FEWEST_QUERIES

    def computes(self, call: Call) -> bool:
        return call.one_softmax

    def form(self, call: Call) -> str:
        return bias_of(call).name

    def run(self, call: Call) -> tuple[Tensor, None]:
        # Autocast would make tables in half precision.
        with torch.autocast(call.device.type, enabled=False):
            bias = bias_of(call)
            return by_kernel(bias, replace(call, q=bias.moved(call.q))), None


def by_kernel(bias: BlockBias, call: Call) -> Tensor:
    """Return the output of a call whose logits get a bias."""
    inputs = bias.inputs
    bias.inputs = ()  # autograd keeps them
    output: Tensor = _Fused.apply(bias, call.scale, call.q, call.k, call.v, *inputs)  # type: ignore[no-untyped-call]
    return output


def bias_of(call: Call, added: Bias | None = None) -> BlockBias:
    """Return the bias that a call adds, or part of it, in the fastest form that holds it."""
    added = call.scheme.added() if added is None else added
    assert added is not None
    if isinstance(added, ContentBias) and call.causal and call.slots_tell_distances:
        vectors = added.vectors(call.tables)
        if vectors is not None:
            return ProductsBias(vectors, call)
    if isinstance(added, DistanceTable) and call.slots_tell_distances:
        return TableBias(added.at(TableBias.distances(call), call.precise), call)
    if isinstance(added, PiecewiseLinear) and call.causal and call.slots_tell_distances:
        query = call.positions.query
        if int(query.max()) >= added.constant_below():
            return PiecewiseBias(added, call)
        return TableBias(added.table(TableBias.distances(call), query[:1, :1], call.precise), call)
    return AnyBias(added, call)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: BlockBias, scale: float, q: Tensor, k: Tensor, v: Tensor, *inputs: Tensor) -> Tensor:
        output = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        with torch.autocast("cpu", enabled=False):
            bias = form.begin(inputs)
            for block in bias.blocks(bias.rows):
                here = (slice(None), slice(None), slice(block.start, block.stop))
                rows, found = bias.in_order(q[here]), []
                for piece in bias.pieces(block):
                    keys, values = (x[:, :, piece.keys] for x in (k, v))
                    found.append(kernel.forward(rows, keys, values, piece.bias, scale, causal=piece.causal))
                output[here], lse[here] = (bias.in_order(x) for x in functools.reduce(_merged, found))
        ctx.form, ctx.scale = form, scale
        ctx.save_for_backward(q, k, v, output, kernel.mark_empty_rows(lse), *inputs)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse, *inputs = ctx.saved_tensors  # gradient checkpointing gives them once
        wanted = ctx.needs_input_grad[5:]
        precise = torch.promote_types(q.dtype, torch.float32)
        sums = [torch.zeros(x.shape, dtype=precise, device=x.device) for x in (q, k, v)]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        with torch.autocast("cpu", enabled=False):
            bias = ctx.form.begin(inputs, wanted)
            bias.by_hand = bias.learning or bias.spread() > STEEP
            if bias.by_hand:
                found = _own_backward(bias, ctx.scale, [x.to(precise) for x in (q, k, v, lse, grad)], sums)
            else:
                _kernel_backward(bias, ctx.scale, (q, k, v, output, lse), grad, sums)
        return None, None, *(x.to(y.dtype) for x, y in zip(sums, (q, k, v), strict=True)), *found


def _merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and logarithm of the sum of exponentials over the keys of two calls."""
    (output, lse), (other, other_lse) = first, second
    share = torch.sigmoid(other_lse - lse)[..., None]
    return torch.lerp(output.to(share), other.to(share), share).to(output.dtype), torch.logaddexp(lse, other_lse)


def _kernel_backward(
    bias: BlockBias, scale: float, done: Sequence[Tensor], grad: Tensor, sums: Sequence[Tensor]
) -> None:
    """Add the gradients of queries, keys and values to `sums`, for a bias that has none."""
    of_q, of_k, of_v = sums
    q, k, v, *ends = done
    for block in bias.blocks(bias.rows):
        here = (slice(None), slice(None), slice(block.start, block.stop))
        rows, output, lse, d_output = (bias.in_order(x[here]) for x in (q, *ends, grad))
        for piece in bias.pieces(block):
            keys = (slice(None), slice(None), piece.keys)
            mine = (rows, k[keys], v[keys], output, lse)
            dq, dk, dv = kernel.backward(d_output, mine, piece.bias, scale, causal=piece.causal)
            of_q[here] += bias.in_order(dq)
            of_k[keys] += dk
            of_v[keys] += dv


def _own_backward(
    bias: BlockBias, scale: float, given: Sequence[Tensor], sums: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Add the gradients of queries, keys and values to `sums`; return the bias's own gradients, if it learns.

    `given` holds queries, keys, values, logarithms of sums and the gradient of the output.
    """
    (q, k, v, lse, grad), (of_q, of_k, of_v) = given, sums
    for block in bias.blocks(bias.learning_rows):
        pieces, rows, keys = bias.pieces(block), slice(block.start, block.stop), slice(block.first, block.keys)
        at_once = max(1, _IN_CACHE // (bias.learning_rows * block.keys * q.shape[1]))
        for row in range(0, q.shape[0], at_once):
            batch = slice(row, min(row + at_once, q.shape[0]))
            q_rows, g_rows, level = (bias.in_order(x[batch, :, rows]) for x in (q, grad, lse))
            k_keys, v_keys = k[batch, :, keys], v[batch, :, keys]
            # Powers of 2, since torch's exp is slow, and very slow where the result is next to nothing.
            if bias.in_channels:
                # Rounding queries would keep large channels from cancelling.
                weights = grouped_matmul(q_rows, k_keys.mT).mul_(scale * _LOG2_E)
            else:
                weights = grouped_matmul(q_rows * (scale * _LOG2_E), k_keys.mT)
            for piece in pieces:
                if piece.bias is None:
                    continue
                added = piece.bias[batch] if piece.bias.shape[0] > 1 else piece.bias
                here = slice(piece.keys.start - block.first, piece.keys.stop - block.first)
                weights[..., here].add_(added, alpha=_LOG2_E)
            weights.sub_(level[..., None] * _LOG2_E)
            torch.threshold_(weights, _LEAST, -math.inf).exp2_()
            # Not by way of the output, whose rounding would not leave sums of zero.
            d_logits = grouped_matmul(g_rows, v_keys.mT).mul_(weights)
            d_logits.addcmul_(weights, d_logits.sum(-1, keepdim=True), value=-1)
            if bias.learning:
                bias.add(block, batch, d_logits)
            of_q[batch, :, rows] = bias.in_order(grouped_matmul(d_logits, k_keys).mul_(scale))
            _add_products(of_k[batch, :, keys], d_logits, q_rows, scale)
            _add_products(of_v[batch, :, keys], weights, g_rows, 1.0)
    return bias.gradients() if bias.learning else [None] * len(bias.inputs)


def _add_products(total: Tensor, weights: Tensor, rows: Tensor, factor: float) -> None:
    """Add `factor * weights.T @ rows` of `[b, H, q, K]` and `[b, H, q, D]` to `[b, G, K, D]`."""
    total = total.view(-1, *total.shape[2:])
    count = len(total)
    total.baddbmm_(
        weights.reshape(count, -1, weights.shape[-1]).mT, rows.reshape(count, -1, rows.shape[-1]), alpha=factor
    )
