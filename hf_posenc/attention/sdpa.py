"""Plain scaled dot-product attention, for schemes that only touch what goes into it (rotations, input encodings)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.attention.layout import shows_ahead
from hf_posenc.attention.mask import Mask
from hf_posenc.attention.task import Task
from hf_posenc.operands import Block
from hf_posenc.scheme import Scheme

_TOUCHES_THE_MATRIX = ("score", "weigh", "mix")


def applies(scheme: Scheme, task: Task, mask: Mask) -> bool:
    """Whether the fused kernel computes this scheme."""
    return task.native_score is None and (not touches_the_matrix(scheme) or _folds(scheme, task, mask))


def touches_the_matrix(scheme: Scheme) -> bool:
    """Whether the scheme does anything between `q @ k.T` and the output."""
    return any(scheme.overrides(seam) for seam in _TOUCHES_THE_MATRIX)


def _folds(scheme: Scheme, task: Task, mask: Mask) -> bool:
    """Whether plain attention over what the scheme makes of these operands is all it does."""
    folded = scheme.folded()
    if folded is None or task.content_q is not None:
        return False
    query = task.positions.query
    near = query.shape[1] == 1 or task.reach <= folded.span
    if near and folded.ahead:
        return True
    # A graph that is being compiled has no numbers.
    if torch.compiler.is_compiling():
        return False
    if not near and int((query.amax(1) - query.amin(1)).max()) > folded.span:
        return False
    return folded.ahead or not shows_ahead(task, mask)


def sdpa(scheme: Scheme, task: Task, mask: Mask) -> Tensor:
    """Return the output `[B, H, Q, D]`."""
    q, k, v = task.q, task.k, task.v
    folded = scheme.folded()
    if folded is not None:
        block = Block(task.positions, task.reach, state=task.state, own=task.own, tables=task.tables)
        q, k, v = folded.of(q, k, v, block)
    length, keys = q.shape[2], k.shape[2]
    if mask.only_ahead and (length == 1 or not mask.ahead):
        attend_mask, causal = None, length > 1
    else:
        keep, bias = mask.rows(0, length, keys, task.positions)
        causal = False
        if bias is None:
            attend_mask = keep
        else:
            low = q.new_full((), float("-inf"))
            attend_mask = bias.to(q.dtype) if keep is None else bias.to(q.dtype).where(keep, low)
    output = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=attend_mask,
        dropout_p=task.dropout,
        is_causal=causal,
        scale=task.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return output.to(task.v.dtype)
