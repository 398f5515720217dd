"""Steps of softmax attention: products with keys and values that heads share, and hidden keys."""

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


def fill_hidden_(x: Tensor, keep: Tensor | None, value: float) -> Tensor:
    """Overwrite the numbers `[B, H, q, K]` of hidden keys in place, whatever they are, NaN included, and return them.

    `keep` marks the keys that may be seen, bool `[B|1, H|1, q|1, K]`; `None` means all. Autograd does not notice.
    """
    return x if keep is None else x.masked_fill_(~keep, value)


def softmax_of_seen(logits: Tensor, keep: Tensor | None) -> Tensor:
    """Return the softmax `[B, H, q, K]` in which hidden keys get nothing; a row of hidden keys only is even.

    `keep` marks the keys that may be seen, bool `[B|1, H|1, q|1, K]`; `None` means all.
    """
    if keep is not None:
        logits = logits.masked_fill(~keep, torch.finfo(logits.dtype).min)
    return logits.softmax(dim=-1)
