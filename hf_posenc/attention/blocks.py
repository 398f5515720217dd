"""Any scheme in O(S x block) memory: query blocks one after the other, each recomputed in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.attention.dense import rows
from hf_posenc.attention.mask import Mask
from hf_posenc.attention.reading import reading
from hf_posenc.attention.task import Task
from hf_posenc.scheme import Scheme

# A block's logits should stay in cache, with what a scheme makes of them, unless that makes it a few rows only; and never weigh on
# memory.
_LOGITS_IN_CACHE, _LOGITS_AT_MOST = 2**19, 2**22
_FEW_ROWS = 64


def rows_per_block(batch: int, heads: int, keys: int) -> int:
    """Return how many query rows to take at once."""
    logits = max(1, batch * heads * keys)
    wanted = max(_LOGITS_IN_CACHE // logits, min(_FEW_ROWS, _LOGITS_AT_MOST // logits))
    return max(16, min(128, wanted))


def blocks(scheme: Scheme, task: Task, mask: Mask, block_rows: int | None = None) -> Tensor:
    """Return the output `[B, H, Q, D]` without keeping any tensor of size Q x K.

    The forward pass keeps the operands only; a block's logits exist while it is computed, and once more in the backward
    pass. Gradients of gradients are not available; take the dense executor for those.
    """
    batch, heads, _, _ = task.q.shape
    call = _Call(scheme, task.outline(), mask, block_rows or rows_per_block(batch, heads, task.k.shape[2]))
    output: Tensor = _Blocks.apply(call, *task.operands(), *call.leaves)  # type: ignore[no-untyped-call]
    return output


class _Call:
    """One call, by blocks of so many rows, without its operands."""

    def __init__(self, scheme: Scheme, task: Task, mask: Mask, step: int) -> None:
        self.scheme, self.task, self.mask, self.step = scheme, task, mask, step
        self.parameters = tuple(scheme.parameters())
        self.leaves = (*self.parameters, *task.parameters)

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Return the first row of each block, the row after its last, and the keys that it needs."""
        length, keys = self.task.q.shape[2], self.task.k.shape[2]
        for start in range(0, length, self.step):
            stop = min(start + self.step, length)
            yield start, stop, self.mask.keys_needed(stop, keys)

    def output(self, part: Task, start: int, stop: int, keys: int) -> Tensor:
        """Return the output of a block, given its part of the task."""
        seen = self.mask.rows(start, stop, keys, self.task.positions)
        return rows(self.scheme, part, *seen)[0]


class _Blocks(torch.autograd.Function):
    """Runs blocks without autograd, and once more with it, one block at a time, in the backward pass.

    `torch.utils.checkpoint` around each block would do the same on paper. But the graph it leaves behind for each block sits
    between the freed buffers of neighbouring blocks, and the process grows by S x S all the same (measured: 1.6 GB at
    S = 4096 against 0.1 GB here).
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        operands = tensors[: len(tensors) - len(call.leaves)]
        task, q = call.task.with_operands(operands), operands[0]
        ctx.call, ctx.device = call, q.device.type
        ctx.autocast = (torch.is_autocast_enabled(ctx.device), torch.get_autocast_dtype(ctx.device))
        ctx.generator = _generator_state(q.device) if task.dropout > 0 else None
        # The parameters too: torch then notices if one was changed in between.
        ctx.save_for_backward(*tensors)
        output: Tensor | None = None
        for start, stop, keys in call.blocks():
            part = call.output(task.part(start, stop, keys), start, stop, keys)
            if output is None:
                # Once for all: a small tensor kept between two large freed ones keeps their memory from being reused.
                output = part.new_empty(*part.shape[:2], q.shape[2], part.shape[3])
            output[:, :, start:stop] = part
        assert output is not None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        return reading(call.scheme, call.parameters, lambda: _Blocks.gradients(ctx, grad))

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        tensors = ctx.saved_tensors  # gradient checkpointing gives them once
        operands, needed = tensors[: len(tensors) - len(call.leaves)], ctx.needs_input_grad[1:]
        everything = (*operands, *call.leaves)
        totals = empty_sums(everything, needed)
        leaves = [x for x, wanted in zip(call.leaves, needed[len(operands) :], strict=True) if wanted]
        enabled, dtype = ctx.autocast
        with _generator_set(ctx.generator, grad.device), torch.autocast(ctx.device, dtype=dtype, enabled=enabled):
            for start, stop, keys in call.blocks():
                # Parts of their own, so that no gradient is padded to the size of the whole.
                places = call.task.places(start, stop, keys)
                parts = [
                    x[place].detach().requires_grad_(wanted)
                    for x, place, wanted in zip(operands, places, needed, strict=False)
                ]
                positions = call.task.positions.rows(start, stop, keys)
                with torch.enable_grad():
                    task = replace(call.task.with_operands(parts), positions=positions)
                    output = call.output(task, start, stop, keys)
                targets = [x for x in parts if x.requires_grad] + leaves
                found = iter(torch.autograd.grad(output, targets, grad[:, :, start:stop], allow_unused=True))
                for index, total in enumerate(totals):
                    part = None if total is None else next(found)
                    if total is not None and part is not None:
                        total[places[index] if index < len(places) else ...] += part
        return (None, *finished_sums(totals, everything))


def empty_sums(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """Return where to sum the gradients of these tensors that are needed, in float32 or wider."""
    return [
        torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if wanted else None
        for x, wanted in zip(tensors, needed, strict=True)
    ]


def finished_sums(totals: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the sums in the dtypes of the tensors."""
    return [None if total is None else total.to(x.dtype) for total, x in zip(totals, tensors, strict=True)]


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextlib.contextmanager
def _generator_set(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Replay the random numbers of the forward pass, if it drew any (dropout)."""
    if state is None:
        yield
        return
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        if on_gpu:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield
