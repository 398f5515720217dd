"""The reference: all rows at once, straight from the seams. Every other executor must equal it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.attention.mask import Mask
from hf_posenc.attention.task import Task
from hf_posenc.operands import Block
from hf_posenc.scheme import Scheme, grouped_matmul


def dense(scheme: Scheme, task: Task, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the output `[B, H, Q, D]` and the weights `[B, H, Q, K]`, in the dtype of the values."""
    length = task.q.shape[2]
    keys = mask.keys_needed(length, task.k.shape[2])
    part = task if keys == task.k.shape[2] else task.part(0, length, keys)
    return rows(scheme, part, *mask.rows(0, length, keys, task.positions))


def rows(scheme: Scheme, task: Task, keep: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output and weights of all queries and keys of a task, given what `Mask.rows` says of them."""
    block = block_of(task, keep)
    return from_logits(scheme, task, block, logits_of(task, block), bias)


def from_logits(
    scheme: Scheme, task: Task, block: Block, found: tuple[Tensor, Tensor, Tensor], bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the same, given what `logits_of` found."""
    logits, q, k = found
    logits = scheme.score(logits, q, k, block)
    if bias is not None:
        # After the scheme, which may do more with logits than add to them.
        logits = logits + bias
    weights = scheme.weigh(logits, block).to(task.v.dtype)
    if task.dropout:
        weights = F.dropout(weights, task.dropout)
    keys = k.shape[2]
    seen = weights
    if weights.shape[-1] > keys:
        # `mix` must read what is returned, or no gradient reaches it.
        seen = weights[..., :keys]
        weights = torch.cat((seen, weights[..., keys:]), dim=-1)
    return scheme.mix(weights, task.v, block), seen


def block_of(task: Task, keep: Tensor | None) -> Block:
    """Return the block that is a whole task, as the seams get it."""
    return Block(
        positions=task.positions,
        reach=task.reach,
        keep=keep,
        values=task.v,
        native=task.native_score is not None or task.content_q is not None,
        state=task.state,
        own=task.own,
        tables=task.tables,
    )


def logits_of(task: Task, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `Scheme.score` gets: scaled logits `[B, H, Q, K]`, queries and keys."""
    q, k = task.q, task.k
    precise = torch.promote_types(q.dtype, torch.float32)
    if task.upcast:
        q, k = q.to(precise), k.to(precise)
    logits = grouped_matmul(q, k.transpose(-1, -2)).to(precise) * task.scale
    if task.native_score is not None:
        logits = task.native_score(logits, block)
    q = q if task.content_q is None else task.content_q
    k = k if task.content_k is None else task.content_k
    return logits, q, k
