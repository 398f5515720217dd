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
from hf_posenc.attention.cpu import kernel
from hf_posenc.attention.cpu.biases import LEAST, NATS, AnyBias, BlockBias, KeysBias, Piece
from hf_posenc.attention.cpu.kernel import Done
from hf_posenc.attention.cpu.pieces import PiecewiseBias, PiecewiseLookup
from hf_posenc.attention.cpu.products import ProductsBias
from hf_posenc.attention.cpu.tables import TableBias
from hf_posenc.attention.executor import FEWEST_QUERIES, Executor
from hf_posenc.ops.softmax import grouped_matmul
from hf_posenc.scheme import Scheme
from hf_posenc.structures import DistanceTable, KeyBias, PiecewiseLinear, RelativeProducts

# Numbers of a matrix that should be in cache at once, in the backward pass of a bias that learns.
_IN_CACHE = 2**18
_LOG2_E = math.log2(math.e)
# Products with numbers too small for the usual form of float32 take many CPUs a hundred times as long: steep slopes
# and gates would spend nearly all of the backward pass on weights that count for nothing (see `LEAST`). The kernel
# does not drop them, so biases that differ by so much (natural logarithms) do without it there.
_SPREAD = 75.0
# With fewer keys a cutoff gains nothing. First keys are rounded down to multiples of the step, so that neighbouring
# heads go together.
_CUTOFF_KEYS, _CUTOFF_STEP = 256, 64


class Fused(Executor):
    """Blocks of rows through the fused kernel, each with its part of the bias."""

    name = "fused"
    windows = True

    def knows(self, scheme: Scheme, device: torch.device) -> bool:
        return device.type == "cpu" and scheme.added() is not None and kernel.works()

    def pays(self, call: Call) -> bool:
        return call.queries >= FEWEST_QUERIES

    def computes(self, call: Call) -> bool:
        return call.one_softmax

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
    """A bias, and the rows `start:stop` that it is for."""

    start: int
    stop: int
    bias: BlockBias

    def in_order(self, rows: Tensor) -> Tensor:
        """Return rows `[B, H, q, ...]` in the order of the bias, or bring them back from it."""
        return rows.flip(2) if self.bias.backwards else rows

    def heads(self, block: Rows, heads: int, groups: int) -> Iterator[tuple[slice, slice, int]]:
        """Return groups of neighbouring heads in a block, their kv heads, and the first key that they need."""
        first, shared = self.bias.first_keys(block), heads // groups
        if first is None:
            yield slice(0, heads), slice(0, groups), 0
            return
        starts = (first.view(-1, shared).amin(1) // _CUTOFF_STEP * _CUTOFF_STEP).tolist()
        begin = 0
        for group in range(1, groups + 1):
            if group == groups or starts[group] != starts[begin]:
                yield slice(begin * shared, group * shared), slice(begin, group), starts[begin]
                begin = group


@dataclass(frozen=True, eq=False)
class _Step:
    """Some heads of a block of rows: their places in queries, in keys and values, and their bias."""

    part: _Part
    here: tuple[slice, slice, slice]
    groups: slice
    pieces: list[Piece]

    def rows(self, x: Tensor) -> Tensor:
        """Return the rows of a tensor `[B, H, Q, ...]`, in the order of the bias."""
        return self.part.in_order(x[self.here])

    def keys(self, x: Tensor, piece: Piece) -> Tensor:
        """Return the keys of a piece, from a tensor `[B, G, K, D]`."""
        return x[:, self.groups, piece.keys]


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
            yield replace(part, bias=part.bias.for_pass([next(given) for _ in part.bias.inputs]))

    def blocks(self, part: _Part, rows: int, keys: int) -> Iterator[Rows]:
        """Return the blocks of a part, of so many rows each."""
        for start in range(part.start, part.stop, rows):
            stop = min(start + rows, part.stop)
            yield Rows(start, stop, min(stop + self.ahead, keys) if self.causal else keys)

    def steps(self, part: _Part, q: Tensor, k: Tensor) -> Iterator[_Step]:
        """Return the calls of the kernel that a part takes."""
        for block in self.blocks(part, part.bias.rows, k.shape[2]):
            pieces = part.bias.pieces(block)
            for heads, groups, first in part.heads(block, q.shape[1], k.shape[1]):
                here = (slice(None), heads, slice(block.start, block.stop))
                yield _Step(part, here, groups, _from(pieces, heads, first))


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
        bias = PiecewiseBias(added, call, call.keys)
    elif vectors is not None and regular:
        bias = ProductsBias(vectors, call)
    elif isinstance(added, PiecewiseLinear) and PiecewiseLookup.pays(call):
        bias = PiecewiseLookup(added, call, call.reach + 1)
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
                slacks.append(_slack(q, k, plan.scale) if part.bias.may_cut() else None)
                part.bias.prepare(slacks[-1])
                for step in plan.steps(part, q, k):
                    rows = step.rows(q)
                    found = [
                        kernel.forward(rows, step.keys(k, x), step.keys(v, x), x.bias, plan.scale, causal=x.causal)
                        for x in step.pieces
                    ]
                    merged = functools.reduce(_merged, found)
                    output[step.here], lse[step.here] = part.in_order(merged[0]), part.in_order(merged[1])
        ctx.plan, ctx.slacks = plan, slacks
        ctx.save_for_backward(q, k, v, output, kernel.mark_empty_rows(lse), *inputs)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse, *inputs = ctx.saved_tensors
        plan: _Plan = ctx.plan
        needed = ctx.needs_input_grad[4:]
        done, sums = Done(q, k, v, output, lse), _Sums(q, k, v)
        found: list[Tensor | None] = []
        with torch.autocast("cpu", enabled=False):
            for part, slack in zip(plan.with_inputs(inputs), ctx.slacks, strict=True):
                wanted = needed[len(found) : len(found) + len(part.bias.inputs)]
                part.bias.prepare(slack)
                if any(wanted) or part.bias.spread() > _SPREAD:
                    found += _own_backward(plan, part, wanted, grad, done, sums)
                else:
                    _kernel_backward(plan, part, grad, done, sums)
                    found += [None] * len(wanted)
        return (None, sums.q.to(q.dtype), sums.k.to(k.dtype), sums.v.to(v.dtype), *found)


def _slack(q: Tensor, k: Tensor, scale: float) -> Tensor | None:
    """Return how far below the bias of a query's own key that of another key must be for it to get no weight, `[H]`.

    A steep penalty on distance leaves most heads with a part of the keys. The lengths of queries and keys bound how
    much they may do against it. The slack is NaN or infinite where queries or keys are; there is none where a cutoff
    does not pay.
    """
    if k.shape[2] < _CUTOFF_KEYS or q.shape[2] == 1:
        return None
    precise = torch.promote_types(q.dtype, torch.float32)
    of_q, of_k = (torch.linalg.vector_norm(x, dim=-1, dtype=precise).amax(dim=(0, 2)) for x in (q, k))
    # The own key's product is not less than the negative of this bound, any other not more than the bound.
    bound = abs(scale) * of_q * of_k.repeat_interleave(len(of_q) // len(of_k))
    enough: Tensor = 2 * bound + NATS
    return enough


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


def _kernel_backward(plan: _Plan, part: _Part, grad: Tensor, done: Done, sums: _Sums) -> None:
    for step in plan.steps(part, done.q, done.k):
        q, output, lse, d_output = (step.rows(x) for x in (done.q, done.output, done.lse, grad))
        sums.q[step.here] = 0
        for piece in step.pieces:
            mine = Done(q, step.keys(done.k, piece), step.keys(done.v, piece), output, lse)
            dq, dk, dv = kernel.backward(d_output, mine, piece.bias, plan.scale, causal=piece.causal)
            sums.q[step.here] += part.in_order(dq)
            step.keys(sums.k, piece).add_(dk)
            step.keys(sums.v, piece).add_(dv)


def _own_backward(
    plan: _Plan, part: _Part, wanted: Sequence[bool], grad: Tensor, done: Done, sums: _Sums
) -> Sequence[Tensor | None]:
    """Add the gradients of the operands to `sums`, and return those of the bias's inputs, where they are wanted."""
    q, k, v, grad, lse = (x.to(sums.q.dtype) for x in (done.q, done.k, done.v, grad, done.lse))
    bias, learns = part.bias, any(wanted)
    bias.learn(wanted)
    for block in plan.blocks(part, bias.learning_rows, k.shape[2]):
        pieces = bias.pieces(block)
        runs = list(part.heads(block, q.shape[1], k.shape[1]))
        # Several rows of the batch with all heads only, see `_add_products`.
        at_once = max(1, _IN_CACHE // (bias.learning_rows * block.keys * q.shape[1])) if len(runs) == 1 else 1
        for row in range(0, q.shape[0], at_once):
            batch = slice(row, min(row + at_once, q.shape[0]))
            for heads, theirs, first in runs:
                here, keys = (batch, heads, slice(block.start, block.stop)), (batch, theirs, slice(first, block.keys))
                q_rows, g_rows = part.in_order(q[here]), part.in_order(grad[here])
                # Powers of 2, since torch's exp is slow, and very slow where the result is next to nothing.
                weights = grouped_matmul(q_rows * (plan.scale * _LOG2_E), k[keys].mT)
                for piece in _from(pieces, heads, first):
                    added = piece.bias[batch] if piece.bias.shape[0] > 1 else piece.bias
                    weights[..., piece.keys.start - first : piece.keys.stop - first].add_(added, alpha=_LOG2_E)
                weights.sub_(part.in_order(lse[here])[..., None] * _LOG2_E)
                torch.threshold_(weights, LEAST, -math.inf).exp2_()
                # Not by way of the output, whose rounding would not leave sums of zero.
                d_logits = grouped_matmul(g_rows, v[keys].mT).mul_(weights)
                d_logits.addcmul_(weights, d_logits.sum(-1, keepdim=True), value=-1)
                if learns:
                    bias.add(block, batch, heads, first, d_logits)
                sums.q[here] = part.in_order(grouped_matmul(d_logits, k[keys]).mul_(plan.scale))
                _add_products(sums.k[keys], d_logits, q_rows, plan.scale)
                _add_products(sums.v[keys], weights, g_rows, 1.0)
        if learns:
            bias.end(block)
    return bias.gradients() if learns else [None] * len(wanted)


def _add_products(total: Tensor, weights: Tensor, rows: Tensor, factor: float) -> None:
    """Add `factor * weights.T @ rows` of `[b, H, q, K]` and `[b, H, q, D]` to `[b, G, K, D]`."""
    # One row of the batch, or all heads: there is such a view.
    total = total.view(-1, *total.shape[2:])
    count = len(total)
    total.baddbmm_(
        weights.reshape(count, -1, weights.shape[-1]).mT, rows.reshape(count, -1, rows.shape[-1]), alpha=factor
    )
