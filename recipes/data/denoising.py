"""What an encoder-decoder is trained on: the encoder reads a corrupted text, and the decoder writes it whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import default_data_collator

from hf_posenc.errors import RecipeError
from hf_posenc.recipes.data.collation import Collator, content_generator

SENTINEL = "<extra_id_0>"


class Denoising:
    """Replace random tokens of what the encoder reads by the first sentinel; the labels stay whole.

    To write the next token the decoder must find its place in the source, and only positions say which token follows
    which there. (Where spans are cut out and only these are to be written, as T5 was first trained, the decoder has
    little to look up.) What is replaced depends on the seed and the window alone, so a run that is resumed draws the same.

    Args:
        tokenizer: Of the model; it must know the sentinel.
        share: Share of the tokens that are replaced, from 0 to 1.
        seed: Of the draws.
        collate: Makes the batch; by default stacks.

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
        """Return the batch with corrupted `input_ids` `[B, n]`; transformers makes the decoder's inputs of the labels."""
        batch = self._collate(examples)
        return batch | {"input_ids": self.corrupt(batch["input_ids"])}

    def corrupt(self, ids: Tensor) -> Tensor:
        """Return token ids `[B, n]` of which a share is the sentinel, the same for the same window."""
        replaced = [torch.rand(len(row), generator=content_generator(row, self.seed)) < self.share for row in ids]
        return ids.masked_fill(torch.stack(replaced).to(ids.device), self.sentinel)
