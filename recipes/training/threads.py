"""Number of CPU threads for training: no more than its steps have work for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import nn

from hf_posenc.recipes.processes import processes

# Multiplications with weights per forward that pay for one more thread. Measured on two cores with the built-in model
# (468,000 weights): in windows of 1,024 tokens and batches of 8, slightly below this for each of two threads, one
# thread is as fast as two; with an eighth of the tokens, more than twice as fast.
_WORTH_A_THREAD = 2**31
# The user's own choice takes precedence.
_CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextlib.contextmanager
def enough_threads(model: nn.Module, tokens: int) -> Iterator[None]:
    """Limit torch's threads, within the context, to those that steps of a model have work for.

    The number is unchanged if the environment gives one, or an accelerator computes.

    Args:
        model: Model to train.
        tokens: Tokens per forward, over all rows of the batch.
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
