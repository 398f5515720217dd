"""Collators of training: position skipping, mixed lengths, and denoising for encoder-decoders.

All take windows `[B, n]` of token ids and work as the `data_collator` of any `Trainer`. Draws depend only on the seed
and the tokens, so a resumed run, or one with several data workers, draws the same. For packed documents use
`transformers.DataCollatorWithFlattening`; patched models keep its sequences apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import default_data_collator

from hf_posenc.errors import OptionError, RecipeError, ShapeError

Collator = Callable[[list[Any]], dict[str, Tensor]]

# Token in the encoder's input that stands for one to restore.
SENTINEL = "<extra_id_0>"


class PositionSkipping:
    """Give windows the positions of a longer text, by leaving some out (PoSE, Zhu et al. 2024, arXiv 2309.10400).

    Each window is cut into chunks, with a gap of random size in the positions between two chunks; the last position is
    at most `length - 1`. So training sees all distances up to `length` at the price of short windows. Tokens and labels
    are unchanged.

    Args:
        length: Length of the longer text.
        chunks: Number of chunks per window.
        seed: Random seed of cuts and gaps.
        collate: Collator of the batch; stacks by default.

    Raises:
        OptionError: There are fewer than two chunks.
    """

    def __init__(
        self, length: int, *, chunks: int = 2, seed: int = 0, collate: Collator = default_data_collator
    ) -> None:
        if chunks < 2:
            raise OptionError(f"PositionSkipping(chunks={chunks!r}): expected at least 2; one chunk skips nothing.")
        self.length, self.chunks, self.seed, self._collate = length, chunks, seed, collate

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        """Return the batch, with `position_ids` int64 `[B, n]` and a mask of ones."""
        batch = self._collate(examples)
        tokens = batch["input_ids"].shape[1]
        if tokens > self.length or tokens < self.chunks:
            raise ShapeError(
                f"Got windows of {tokens} tokens; expected at least {self.chunks}, one per chunk, and at most "
                f"length={self.length}, the number of positions to choose from."
            )
        batch["position_ids"] = torch.stack([self.positions(row) for row in batch["input_ids"]])
        # Without a mask, transformers would take each gap for the start of another document.
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        return batch

    def positions(self, ids: Tensor) -> Tensor:
        """Return the positions of one window of token ids, int64 `[n]`."""
        tokens, draw = len(ids), content_generator(ids, self.seed)
        cuts = torch.randperm(tokens - 1, generator=draw)[: self.chunks - 1].sort().values + 1
        # Sorted points among the free positions: every set of gaps is equally likely.
        free = self.length - tokens
        gaps = torch.randint(free + 1, (self.chunks - 1,), generator=draw).sort().values
        skipped = torch.zeros(tokens, dtype=torch.long)
        skipped[cuts] = gaps.diff(prepend=torch.zeros(1, dtype=torch.long))
        return torch.arange(tokens) + skipped.cumsum(0)


class MixedLengths:
    """Cut the windows of each batch into shorter ones, all of one length drawn for the batch.

    Args:
        lengths: Lengths to draw from; each must divide the windows' length.
        seed: Random seed.
        collate: Collator of the batch; stacks by default.

    Raises:
        OptionError: `lengths` is empty, or has a length below 1.
    """

    def __init__(self, lengths: Sequence[int], *, seed: int = 0, collate: Collator = default_data_collator) -> None:
        if not lengths or min(lengths) < 1:
            raise OptionError(f"MixedLengths(lengths={lengths!r}): expected one or more positive lengths.")
        self.lengths, self.seed, self._collate = tuple(lengths), seed, collate

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        """Return the batch, every tensor `[B * n / length, length]`."""
        batch = self._collate(examples)
        draw = content_generator(batch["input_ids"], self.seed)
        return cut(batch, draw_length(self.lengths, draw))


class Denoising:
    """Collator that replaces random encoder inputs by the first sentinel; the labels stay whole.

    To write the next token the decoder must find its place in the source, which needs positions. (T5's own span
    corruption, where only the spans are written, gives the decoder little to look up.) Draws depend only on the seed
    and the window, so a resumed run draws the same.

    Args:
        tokenizer: The model's tokenizer; it must know the sentinel.
        share: Share of tokens to replace, from 0 to 1.
        seed: Random seed.
        collate: Collator of the batch; stacks by default.

    Raises:
        RecipeError: The tokenizer has no sentinel.
    """

    def __init__(
        self, tokenizer: Any, *, share: float = 0.15, seed: int = 0, collate: Collator = default_data_collator
    ) -> None:
        vocabulary = tokenizer.get_vocab()
        if SENTINEL not in vocabulary:
            raise RecipeError(
                f"The {type(tokenizer).__name__} has no token {SENTINEL}, which marks what is to be restored; expected "
                "a tokenizer of the T5 family. Add the token to it, and train the model's embedding of it."
            )
        self.sentinel: int = vocabulary[SENTINEL]
        self.share, self.seed, self._collate = share, seed, collate

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        """Return the batch with corrupted `input_ids` `[B, n]`; the model makes decoder inputs from the labels."""
        batch = self._collate(examples)
        return batch | {"input_ids": self.corrupt(batch["input_ids"])}

    def corrupt(self, ids: Tensor) -> Tensor:
        """Return token ids `[B, n]` with a share replaced by the sentinel; equal windows are corrupted equally."""
        replaced = [torch.rand(len(row), generator=content_generator(row, self.seed)) < self.share for row in ids]
        return ids.masked_fill(torch.stack(replaced).to(ids.device), self.sentinel)


def draw_length(lengths: Sequence[int], draw: torch.Generator) -> int:
    """Return one of the lengths, drawn uniformly."""
    return lengths[int(torch.randint(len(lengths), (1,), generator=draw))]


def cut(batch: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """Cut the windows of a batch into shorter ones: every tensor becomes `[B * n / length, length]`.

    Raises:
        ShapeError: The length does not divide the windows' length.
    """
    tokens = batch["input_ids"].shape[1]
    if tokens % length:
        raise ShapeError(f"Got windows of {tokens} tokens; expected a multiple of length {length}.")
    return {name: tensor.reshape(-1, length) for name, tensor in batch.items()}


def content_generator(ids: Tensor, seed: int) -> torch.Generator:
    """Return a generator seeded by token ids and a seed."""
    return torch.Generator().manual_seed(zlib.crc32(ids.cpu().contiguous().numpy().tobytes(), seed))
