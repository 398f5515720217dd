"""Perplexity by context length.

The same target tokens are scored at every context length; only the amount of text read before them changes. With
other targets at every length, columns could not be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from hf_posenc.errors import PositionError, RecipeError, ShapeError
from hf_posenc.recipes.evaluation.grid import MASKED_PERPLEXITY, PERPLEXITY, Grid
from hf_posenc.recipes.evaluation.measure import Corruption, Measure, Piece, Workers, different, losses, predictions
from hf_posenc.recipes.loading import is_masked
from hf_posenc.recipes.reports.curves import trained_mark

# Scored tokens per window: few, because the shortest context must cover them.
TARGETS = 64
# Name of the axis of context lengths.
CONTEXT = "tokens read"


def context_curve(model: Any, ids: Tensor, contexts: Sequence[int], *, batch_size: int = 8, **options: Any) -> Grid:
    """Measure perplexity by context length in each process alone: `curve.at(128)` is that at 128 tokens.

    Arguments, errors and samples are those of `ContextPerplexity`; raise `PositionError` if the model can read none of
    the contexts.
    """
    measure = ContextPerplexity(ids, contexts, **options)
    (found,) = measure(model, Workers(batch_size=batch_size, alone=True))
    check_read(model, found)
    return found


def check_read(model: Any, perplexity: Grid) -> None:
    """Raise a `PositionError` if a model can read none of the contexts."""
    if bool(perplexity.samples.isnan().all()):
        raise PositionError(
            f"{type(model).__name__} can read none of {', '.join(map(str, perplexity.points))} tokens. Give shorter "
            "ones."
        )


def spread_windows(ids: Tensor, length: int, windows: int, *, targets: int) -> Tensor:
    """Cut windows of `length` tokens out of `ids` `[tokens]`, evenly spaced, `[windows, length]`.

    In a short text windows overlap, but never in their last `targets` tokens: no token is scored twice. Raise
    `ShapeError` if the text is too short even so.
    """
    least = length + (windows - 1) * targets
    if ids.ndim != 1 or len(ids) < least:
        raise ShapeError(
            f"Got token ids of shape {list(ids.shape)}; {windows} windows of {length} tokens with {targets} targets "
            f"each take at least [{least}]. Give more text, fewer windows or shorter contexts."
        )
    stride = min(len(ids) // windows, (len(ids) - length) // max(windows - 1, 1))
    return torch.stack([ids[row * stride : row * stride + length] for row in range(windows)])


def contexts_for(
    trained_length: int, tokens: int, *, windows: int, contexts: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the context lengths to measure on `windows` of a text of so many tokens, and why others are left out.

    By default the lengths are a quarter to eight times the trained length, in powers of two, without those shorter than
    the scored tokens, unless all are. Raise `RecipeError` if a requested length is impossible, or all default ones are.
    """
    # `spread_windows` lets windows overlap, except in their targets; a window has a token more than it reads.
    others = 1 + (windows - 1) * TARGETS
    every = [trained_length * 2**power // 4 for power in range(6)]
    wanted = dict.fromkeys(contexts or [length for length in every if length >= TARGETS] or every)
    possible = tuple(sorted(context for context in wanted if TARGETS <= context <= tokens - others))
    notes = tuple(
        f"not measured at {context} tokens: shorter than the {TARGETS} tokens that are scored"
        if context < TARGETS
        else f"not measured at {context} tokens: {windows} windows of it take {context + others:,} held-out "
        f"tokens, there are {tokens:,}"
        for context in wanted
        if context not in possible
    )
    if (contexts and notes) or not possible:
        raise RecipeError(f"Contexts: {'; '.join(notes)}. Give other contexts, fewer windows or more held-out text.")
    return possible, notes


def windows_for(context: int, tokens: int, *, most: int) -> int:
    """Return how many windows of a context, 2 to `most`, a text of so many tokens has; only their targets are apart."""
    return max(2, min(most, 1 + (tokens - 1 - context) // TARGETS))


class ContextPerplexity(Measure):
    """Perplexity of the same tokens after contexts of different lengths; a sample is the mean loss of a window in nats.

    The windows are spread evenly over `ids`. In each window, a causal model reads `context` tokens, and its last
    `targets` predictions are scored. The encoder of an encoder-decoder reads the last `context` tokens corrupted, its
    decoder predicts them uncorrupted, and the last `targets` are scored. A masked language model reads them corrupted,
    too, and the corrupted ones among the last `targets` are scored. A token is corrupted at every length or at none. So
    the scored tokens are the same at every length and for every model.

    Args:
        ids: Token ids of a text, int64 `[tokens]`.
        contexts: Context lengths in tokens, each at least `targets`.
        windows: Number of windows of the text; one sample each.
        targets: Scored tokens per window.
        corrupt: Function that corrupts windows `[B, max(contexts)]` for an encoder; `None` for causal models.
        start: Token that stands for the first one that a causal model reads, as the tokenizer puts it before each text;
            `None` if it puts none.
        trained_length: Tokens per window in the model's training, for the picture; `None` if unknown.

    Raises:
        OptionError: Contexts are empty or repeated; a model with an encoder comes without `corrupt`, or a causal one
            with it.
        ShapeError: A context is shorter than the targets, the text is too short, or nothing is masked among the targets
            of a window.
    """

    name = "perplexity"
    title = "Perplexity by context length"
    takes = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForMaskedLM)
    hides = True

    def __init__(
        self,
        ids: Tensor,
        contexts: Sequence[int],
        *,
        windows: int = 16,
        targets: int = TARGETS,
        corrupt: Corruption | None = None,
        start: int | None = None,
        trained_length: int | None = None,
    ) -> None:
        self._contexts = different("contexts", contexts)
        if self._contexts[0] < targets:
            raise ShapeError(f"contexts={tuple(contexts)}: expected at least {targets} tokens, the number of targets.")
        self._targets, self._corrupt, self._start = targets, corrupt, None if corrupt else start
        self._rows = spread_windows(ids, self._contexts[-1] + 1, windows, targets=targets)
        self.mark = trained_mark(trained_length)
        self.note = (
            f"Perplexity of the same {targets} tokens in each of {windows} windows of text; for a masked language "
            "model, of the masked ones among them. Columns give the tokens read, the scored ones included."
        )

    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        quantity = MASKED_PERPLEXITY if is_masked(model) else PERPLEXITY
        # Where one context cannot be read, longer ones cannot either.
        found = self._by_piece(model, workers, lambda samples: bool(samples.isnan().all()))
        return (Grid(quantity, {CONTEXT: self._contexts}, found),)

    def pieces(self) -> Sequence[Piece]:
        rows: list[tuple[Tensor, ...]] = [(row,) for row in self._rows]
        if self._corrupt is not None:
            # A token is corrupted at every length or at none.
            rows = list(zip(self._rows, self._corrupt(self._rows[:, 1:]), strict=True))
        return [(context, rows, partial(self._read, context)) for context in self._contexts]

    def _read(self, context: int, model: Any, rows: Tensor, corrupted: Tensor | None = None) -> Tensor:
        """Return the losses of windows after a context, float64 `[B, 1]`."""
        read = rows[:, :-1] if corrupted is None else corrupted
        scored = torch.ones(len(rows), self._targets, dtype=torch.bool)
        if is_masked(model):
            scored = (read != rows[:, 1:])[:, -self._targets :].cpu()
            if not bool(scored.any(dim=1).all()):
                raise ShapeError(
                    f"None of the last {self._targets} tokens of a window is masked, so there is nothing to score. "
                    "Give more targets, or another seed."
                )
        read = read[:, -context:]
        if self._start is not None:
            read = torch.cat((torch.full_like(read[:, :1], self._start), read[:, 1:]), dim=1)
        logits = predictions(model, read, rows[:, -context:], self._targets)
        # A loss may be infinite, so the others are not multiplied by 0.
        lost = losses(logits, rows[:, -self._targets :]).masked_fill(~scored, 0)
        return (lost.sum(dim=1) / scored.sum(dim=1))[:, None]
