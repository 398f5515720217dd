"""Breaking a stick: the weights that stick-breaking attention makes of logits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.ops.masking import differentiable_gradients, fill_hidden_, worth_it


def broken(logits: Tensor, taking: Tensor) -> tuple[Tensor, Tensor]:
    """Break a stick from the last key to the first: each takes the sigmoid of its logit of what is left.

    Args:
        logits: Logits `[B, H, q, K]`.
        taking: Keys that break a piece off, bool `[B|1, H|1, q, K]`.

    Returns:
        The pieces `[B, H, q, K]`, and what is left of 1 in the end, `[B, H, q, 1]`.
    """
    if not worth_it(logits):
        return _naive(logits, taking)
    pieces, rest = _Broken.apply(logits, taking)  # type: ignore[no-untyped-call]
    return pieces, rest


def _naive(logits: Tensor, taking: Tensor) -> tuple[Tensor, Tensor]:
    # So low a logit takes nothing and leaves all.
    return _pieces(torch.where(taking, logits, torch.finfo(logits.dtype).min))


def _pieces(logits: Tensor) -> tuple[Tensor, Tensor]:
    left = F.logsigmoid(-logits).flip(-1).cumsum(-1).flip(-1)  # log(1 - beta), summed from each key to the last
    # Pieces too small for a normal number would take most of the time on a CPU, here and where they are multiplied.
    smallest = 4 * torch.finfo(logits.dtype).tiny
    pieces = (logits + left).clamp_min(math.log(smallest)).exp()
    return F.threshold(pieces, 2 * smallest, 0), left[..., :1].exp()


class _Broken(torch.autograd.Function):
    """The same, with a third of the passes in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, taking: Tensor) -> tuple[Tensor, Tensor]:
        filled = fill_hidden_(logits.clone(), taking, torch.finfo(logits.dtype).min)
        pieces, rest = _pieces(filled)
        ctx.save_for_backward(logits, taking, filled, pieces, rest)
        return pieces, rest

    @staticmethod
    def backward(ctx: Any, of_pieces: Tensor, of_rest: Tensor) -> tuple[Tensor | None, None]:
        logits, taking, filled, pieces, rest = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(lambda x: _naive(x, taking), [logits], (of_pieces, of_rest))[0], None
        own = of_pieces * pieces
        # A logit takes from the pieces of the keys before it, and from the rest.
        others = own.cumsum(-1).add_(of_rest * rest)
        return own.addcmul_(filled.sigmoid(), others, value=-1), None
