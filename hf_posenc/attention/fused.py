"""Schemes that only add a bias: blocks of rows go through the fused kernel, each with its part of the bias.

No bias of size Q x K ever exists. Where the distance of two tokens is the difference of their slots, the bias of a block is a
view of a table that overlaps itself, and costs nothing; see `TableBias`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.attention import far, kernel
from hf_posenc.attention.biases import AnyBias, BlockBias, KeysBias, Piece, RowBlock
from hf_posenc.attention.layout import slots_tell_distances
from hf_posenc.attention.lookups import PiecewiseLookup, TableLookup
from hf_posenc.attention.mask import Mask
from hf_posenc.attention.pieces import PiecewiseBias
from hf_posenc.attention.products import ProductsBias
from hf_posenc.attention.tables import TableBias
from hf_posenc.attention.task import Task
from hf_posenc.scheme import Scheme, grouped_matmul
from hf_posenc.structures import Added, DistanceTable, KeyBias, PiecewiseLinear, RelativeProducts

# How many numbers of a matrix should be in cache at once, in the backward pass of a bias that learns.
_IN_CACHE = 2**18

_LOG2_E = math.log2(math.e)
# Products with numbers too small for the usual form of float32 take many CPUs a hundred times as long: steep slopes and gates would
# spend nearly all of the backward pass on weights that count for nothing (see `far.LEAST`). The kernel does not drop them, so
# biases that differ by so much (natural logarithms) do without it there.
_SPREAD = 75.0


@dataclass(frozen=True, eq=False)
class Part:
    """A bias, and the rows it is for.

    Attributes:
        start: First row.
        stop: The row after the last.
        bias: Of these rows.
    """

    start: int
    stop: int
    bias: BlockBias

    def in_order(self, rows: Tensor) -> Tensor:
        """Return rows `[B, H, q, ...]` in the order of the bias, or bring them back from it."""
        return rows.flip(2) if self.bias.backwards else rows


@dataclass(frozen=True, eq=False)
class Plan:
    """How to run one call.

    Attributes:
        parts: Cover all rows, in order.
        causal: Whether row i sees the first `i + 1 + ahead` keys at most.
        ahead: Keys before the first query's own, in causal calls.
        scale: Factor on `q @ k.T`.
    """

    parts: tuple[Part, ...]
    causal: bool
    ahead: int
    scale: float

    def blocks(self, part: Part, rows: int, keys: int) -> list[RowBlock]:
        """Return the blocks of a part, of so many rows each."""
        found = []
        for start in range(part.start, part.stop, rows):
            stop = min(start + rows, part.stop)
            found.append(RowBlock(start, stop, min(stop + self.ahead, keys) if self.causal else keys))
        return found


def applies(scheme: Scheme, task: Task) -> bool:
    """Whether the scheme only adds to logits, and the kernel computes it."""
    return (
        task.native_score is None
        and not task.dropout
        and not task.upcast
        and scheme.added() is not None
        and kernel.takes(task.q, task.k, task.v)
        and task.q.dtype == task.k.dtype == task.v.dtype
    )


def fused(scheme: Scheme, task: Task, mask: Mask) -> Tensor:
    """Return the output `[B, H, Q, D]`, without any tensor of size Q x K."""
    added = scheme.added()
    assert added is not None
    q = task.q
    # Autocast would make tables in half precision.
    with torch.autocast(task.q.device.type, enabled=False):
        plan = Plan(tuple(_parts(scheme, added, task, mask)), mask.rule == "slots", mask.ahead, task.scale)
        for part in plan.parts:
            q = part.bias.moved(q)
    return _run(plan, q, task.k, task.v)


def form(scheme: Scheme, task: Task, mask: Mask) -> str:
    """Return in which form the bias is added."""
    added = scheme.added()
    assert added is not None
    kinds = {type(part.bias): part.bias.name for part in _parts(scheme, added, task, mask)}
    return ", ".join(kinds.values())


def _parts(scheme: Scheme, added: Added, task: Task, mask: Mask) -> Iterator[Part]:
    """Cover the rows with the fastest form that holds what is added."""
    queries, causal, dtype = task.q.shape[2], scheme.geometry.causal, torch.promote_types(task.q.dtype, torch.float32)
    vectors = None
    if isinstance(added, RelativeProducts) and causal and ProductsBias.pays(task):
        vectors = added.vectors(task.tables)
    by_distance = vectors is not None or isinstance(added, (DistanceTable, PiecewiseLinear))
    regular = by_distance and slots_tell_distances(task, mask, causal=causal)
    if isinstance(added, KeyBias):
        yield Part(0, queries, KeysBias(added.at(task.state), added.at(task.own), task, mask))
    elif isinstance(added, DistanceTable) and regular:
        table = added.at(TableBias.distances(task, causal=causal), dtype)
        yield Part(0, queries, TableBias(table, task, mask, causal=causal))
    elif isinstance(added, PiecewiseLinear) and regular:
        same = task.positions.query.amax(0) < added.constant_below()
        count = int(same.long().cumprod(0).sum())  # the first rows
        if count:
            table = added.table(TableBias.distances(task, causal=True), task.positions.query[:1, :1], dtype)
            yield Part(0, count, TableBias(table, task, mask, causal=True))
        if count < queries:
            yield Part(count, queries, PiecewiseBias(added, task, mask))
    elif vectors is not None and regular:
        yield Part(0, queries, ProductsBias(vectors, task, mask))
    elif isinstance(added, DistanceTable) and TableLookup.pays(task):
        yield Part(0, queries, TableLookup(added, task, mask, causal=causal))
    elif isinstance(added, PiecewiseLinear) and PiecewiseLookup.pays(task):
        yield Part(0, queries, PiecewiseLookup(added, task, mask))
    else:
        yield Part(0, queries, AnyBias(added, task, mask, scheme))


def _run(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output `[B, H, Q, D]`; gradients flow into operands and into what the biases were made of."""
    inputs = [tensor for part in plan.parts for tensor in part.bias.give_inputs()]
    output: Tensor = _Fused.apply(plan, q, k, v, *inputs)  # type: ignore[no-untyped-call]
    return output


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, *inputs: Tensor) -> Tensor:
        output = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        slacks = []
        with torch.autocast("cpu", enabled=False):
            for part, given in _with_inputs(plan, inputs):
                slacks.append(far.slack(q, k, plan.scale) if part.bias.leaves_out(given) else None)
                prepared = part.bias.prepare(given, slacks[-1])
                for block in plan.blocks(part, part.bias.rows, k.shape[2]):
                    rows = slice(block.start, block.stop)
                    q_rows = part.in_order(q[:, :, rows])
                    pieces = part.bias.block(prepared, block)
                    for heads, theirs, first in _heads(part, prepared, block, (q, k)):
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
        plan: Plan = ctx.plan
        needed = ctx.needs_input_grad[4:]
        sums = _Sums(q, k, v)
        found: list[Tensor | None] = []
        with torch.autocast("cpu", enabled=False):
            for (part, given), slack in zip(_with_inputs(plan, inputs), ctx.slacks, strict=True):
                wanted = needed[len(found) : len(found) + len(given)]
                prepared = part.bias.prepare(given, slack)
                if any(wanted) or part.bias.spread(prepared) > _SPREAD:
                    found += _own_backward(plan, part, given, prepared, wanted, (q, k, v, output, lse, grad), sums)
                else:
                    _kernel_backward(plan, part, prepared, (q, k, v, output, lse, grad), sums)
                    found += [None] * len(given)
        return (None, sums.q.to(q.dtype), sums.k.to(k.dtype), sums.v.to(v.dtype), *found)


def _heads(
    part: Part, prepared: object, block: RowBlock, operands: tuple[Tensor, Tensor]
) -> Iterator[tuple[slice, slice, int]]:
    """Return the heads that go together in a block, their kv heads, and the first key that they need."""
    (heads, groups) = (x.shape[1] for x in operands)
    shared = heads // groups
    for mine, start in far.runs(part.bias.first_keys(prepared, block), heads, shared):
        yield mine, slice(mine.start // shared, mine.stop // shared), start


def _from(pieces: list[Piece], heads: slice, first: int) -> list[Piece]:
    """Return what pieces have for some heads, from a key on."""
    parts = (piece.part(heads, first) for piece in pieces)
    return [part for part in parts if part is not None]


def _merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return output and logarithm of the sum of exponentials over the keys of two calls."""
    (output, lse), (other, other_lse) = first, second
    share = torch.sigmoid(other_lse - lse)[..., None]
    return torch.lerp(output.to(share), other.to(share), share).to(output.dtype), torch.logaddexp(lse, other_lse)


def _with_inputs(plan: Plan, inputs: tuple[Tensor, ...] | list[Tensor]) -> list[tuple[Part, tuple[Tensor, ...]]]:
    given = iter(inputs)
    return [(part, tuple(next(given) for _ in part.bias.inputs)) for part in plan.parts]


class _Sums:
    """Gradients of queries, keys and values, in float32 or wider, to be added to."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        precise = torch.promote_types(q.dtype, torch.float32)
        self.q = torch.empty_like(q, dtype=precise)
        self.k, self.v = (torch.zeros(x.shape, dtype=precise, device=x.device) for x in (k, v))


def _kernel_backward(
    plan: Plan,
    part: Part,
    prepared: object,
    saved: tuple[Tensor, ...],
    sums: _Sums,
) -> None:
    q, k, v, output, lse, grad = saved
    for block in plan.blocks(part, part.bias.rows, k.shape[2]):
        rows = slice(block.start, block.stop)
        in_rows = [part.in_order(x[:, :, rows]) for x in (grad, q, output, lse)]
        pieces = part.bias.block(prepared, block)
        for heads, theirs, first in _heads(part, prepared, block, (q, k)):
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
    plan: Plan,
    part: Part,
    inputs: tuple[Tensor, ...],
    prepared: object,
    wanted: tuple[bool, ...],
    saved: tuple[Tensor, ...],
    sums: _Sums,
) -> list[Tensor | None]:
    """Add the gradients of the operands to `sums`, and return those of what the bias was made of, where they are wanted."""
    precise = sums.q.dtype
    q, k, v, _, lse, grad = (x.to(precise) for x in saved)
    gradient, learns = part.bias.gradient(inputs, prepared, wanted), any(wanted)
    for block in plan.blocks(part, part.bias.learning_rows, k.shape[2]):
        pieces = gradient.block(block)
        runs = list(_heads(part, prepared, block, (q, k)))
        # Several rows of the batch with all heads only, see `_add_products`.
        rows_at_once = max(1, _IN_CACHE // (part.bias.learning_rows * block.keys * q.shape[1])) if len(runs) == 1 else 1
        for row in range(0, q.shape[0], rows_at_once):
            batch = slice(row, min(row + rows_at_once, q.shape[0]))
            for heads, theirs, first in _in_cache(runs, part.bias.learning_rows, block.keys, (q, k)):
                here, keys = (batch, heads, slice(block.start, block.stop)), slice(first, block.keys)
                q_rows, g_rows = part.in_order(q[here]), part.in_order(grad[here])
                k_part, v_part = k[batch, theirs, keys], v[batch, theirs, keys]
                # Powers of 2, since torch's exp is slow, and very slow where the result is next to nothing.
                weights = grouped_matmul(q_rows * (plan.scale * _LOG2_E), k_part.mT)
                for piece in _from(pieces, heads, first):
                    bias = piece.bias[batch] if piece.bias.shape[0] > 1 else piece.bias
                    weights[..., piece.keys.start - first : piece.keys.stop - first].add_(bias, alpha=_LOG2_E)
                weights.sub_(part.in_order(lse[here])[..., None] * _LOG2_E)
                torch.threshold_(weights, far.LEAST, -math.inf).exp2_()
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
    return gradient.result() if learns else [None] * len(inputs)


def _in_cache(
    runs: list[tuple[slice, slice, int]], rows: int, keys: int, operands: tuple[Tensor, Tensor]
) -> Iterator[tuple[slice, slice, int]]:
    """Return heads that go together, their kv heads and first key, as few at a time as a cache has room for."""
    shared = operands[0].shape[1] // operands[1].shape[1]
    for heads, _, first in runs:
        at_once = max(1, _IN_CACHE // (rows * (keys - first)) // shared) * shared
        for start in range(heads.start, heads.stop, at_once):
            mine = slice(start, min(start + at_once, heads.stop))
            yield mine, slice(mine.start // shared, mine.stop // shared), first


def _add_products(total: Tensor, weights: Tensor, rows: Tensor, factor: float) -> None:
    """Add `factor * weights.T @ rows` of `[b, H, q, K]` and `[b, H, q, D]` to `[b, G, K, D]`, over heads that share a kv head."""
    # One row of the batch, or all heads: there is such a view.
    total = total.view(-1, *total.shape[2:])
    count = len(total)
    total.baddbmm_(
        weights.reshape(count, -1, weights.shape[-1]).mT, rows.reshape(count, -1, rows.shape[-1]), alpha=factor
    )
