"""Induction: repetition of an earlier sequence, by its distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import OptionError, ShapeError
from hf_posenc.recipes.evaluation.grid import LOSS, Grid, share
from hf_posenc.recipes.evaluation.measure import Measure, Workers, different
from hf_posenc.recipes.evaluation.predictions import correct, losses, predictions
from hf_posenc.recipes.plots.curves import trained_mark


class InductionCopy(Measure):
    """Prediction of the second copy of a random sequence (Olsson et al. 2022, arXiv 2209.11895).

    The sequence is meaningless, so the model can only copy from half of the text earlier. The first token of the second
    copy is unpredictable and not scored. The measure is undefined for an encoder-decoder, whose encoder would read both
    copies.

    Args:
        symbols: Token ids that the sequences are drawn from, int64 `[n]`.
        lengths: Tokens of both copies together; even numbers.
        samples: Sequences per length.
        seed: Random seed of the sequences.
        trained_length: Tokens per window in the model's training, for the picture; `None` if unknown.

    Raises:
        OptionError: Lengths are empty or repeated.
        ShapeError: A length is odd or shorter than two tokens per copy.
    """

    name = "induction"
    title = "Copying a random sequence by length"

    def __init__(
        self,
        symbols: Tensor,
        lengths: Sequence[int],
        *,
        samples: int = 16,
        seed: int = 0,
        trained_length: int | None = None,
    ) -> None:
        if any(length % 2 or length < 4 for length in lengths):
            raise ShapeError(f"lengths={tuple(lengths)}: expected even numbers, at least 4: both copies together.")
        self._lengths = tuple(sorted(different("lengths", lengths)))
        self._samples, self._symbols = samples, symbols
        generator = torch.Generator().manual_seed(seed)
        self._rows = [
            (symbols[torch.randint(len(symbols), (length // 2,), generator=generator)].repeat(2),)
            for length in self._lengths
            for _ in range(samples)
        ]
        self.tokens = sum(row.numel() for (row,) in self._rows)
        self.mark = trained_mark(trained_length)
        self.note = (
            f"A random sequence of {len(symbols)} different tokens, read twice; {samples} samples per length. Columns "
            "give the length of both copies together. The second copy is scored, without its first token."
        )

    def check(self, model: Any) -> None:
        super().check(model)
        if model.config.is_encoder_decoder:
            raise OptionError(
                f"InductionCopy is not defined for {type(model).__name__}: its encoder would read both copies. "
                "Leave it out."
            )

    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        def score(rows: Tensor) -> Tensor:
            second = rows[:, rows.shape[1] // 2 + 1 :]
            logits = predictions(model, rows[:, :-1], second)
            return torch.stack(
                [correct(logits, second).double().mean(dim=1), losses(logits, second).mean(dim=1)], dim=1
            )

        found = workers.map(score, self._rows, 2).view(len(self._lengths), self._samples, 2)
        axes = {"tokens in both copies": self._lengths}
        count = len(self._symbols)
        return (
            Grid(share("right tokens", 1 / count), axes, found[..., 0]),
            Grid(replace(LOSS, guess=math.log(count)), axes, found[..., 1]),
        )
