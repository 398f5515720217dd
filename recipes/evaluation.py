"""Perplexity by context length: what a positional encoding is worth at, below and beyond the trained length.

The same target tokens are scored at every context length; only how much of the text before them the model reads
changes. Otherwise a longer context would come with easier or harder targets, and columns could not be compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.errors import PositionError, ShapeError

# Scored tokens per window, few enough that the shortest useful context already covers them.
TARGETS = 64


@dataclass(frozen=True)
class Estimate:
    """A mean over windows.

    Attributes:
        mean: The mean.
        error: Its standard error; NaN for a single window.
    """

    mean: float
    error: float

    @classmethod
    def of(cls, values: Tensor) -> Estimate:
        """Return the mean of `values` `[windows]` and its standard error."""
        error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(float(values.mean()), error)


@dataclass(frozen=True, eq=False)
class ContextCurve:
    """Loss of the same target tokens, by how many tokens the model read.

    Attributes:
        contexts: Numbers of tokens read.
        losses: Mean loss of the targets of each window in nats per token, float64 `[contexts, windows]`.
    """

    contexts: tuple[int, ...]
    losses: Tensor

    @property
    def windows(self) -> int:
        """How many windows were measured."""
        return self.losses.shape[1]

    def perplexity(self, context: int) -> Estimate:
        """Return the perplexity at a context length; its error is that of the mean loss, carried through `exp`."""
        loss = Estimate.of(self._at(context))
        return Estimate(math.exp(loss.mean), math.exp(loss.mean) * loss.error)

    def minus(self, other: ContextCurve, context: int) -> Estimate:
        """Return this loss minus that of another model on the same windows, in nats per token.

        The difference is taken window by window: hard windows are hard for both, so its error is much smaller than
        that of either loss.

        Raises:
            ShapeError: The curves were measured on different numbers of windows.
        """
        if other.windows != self.windows:
            raise ShapeError(
                f"Got curves of {self.windows} and {other.windows} windows; a paired comparison takes the same. "
                "Measure both models with the same ids and number of windows."
            )
        return Estimate.of(self._at(context) - other._at(context))

    def _at(self, context: int) -> Tensor:
        if context not in self.contexts:
            raise ShapeError(f"context={context}: measured were {', '.join(map(str, self.contexts))}.")
        return self.losses[self.contexts.index(context)]


def context_curve(
    model: Any, ids: Tensor, contexts: Sequence[int], *, windows: int = 16, targets: int = TARGETS, batch_size: int = 8
) -> ContextCurve:
    """Measure the loss of the same target tokens after contexts of different lengths.

    The windows lie evenly over `ids`. Of each, the model reads the last `context` tokens but one, and its last
    `targets` predictions are scored; so at every length, and for every model, the scored tokens are the same.

    Args:
        model: A causal language model of transformers, on any device.
        ids: Token ids of a text, int64 `[tokens]`.
        contexts: How many tokens the model reads, each at least `targets`.
        windows: How many windows.
        targets: How many tokens are scored in each window.
        batch_size: Windows per forward.

    Returns:
        The losses.

    Raises:
        ShapeError: A context is shorter than the targets, or the text is too short for the windows.
        PositionError: The model has no encoding for positions that far.
    """
    rows = spread_windows(ids, max(contexts) + 1, windows)
    if min(contexts) < targets:
        raise ShapeError(f"contexts={tuple(contexts)}: expected at least {targets} tokens, the number of targets.")
    training = model.training
    model.eval()
    try:
        losses = [_losses(model, rows[:, -context - 1 :], targets, batch_size) for context in contexts]
    finally:
        model.train(training)
    return ContextCurve(tuple(contexts), torch.stack(losses))


def spread_windows(ids: Tensor, length: int, windows: int) -> Tensor:
    """Cut windows of `length` tokens out of `ids` `[tokens]`, evenly spaced and not overlapping, `[windows, length]`.

    Raises:
        ShapeError: There are not enough tokens.
    """
    if ids.ndim != 1 or len(ids) < windows * length:
        raise ShapeError(
            f"Got token ids of shape {list(ids.shape)}; {windows} windows of {length} tokens take at least "
            f"[{windows * length}]. Give more text, fewer windows or shorter contexts."
        )
    stride = len(ids) // windows
    return torch.stack([ids[row * stride : row * stride + length] for row in range(windows)])


@torch.no_grad()
def _losses(model: Any, rows: Tensor, targets: int, batch_size: int) -> Tensor:
    """Return the mean loss of the last `targets` tokens of each row, float64 `[windows]`."""
    found = []
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size].to(model.device)
        try:
            logits = model(input_ids=batch[:, :-1], use_cache=False, logits_to_keep=targets).logits
        except IndexError as error:
            raise PositionError(
                f"The {type(model).__name__} cannot read {batch.shape[1] - 1} tokens: its position table is shorter. "
                "Leave out the longer contexts."
            ) from error
        # The vocabulary goes where cross_entropy wants it: [windows, vocabulary, targets].
        loss = F.cross_entropy(logits.double().transpose(1, 2), batch[:, -targets:], reduction="none")
        found.append(loss.mean(dim=1).cpu())
    return torch.cat(found)
