"""Hidden keys: numbers put in place of theirs, and weights that they do not get."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# From so many numbers on.
_WORTH_IT = 2**16


def worth_it(x: Tensor) -> bool:
    """Whether numbers are many enough to look for the first hidden key of them, and for a backward pass by hand."""
    # To read where a key is hidden makes a GPU wait, and a graph that is being compiled has no numbers.
    return x.numel() >= _WORTH_IT and x.device.type == "cpu" and not torch.compiler.is_compiling()


def fill_hidden_(x: Tensor, keep: Tensor | None, value: float) -> Tensor:
    """Put `value` in place of the numbers of hidden keys, whatever those are, NaN included; return `x`.

    Args:
        x: The numbers `[B, H, q, K]`, changed in place; autograd does not need to know.
        keep: Which keys may be seen, bool `[B|1, H|1, q|1, K]`; `None` means all.
        value: What to put there.
    """
    if keep is not None:
        first = _first_hidden(keep) if worth_it(x) else 0
        # Of a causal block of rows this is a few of the last columns.
        x[..., first:].masked_fill_(~keep[..., first:], value)
    return x


def softmax_of_seen(logits: Tensor, keep: Tensor | None) -> Tensor:
    """Return the softmax `[B, H, q, K]` in which hidden keys get nothing; a row in which all are hidden is even.

    Args:
        logits: `[B, H, q, K]`.
        keep: Which keys may be seen, bool `[B|1, H|1, q|1, K]`; `None` means all.
    """
    if keep is None:
        return logits.softmax(dim=-1)
    if not worth_it(logits):
        return _plain(logits, keep)
    weights: Tensor = _SoftmaxOfSeen.apply(logits, keep)  # type: ignore[no-untyped-call]
    return weights


def _first_hidden(keep: Tensor) -> int:
    """Return the first column in which a key is hidden, or how many columns there are."""
    # Bytes, since torch is slow to reduce booleans.
    seen_by_all = keep.view(torch.uint8).flatten(0, 2).amin(dim=0)
    first = int(seen_by_all.argmin())
    return first if not seen_by_all[first] else len(seen_by_all)


def _plain(logits: Tensor, keep: Tensor) -> Tensor:
    return logits.masked_fill(~keep, torch.finfo(logits.dtype).min).softmax(dim=-1)


class _SoftmaxOfSeen(torch.autograd.Function):
    """Fills as few columns as it may, on the way back in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, keep: Tensor) -> Tensor:
        filled = fill_hidden_(logits.clone(), keep, torch.finfo(logits.dtype).min)
        weights = filled.softmax(dim=-1)
        ctx.save_for_backward(logits, keep, weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, keep, weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            # For gradients of gradients, of what they flow into.
            (found,) = torch.autograd.grad(_plain(logits, keep), logits, grad, create_graph=True)
            return found, None
        of_logits = torch.ops.aten._softmax_backward_data(grad, weights, -1, logits.dtype)
        return fill_hidden_(of_logits, keep, 0.0), None
