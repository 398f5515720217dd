"""Retrieval of a passkey from a long context, by its depth and the length of the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import OptionError, ShapeError
from hf_posenc.recipes.evaluation.grid import share, successes
from hf_posenc.recipes.evaluation.measure import ByLength, different
from hf_posenc.recipes.evaluation.predictions import answer_predictions, correct
from hf_posenc.recipes.evaluation.text import ordinary_tokens

# Number of symbols of cue and key: few and frequent, so that every model knows them.
_SYMBOLS = 64
# Tokens of a cue and of a key.
_CUE, _KEY = 4, 5


class NeedleRetrieval(ByLength):
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
        self._axes = {"depth": different("depths", depths), "tokens read": tuple(sorted(different("lengths", lengths)))}
        self._quantities = (successes("whole key", len(self._symbols) ** -_KEY), share("rank of the key", 0.5))
        generator = torch.Generator().manual_seed(seed)
        self._rows = [
            row for length in sorted(lengths) for row in _rows(ids, length, depths, samples, self._symbols, generator)
        ]
        self.tokens = sum(part.numel() for row in self._rows for part in row)
        self.note = (
            f"A key of {_KEY} tokens, each one of {len(self._symbols)} symbols, stands in a text at the "
            f"given depth (0 is the beginning); {samples} samples each. Whole key: the greedy continuation is the key. "
            f"Rank: share of the other symbols that are less likely than the right one. {self._ends}"
        )

    def _score(self, model: Any, *parts: Tensor) -> Tensor:
        prompts, keys = parts
        logits = answer_predictions(model, prompts, keys)
        whole = correct(logits, keys).all(dim=1)
        return torch.stack([whole.double(), _rank(logits.cpu(), keys, self._symbols)], dim=1)


def _rows(
    ids: Tensor, length: int, depths: Sequence[float], samples: int, symbols: Tensor, generator: torch.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Return prompts `[length - key + 1]` and keys `[key]`; the depths of a sample are consecutive."""
    room = length + 1 - 2 * (_CUE + _KEY)
    if not 0 < room <= len(ids):
        raise ShapeError(
            f"A needle of {_CUE + _KEY} tokens in {length} leaves {room} of text, and there are {len(ids)}. Give "
            "longer lengths, or more text."
        )
    found = []
    for _ in range(samples):
        key, cue = (_draw(symbols, count, generator) for count in (_KEY, _CUE))
        start = int(torch.randint(len(ids) - room + 1, (), generator=generator))
        text = ids[start : start + room]
        for depth in depths:
            place = round(depth * room)
            found.append((torch.cat([text[:place], cue, key, text[place:], cue]), key))
    return found


def _rank(logits: Tensor, keys: Tensor, symbols: Tensor) -> Tensor:
    """Return the mean share of the other symbols that are less likely than the right one, float64 `[B]`."""
    right = logits.gather(2, keys[:, :, None])
    others = logits[:, :, symbols]
    # Equally likely symbols count half; the right symbol itself, always equal, is subtracted.
    below = (others < right).double().sum(dim=2) + ((others == right).double().sum(dim=2) - 1) / 2
    return (below / (len(symbols) - 1)).mean(dim=1)


def _draw(symbols: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return symbols[torch.randint(len(symbols), (count,), generator=generator)]
