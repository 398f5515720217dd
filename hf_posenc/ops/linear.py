"""Products of matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def grouped_matmul(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply `[B, H, q, x]` by `[B, G, x, y]` with each kv head serving H / G query heads, without repeating it."""
    batch, heads, length, width = rows.shape
    groups = shared.shape[1]
    if groups == heads:
        return rows @ shared
    folded = rows.reshape(batch, groups, heads // groups * length, width) @ shared  # [B, G, H/G * q, y]
    return folded.view(batch, heads, length, shared.shape[-1])


def channel_linear(weight: Tensor, bias: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Return a linear layer along the second dimension, `[B|1, out, N]`, of inputs `[B|1, C, N]` that lie side by side.

    Logits have heads there, so the result needs no transpose. Inputs of one row for the whole batch come last.
    """
    total, stop = bias[:, None], weight.shape[1]
    # From the last one on: inputs that are the same for all rows of the batch are multiplied once for them.
    for x in reversed(inputs):
        start = stop - x.shape[1]
        total = torch.baddbmm(total, weight[:, start:stop].expand(len(x), -1, -1), x)
        stop = start
    return total
