"""The executors in order of preference, and the choice between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from hf_posenc.attention.blocks import Blocks
from hf_posenc.attention.call import Call, Executor
from hf_posenc.attention.cpu.fused import Fused
from hf_posenc.attention.cpu.locality import Local
from hf_posenc.attention.dense import Dense
from hf_posenc.attention.gpu.flex import Flex
from hf_posenc.attention.gpu.kernels import Triton
from hf_posenc.attention.sdpa import Sdpa
from hf_posenc.errors import OptionError
from hf_posenc.ops import transformed
from hf_posenc.scheme import Scheme

_BLOCKS = Blocks()
# The first that takes a call runs it; the last takes any, and alone returns weights.
EXECUTORS: tuple[Executor, ...] = (Sdpa(), Triton(), Flex(), Fused(), Local(), _BLOCKS, Dense())

_RECORD: ContextVar[list[str] | None] = ContextVar("record", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """Collect the executors of all calls in this context, with the form in which positions entered, if several."""
    found: list[str] = []
    token = _RECORD.set(found)
    try:
        yield found
    finally:
        _RECORD.reset(token)


def executors(scheme: Scheme, device: torch.device | None = None) -> tuple[str, ...]:
    """Return the names of the executors that can run a scheme on a device (`None`: a CPU), the reference first."""
    device = device or torch.device("cpu")
    return tuple(executor.name for executor in reversed(EXECUTORS) if executor.knows(scheme, device))


def choose(call: Call) -> Executor:
    """Return the executor that runs a call."""
    *others, reference = EXECUTORS
    traced = torch.compiler.is_compiling() or transformed()
    for executor in () if call.need_weights else others:
        if (executor.traces or not traced) and executor.takes(call):
            return executor
    return reference


def run(call: Call, *, executor: str | None = None) -> tuple[Tensor, Tensor | None]:
    """Run one attention call on projected operands.

    Args:
        call: The call.
        executor: Name of the executor; `None` chooses. A kernel that does not compute this call leaves it to the
            blocks.

    Returns:
        The output `[B, H, Q, D]`; the weights `[B, H, Q, K]` if the call needs them, else `None`.

    Raises:
        OptionError: The named executor cannot run the call.
    """
    used = choose(call) if executor is None else _named(executor, call)
    # A context variable would break a graph that is being compiled.
    record = None if torch.compiler.is_compiling() else _RECORD.get()
    if record is not None:
        record.append(used.describe(call))
    output, weights = used.run(call)
    return output, weights if call.need_weights else None


def _named(name: str, call: Call) -> Executor:
    """Return the executor of a name, or the blocks where it does not compute this call."""
    executor = next(executor for executor in EXECUTORS if executor.name == name)
    if call.mask.learns and not executor.learns_masks:
        raise OptionError(
            f"Executor {name!r} has no gradient for a mask that requires one. Leave the executor out, or take 'dense'."
        )
    if executor.fits(call):
        return executor
    if executor.refusal is not None:
        raise OptionError(
            f"Executor {name!r} cannot run this call of {type(call.scheme).__name__}: {executor.refusal}. "
            "Leave the executor out, or take 'blocks'."
        )
    return _BLOCKS
