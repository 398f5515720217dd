"""Schemes that only add a bias: blocks of rows go through the fused kernel, each with its part of the bias.

No bias of size Q x K ever exists. Where the distance of two tokens is the difference of their slots, the bias of a
block is a view of a table that overlaps itself, and costs nothing; see `TableBias`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.attention.blocks import Rows
from hf_posenc.attention.call import Call
from hf_posenc.attention.cpu import cutoff, kernel
from hf_posenc.attention.cpu.biases import AnyBias, BlockBias, KeysBias, Piece
from hf_posenc.attention.cpu.lookups import PiecewiseLookup, TableLookup
from hf_posenc.attention.cpu.pieces import PiecewiseBias
from hf_posenc.attention.cpu.products import ProductsBias
from hf_posenc.attention.cpu.tables import TableBias
from hf_posenc.attention.executor import FEWEST_QUERIES, Executor
from hf_posenc.ops.linear import grouped_matmul
from hf_posenc.scheme import Scheme
from hf_posenc.structures import DistanceTable, KeyBias, PiecewiseLinear, RelativeProducts

# Numbers of a matrix that should be in cache at once, in the backward pass of a bias that learns.
_IN_CACHE = 2**18

_LOG2_E = math.log2(math.e)
# Products with numbers too small for the usual form of float32 take many CPUs a hundred times as long: steep slopes
# and gates would spend nearly all of the backward pass on weights that count for nothing (see `cutoff.LEAST`). The
# kernel does not drop them, so biases that differ by so much (natural logarithms) do without it there.
_SPREAD = 75.0


class Fused(Executor):
    """Blocks of rows through the fused kernel, each with its part of the bias."""

    name = "fused"
    windows = True

    def knows(self, scheme: Scheme, device: torch.device) -> bool:
        return device.type == "cpu" and scheme.added() is not None

    def pays(self, call: Call) -> bool:
        # The form depends on numbers in tensors, which a graph that is being compiled does not have.
        return call.queries >= FEWEST_QUERIES and not torch.compiler.is_compiling()

    def computes(self, call: Call) -> bool:
        return call.one_softmax and call.scheme.added() is not None and kernel.takes(call.q, call.k, call.v)

    def form(self, call: Call) -> str:
        return ", ".join(dict.fromkeys(part.bias.name for part in _parts(call)))

    def run(self, call: Call) -> tuple[Tensor, None]:
        q = call.q
        # Autocast would make tables in half precision.
        with torch.autocast(call.device.type, enabled=False):
            parts = tuple(_parts(call))
            for part in parts:
                q = part.bias.moved(q)
        inputs = [tensor for part in parts for tensor in part.bias.give_inputs()]
        plan = _Plan(parts, call.mask.rule == "slots", call.mask.ahead, call.scale)
        output: Tensor = _Fused.apply(plan, q, call.k, call.v, *inputs)  # type: ignore[no-untyped-call]
        return output, None


@dataclass(frozen=True, eq=False)
class _Part:
    """A bias, and the rows that it is for.

    Attributes:
        start: First row.
        stop: Row after the last.
        bias: Bias of these rows.
    """

    start: int
    stop: int
    bias: BlockBias

    def in_order(self, rows: Tensor) -> Tensor:
        """Return rows `[B, H, q, ...]` in the order of the bias, or bring them back from it."""
        return rows.flip(2) if self.bias.backwards else rows

    def heads(self, block: Rows, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice, int]]:
        """Return groups of heads in a block, their kv heads, and the first key that they need."""
        heads, shared = q.shape[1], q.shape[1] // k.shape[1]
        for mine, first in cutoff.runs(self.bias.first_keys(block), heads, shared):
            yield mine, slice(mine.start // shared, mine.stop // shared), first


@dataclass(frozen=True, eq=False)
class _Plan:
    """How to run one call.

    Attributes:
        parts: Biases that cover all rows, in order.
        causal: Whether row i sees the first `i + 1 + ahead` keys at most.
        ahead: Number of keys before the first query's own, in causal calls.
        scale: Factor on `q @ k.T`.
    """

    parts: tuple[_Part, ...]
    causal: bool
    ahead: int
    scale: float

    def with_inputs(self, inputs: Sequence[Tensor]) -> Iterator[_Part]:
        """Return the parts with the inputs of their biases."""
        given = iter(inputs)
        for part in self.parts:
            yield replace(part, bias=part.bias.with_inputs([next(given) for _ in part.bias.inputs]))

    def blocks(self, part: _Part, rows: int, keys: int) -> list[Rows]:
        """Return the blocks of a part, of so many rows each."""
        found = []
        for start in range(part.start, part.stop, rows):
            stop = min(start + rows, part.stop)
            found.append(Rows(start, stop, min(stop + self.ahead, keys) if self.causal else keys))
        return found


def _parts(call: Call) -> Iterator[_Part]:
    """Cover the rows with the fastest form that holds the bias."""
    added = call.scheme.added()
    vectors = None
    if isinstance(added, RelativeProducts) and call.causal and ProductsBias.pays(call):
        vectors = added.vectors(call.tables)
    by_distance = vectors is not None or isinstance(added, (DistanceTable, PiecewiseLinear))
    regular = by_distance and call.slots_tell_distances
    split = 0
    bias: BlockBias
    if isinstance(added, KeyBias):
        bias = KeysBias(added.at(call.state), added.at(call.own), call)
    elif isinstance(added, DistanceTable) and regular:
        bias = TableBias(added.at(TableBias.distances(call), call.precise), call)
    elif isinstance(added, PiecewiseLinear) and regular:
        # The weight of the first queries is the same, so that the function is a table for them.
        same = call.positions.query.amax(0) < added.constant_below()
        split = int(same.long().cumprod(0).sum())
        if split:
            table = added.table(TableBias.distances(call), call.positions.query[:1, :1], call.precise)
            yield _Part(0, split, TableBias(table, call))
        if split == call.queries:
            return
        bias = PiecewiseBias(added, call)
    elif vectors is not None and regular:
        bias = ProductsBias(vectors, call)
    elif isinstance(added, DistanceTable) and TableLookup.pays(call):
        bias = TableLookup(added, call)
    elif isinstance(added, PiecewiseLinear) and PiecewiseLookup.pays(call):
        bias = PiecewiseLookup(added, call)
    else:
        assert added is not None
        bias = AnyBias(added, call)
    yield _Part(split, call.queries, bias)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, q: Tensor, k: Tensor, v: Tensor, *inputs: Tensor) -> Tensor:
        output = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        slacks = []
        with torch.autocast("cpu", enabled=False):
            for part in plan.with_inputs(inputs):
                slacks.append(cutoff.slack(q, k, plan.scale) if part.bias.may_cut() else None)
                part.bias.prepare(slacks[-1])
                for block in plan.blocks(part, part.bias.rows, k.shape[2]):
                    rows = slice(block.start, block.stop)
                    q_rows = part.in_order(q[:, :, rows])
                    pieces = part.bias.pieces(block)
                    for heads, theirs, first in part.heads(block, q, k):
                        parts = []
                        for piece in _from(pieces, heads, first):
                            k_part, v_part = k[:, theirs, piece.keys], v[:, theirs, piece.keys]
                            parts.append(
                                kernel.forward(
                                    q_rows[:, heads], k_part, v_part, piece.bias, plan.scale, causal=piece.causal
                                )
                            )
                        found, sums = functools.reduce(_merged, parts)
                        output[:, heads, rows], lse[:, heads, rows] = part.in_order(found), part.in_order(sums)
        ctx.plan, ctx.slacks = plan, slacks
        ctx.save_for_backward(q, k, v, output, kernel.mark_empty_rows(lse), *inputs)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse, *inputs = ctx.saved_tensors
        plan: _Plan = ctx.plan
        needed = ctx.needs_input_grad[4:]
        sums = _Sums(q, k, v)
        found: list[Tensor | None] = []
        with torch.autocast("cpu", enabled=False):
            for part, slack in zip(plan.with_inputs(inputs), ctx.slacks, strict=True):
                wanted = needed[len(found) : len(found) + len(part.bias.inputs)]
                part.bias.prepare(slack)
                if any(wanted) or part.bias.spread() > _SPREAD:
                    found += _own_backward(plan, part, wanted, (q, k, v, output, lse, grad), sums)
                else:
                    _kernel_backward(plan, part, (q, k, v, output, lse, grad), sums)
                    found += [None] * len(wanted)
        return (None, sums.q.to(q.dtype), sums.k.to(k.dtype), sums.v.to(v.dtype), *found)


def _from(pieces: list[Piece], heads: slice, first: int) -> list[Piece]:
    """Return the parts of pieces for some heads, from a key on."""
    parts = (piece.part(heads, first) for piece in pieces)
    return [part for part in parts if part is not None]


def _merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and logarithm of the sum of exponentials over the keys of two calls."""
    (output, lse), (other, other_lse) = first, second
    share = torch.sigmoid(other_lse - lse)[..., None]
    return torch.lerp(output.to(share), other.to(share), share).to(output.dtype), torch.logaddexp(lse, other_lse)


class _Sums:
    """Gradients of queries, keys and values, in float32 or wider, to be added to."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        precise = torch.promote_types(q.dtype, torch.float32)
        self.q = torch.empty_like(q, dtype=precise)
        self.k, self.v = (torch.zeros(x.shape, dtype=precise, device=x.device) for x in (k, v))


def _kernel_backward(plan: _Plan, part: _Part, saved: tuple[Tensor, ...], sums: _Sums) -> None:
    q, k, v, output, lse, grad = saved
    for block in plan.blocks(part, part.bias.rows, k.shape[2]):
        rows = slice(block.start, block.stop)
        in_rows = [part.in_order(x[:, :, rows]) for x in (grad, q, output, lse)]
        pieces = part.bias.pieces(block)
        for heads, theirs, first in part.heads(block, q, k):
            g_rows, q_rows, o_rows, l_rows = (x[:, heads] for x in in_rows)
            for index, piece in enumerate(_from(pieces, heads, first)):
                k_part, v_part = (x[:, theirs, piece.keys] for x in (k, v))
                dq, dk, dv = kernel.backward(
                    g_rows, q_rows, k_part, v_part, o_rows, l_rows, piece.bias, plan.scale, causal=piece.causal
                )
                dq = part.in_order(dq)
                sums.q[:, heads, rows] = dq if not index else sums.q[:, heads, rows] + dq
                sums.k[:, theirs, piece.keys] += dk
                sums.v[:, theirs, piece.keys] += dv


def _own_backward(
    plan: _Plan, part: _Part, wanted: Sequence[bool], saved: tuple[Tensor, ...], sums: _Sums
) -> Sequence[Tensor | None]:
    """Add the gradients of the operands to `sums`, and return those of the bias's inputs, where they are wanted."""
    precise = sums.q.dtype
    q, k, v, _, lse, grad = (x.to(precise) for x in saved)
    gradient, learns = part.bias.gradient(wanted), any(wanted)
    for block in plan.blocks(part, part.bias.learning_rows, k.shape[2]):
        pieces = gradient.pieces(block)
        runs = list(part.heads(block, q, k))
        # Several rows of the batch with all heads only, see `_add_products`.
        rows_at_once = max(1, _IN_CACHE // (part.bias.learning_rows * block.keys * q.shape[1])) if len(runs) == 1 else 1
        for row in range(0, q.shape[0], rows_at_once):
            batch = slice(row, min(row + rows_at_once, q.shape[0]))
            for heads, theirs, first in _in_cache(runs, part.bias.learning_rows, block.keys, q.shape[1] // k.shape[1]):
                here, keys = (batch, heads, slice(block.start, block.stop)), slice(first, block.keys)
                q_rows, g_rows = part.in_order(q[here]), part.in_order(grad[here])
                k_part, v_part = k[batch, theirs, keys], v[batch, theirs, keys]
                # Powers of 2, since torch's exp is slow, and very slow where the result is next to nothing.
                weights = grouped_matmul(q_rows * (plan.scale * _LOG2_E), k_part.mT)
                for piece in _from(pieces, heads, first):
                    bias = piece.bias[batch] if piece.bias.shape[0] > 1 else piece.bias
                    weights[..., piece.keys.start - first : piece.keys.stop - first].add_(bias, alpha=_LOG2_E)
                weights.sub_(part.in_order(lse[here])[..., None] * _LOG2_E)
                torch.threshold_(weights, cutoff.LEAST, -math.inf).exp2_()
                # Not by way of the output, whose rounding would not leave sums of zero.
                d_logits = grouped_matmul(g_rows, v_part.mT).mul_(weights)
                d_logits.addcmul_(weights, d_logits.sum(-1, keepdim=True), value=-1)
                if learns:
                    gradient.add(block, batch, heads, first, d_logits)
                sums.q[here] = part.in_order(grouped_matmul(d_logits, k_part).mul_(plan.scale))
                _add_products(sums.k[batch, theirs, keys], d_logits, q_rows, plan.scale)
                _add_products(sums.v[batch, theirs, keys], weights, g_rows, 1.0)
        if learns:
            gradient.end(block)
    return gradient.result() if learns else [None] * len(wanted)


def _in_cache(
    runs: list[tuple[slice, slice, int]], rows: int, keys: int, shared: int
) -> Iterator[tuple[slice, slice, int]]:
    """Return groups of heads, their kv heads and first key, as few heads at a time as a cache has room for."""
    for heads, _, first in runs:
        at_once = max(1, _IN_CACHE // (rows * (keys - first)) // shared) * shared
        for start in range(heads.start, heads.stop, at_once):
            mine = slice(start, min(start + at_once, heads.stop))
            yield mine, slice(mine.start // shared, mine.stop // shared), first


def _add_products(total: Tensor, weights: Tensor, rows: Tensor, factor: float) -> None:
    """Add `factor * weights.T @ rows` of `[b, H, q, K]` and `[b, H, q, D]` to `[b, G, K, D]`."""
    # One row of the batch, or all heads: there is such a view.
    total = total.view(-1, *total.shape[2:])
    count = len(total)
    total.baddbmm_(
        weights.reshape(count, -1, weights.shape[-1]).mT, rows.reshape(count, -1, rows.shape[-1]), alpha=factor
    )
