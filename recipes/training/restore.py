"""Restoring of weights after fits that fail or do not help."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn


@contextlib.contextmanager
def kept(weights: Sequence[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Yield a function that restores the weights, which an error does too; leave no gradients on them."""
    values = [weight.detach().clone() for weight in weights]

    def put_back() -> None:
        with torch.no_grad():
            for weight, value in zip(weights, values, strict=True):
                weight.copy_(value)

    try:
        yield put_back
    except BaseException:
        put_back()
        raise
    finally:
        for weight in weights:
            weight.grad = None
