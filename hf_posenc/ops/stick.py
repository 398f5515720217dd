"""Breaking a stick: the weights that stick-breaking attention makes of logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def broken(logits: Tensor, taking: Tensor) -> tuple[Tensor, Tensor]:
    """Break a stick from the last key to the first: each takes the sigmoid of its logit of what is left.

    Args:
        logits: Logits `[B, H, q, K]`.
        taking: Keys that break a piece off, bool `[B|1, H|1, q, K]`.

    Returns:
        The pieces `[B, H, q, K]`, and what is left of 1 in the end, `[B, H, q, 1]`.
    """
    # So low a logit takes nothing and leaves all.
    logits = torch.where(taking, logits, torch.finfo(logits.dtype).min)
    left = F.logsigmoid(-logits).flip(-1).cumsum(-1).flip(-1)  # log(1 - beta), summed from each key to the last
    # Pieces too small for a normal number would take most of the time on a CPU, here and where they are multiplied.
    smallest = 4 * torch.finfo(logits.dtype).tiny
    pieces = (logits + left).clamp_min(math.log(smallest)).exp()
    return F.threshold(pieces, 2 * smallest, 0), left[..., :1].exp()
