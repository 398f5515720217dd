"""Perplexity by context length, below, at and beyond the trained length.

The same target tokens are scored at every context length; only the amount of text read before them changes. With
other targets at every length, columns could not be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.errors import OptionError, PositionError, ShapeError
from hf_posenc.patches.patch import evaluating
from hf_posenc.recipes.evaluation import intervals
from hf_posenc.recipes.evaluation.intervals import Interval

# Scored tokens per window: few, because the shortest context must cover them.
TARGETS = 64

# A function from token ids `[B, n]` to corrupted token ids `[B, n]`.
Corruption = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ContextCurve:
    """Loss of the same target tokens by context length.

    Attributes:
        contexts: Numbers of tokens read.
        losses: Mean loss of the targets of each window in nats per token, float64 `[contexts, windows]`.
    """

    contexts: tuple[int, ...]
    losses: Tensor

    @property
    def windows(self) -> int:
        """Number of windows measured."""
        return self.losses.shape[1]

    def loss(self, context: int) -> Interval:
        """Return the loss at a context length, in nats per token."""
        return intervals.of_mean(self._at(context))

    def perplexity(self, context: int) -> Interval:
        """Return the perplexity at a context length."""
        return intervals.of_exponential(self._at(context))

    def minus(self, other: ContextCurve, context: int) -> Interval:
        """Return this loss minus that of another model on the same windows, in nats per token.

        Differences are taken window by window. Hard windows are hard for both models, so the difference is known more
        precisely than either loss.

        Raises:
            ShapeError: The curves were measured on different numbers of windows.
        """
        return intervals.of_mean(self._differences(other, context))

    def ratio(self, other: ContextCurve, context: int) -> Interval:
        """Return this perplexity as a share of that of another model on the same windows.

        Raises:
            ShapeError: The curves were measured on different numbers of windows.
        """
        return intervals.of_exponential(self._differences(other, context))

    def _differences(self, other: ContextCurve, context: int) -> Tensor:
        if other.windows != self.windows:
            raise ShapeError(
                f"Got curves of {self.windows} and {other.windows} windows; a paired comparison takes the same. "
                "Measure both models with the same ids and number of windows."
            )
        return self._at(context) - other._at(context)

    def _at(self, context: int) -> Tensor:
        if context not in self.contexts:
            raise ShapeError(f"context={context}: measured were {', '.join(map(str, self.contexts))}.")
        return self.losses[self.contexts.index(context)]


def context_curve(
    model: Any,
    ids: Tensor,
    contexts: Sequence[int],
    *,
    windows: int = 16,
    targets: int = TARGETS,
    batch_size: int = 8,
    corrupt: Corruption | None = None,
) -> ContextCurve:
    """Measure the loss of the same target tokens after contexts of different lengths.

    The windows are spread evenly over `ids`. In each window, a causal model reads `context` tokens, and its last
    `targets` predictions are scored. The encoder of an encoder-decoder reads the last `context` tokens corrupted, its
    decoder predicts them uncorrupted, and the last `targets` are scored. A token is corrupted at every length or at
    none. So the scored tokens are the same at every length and for every model.

    Args:
        model: A language model of transformers, causal or encoder-decoder, on any device.
        ids: Token ids of a text, int64 `[tokens]`.
        contexts: Context lengths in tokens, each at least `targets`.
        windows: Number of windows.
        targets: Scored tokens per window.
        batch_size: Windows per forward.
        corrupt: Function that corrupts windows `[windows, max(contexts)]` for the encoder of an encoder-decoder; `None`
            for causal models.

    Returns:
        The losses.

    Raises:
        ShapeError: A context is shorter than the targets, or the text is too short for the windows.
        OptionError: An encoder-decoder comes without `corrupt`, or a causal model with it.
        PositionError: The model has no encoding for positions that far.
    """
    check_corruption("context_curve", model, corrupt)
    if corrupt is not None and not model.config.is_encoder_decoder:
        raise OptionError(
            f"context_curve(corrupt=...): {type(model).__name__} has no encoder that reads a corrupted text; "
            "leave it out."
        )
    rows = spread_windows(ids, max(contexts) + 1, windows, targets=targets)
    if min(contexts) < targets:
        raise ShapeError(f"contexts={tuple(contexts)}: expected at least {targets} tokens, the number of targets.")
    read = rows[:, :-1] if corrupt is None else corrupt(rows[:, 1:])
    with evaluating(model):
        losses = [_losses(model, read[:, -context:], rows[:, -context:], targets, batch_size) for context in contexts]
    return ContextCurve(tuple(contexts), torch.stack(losses))


def check_corruption(measure: str, model: Any, corrupt: object) -> None:
    """Check that an encoder-decoder comes with a corruption: its encoder must not read the text to predict.

    Raises:
        OptionError: The model has an encoder, and `corrupt` is `None`.
    """
    if model.config.is_encoder_decoder and corrupt is None:
        raise OptionError(
            f"{measure}(corrupt=None): the encoder of {type(model).__name__} must not read what its decoder "
            "writes; pass hf_posenc.recipes.data.collation.Denoising(tokenizer).corrupt."
        )


def spread_windows(ids: Tensor, length: int, windows: int, *, targets: int) -> Tensor:
    """Cut windows of `length` tokens out of `ids` `[tokens]`, evenly spaced, `[windows, length]`.

    In a short text windows overlap, but never in their last `targets` tokens: no token is scored twice.

    Raises:
        ShapeError: The text has too few tokens for the windows.
    """
    least = length + (windows - 1) * targets
    if ids.ndim != 1 or len(ids) < least:
        raise ShapeError(
            f"Got token ids of shape {list(ids.shape)}; {windows} windows of {length} tokens with {targets} targets "
            f"each take at least [{least}]. Give more text, fewer windows or shorter contexts."
        )
    stride = min(len(ids) // windows, (len(ids) - length) // max(windows - 1, 1))
    return torch.stack([ids[row * stride : row * stride + length] for row in range(windows)])


@torch.no_grad()
def _losses(model: Any, read: Tensor, whole: Tensor, targets: int, batch_size: int) -> Tensor:
    """Return the mean loss of the last `targets` tokens of each row of `whole`, float64 `[windows]`."""
    found = []
    for start in range(0, len(whole), batch_size):
        inputs, labels = (rows[start : start + batch_size].to(model.device) for rows in (read, whole))
        try:
            logits = logits_of_targets(model, inputs, labels, targets)
        except IndexError as error:
            raise PositionError(
                f"The {type(model).__name__} cannot read {inputs.shape[1]} tokens: its position table is shorter. "
                "Leave out the longer contexts."
            ) from error
        # cross_entropy expects the vocabulary second: [windows, vocabulary, targets].
        loss = F.cross_entropy(logits.double().transpose(1, 2), labels[:, -targets:], reduction="none")
        found.append(loss.mean(dim=1).cpu())
    return torch.cat(found)


def logits_of_targets(model: Any, inputs: Tensor, labels: Tensor, targets: int) -> Tensor:
    """Return the logits that predict the last `targets` labels, `[windows, targets, vocabulary]`."""
    logits: Tensor
    if model.config.is_encoder_decoder:
        written = model.prepare_decoder_input_ids_from_labels(labels)
        logits = model(input_ids=inputs, decoder_input_ids=written, use_cache=False).logits[:, -targets:]
    else:
        logits = model(input_ids=inputs, use_cache=False, logits_to_keep=targets).logits
    return logits
