"""Derivatives beyond the first: of a plain form of what a fast one computes.

Kernels have a backward pass, which has no derivative of its own. torch runs it with gradients enabled if a graph of it
is asked for (`create_graph=True`). Then the fast form gives no gradients, and the plain form gives all of them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

# A function that torch can differentiate any number of times: of operands, then of parameters that it may also find by
# itself, so that they must be given themselves.
Form: TypeAlias = Callable[..., Sequence[Tensor]]


def first_order(
    backward: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Decorate the backward pass of a fast form: it gives nothing where a graph of it is asked for."""

    @functools.wraps(backward)
    def of_first_order(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return (None,) * len(ctx.needs_input_grad)
        return backward(ctx, *grads)

    return of_first_order


def ending(x: Tensor) -> Tensor:
    """Return an operand of a kernel of torch, whose gradient ends there where a graph of it is asked for."""
    return _Ending.apply(x) if torch.is_grad_enabled() and x.requires_grad else x  # type: ignore[no-untyped-call]


def differentiable(output: Tensor, form: Form, operands: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Return the output of a fast form, with derivatives of a plain one, which must hold no operands, for graphs."""
    if not output.requires_grad or torch.compiler.is_compiling():
        return output
    found: Tensor = _Output.apply(form, len(operands), output, *operands, *parameters)  # type: ignore[no-untyped-call]
    return found


class _Ending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        return (grad,)


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, count: int, output: Tensor, *tensors: Tensor) -> Tensor:
        ctx.form, ctx.count = form, count
        ctx.save_for_backward(*tensors)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        if not torch.is_grad_enabled():
            return None, None, grad, *(None for _ in wanted)
        return None, None, None, *_gradients(ctx.form, ctx.count, wanted, (grad,), ctx.saved_tensors)


class _Plain(torch.autograd.Function):
    """Runs a form on operands that have no history: a parameter may be part of it, and would count twice."""

    @staticmethod
    def forward(ctx: Any, form: Form, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.form, ctx.count = form, count
        ctx.save_for_backward(*tensors)
        with torch.enable_grad():
            fresh = (x.detach().requires_grad_(x.requires_grad) for x in tensors[:count])
            return tuple(x.detach() for x in form(*fresh, *tensors[count:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        return None, None, *_gradients(ctx.form, ctx.count, wanted, grads, ctx.saved_tensors)


def _gradients(
    form: Form, count: int, wanted: Sequence[bool], grads: Sequence[Tensor], tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of a form for the wanted tensors, with derivatives of their own."""

    def derivative(*given: Tensor) -> Sequence[Tensor]:
        of_results, tensors = given[: len(grads)], given[len(grads) :]
        targets = [x for x, learns in zip(tensors, wanted, strict=True) if learns]
        pairs = [(x, of_x) for x, of_x in zip(form(*tensors), of_results, strict=True) if x.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in targets]
        results, of_results = zip(*pairs, strict=True)
        return torch.autograd.grad(
            results, targets, of_results, create_graph=True, allow_unused=True, materialize_grads=True
        )

    found = iter(_Plain.apply(derivative, len(grads) + count, *grads, *tensors))  # type: ignore[no-untyped-call]
    return [next(found) if learns else None for learns in wanted]
