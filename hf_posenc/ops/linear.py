"""Products of matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_matmul(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply `[B, H, q, x]` by `[B, G, x, y]` with each kv head serving H / G query heads, without repeating it."""
    batch, heads, length, width = rows.shape
    groups = shared.shape[1]
    if groups == heads:
        return rows @ shared
    if torch.compiler.is_exporting():
        # The fold would bind the graph to one length.
        return rows @ shared.repeat_interleave(heads // groups, dim=1)
    folded = rows.reshape(batch, groups, heads // groups * length, width) @ shared  # [B, G, H/G * q, y]
    return folded.view(batch, heads, length, shared.shape[-1])
