"""Copying from a meaningless context: a repeated sequence (induction), and values of keys (associative recall)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import OptionError, ShapeError
from hf_posenc.recipes.evaluation.grid import LOSS, Grid, share
from hf_posenc.recipes.evaluation.measure import ByLength, Workers, different
from hf_posenc.recipes.evaluation.predictions import correct, losses, predictions
from hf_posenc.recipes.plots.curves import trained_mark


class Copying(ByLength):
    """Prediction of tokens that can only be copied from earlier in a random text.

    The measures are undefined for an encoder-decoder, whose encoder would read the answers.

    Args:
        symbols: Token ids that the texts are drawn from, int64 `[n]`.
        lengths: Tokens of the texts.
        samples: Texts per length.
        seed: Random seed of the texts.
        trained_length: Tokens per window in the model's training, for the picture; `None` if unknown.

    Raises:
        OptionError: Lengths are empty or repeated, or the symbols are too few.
        ShapeError: A length is impossible.
    """

    axis = "tokens read"

    def __init__(
        self,
        symbols: Tensor,
        lengths: Sequence[int],
        *,
        samples: int = 16,
        seed: int = 0,
        trained_length: int | None = None,
    ) -> None:
        self._symbols, self._samples = symbols, samples
        self._check(lengths)
        self._lengths = tuple(sorted(different("lengths", lengths)))
        generator = torch.Generator().manual_seed(seed)
        self._rows = [(self._text(length, generator),) for length in self._lengths for _ in range(samples)]
        self.tokens = sum(row.numel() for (row,) in self._rows)
        self.mark, self.note = trained_mark(trained_length), self._note()

    @abstractmethod
    def _note(self) -> str:
        """Return the definition of the measured quantity."""

    @abstractmethod
    def _check(self, lengths: Sequence[int]) -> None:
        """Raise unless there are texts of these lengths."""

    @abstractmethod
    def _text(self, length: int, generator: torch.Generator) -> Tensor:
        """Return a text, int64 `[length]`."""

    @abstractmethod
    def _scored(self, length: int) -> Tensor:
        """Return the places of the scored tokens, ascending, int64 `[n]`."""

    def check(self, model: Any) -> None:
        super().check(model)
        if model.config.is_encoder_decoder:
            raise OptionError(
                f"{type(self).__name__} is not defined for {type(model).__name__}: its encoder would read the answers. "
                "Leave it out."
            )

    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        def score(rows: Tensor) -> Tensor:
            places = self._scored(rows.shape[1])
            first, labels = int(places[0]), rows[:, places]
            logits = predictions(model, rows[:, :-1], rows[:, first:])[:, places - first]
            return torch.stack(
                [correct(logits, labels).double().mean(dim=1), losses(logits, labels).mean(dim=1)], dim=1
            )

        count = len(self._symbols)
        quantities = (share("right tokens", 1 / count), replace(LOSS, guess=math.log(count)))
        found = self._by_length(workers, score, quantities).permute(2, 0, 1)
        axes = {self.axis: self._lengths}
        return tuple(Grid(quantity, axes, part) for quantity, part in zip(quantities, found, strict=True))


class InductionCopy(Copying):
    """Prediction of the second copy of a random sequence (Olsson et al. 2022, arXiv 2209.11895).

    The sequence is meaningless, so the model can only copy from half of the text earlier. The first token of the second
    copy is unpredictable and not scored. Lengths are those of both copies together, and even. The arguments are those
    of `Copying`.
    """

    name = "induction"
    title = "Copying a random sequence by length"
    axis = "tokens in both copies"

    def _note(self) -> str:
        return (
            f"A random sequence of {len(self._symbols)} different tokens, read twice; {self._samples} samples per "
            "length. Columns give the length of both copies together. The second copy is scored, without its first "
            "token."
        )

    def _check(self, lengths: Sequence[int]) -> None:
        if any(length % 2 or length < 4 for length in lengths):
            raise ShapeError(f"lengths={tuple(lengths)}: expected even numbers, at least 4: both copies together.")

    def _text(self, length: int, generator: torch.Generator) -> Tensor:
        return self._symbols[torch.randint(len(self._symbols), (length // 2,), generator=generator)].repeat(2)

    def _scored(self, length: int) -> Tensor:
        return torch.arange(length // 2 + 1, length)


class AssociativeRecall(Copying):
    """Recall of the values of several keys (multi-query associative recall, Arora et al. 2023, arXiv 2312.04927).

    The text begins with pairs of a key and its value, goes on with other random tokens, and ends with all keys in
    another order, each followed by its value, which is scored. The arguments are those of `Copying`.
    """

    name = "mqar"
    title = "Recalling the values of keys by length"

    _pairs = 16

    def _note(self) -> str:
        return (
            f"{self._pairs} pairs of a key and a value, random tokens, and all keys again, each before its value. The "
            f"values are scored there; {len(self._symbols)} different tokens, {self._samples} samples per length."
        )

    def _check(self, lengths: Sequence[int]) -> None:
        least = 4 * self._pairs
        if any(length < least for length in lengths):
            raise ShapeError(f"lengths={tuple(lengths)}: expected at least {least}, for {self._pairs} pairs twice.")
        if len(self._symbols) <= self._pairs:
            raise OptionError(f"Got {len(self._symbols)} symbols; expected more than there are keys, {self._pairs}.")

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
