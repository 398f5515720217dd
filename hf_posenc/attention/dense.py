"""The reference: all rows at once, straight from the seams. Every other executor must equal it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.attention.mask import Mask
from hf_posenc.attention.task import Task
from hf_posenc.scheme import Block, Scheme, grouped_matmul


def dense(scheme: Scheme, task: Task, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the output `[B, H, Q, D]` and the weights `[B, H, Q, K]`, in the dtype of the values."""
    return rows(scheme, task, mask, 0, task.q.shape[2])


def rows(scheme: Scheme, task: Task, mask: Mask, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Attention of the query rows `start:stop` against all keys they can see."""
    keys = mask.keys_needed(stop, task.k.shape[2])
    q = task.q[:, :, start:stop]
    k, v = task.k[:, :, :keys], task.v[:, :, :keys]
    keep, bias = mask.rows(start, stop, keys, task.positions)
    block = Block(
        positions=task.positions.rows(start, stop, keys),
        reach=task.reach,
        keep=keep,
        values=v,
        native=task.native_score is not None or task.content_q is not None,
        state={name: tensor[:, :keys] for name, tensor in task.state.items()},
        own={name: tensor[:, start:stop] for name, tensor in task.own.items()},
        tables=task.tables,
    )
    precise = torch.promote_types(q.dtype, torch.float32)
    if task.upcast:
        q, k = q.to(precise), k.to(precise)
    logits = grouped_matmul(q, k.transpose(-1, -2)).to(precise) * task.scale  # [B, H, q, K]
    if task.native_score is not None:
        logits = task.native_score(logits, block)
    if task.content_q is not None:
        q = task.content_q[:, :, start:stop]
    if task.content_k is not None:
        k = task.content_k[:, :, :keys]
    logits = scheme.score(logits, q, k, block)
    if bias is not None:
        # After the scheme, which may do more with logits than add to them.
        logits = logits + bias
    weights = scheme.weigh(logits, block).to(v.dtype)
    if task.dropout:
        weights = F.dropout(weights, task.dropout)
    return scheme.mix(weights, v, block), weights[..., :keys]
