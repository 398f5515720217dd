"""Collators of training: skipped positions, mixed lengths, denoising for encoder-decoders, and masking for encoders.

All take windows `[B, n]` of token ids and work as the `data_collator` of any `Trainer`. Draws depend only on the seed
and the tokens, so a resumed run, or one with several data workers, draws the same. For packed documents use
`transformers.DataCollatorWithFlattening`; patched models keep its sequences apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    DataCollatorForLanguageModeling,
    default_data_collator,
)

from hf_posenc.errors import RecipeError, ShapeError
from hf_posenc.recipes.loading import auto_class

Collator = Callable[[list[Any]], dict[str, Tensor]]

# Share of tokens to restore, and the token in the encoder's input that stands for one.
_SHARE = 0.15
SENTINEL = "<extra_id_0>"


class PositionSkipping:
    """Give windows the positions of a longer text, by leaving some out (PoSE, Zhu et al. 2024, arXiv 2309.10400).

    Each window is cut in two, with a gap of random size in the positions between the parts; the last position is at
    most `length - 1`. So training sees all distances up to `length` at the price of short windows. Tokens and labels
    are unchanged.

    The seed draws cuts and gaps, and the `share` of the windows that have a gap. `collate` makes the batch; by default
    it stacks.
    """

    def __init__(
        self, length: int, *, share: float = 1.0, seed: int = 0, collate: Collator = default_data_collator
    ) -> None:
        self.length, self.share, self.seed, self._collate = length, share, seed, collate

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        """Return the batch, with `position_ids` int64 `[B, n]` and a mask of ones."""
        batch = self._collate(examples)
        tokens = batch["input_ids"].shape[1]
        if not 2 <= tokens <= self.length:
            raise ShapeError(
                f"Got windows of {tokens} tokens; expected at least 2, and at most length={self.length}, the number of "
                "positions to choose from."
            )
        batch["position_ids"] = torch.stack([self.positions(row) for row in batch["input_ids"]])
        # Without a mask, transformers would take each gap for the start of another document.
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        return batch

    def positions(self, ids: Tensor) -> Tensor:
        """Return the positions of one window of token ids, int64 `[n]`."""
        tokens, draw = len(ids), content_generator(ids, self.seed)
        cut = 1 + int(torch.randperm(tokens - 1, generator=draw)[0])
        gap = int(torch.randint(self.length - tokens + 1, (), generator=draw))
        if self.share < 1 and float(torch.rand((), generator=draw)) >= self.share:
            gap = 0
        return torch.arange(tokens) + gap * (torch.arange(tokens) >= cut)


class Repetition:
    """Let the second half of a share of the windows repeat the first, so that they show what copying is.

    Ordinary text seldom repeats itself, so attention learns little of it there. The seed draws the windows. `collate`
    makes the batch; by default it stacks. The `start` token of a text, if windows have one, is not repeated.
    """

    def __init__(
        self,
        share: float,
        *,
        seed: int = 0,
        collate: Collator = default_data_collator,
        start: int | None = None,
    ) -> None:
        self.share, self.seed, self._collate, self._first = share, seed, collate, 0 if start is None else 1

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        """Return the batch; labels follow the tokens."""
        batch = self._collate(examples)
        # Another seed than that of skipped positions, which draw from the same tokens.
        draws = torch.cat(
            [torch.rand(1, generator=content_generator(row, self.seed + 1)) for row in batch["input_ids"]]
        )
        repeats, first = draws < self.share, self._first
        half = (batch["input_ids"].shape[1] - first) // 2
        for name in ("input_ids", "labels"):
            if name in batch:
                batch[name] = batch[name].clone()
                once = batch[name][repeats, first : first + half]
                batch[name][repeats, first + half : first + 2 * half] = once
        return batch


class MixedLengths:
    """Let a share of long windows be read as texts of at most `length` tokens, or a causal model unlearns short texts.

    Their positions restart every `length` tokens, which keeps the parts apart as packed documents. Where texts have a
    `start` token, it takes the place of the first token of each part, and is no label there. The seed draws the
    windows.
    """

    def __init__(self, length: int, *, share: float = 0.5, seed: int = 0, start: int | None = None) -> None:
        self.length, self.share, self.seed, self._start = length, share, seed, start

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        """Return the batch, with `position_ids` int64 `[B, n]` if windows are longer than `length`."""
        batch: dict[str, Tensor] = default_data_collator(examples)
        ids = batch["input_ids"]
        if ids.shape[1] > self.length:
            places = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
            draws = torch.cat([torch.rand(1, generator=content_generator(row, self.seed)) for row in ids])
            batch["position_ids"] = torch.where(draws[:, None] < self.share, places % self.length, places)
            if self._start is not None:
                begins = (batch["position_ids"] == 0) & (places > 0)
                batch["input_ids"] = ids.masked_fill(begins, self._start)
                if "labels" in batch:
                    batch["labels"] = batch["labels"].masked_fill(begins, -100)
        return batch


class Denoising:
    """Collator that replaces random encoder inputs by the first sentinel; the labels stay whole.

    To write the next token the decoder must find its place in the source, which needs positions. (T5's own span
    corruption, where only the spans are written, gives the decoder little to look up.)

    Args:
        tokenizer: The model's tokenizer; it must know the sentinel.
        seed: Random seed.

    Raises:
        RecipeError: The tokenizer has no sentinel.
    """

    def __init__(self, tokenizer: Any, *, seed: int = 0) -> None:
        vocabulary = tokenizer.get_vocab()
        if SENTINEL not in vocabulary:
            raise RecipeError(
                f"The {type(tokenizer).__name__} has no token {SENTINEL}, which marks what is to be restored; expected "
                "a tokenizer of the T5 family. Add the token to it, and train the model's embedding of it."
            )
        self.sentinel: int = vocabulary[SENTINEL]
        self.seed = seed

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        """Return the batch with corrupted `input_ids` `[B, n]`; the model makes decoder inputs from the labels."""
        batch: dict[str, Tensor] = default_data_collator(examples)
        return batch | {"input_ids": self.corrupt(batch["input_ids"])}

    def corrupt(self, ids: Tensor) -> Tensor:
        """Return token ids `[B, n]` with a share replaced by the sentinel; equal windows are corrupted equally."""
        replaced = [torch.rand(len(row), generator=content_generator(row, self.seed)) < _SHARE for row in ids]
        return ids.masked_fill(torch.stack(replaced).to(ids.device), self.sentinel)


class Masking:
    """Collator that masks tokens for a masked language model, as `DataCollatorForLanguageModeling`; they are labels.

    In training some of them are replaced by random tokens or left as they are; `corrupt` masks them all. No special
    token is masked, and of each window at least one token is. The arguments are those of `Denoising`.

    Raises:
        RecipeError: The tokenizer has no mask token.
    """

    def __init__(self, tokenizer: Any, *, seed: int = 0) -> None:
        if tokenizer.mask_token_id is None:
            raise RecipeError(
                f"The {type(tokenizer).__name__} has no mask token, which marks what a masked language model predicts. "
                "Set mask_token in the tokenizer_config.json of the model; the model must know the token."
            )
        self.mask: int = tokenizer.mask_token_id
        self.seed = seed
        self._masked: Any = DataCollatorForLanguageModeling(tokenizer, mlm_probability=_SHARE)

    def __call__(self, examples: list[Any]) -> dict[str, Tensor]:
        """Return the batch with masked `input_ids` `[B, n]`; `labels` are -100 where nothing is to be predicted."""
        batch: dict[str, Tensor] = default_data_collator(examples)
        ids, labels = self._draw(batch["input_ids"])
        return batch | {"input_ids": ids, "labels": labels}

    def corrupt(self, ids: Tensor) -> Tensor:
        """Return token ids `[B, n]` with a share replaced by the mask token; equal windows are masked equally."""
        return ids.masked_fill(self._draw(ids)[1] != -100, self.mask)

    def _draw(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        drawn = []
        for row in ids.cpu():
            self._masked.generator = content_generator(row, self.seed)
            read, labels = self._masked.torch_mask_tokens(row[None].clone())
            if bool((labels == -100).all()):
                # The mean over no tokens would not be a number.
                read[0, -1], labels[0, -1] = self.mask, row[-1]
            drawn.append((read, labels))
        read, labels = (torch.cat(parts).to(ids.device) for parts in zip(*drawn, strict=True))
        return read, labels


# What hides from a model the tokens that it is to predict.
Corruptor = Denoising | Masking


def corruptor(config: Any, tokenizer: Any, *, seed: int = 0) -> Corruptor | None:
    """Return the collator for the model of a config; `None` for causal models, which read what they predict.

    Raises:
        RecipeError: The tokenizer lacks the token that marks what is to be predicted.
    """
    kinds: dict[Any, Any] = {AutoModelForSeq2SeqLM: Denoising, AutoModelForMaskedLM: Masking}
    kind = kinds.get(auto_class(config))
    found: Corruptor | None = None if kind is None else kind(tokenizer, seed=seed)
    return found


def content_generator(ids: Tensor, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(ids.cpu().contiguous().numpy().tobytes(), seed))
