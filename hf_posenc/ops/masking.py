"""Masking: numbers of hidden keys are overwritten, and hidden keys get no weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Minimum number of numbers.
_WORTH_IT = 2**16


def worth_it(x: Tensor) -> bool:
    """Whether a tensor is large enough for a search of the first hidden key, and for a backward pass by hand."""
    # To read where a key is hidden makes a GPU wait, and a graph that is being compiled has no numbers.
    return not torch.compiler.is_compiling() and x.numel() >= _WORTH_IT and x.device.type == "cpu"


def fill_hidden_(x: Tensor, keep: Tensor | None, value: float) -> Tensor:
    """Overwrite the numbers of hidden keys with `value`, whatever they are, NaN included; return `x`.

    Args:
        x: Numbers `[B, H, q, K]`, changed in place; autograd does not need to know.
        keep: Keys that may be seen, bool `[B|1, H|1, q|1, K]`; `None` means all.
        value: Number to write.
    """
    if keep is not None:
        first = _first_hidden(keep) if worth_it(x) else 0
        # In a causal block of rows these are a few of the last columns.
        x[..., first:].masked_fill_(~keep[..., first:], value)
    return x


def softmax_of_seen(logits: Tensor, keep: Tensor | None) -> Tensor:
    """Return the softmax `[B, H, q, K]` in which hidden keys get nothing; a row of hidden keys only is even.

    Args:
        logits: Logits `[B, H, q, K]`.
        keep: Keys that may be seen, bool `[B|1, H|1, q|1, K]`; `None` means all.
    """
    if keep is None:
        return logits.softmax(dim=-1)
    if not worth_it(logits):
        return _naive(logits, keep)
    weights: Tensor = _SoftmaxOfSeen.apply(logits, keep)  # type: ignore[no-untyped-call]
    return weights


def differentiable_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: Sequence[Tensor], grads: Tensor | tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Return gradients of `function(*inputs)` that have gradients themselves; `None` for inputs that need none."""
    targets = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad(function(*inputs), targets, grads, create_graph=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def _first_hidden(keep: Tensor) -> int:
    """Return the first column in which a key is hidden, or the number of columns."""
    # Bytes, since torch is slow to reduce booleans.
    seen_by_all = keep.view(torch.uint8).flatten(0, 2).amin(dim=0)
    first = int(seen_by_all.argmin())
    return first if not seen_by_all[first] else len(seen_by_all)


def _naive(logits: Tensor, keep: Tensor) -> Tensor:
    return logits.masked_fill(~keep, torch.finfo(logits.dtype).min).softmax(dim=-1)


class _SoftmaxOfSeen(torch.autograd.Function):
    """Fills as few columns as possible, in the backward pass in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, keep: Tensor) -> Tensor:
        filled = fill_hidden_(logits.clone(), keep, torch.finfo(logits.dtype).min)
        weights = filled.softmax(dim=-1)
        ctx.save_for_backward(logits, keep, weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        logits, keep, weights = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(lambda x: _naive(x, keep), [logits], grad)[0], None
        of_logits = torch.ops.aten._softmax_backward_data(grad, weights, -1, logits.dtype)
        return fill_hidden_(of_logits, keep, 0.0), None
