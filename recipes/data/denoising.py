"""Training task of encoder-decoders: the encoder reads corrupted text, the decoder writes the original."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import default_data_collator

from hf_posenc.errors import RecipeError
from hf_posenc.recipes.data.collation import Collator, content_generator

SENTINEL = "<extra_id_0>"


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
