"""Recall of what stands earlier in a text: a hidden key, a random sequence, the values of keys."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_posenc.errors import OptionError, ShapeError
from hf_posenc.recipes.evaluation.grid import Grid, Point, Quantity, share, successes
from hf_posenc.recipes.evaluation.measure import Measure, Piece, Row, Workers, different
from hf_posenc.recipes.evaluation.predictions import answer_predictions, correct, losses
from hf_posenc.recipes.evaluation.text import ordinary_tokens
from hf_posenc.recipes.loading import auto_class
from hf_posenc.recipes.reports.curves import trained_mark

# Number of symbols of cue and key: few and frequent, so that every model knows them.
_SYMBOLS = 64
# Tokens of a cue and of a key.
_CUE, _KEY = 4, 5
# Keys that have values.
_PAIRS = 16


class Recall(Measure):
    """A measure of ascending lengths, which ends at the first one where a model does no better than guessing.

    The last axis has the lengths. Rows are prompts and answers, ordered by length, then by sample, then by the points
    of other axes.
    """

    # Each token of an answer is scored, or every other one.
    _step: ClassVar[int] = 1

    def __init__(
        self, axes: Mapping[str, tuple[Point, ...]], quantities: Sequence[Quantity], rows: Sequence[Row], note: str
    ) -> None:
        self._axes, self._quantities, self._rows = axes, quantities, rows
        self.note = f"{note} Where a model does no better than guessing, longer texts are left out."

    @abstractmethod
    def _found(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return the samples `[B]` of each quantity from logits `[B, n, vocabulary]` of labels `[B, n]`."""

    def _score(self, model: Any, prompts: Tensor, answers: Tensor) -> Tensor:
        logits = answer_predictions(model, prompts, answers)
        found = self._found(logits[:, :: self._step], answers[:, :: self._step])
        return torch.stack([samples.double() for samples in found], dim=1)

    def pieces(self) -> Sequence[Piece]:
        """Return the rows of each length."""
        *_, lengths = self._axes.values()
        size = len(self._rows) // len(lengths)
        return [(int(n), self._rows[i * size : (i + 1) * size], self._score) for i, n in enumerate(lengths)]

    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        *others, lengths = map(len, self._axes.values())
        width = len(self._quantities)
        found = torch.full((lengths, len(self._rows) // lengths, width), torch.nan, dtype=torch.float64)
        for part, (_, rows, function) in zip(found, self.pieces(), strict=True):
            part[:] = workers.map(partial(function, model), rows, width)
            if not any(quantity.shows(samples) for quantity, samples in zip(self._quantities, part.T, strict=True)):
                break
        found = found.view(lengths, -1, *others, width)
        # Quantities come first, then other axes, lengths and samples.
        parts = found.permute(-1, *range(2, found.ndim - 1), 0, 1)
        return tuple(Grid(quantity, self._axes, part) for quantity, part in zip(self._quantities, parts, strict=True))


class NeedleRetrieval(Recall):
    """Retrieval of a key hidden in the context, prompted with the cue that announced it.

    The model reads a text of exactly the given length, with cue and key at the given depth and the cue again at the
    end. Its greedy continuation is compared with the key. Small models seldom repeat a whole key, so the rank tells
    more about them: the share of the other symbols that the model considers less likely than the right one, averaged
    over the key. A model that remembers nothing reaches 50 %. The same texts and keys are used at all depths.

    Args:
        ids: Token ids of the text that hides the needle, int64 `[tokens]`.
        lengths: Context lengths in tokens.
        depths: Places of the needle in the text, from 0 (its beginning) to 1 (right before the last cue).
        samples: Keys and texts per length.
        symbols: Token ids, the most frequent first, int64 `[n]`; by default those of the text. Cue and key are drawn
            from the first 64, and the key is ranked among these.
        seed: Random seed of keys and texts.

    Raises:
        ShapeError: A length leaves no room for text.
        OptionError: A depth is out of range; lengths or depths are empty or repeated.
    """

    name = "needle"
    title = "Retrieval of a passkey by depth and length"

    def __init__(
        self,
        ids: Tensor,
        lengths: Sequence[int],
        *,
        depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
        samples: int = 8,
        symbols: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        if not all(0 <= depth <= 1 for depth in depths):
            raise OptionError(f"depths={tuple(depths)}: expected numbers from 0 (the beginning) to 1 (the end).")
        self._symbols = (ordinary_tokens(ids) if symbols is None else symbols)[:_SYMBOLS]
        depths, lengths = different("depths", depths), different("lengths", lengths)
        generator = torch.Generator().manual_seed(seed)
        texts = [self._text(ids, length, generator) for length in lengths for _ in range(samples)]
        super().__init__(
            {"depth": depths, "tokens read": lengths},
            (successes("whole key", len(self._symbols) ** -_KEY), share("rank of the key", 0.5)),
            [_hidden(*text, depth) for text in texts for depth in depths],
            f"A key of {_KEY} tokens, each one of {len(self._symbols)} symbols, stands in a text at the "
            f"given depth (0 is the beginning); {samples} samples each. Whole key: the greedy continuation is the key. "
            "Rank: share of the other symbols that are less likely than the right one.",
        )

    def _text(self, ids: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return a text that leaves room for cue, key and cue, less the token that is not read; key and cue."""
        room = length + 1 - 2 * (_CUE + _KEY)
        if not 0 < room <= len(ids):
            raise ShapeError(
                f"A needle of {_CUE + _KEY} tokens in {length} leaves {room} of text, and there are {len(ids)}. Give "
                "longer lengths, or more text."
            )
        key, cue = (_draw(self._symbols, count, generator) for count in (_KEY, _CUE))
        start = int(torch.randint(len(ids) - room + 1, (), generator=generator))
        return ids[start : start + room], key, cue

    def _found(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        right, others = logits.cpu().gather(2, labels[:, :, None]), logits.cpu()[:, :, self._symbols]
        # Equally likely symbols count half; the right symbol itself, always equal, is subtracted.
        below = (others < right).double().sum(dim=2) + ((others == right).double().sum(dim=2) - 1) / 2
        return correct(logits, labels).all(dim=1), (below / (len(self._symbols) - 1)).mean(dim=1)


def _hidden(text: Tensor, key: Tensor, cue: Tensor, depth: float) -> Row:
    """Return a prompt, which ends with the cue, and the key."""
    place = round(depth * len(text))
    return torch.cat([text[:place], cue, key, text[place:], cue]), key


def _draw(symbols: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return symbols[torch.randint(len(symbols), (count,), generator=generator)]


class InductionCopy(Recall):
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
    takes = (AutoModelForCausalLM,)
    axis = "tokens in both copies"
    verb: ClassVar[str] = "copies"
    _says = (
        "A random sequence, read twice. Columns give the length of both copies together. The second copy is scored, "
        "without its first token."
    )

    def __init__(
        self,
        symbols: Tensor,
        lengths: Sequence[int],
        *,
        samples: int = 16,
        seed: int = 0,
        trained_length: int | None = None,
    ) -> None:
        lengths, count = different("lengths", lengths), len(symbols)
        generator = torch.Generator().manual_seed(seed)
        super().__init__(
            {self.axis: lengths},
            (share("right tokens", 1 / count), Quantity("loss", "mean", "nats per token", guess=math.log(count))),
            [self._row(symbols, length, generator) for length in lengths for _ in range(samples)],
            f"{self._says} {count} different tokens; {samples} samples per length.",
        )
        self.mark = trained_mark(trained_length)

    def _row(self, symbols: Tensor, length: int, generator: torch.Generator) -> Row:
        """Return a prompt and its answer, of so many tokens together."""
        if length % 2 or length < 4:
            raise ShapeError(f"lengths: got {length}; expected even numbers, at least 4: both copies together.")
        once = _draw(symbols, length // 2, generator)
        return torch.cat([once, once[:1]]), once[1:]

    def _found(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return correct(logits, labels).double().mean(dim=1), losses(logits, labels).mean(dim=1)


class AssociativeRecall(InductionCopy):
    """Recall of the values of several keys (multi-query associative recall, Arora et al. 2023, arXiv 2312.04927).

    The text begins with pairs of a key and its value, goes on with other random tokens, and ends with all keys in
    another order, each followed by its value, which is scored. The arguments are those of `InductionCopy`, for any
    length that has room for the pairs twice.
    """

    name = "mqar"
    title = "Recalling the values of keys by length"
    axis = "tokens read"
    verb = "recalls"
    _step = 2
    _says = (
        f"{_PAIRS} pairs of a key and a value, random tokens, and all keys again, each before its value, which is "
        "scored there."
    )

    def _row(self, symbols: Tensor, length: int, generator: torch.Generator) -> Row:
        if length < 4 * _PAIRS:
            raise ShapeError(f"lengths: got {length}; expected at least {4 * _PAIRS}, for {_PAIRS} pairs twice.")
        if len(symbols) <= _PAIRS:
            raise OptionError(f"Got {len(symbols)} symbols; expected more than there are keys, {_PAIRS}.")
        symbols = symbols[torch.randperm(len(symbols), generator=generator)]
        keys, others = symbols[:_PAIRS], symbols[_PAIRS:]
        # A key stands nowhere else, so it has one value.
        drawn = _draw(others, length - 3 * _PAIRS, generator)
        pairs = torch.stack([keys, drawn[:_PAIRS]], dim=1)
        asked = pairs[torch.randperm(_PAIRS, generator=generator)].flatten()
        # The answer begins with the first value.
        return torch.cat([pairs.flatten(), drawn[_PAIRS:], asked[:1]]), asked[1:]


# What a run measures besides perplexity, by the name of the ability.
RECALLS: dict[str, type[InductionCopy]] = {"copy": InductionCopy, "recall": AssociativeRecall}


def recalls_for(config: Any, symbols: Tensor, length: int, *, samples: int) -> dict[str, InductionCopy]:
    """Return the measures of copying and recalling, by `RECALLS`, that a model and a length of texts allow.

    The symbols are those of `ordinary_tokens`. The most frequent ones are drawn from, which every model knows.
    """
    symbols, length = symbols[:_SYMBOLS], length // 2 * 2
    fits = {"copy": length >= 4 and len(symbols) > 1, "recall": length >= 4 * _PAIRS and len(symbols) > _PAIRS}
    return {
        name: measure(symbols, [length], samples=samples)
        for name, measure in RECALLS.items()
        if fits[name] and auto_class(config) in measure.takes
    }
