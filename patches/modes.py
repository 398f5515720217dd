"""Looking at a model without changing what it is doing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a while; afterwards each module is in the mode that it was in.

    `train(True)` would not do: parts of a model that is trained may be in evaluation mode, such as those that are frozen.
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
