"""Any scheme in O(S x block) memory: query blocks one after the other, each recomputed in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.attention.dense import rows
from hf_posenc.attention.mask import Mask
from hf_posenc.attention.task import Task
from hf_posenc.scheme import Scheme

# A block's logits should stay in cache and never weigh on memory: about 4M of them, in 16 to 128 rows.
_LOGITS_PER_BLOCK = 2**22


def rows_per_block(batch: int, heads: int, keys: int) -> int:
    """Return how many query rows to take at once."""
    return max(16, min(128, _LOGITS_PER_BLOCK // max(1, batch * heads * keys)))


def blocks(scheme: Scheme, task: Task, mask: Mask, block_rows: int | None = None) -> Tensor:
    """Return the output `[B, H, Q, D]` without keeping any tensor of size Q x K.

    The forward pass keeps the operands only; a block's logits exist while it is computed, and once more in the backward
    pass. Gradients of gradients are not available; take the dense executor for those.
    """
    batch, heads, _, _ = task.q.shape
    step = block_rows or rows_per_block(batch, heads, task.k.shape[2])
    operands = task.operands()

    def compute(operands: Sequence[Tensor], start: int, stop: int) -> Tensor:
        return rows(scheme, task.with_operands(operands), mask, start, stop)[0]

    leaves = (*scheme.parameters(), *task.parameters)
    output: Tensor = _Blocks.apply(compute, step, len(operands), task.dropout > 0, *operands, *leaves)  # type: ignore[no-untyped-call]
    return output


class _Blocks(torch.autograd.Function):
    """Runs blocks without autograd, and once more with it, one block at a time, in the backward pass.

    `torch.utils.checkpoint` around each block would do the same on paper. But the graph it leaves behind for each block sits
    between the freed buffers of neighbouring blocks, and the process grows by S x S all the same (measured: 1.6 GB at
    S = 4096 against 0.1 GB here).
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[Sequence[Tensor], int, int], Tensor],
        step: int,
        count: int,
        random: bool,
        *tensors: Tensor,
    ) -> Tensor:
        operands, leaves = tensors[:count], tensors[count:]
        q = operands[0]
        ctx.compute, ctx.step, ctx.leaves = compute, step, leaves
        ctx.device = q.device.type
        ctx.autocast = (torch.is_autocast_enabled(ctx.device), torch.get_autocast_dtype(ctx.device))
        ctx.generator = _generator_state(q.device) if random else None
        ctx.save_for_backward(*operands)
        length = q.shape[2]
        output: Tensor | None = None
        for start in range(0, length, step):
            stop = min(start + step, length)
            part = compute(operands, start, stop)
            if output is None:
                # Once for all: a small tensor kept between two large freed ones keeps their memory from being reused.
                output = part.new_empty(*part.shape[:2], length, part.shape[3])
            output[:, :, start:stop] = part
        assert output is not None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[4:]
        operands = [
            tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(ctx.saved_tensors, needed, strict=False)
        ]
        targets = [t for t, wanted in zip((*operands, *ctx.leaves), needed, strict=True) if wanted]
        totals: list[Tensor | None] = [None] * len(targets)
        length = operands[0].shape[2]
        enabled, dtype = ctx.autocast
        with (
            _generator_set(ctx.generator, grad.device),
            torch.autocast(ctx.device, dtype=dtype, enabled=enabled),
            torch.enable_grad(),
        ):
            for start in range(0, length, ctx.step):
                stop = min(start + ctx.step, length)
                output = ctx.compute(operands, start, stop)
                parts = torch.autograd.grad(output, targets, grad[:, :, start:stop], allow_unused=True)
                for index, part in enumerate(parts):
                    if part is not None:
                        total = totals[index]
                        totals[index] = part.clone() if total is None else total.add_(part)
        found = iter(totals)
        return (None, None, None, None, *(next(found) if wanted else None for wanted in needed))


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
