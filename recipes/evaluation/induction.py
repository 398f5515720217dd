"""Copying from a meaningless context: a repeated sequence (induction), and values of keys (associative recall)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import OptionError, ShapeError
from hf_posenc.recipes.evaluation.grid import LOSS, share
from hf_posenc.recipes.evaluation.measure import ByLength, different
from hf_posenc.recipes.evaluation.predictions import correct, losses, predictions
from hf_posenc.recipes.plots.curves import trained_mark


class InductionCopy(ByLength):
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
    axis = "tokens in both copies"

    def __init__(
        self,
        symbols: Tensor,
        lengths: Sequence[int],
        *,
        samples: int = 16,
        seed: int = 0,
        trained_length: int | None = None,
    ) -> None:
        self._symbols, self._lengths = symbols, tuple(sorted(different("lengths", lengths)))
        self._axes, count = {self.axis: self._lengths}, len(symbols)
        self.note = f"{self._says()} {count} different tokens; {samples} samples per length. {self._ends}"
        self._quantities = (share("right tokens", 1 / count), replace(LOSS, guess=math.log(count)))
        generator = torch.Generator().manual_seed(seed)
        self._rows = [(self._text(length, generator),) for length in self._lengths for _ in range(samples)]
        self.tokens = sum(row.numel() for (row,) in self._rows)
        self.mark = trained_mark(trained_length)

    def _says(self) -> str:
        """Return the definition of the quantity, and raise unless there are texts of the lengths."""
        if any(length % 2 or length < 4 for length in self._lengths):
            raise ShapeError(f"lengths={self._lengths}: expected even numbers, at least 4: both copies together.")
        return (
            "A random sequence, read twice. Columns give the length of both copies together. The second copy is "
            "scored, without its first token."
        )

    def _text(self, length: int, generator: torch.Generator) -> Tensor:
        """Return a text, int64 `[length]`."""
        return self._symbols[torch.randint(len(self._symbols), (length // 2,), generator=generator)].repeat(2)

    def _scored(self, length: int) -> Tensor:
        """Return the places of the scored tokens, ascending, int64 `[n]`."""
        return torch.arange(length // 2 + 1, length)

    def check(self, model: Any) -> None:
        super().check(model)
        if model.config.is_encoder_decoder:
            raise OptionError(
                f"{type(self).__name__} is not defined for {type(model).__name__}: its encoder would read what "
                "is scored. Leave it out."
            )

    def _score(self, model: Any, *parts: Tensor) -> Tensor:
        (rows,) = parts
        places = self._scored(rows.shape[1])
        first, labels = int(places[0]), rows[:, places]
        logits = predictions(model, rows[:, :-1], rows[:, first:])[:, places - first]
        return torch.stack([correct(logits, labels).double().mean(dim=1), losses(logits, labels).mean(dim=1)], dim=1)


class AssociativeRecall(InductionCopy):
    """Recall of the values of several keys (multi-query associative recall, Arora et al. 2023, arXiv 2312.04927).

    The text begins with pairs of a key and its value, goes on with other random tokens, and ends with all keys in
    another order, each followed by its value, which is scored. The arguments are those of `InductionCopy`, for any
    length that has room for the pairs twice.
    """

    name = "mqar"
    title = "Recalling the values of keys by length"
    axis = "tokens read"

    _pairs = 16

    def _says(self) -> str:
        least = 4 * self._pairs
        if self._lengths[0] < least:
            raise ShapeError(f"lengths={self._lengths}: expected at least {least}, for {self._pairs} pairs twice.")
        if len(self._symbols) <= self._pairs:
            raise OptionError(f"Got {len(self._symbols)} symbols; expected more than there are keys, {self._pairs}.")
        return (
            f"{self._pairs} pairs of a key and a value, random tokens, and all keys again, each before its value, "
            "which is scored there."
        )

    def _text(self, length: int, generator: torch.Generator) -> Tensor:
        symbols = self._symbols[torch.randperm(len(self._symbols), generator=generator)]
        keys, others = symbols[: self._pairs], symbols[self._pairs :]
        # A key stands nowhere else, so it has one value.
        drawn = others[torch.randint(len(others), (length - 3 * self._pairs,), generator=generator)]
        pairs = torch.stack([keys, drawn[: self._pairs]], dim=1)
        asked = pairs[torch.randperm(self._pairs, generator=generator)]
        return torch.cat([pairs.flatten(), drawn[self._pairs :], asked.flatten()])

    def _scored(self, length: int) -> Tensor:
        return torch.arange(length - 2 * self._pairs + 1, length, 2)
