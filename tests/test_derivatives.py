"""Derivatives beyond the first, in every form that torch has, against finite differences of first gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_engine import HIDDEN, make, on, plain
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd import functional as old
from torch.utils.checkpoint import checkpoint
from variants import identify, variants

import hf_posenc
from hf_posenc import OptionError, Positions, Scheme, attend
from hf_posenc.attention import Call, Mask, executors, run

# The queries of one call of the fused executor, in more than one block; the others are forced.
LENGTH = 40
EXECUTORS = [(name, way) for name in hf_posenc.schemes() for way in executors(make(name)) if way != "dense"]
# The first case of each scheme by default.
CASES = [
    pytest.param(*case, marks=pytest.mark.grid if number else ())
    for _, cases in itertools.groupby(variants(), lambda case: case[0])
    for number, case in enumerate(cases)
]
Loss = Callable[..., Tensor]
Forms = dict[str, Callable[[Loss, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]]


def double(name: str, way: str, options: dict[str, Any]) -> Scheme:
    return make(name, causal=way == "causal", **options).double()


def operands(scheme: Scheme, length: int = LENGTH) -> list[Tensor]:
    """Queries, keys, values, hidden states and parameters, above the bounds that gradients ignore."""
    own, random = scheme.geometry, torch.Generator().manual_seed(1)
    shapes = [(1, heads, length, own.head_dim) for heads in (own.heads, own.kv_heads, own.kv_heads)]
    drawn = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in (*shapes, (1, length, HIDDEN))]
    return [*drawn, *(x.detach().abs() + 0.1 for x in scheme.parameters())]


def loss_of(scheme: Scheme, executor: str | None, wrap: Callable[..., Any] = lambda run, *given: run(*given)) -> Loss:
    names = [name for name, _ in scheme.named_parameters()]

    def call(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Any:
        return attend(scheme, q, k, v, **on(plain(q.shape[2])[0], executor, hidden=hidden))

    def run(*given: Tensor) -> Any:
        lent = dict(zip(names, given[4:], strict=True))
        return torch.func.functional_call(scheme, lent, (call, *given[:4]))

    def loss(*given: Tensor) -> Tensor:
        output: Tensor = wrap(run, *given)
        # Of every derivative something is left.
        return (output.sin() * torch.linspace(0.5, 1, output.numel(), dtype=output.dtype).view_as(output)).sum()

    return loss


def leaves(given: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in given]


def gradient(loss: Loss, given: Sequence[Tensor], *, graph: bool = False) -> Sequence[Tensor]:
    return torch.autograd.grad(loss(*given), given, create_graph=graph, allow_unused=True, materialize_grads=True)


def inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    return sum((x * y).sum() for x, y in zip(one, other, strict=True))


def by_grad(loss: Loss, given: Sequence[Tensor], along: Sequence[Tensor]) -> Sequence[Tensor]:
    xs = leaves(given)
    first = inner(gradient(loss, xs, graph=True), along)
    return torch.autograd.grad(first, xs, allow_unused=True, materialize_grads=True)


def by_backward(loss: Loss, given: Sequence[Tensor], along: Sequence[Tensor]) -> Sequence[Tensor]:
    xs = leaves(given)
    inner(gradient(loss, xs, graph=True), along).backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]


def by_hvp(loss: Loss, given: Sequence[Tensor], along: Sequence[Tensor]) -> Sequence[Tensor]:
    found: Sequence[Tensor] = old.hvp(loss, tuple(given), tuple(along))[1]
    return found


def by_dual_numbers(loss: Loss, given: Sequence[Tensor], along: Sequence[Tensor]) -> Sequence[Tensor]:
    """Forward mode over backward()."""
    xs = leaves(given)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, y) for x, y in zip(xs, along, strict=True)]
        tangents = [forward_ad.unpack_dual(x).tangent for x in gradient(loss, duals)]
    return [torch.zeros_like(x) if t is None else t for x, t in zip(xs, tangents, strict=True)]


def by_func(outer: str, loss: Loss, given: Sequence[Tensor], along: Sequence[Tensor]) -> Sequence[Tensor]:
    xs, first = tuple(given), torch.func.grad(loss, argnums=tuple(range(len(given))))
    if outer == "jvp":
        return torch.func.jvp(first, xs, tuple(along))[1]
    if outer == "vjp":
        return torch.func.vjp(first, *xs)[1](tuple(along))
    if outer == "grad":
        return torch.func.grad(lambda *ys: inner(first(*ys), along), argnums=tuple(range(len(xs))))(*xs)
    # Transforms with vmap in them: the derivative along one line.
    line = getattr(torch.func, outer)(lambda t: first(*(x + t * y for x, y in zip(xs, along, strict=True))))
    return line(torch.zeros((), dtype=torch.float64))


FORMS: Forms = {
    "grad": by_grad, "backward": by_backward, "hvp": by_hvp,
    "dual numbers": by_dual_numbers,
    **{f"func.{outer}": functools.partial(by_func, outer) for outer in ("jvp", "vjp", "grad", "jacfwd")},
}  # fmt: skip


def check(forms: Forms, scheme: Scheme, executor: str | None, length: int = LENGTH, **others: Any) -> None:
    loss, given = loss_of(scheme, executor, **others), operands(scheme, length)
    random = torch.Generator().manual_seed(2)
    along = [torch.randn(x.shape, generator=random, dtype=torch.float64) for x in given]
    step, reference = 1e-5, loss_of(scheme, "dense")
    if isinstance(scheme, hf_posenc.schemes()["cape"].cls):
        want = by_grad(reference, given, along)  # it bends at so many points that steps cross some
    else:
        near = [[x + s * y for x, y in zip(given, along, strict=True)] for s in (step, -step)]
        want = [(x - y) / (2 * step) for x, y in zip(*(gradient(reference, leaves(x)) for x in near), strict=True)]
    size = max(float(x.abs().max()) for x in want)
    assert size > 1e-3, "attention has second derivatives"
    for form, second in forms.items():
        try:
            found = second(loss, given, along)
        except NotImplementedError as error:  # torch has not all of its own functions
            if form != "dual numbers" or "_backward that does not support it" not in str(error):
                raise
            continue
        for number, (got, expected) in enumerate(zip(found, want, strict=True)):
            off = float((got - expected).abs().max()) / size if got.numel() else 0.0
            assert off < 1e-5, f"{form}: operand {number} is off by {off:.1e} of {size:.1e}"


@pytest.mark.generic
@pytest.mark.filterwarnings("ignore:Using backward", "ignore:There is a performance drop", "ignore:.torch.jit.script")
@pytest.mark.parametrize(("name", "way", "options"), CASES, ids=identify)
def test_second_derivatives_in_every_form(name: str, way: str, options: dict[str, Any]) -> None:
    check(FORMS, double(name, way, options), None)


@pytest.mark.parametrize(("name", "executor"), EXECUTORS, ids=identify)
def test_second_derivatives_of_every_executor(name: str, executor: str) -> None:
    check({"grad": by_grad}, double(name, "causal", {}), executor)


def test_a_third_derivative() -> None:
    """By a graph of a graph of the fused executor."""
    loss, given = loss_of(double("alibi", "causal", {}), None), leaves(operands(double("alibi", "causal", {})))
    found = []
    for other in (loss, loss_of(double("alibi", "causal", {}), "dense")):
        first = gradient(other, given, graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), given[:3], create_graph=True)
        found.append(torch.autograd.grad(sum(x.cos().sum() for x in second), given[:3]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["alibi", "liere", "cope"])
def test_second_derivatives_inside_of_gradient_checkpointing(name: str) -> None:
    keep = functools.partial(checkpoint, use_reentrant=False)
    check({"grad": by_grad, "backward": by_backward}, double(name, "causal", {}), None, wrap=keep)


@pytest.mark.parametrize("executor", ["sdpa", "blocks"])
def test_a_second_derivative_with_dropout_is_refused(executor: str) -> None:
    scheme = double("rope", "causal", {})
    q, k, v = (x.requires_grad_() for x in operands(scheme)[:3])
    places = plain(LENGTH)[0]
    mask = Mask("slots")
    call = Call(scheme, q, k, v, Positions(places, places), LENGTH - 1, 1.0, mask, dropout=0.1)
    output, _ = run(call, executor=executor)
    (first,) = torch.autograd.grad(output.sum(), q, retain_graph=True)
    assert first.any()
    with pytest.raises(OptionError, match="second derivative of attention with dropout"):
        torch.autograd.grad(output.sum(), q, create_graph=True)
