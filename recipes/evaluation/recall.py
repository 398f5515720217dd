"""Recall of what stands earlier in a text: a random sequence, the values of keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_posenc.errors import OptionError, ShapeError
from hf_posenc.recipes.evaluation.grid import Grid, share
from hf_posenc.recipes.evaluation.measure import Measure, Piece, Row, Workers, answer_predictions, correct, different
from hf_posenc.recipes.loading import auto_class
from hf_posenc.recipes.reports.curves import trained_mark

# Number of symbols in the measures of a run: few and frequent, so that every model knows them.
_SYMBOLS = 64
# Keys that have values.
_PAIRS = 16


class InductionCopy(Measure):
    """Prediction of the second copy of a random sequence (Olsson et al. 2022, arXiv 2209.11895).

    The sequence is meaningless, so the model can only copy from half of the text earlier. The first token of the second
    copy is unpredictable and not scored. The measure is undefined for an encoder-decoder, whose encoder would read both
    copies. It ends at the first length where a model does no better than guessing.

    Args:
        symbols: Token ids that the sequences are drawn from, int64 `[n]`.
        lengths: Tokens of both copies together; even numbers.
        samples: Sequences per length.
        seed: Random seed of the sequences.
        start: Token before each text, see `ContextPerplexity`; it is not counted.
        trained_length: Tokens per window in the model's training, for the picture; `None` if unknown.

    Raises:
        OptionError: Lengths are empty or repeated.
        ShapeError: A length is odd or shorter than two tokens per copy.
    """

    name = "induction"
    title = "Copying a random sequence by length"
    takes = (AutoModelForCausalLM,)
    axis: ClassVar[str] = "tokens in both copies"
    # Each token of an answer is scored, or every other one.
    _step: ClassVar[int] = 1
    _says: ClassVar[str] = (
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
        start: int | None = None,
        trained_length: int | None = None,
    ) -> None:
        self._lengths, self._samples, count = different("lengths", lengths), samples, len(symbols)
        self._quantity = share("right tokens", 1 / count)
        generator = torch.Generator().manual_seed(seed)
        first = symbols.new_tensor([] if start is None else [start])
        rows = (self._row(symbols, length, generator) for length in self._lengths for _ in range(samples))
        self._rows: list[Row] = [(torch.cat((first, prompt)), answer) for prompt, answer in rows]
        self.note = (
            f"{self._says} {count} different tokens; {samples} samples per length. Where a model does no better than "
            "guessing, longer texts are left out."
        )
        self.mark = trained_mark(trained_length)

    def _row(self, symbols: Tensor, length: int, generator: torch.Generator) -> Row:
        if length % 2 or length < 4:
            raise ShapeError(f"lengths: got {length}; expected even numbers, at least 4: both copies together.")
        once = _draw(symbols, length // 2, generator)
        return torch.cat([once, once[:1]]), once[1:]

    def pieces(self) -> Sequence[Piece]:
        size = self._samples
        parts = (self._rows[start : start + size] for start in range(0, len(self._rows), size))
        return [(length, part, self._score) for length, part in zip(self._lengths, parts, strict=True)]

    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        found = self._by_piece(model, workers, lambda samples: not self._quantity.shows(samples))
        return (Grid(self._quantity, {self.axis: self._lengths}, found),)

    def _score(self, model: Any, prompts: Tensor, answers: Tensor) -> Tensor:
        logits = answer_predictions(model, prompts, answers)
        return correct(logits[:, :: self._step], answers[:, :: self._step]).double().mean(dim=1, keepdim=True)


def _draw(symbols: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return symbols[torch.randint(len(symbols), (count,), generator=generator)]


class AssociativeRecall(InductionCopy):
    """Recall of the values of several keys (multi-query associative recall, Arora et al. 2023, arXiv 2312.04927).

    The text begins with pairs of a key and its value, goes on with other random tokens, and ends with all keys in
    another order, each followed by its value, which is scored. The arguments are those of `InductionCopy`, for any
    length that has room for the pairs twice.
    """

    name = "mqar"
    title = "Recalling the values of keys by length"
    axis = "tokens read"
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


def ordinary_tokens(ids: Tensor, special: Collection[int] = ()) -> Tensor:
    """Return the different tokens of a text `[tokens]` but special ones, the most frequent first, int64 `[n]`.

    A model knows these tokens; its vocabulary may also hold tokens that were never trained.
    """
    found, counts = torch.unique(ids, return_counts=True)
    ranked: Tensor = found[counts.argsort(descending=True, stable=True)]
    return ranked[~torch.isin(ranked, torch.tensor(sorted(special), dtype=ranked.dtype))]


# What a run measures besides perplexity, by the name of the ability.
RECALLS: dict[str, type[InductionCopy]] = {"copy": InductionCopy, "recall": AssociativeRecall}


def recalls_for(
    config: Any, symbols: Tensor, length: int, *, samples: int, start: int | None = None
) -> dict[str, InductionCopy]:
    """Return the measures of copying and recalling, by `RECALLS`, that a model and a length of texts allow.

    The symbols are ordered by frequency, see `ordinary_tokens`; `start` is the token before each text.
    """
    symbols, length = symbols[:_SYMBOLS], length // 2 * 2
    fits = {"copy": length >= 4 and len(symbols) > 1, "recall": length >= 4 * _PAIRS and len(symbols) > _PAIRS}
    return {
        name: measure(symbols, [length], samples=samples, start=start)
        for name, measure in RECALLS.items()
        if fits[name] and auto_class(config) in measure.takes
    }
