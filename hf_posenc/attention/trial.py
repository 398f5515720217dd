"""Kernels that are compiled on the spot must pass a trial before they are used.

No test of ours can run on every GPU, driver and compiler. The first call of each kind is computed a second time by the dense
reference, for its last rows, with gradients where there are any; a kernel that does something else, or does not run, is not used,
with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor

from hf_posenc.attention.dense import dense
from hf_posenc.attention.mask import Mask
from hf_posenc.attention.task import Task
from hf_posenc.scheme import Scheme

_ROWS = 64
# Of the root mean square, by bytes of a number: half precision rounds operands, and GPUs may multiply float32 with 10 bits.
_TOLERANCE = {8: 1e-6, 4: 5e-3, 2: 5e-2}
_COMPARED = ("output", "gradient of q", "gradient of k", "gradient of v")
_RESULTS: dict[Hashable, bool] = {}

Executor = Callable[[Scheme, Task, Mask], Tensor]


def passed(name: str, run: Executor, scheme: Scheme, task: Task, mask: Mask) -> bool:
    """Return whether an executor does what the reference does, in the first call of this kind.

    Args:
        name: Of the executor with its form.
        run: The executor.
        scheme: The scheme.
        task: The operands.
        mask: What is hidden.
    """
    of_scheme = (type(scheme), repr(scheme.options()))
    of_call = (task.q.dtype, task.q.device, task.q.shape[-1], mask.rule, mask.keep is None, torch.is_grad_enabled())
    kind = (name, *of_scheme, *of_call)
    if kind not in _RESULTS:
        problem = _difference(run, scheme, task, mask)
        _RESULTS[kind] = problem is None
        if problem is not None:
            warnings.warn(
                f"The {name} kernel for {type(scheme).__name__} {problem} on {task.q.device}. Attention goes by blocks instead, which is "
                "slower. Please report this, with the versions of torch and triton.",
                stacklevel=2,
            )
    return _RESULTS[kind]


def _difference(run: Executor, scheme: Scheme, task: Task, mask: Mask) -> str | None:
    """Return what is wrong with an executor, as the rest of a sentence."""
    part, visible, seen = _last_rows(task, mask)
    weight = torch.randn(part.q.shape, generator=torch.Generator().manual_seed(0)).to(part.q) * seen
    want = _results(lambda *given: dense(*given)[0], scheme, part, visible, weight)
    try:
        got = _results(run, scheme, part, visible, weight)
    except Exception as error:  # a compiler may raise anything
        return f"does not run ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    tolerance = _TOLERANCE[task.q.element_size()]
    for what, a, b in zip(_COMPARED, got, want, strict=False):
        off, size = (float(x.double().square().mean().sqrt()) for x in (a.double() - b.double(), b))
        if not off <= tolerance * (size + tolerance):
            return f"is off by {off / size:.1e} in its {what}"
    return None


def _last_rows(task: Task, mask: Mask) -> tuple[Task, Mask, Tensor]:
    """Return the last rows of a task on copies of the operands, their mask, and which of them see any key."""
    stop, keys = task.q.shape[2], task.k.shape[2]
    start = max(0, stop - _ROWS)
    part = task.part(start, stop, keys)
    part = part.with_operands([x.detach().clone() for x in part.operands()])  # nothing of the caller's graph
    keep, bias = mask.given_rows(start, stop, keys)
    visible = Mask(mask.rule, keep, bias, mask.ahead + start if mask.rule == "slots" else mask.ahead)
    seen = visible.rows(0, stop - start, keys, part.positions)[0]
    rows = torch.ones((), device=task.q.device) if seen is None else seen.any(-1, keepdim=True)
    return part, visible, rows


def _results(run: Executor, scheme: Scheme, task: Task, mask: Mask, weight: Tensor) -> list[Tensor]:
    """Return the output and, where the caller wants any, the gradients."""
    learns = torch.is_grad_enabled()
    leaves = [x.requires_grad_(learns) for x in (task.q.detach(), task.k.detach(), task.v.detach())]
    output = run(scheme, replace(task, q=leaves[0], k=leaves[1], v=leaves[2]), mask)
    grads = torch.autograd.grad(output, leaves, weight) if learns else ()
    return [output.detach() * weight.ne(0), *grads]
