"""Schemes for which position makes a difference among the nearest keys only; see `Nearest`.

Each block of rows finds out how many keys that is. These go through the seams; the others, which share one bias per query or
have no weight, go through the fused kernel or nowhere. The result is the same, not an approximation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.attention import kernel
from hf_posenc.attention.blocks import blocks, empty_sums, finished_sums
from hf_posenc.attention.dense import block_of, from_logits, logits_of
from hf_posenc.attention.layout import slots_tell_distances
from hf_posenc.attention.mask import Mask
from hf_posenc.attention.reading import reading
from hf_posenc.attention.task import Task
from hf_posenc.hiding import fill_hidden_
from hf_posenc.operands import Block
from hf_posenc.scheme import Scheme, grouped_matmul

# Queries of a block: the more, the fewer calls, and the more keys that are not near to all of them.
_ROWS = 80


def applies(scheme: Scheme, task: Task) -> bool:
    """Whether the scheme has a last key that matters, and the operands are of a kind that the kernel computes."""
    return (
        scheme.nearest() is not None
        and task.native_score is None
        and not task.dropout
        and not task.upcast
        and kernel.takes(task.q, task.k, task.v)
        and task.q.dtype == task.k.dtype == task.v.dtype
    )


def sees(task: Task, mask: Mask) -> bool:
    """Whether a mask leaves keys in the order of their distance, so that the nearest are the last."""
    padding_only = mask.keep is None or mask.keep.shape[1:3] == (1, 1)
    return mask.rule == "slots" and padding_only and mask.bias is None and slots_tell_distances(task, mask)


def nearby(scheme: Scheme, task: Task, mask: Mask) -> Tensor:
    """Return the output `[B, H, Q, D]`, without any tensor of size Q x K; by blocks where the last keys are not the nearest."""
    if not sees(task, mask):
        return blocks(scheme, task, mask)
    call = _Call(scheme, task.outline(), mask)
    output: Tensor = _Nearby.apply(call, *task.operands(), *call.leaves)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, eq=False)
class _Near:
    """A block of rows against the keys that matter to it.

    Attributes:
        first: The first of them.
        part: Their part of the task.
        block: As the seams get it.
        product: What `Scheme.score` gets: scaled logits, queries and keys.
    """

    first: int
    part: Task
    block: Block
    product: tuple[Tensor, Tensor, Tensor]


class _Call:
    """One call without its operands, and what its forward pass found out."""

    def __init__(self, scheme: Scheme, task: Task, mask: Mask) -> None:
        nearest = scheme.nearest()
        assert nearest is not None
        self.scheme, self.task, self.mask, self.nearest = scheme, task, mask, nearest
        self.leaves = tuple(scheme.parameters())
        self.precise = torch.promote_types(task.q.dtype, torch.float32)
        # Of each block: its rows, the first of the nearest keys, and the keys it needs.
        self.found: list[tuple[int, int, int, int]] = []

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Return the rows of each block and the keys that it needs."""
        length, keys = self.task.q.shape[2], self.task.k.shape[2]
        for start in range(0, length, _ROWS):
            stop = min(start + _ROWS, length)
            yield start, stop, self.mask.keys_needed(stop, keys)

    def keep(self, start: int, stop: int, keys: int, first: int) -> Tensor | None:
        """Return which of the keys `first:keys` each row of a block may see."""
        keep, _ = self.mask.rows(start, stop, keys, self.task.positions)
        return None if keep is None else keep[..., first:]

    def nearest_keys(self, task: Task, start: int, stop: int, keys: int, tried: int) -> _Near:
        """Return the keys that matter to a block, given how many before it may do."""
        while True:
            first = max(0, start + self.mask.ahead - tried)
            near = self.near(task.part(start, stop, keys, first), start, stop, keys, first)
            if not first or self.nearest.enough(*near.product, near.block):
                return near
            tried *= 2

    def near(self, part: Task, start: int, stop: int, keys: int, first: int) -> _Near:
        """Return a block of rows against the keys `first:keys`, given that part of the task."""
        block = block_of(part, self.keep(start, stop, keys, first))
        return _Near(first, part, block, logits_of(part, block))

    def shares(self, near: _Near) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the nearest keys, hidden ones too, above the bias of the others, and what is added to values."""
        _, q, _ = near.product
        logits = self.scheme.score(*near.product, near.block)
        assert self.nearest.beyond is not None
        bias, value = self.nearest.beyond(q, logits)
        return logits - bias, value

    def hidden_before(self, first: int) -> Tensor | None:
        """Return the mask of the keys before the nearest, to be added, `[B|1, 1, 1, first]`."""
        if self.mask.keep is None:
            return None
        keep = self.mask.keep[..., :first]
        return torch.zeros(keep.shape, dtype=self.precise).masked_fill_(~keep, torch.finfo(self.precise).min)


class _Nearby(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        operands = tensors[: len(tensors) - len(call.leaves)]
        task = call.task.with_operands(operands)
        ctx.call = call
        ctx.autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        output: Tensor | None = None
        lse = task.q.new_empty(task.q.shape[:3], dtype=call.precise)
        tried = call.nearest.first_try
        found = []
        for start, stop, keys in call.blocks():
            near = call.nearest_keys(task, start, stop, keys, tried)
            tried = max(call.nearest.first_try, start + call.mask.ahead - near.first)
            found.append((start, stop, near.first, keys))
            rows = slice(start, stop)
            if call.nearest.beyond is None:
                made = from_logits(call.scheme, near.part, near.block, near.product)[0]
            else:
                made, lse[:, :, rows] = _merged(call, task, near, rows)
            if output is None:
                output = made.new_empty(*made.shape[:2], task.q.shape[2], made.shape[3])
            output[:, :, rows] = made
        assert output is not None
        call.found = found
        # The parameters too: torch then notices if one was changed in between.
        ctx.save_for_backward(output, lse, *tensors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        return reading(call.scheme, call.leaves, lambda: _Nearby.gradients(ctx, grad))

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        output, lse, *tensors = ctx.saved_tensors
        operands = tensors[: len(tensors) - len(call.leaves)]
        needed = ctx.needs_input_grad[1:]
        everything = (*operands, *call.leaves)
        totals = empty_sums(everything, needed)
        leaves = [x for x, wanted in zip(call.leaves, needed[len(operands) :], strict=True) if wanted]
        enabled, dtype = ctx.autocast
        task = call.task.with_operands(operands)
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            for start, stop, first, keys in call.found:
                places = call.task.places(start, stop, keys, first)
                parts = [
                    x[place].detach().requires_grad_(wanted)
                    for x, place, wanted in zip(operands, places, needed, strict=False)
                ]
                positions = call.task.positions.rows(start, stop, keys, first)
                part = replace(call.task.with_operands(parts), positions=positions)
                targets = [x for x in parts if x.requires_grad] + leaves
                rows = slice(start, stop)
                grads: Sequence[Tensor | None]
                with torch.enable_grad():
                    near = call.near(part, start, stop, keys, first)
                if call.nearest.beyond is None:
                    with torch.enable_grad():
                        made = from_logits(call.scheme, part, near.block, near.product)[0]
                    grads = torch.autograd.grad(made, targets, grad[:, :, rows], allow_unused=True)
                else:
                    grads = _near_backward(call, near, targets, grad[:, :, rows], output[:, :, rows], lse[:, :, rows])
                    if first:
                        _far_backward(call, task, start, stop, first, grad, output, lse, totals)
                fresh = iter(grads)
                for index, total in enumerate(totals):
                    piece = None if total is None else next(fresh)
                    if total is not None and piece is not None:
                        total[places[index] if index < len(places) else ...] += piece
        return (None, *finished_sums(totals, everything))


def _merged(call: _Call, task: Task, near: _Near, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the output of a block and the logarithm of the sum of exponentials, above the bias of the farther keys."""
    first = near.first
    logits, value = call.shares(near)
    fill_hidden_(logits, near.block.keep, torch.finfo(logits.dtype).min)
    top = logits.amax(dim=-1)
    weights = _weights(logits, top)
    lse = top + weights.sum(-1).log_()
    if first:
        far, far_lse = kernel.forward(
            task.q[:, :, rows],
            task.k[:, :, :first],
            task.v[:, :, :first],
            call.hidden_before(first),
            task.scale,
        )
        lse = torch.logaddexp(lse, far_lse)
    lse = kernel.mark_empty_rows(lse)
    # Mixing is linear, so that its result can be scaled in place of the weights.
    share = (top - lse).exp_()[..., None]
    output = call.scheme.mix(weights.to(task.v.dtype), near.part.v, near.block)
    output = (output * share).to(output.dtype)
    if first:
        share = (far_lse - lse).exp_()[..., None].to(output.dtype)
        output = output + share * (far if value is None else far + value.to(far))
    return output, lse


def _near_backward(
    call: _Call,
    near: _Near,
    targets: list[Tensor],
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
) -> list[Tensor | None]:
    """Return what the gradient of a block's output gives to the nearest keys, and to all that the seams read."""
    with torch.enable_grad():
        logits, value = call.shares(near)
    weights = fill_hidden_(_weights(logits.detach(), lse), near.block.keep, 0.0)
    by_weight, by_value = _unmixed(call.scheme, near, weights, value, targets, grad)
    inner = (grad.to(weights) * output.to(weights)).sum(-1, keepdim=True)
    d_logits = by_weight.to(weights).sub_(inner).mul_(weights)
    by_logit = torch.autograd.grad(logits, targets, d_logits, allow_unused=True)
    return [b if a is None else a if b is None else a + b for a, b in zip(by_value, by_logit, strict=True)]


def _unmixed(
    scheme: Scheme, near: _Near, weights: Tensor, value: Tensor | None, targets: list[Tensor], grad: Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return what the gradient of a block's output gives to the weights of the nearest keys, and past them to the targets."""
    entering, v = weights.to(near.part.v.dtype), near.part.v
    if value is None and not scheme.overrides("mix"):
        # Two products, where autograd would want the output first.
        rows, out = (x.reshape(*v.shape[:2], -1, x.shape[-1]) for x in (entering, grad))  # [B, G, H / G * q, K or D]
        of_v = rows.mT @ out
        return grouped_matmul(grad, v.mT), [of_v if target is v else None for target in targets]
    with torch.enable_grad():
        entering = entering.detach().requires_grad_()
        mixed = scheme.mix(entering, v, near.block)
        if value is not None:
            share = (1 - weights.sum(-1, keepdim=True)).clamp_min_(0)
            mixed = mixed + (share * value.to(weights)).to(mixed.dtype)
    by_weight, *by_value = torch.autograd.grad(mixed, [entering, *targets], grad, allow_unused=True)
    return by_weight, by_value


def _far_backward(
    call: _Call,
    task: Task,
    start: int,
    stop: int,
    first: int,
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    totals: list[Tensor | None],
) -> None:
    """Add what the gradient of a block's output gives to queries, and to the keys before the nearest and their values."""
    rows, before = slice(start, stop), slice(first)
    assert call.nearest.beyond is not None
    q = task.q if task.content_q is None else task.content_q
    value = call.nearest.beyond(q[:, :, :1], lse)[1]
    own = output[:, :, rows]
    # What is added to all values is no part of any key's own.
    own = own if value is None else own - value.to(own)
    # Under autocast the output is narrower than operands in float32.
    pieces = kernel.backward(
        grad[:, :, rows].to(task.q),
        task.q[:, :, rows],
        task.k[:, :, before],
        task.v[:, :, before],
        own.to(task.q),
        lse[:, :, rows],
        call.hidden_before(first),
        task.scale,
    )
    for total, place, piece in zip(totals, (rows, before, before), pieces, strict=False):
        if total is not None:
            total[:, :, place] += piece


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    # torch's exp is slow, and very slow where the result is next to nothing.
    return ((logits - lse[..., None]) * math.log2(math.e)).exp2_()
