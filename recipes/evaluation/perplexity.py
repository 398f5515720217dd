"""Perplexity by context length, and by position within the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import ShapeError
from hf_posenc.recipes.evaluation.curve import TARGETS, Corruption, check_corruption, spread_windows
from hf_posenc.recipes.evaluation.grid import PERPLEXITY, Grid
from hf_posenc.recipes.evaluation.lengths import readable_curve
from hf_posenc.recipes.evaluation.measure import Measure, different, trained_mark
from hf_posenc.recipes.evaluation.predictions import losses, predictions
from hf_posenc.recipes.evaluation.workers import Workers


class ContextPerplexity(Measure):
    """Perplexity of the same tokens after contexts of different lengths.

    The values are those of `hf_posenc.recipes.evaluation.curve.context_curve`. The decoder of an encoder-decoder
    predicts the text, and its encoder reads it corrupted.

    Args:
        ids: Token ids of a text, int64 `[tokens]`.
        contexts: Context lengths in tokens, each at least `targets`.
        windows: Number of windows of the text; one sample each.
        targets: Scored tokens per window.
        corrupt: Function that corrupts token ids `[B, n]` for the encoder of an encoder-decoder.
        trained_length: Tokens per window in the model's training, for the picture; `None` if unknown.

    Raises:
        OptionError: Contexts are empty or repeated.
        ShapeError: A context is shorter than the targets, or the text is too short.
    """

    name = "perplexity"
    title = "Perplexity by context length"

    def __init__(
        self,
        ids: Tensor,
        contexts: Sequence[int],
        *,
        windows: int = 16,
        targets: int = TARGETS,
        corrupt: Corruption | None = None,
        trained_length: int | None = None,
    ) -> None:
        self._contexts = tuple(sorted(different("contexts", contexts)))
        if self._contexts[0] < targets:
            raise ShapeError(f"contexts={tuple(contexts)}: expected at least {targets} tokens, the number of targets.")
        self._targets, self._corrupt = targets, corrupt
        self._rows = spread_windows(ids, max(contexts) + 1, windows, targets=targets)
        self.tokens = self._rows.numel()
        self.mark = trained_mark(trained_length)
        self.note = (
            f"Perplexity of the same {targets} tokens in each of {windows} windows of text. Columns give the tokens "
            "read, the scored ones included."
        )

    def check(self, model: Any) -> None:
        check_corruption(type(self).__name__, model, self._corrupt)

    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        corrupt = self._corrupt if model.config.is_encoder_decoder else None

        def curve(rows: Tensor) -> Tensor:
            size = len(rows)
            # `readable_curve` cuts the concatenated windows back into these windows.
            found = readable_curve(
                model,
                rows.flatten(),
                self._contexts,
                windows=size,
                targets=self._targets,
                batch_size=size,
                corrupt=corrupt,
            )
            values = torch.full((size, len(self._contexts)), torch.nan, dtype=torch.float64)
            values[:, [self._contexts.index(context) for context in found.contexts]] = found.losses.T
            return values

        found = workers.map(curve, [(row,) for row in self._rows], len(self._contexts))
        return (Grid(PERPLEXITY, {"tokens read": self._contexts}, found.T),)


class PositionPerplexity(Measure):
    """Perplexity of tokens by their position within one long context.

    Different positions hold different tokens, so a single column says little; the course over positions shows where a
    model gets worse. For an encoder-decoder, positions are those of the decoder, whose text the encoder reads
    corrupted.

    Args:
        ids: Token ids of a text, int64 `[tokens]`.
        context: Number of tokens read.
        windows: Number of windows; one sample each.
        bins: Number of equal parts of the context.
        corrupt: Function that corrupts token ids `[B, n]` for the encoder of an encoder-decoder.
        trained_length: Tokens per window in the model's training, for the picture; `None` if unknown.

    Raises:
        ShapeError: The context does not divide into the bins, or the text is too short.
    """

    name = "position"
    title = "Perplexity by position within the context"

    def __init__(
        self,
        ids: Tensor,
        context: int,
        *,
        windows: int = 16,
        bins: int = 16,
        corrupt: Corruption | None = None,
        trained_length: int | None = None,
    ) -> None:
        if context < bins or context % bins:
            raise ShapeError(f"context={context}: expected a multiple of bins={bins}, from that on.")
        self._width, self._corrupt = context // bins, corrupt
        self._rows = spread_windows(ids, context + 1, windows, targets=1)
        self._ends = tuple(range(self._width, context + 1, self._width))
        self.tokens = self._rows.numel()
        self.mark = trained_mark(trained_length)
        self.note = (
            f"Perplexity of the {self._width} tokens up to the position of the column, in {windows} windows of "
            f"{context} tokens."
        )

    def check(self, model: Any) -> None:
        check_corruption(type(self).__name__, model, self._corrupt)

    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        def by_bin(rows: Tensor) -> Tensor:
            labels = rows[:, 1:]
            found = losses(predictions(model, self._read(model, rows), labels), labels)
            return found.view(len(rows), -1, self._width).mean(dim=2)

        found = workers.map(by_bin, [(row,) for row in self._rows], len(self._ends))
        return (Grid(PERPLEXITY, {"position (tokens)": self._ends}, found.T),)

    def _read(self, model: Any, rows: Tensor) -> Tensor:
        if not model.config.is_encoder_decoder:
            return rows[:, :-1]
        assert self._corrupt is not None
        return self._corrupt(rows[:, 1:])
