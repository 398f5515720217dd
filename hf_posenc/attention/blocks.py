"""Any scheme in O(S x block) memory: query blocks one after the other, each recomputed in the backward pass."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
    pass.
    """
    batch, heads, length, _ = task.q.shape
    step = block_rows or rows_per_block(batch, heads, task.k.shape[2])
    outputs = []
    for start in range(0, length, step):
        block = functools.partial(_output, scheme, task, mask, start, min(start + step, length))
        if torch.is_grad_enabled():
            # Only dropout draws random numbers; saving the generator's state for nothing would cost a device sync.
            block = functools.partial(checkpoint, block, use_reentrant=False, preserve_rng_state=task.dropout > 0)
        outputs.append(block())
    return torch.cat(outputs, dim=2)


def _output(scheme: Scheme, task: Task, mask: Mask, start: int, stop: int) -> Tensor:
    return rows(scheme, task, mask, start, stop)[0]
