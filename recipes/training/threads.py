"""How many threads a training on a CPU works with: no more than its steps have work for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import nn

from hf_posenc.recipes.processes import processes

# Multiplications with weights in a forward that make up for waking one more thread at each operation. Measured on two cores with the
# 468,000 weights of the model that comes along: in windows of 1,024 tokens and batches of 8, which is a little less than this for each of
# two threads, one is as fast as two; with an eighth of the tokens more than twice as fast.
_WORTH_A_THREAD = 2**31
# Whoever sets these has decided.
_CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextlib.contextmanager
def enough_threads(model: nn.Module, tokens: int) -> Iterator[None]:
    """Within the context, torch works with no more threads than steps of a model have work for.

    Only ever lowers the number, and leaves it alone where the environment gives one or an accelerator computes.

    Args:
        model: The model.
        tokens: Read by one forward, over all rows of the batch.
    """
    before = torch.get_num_threads()
    work = tokens * sum(parameter.numel() for parameter in model.parameters())
    chosen = any(os.environ.get(variable) for variable in _CHOSEN)
    if not chosen and processes().device.type == "cpu":
        torch.set_num_threads(max(1, min(before, work // _WORTH_A_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
