"""The text of an evaluation, as tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import RecipeError
from hf_posenc.recipes.data import sources
from hf_posenc.recipes.data.windows import HELD_OUT_TOKENS, tokenised
from hf_posenc.recipes.schema.recipe import Data


def read_text(source: str, column: str = "text") -> sources.Documents:
    """Return the documents of a local file or folder (.txt, .jsonl, .parquet), or of "builtin", which is held out.

    Raise `RecipeError` if the file does not exist, holds no text, or has no such column.
    """
    if source == sources.BUILTIN:
        return sources.read(Data(column=column))[1]
    if not sources.expanded(source).exists():
        # Any other name would be looked up on the hub.
        raise RecipeError(f"There is no file or folder {source}. Give one that is there, or {sources.BUILTIN!r}.")
    return sources.whole(source, column)


def token_ids(documents: sources.Documents, tokenizer: Any, most: int = HELD_OUT_TOKENS) -> Tensor:
    """Return the concatenated documents, each with an end-of-sequence token, int64 `[tokens]`, `most` at most."""
    parts = [torch.as_tensor(row["ids"]).long() for row in tokenised(documents, tokenizer=tokenizer, most=most)]
    return torch.cat(parts)[:most]


def ordinary_tokens(ids: Tensor, special: Collection[int] = ()) -> Tensor:
    """Return the different tokens of a text `[tokens]` but special ones, the most frequent first, int64 `[n]`.

    A model knows these tokens; its vocabulary may also hold tokens that were never trained.
    """
    found, counts = torch.unique(ids, return_counts=True)
    ranked: Tensor = found[counts.argsort(descending=True, stable=True)]
    return ranked[~torch.isin(ranked, torch.tensor(sorted(special), dtype=ranked.dtype))]
