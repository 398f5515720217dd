"""The data of a recipe: windows to train on and a stream of tokens to measure on.

Text is tokenised once and cut into windows once; `datasets` keeps both in its cache (`HF_DATASETS_CACHE`), under the content
of the text and of the tokenizer. It writes beside and renames, under a lock, so a process that is killed leaves nothing
half done, and of several that start together one does the work.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.exceptions import DatasetGenerationError
from torch import Tensor

from hf_posenc.errors import RecipeError
from hf_posenc.recipes.data import packing, sources
from hf_posenc.recipes.data.denoising import Denoising
from hf_posenc.recipes.schema.recipe import Data

# Changes whenever the same text would give other tokens or windows.
VERSION = 1
# Held-out tokens that are kept: 16 windows of a quarter of a million, and no more memory than 32 MB.
HELD_OUT_TOKENS = 2**22
# Windows of a stream that wait to be drawn in random order.
SHUFFLE_BUFFER = 1024

# A tokenizer needs some hundred bytes per character while it works, so longer texts go in parts, cut at blank lines.
_PART = 2**20
_BATCH = 64
# What a file that was never written to its end, or is no text at all, is full of.
_NUL = "\0"

_IDS = Features({"ids": List(Value("int32"))})

Pack = Callable[[Iterable[list[int]]], Iterator[packing.Example]]


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a trainer and an evaluation need.

    Attributes:
        train: Windows with `input_ids` and `labels`, int64 `[length]`, and `position_ids` where documents are packed.
            Those of a stream come in shuffled order; others are shuffled by the trainer.
        held_out: Documents that are not trained on, one after the other, int64 `[tokens]`.
        tokens: How many tokens there are to train on; `None` of a stream.
        collate: Makes the batches of an encoder-decoder; `None` is the trainer's own.
    """

    train: Dataset | IterableDataset
    held_out: Tensor
    tokens: int | None
    collate: Denoising | None

    @property
    def corrupt(self) -> Callable[[Tensor], Tensor] | None:
        """What the encoder reads in place of a text, for `context_curve`."""
        return None if self.collate is None else self.collate.corrupt


def load_data(data: Data, tokenizer: Any, *, length: int, seed: int = 0, denoising: bool = False) -> Prepared:
    """Read, tokenise and cut the text of a recipe.

    Documents end with the tokenizer's end-of-sequence token; no other special token is added, and what looks like one in
    the text is text. Documents that are held out are not trained on, nor are copies of them.

    Args:
        data: Which text.
        tokenizer: Of the model.
        length: Tokens per window.
        seed: Of the order of a stream, and of what is corrupted.
        denoising: Whether the model is an encoder-decoder, which restores corrupted windows.

    Raises:
        RecipeError: The text is not there, too short for a window, or does not go with the model.
    """
    _check(data, tokenizer, denoising)
    collate = Denoising(tokenizer, seed=seed) if denoising else None
    documents, set_aside = sources.read(data)
    of_tokenizer = _key(VERSION, _content(tokenizer))
    tokens = _generated(partial(tokenised, tokenizer=tokenizer), documents, _IDS, of_tokenizer)
    measured = _generated(
        partial(tokenised, tokenizer=tokenizer, most=HELD_OUT_TOKENS),
        set_aside,
        _IDS,
        _key(of_tokenizer, HELD_OUT_TOKENS),
    )
    held_out = [np.asarray(ids, dtype=np.int32) for ids in _ids(measured)]
    if sum(map(len, held_out)) <= length:
        raise RecipeError(
            f"The held-out text has {sum(map(len, held_out))} tokens; expected more than a window, {length}. Set more "
            "aside with data.held_out_share, name another data.held_out, or take a shorter training.length."
        )
    train = _packed(data.packing, tokens, length, tokenizer.eos_token_id, frozenset(map(_digest, held_out)))
    # A stream that is too short for a window is noticed now, not when the training begins.
    next(iter(train))
    if isinstance(train, IterableDataset):
        train = train.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    return Prepared(
        train=train.with_format("torch"),
        held_out=torch.from_numpy(np.concatenate(held_out)[:HELD_OUT_TOKENS]).long(),
        tokens=len(train) * length if isinstance(train, Dataset) else None,
        collate=collate,
    )


def _check(data: Data, tokenizer: Any, denoising: bool) -> None:
    if tokenizer.eos_token_id is None:
        raise RecipeError(
            f"The {type(tokenizer).__name__} has no end-of-sequence token to put between documents; set eos_token in "
            "the tokenizer_config.json of the model."
        )
    if denoising and data.packing == "documents":
        raise RecipeError(
            'data.packing is "documents", which an encoder-decoder as it was cannot tell apart: it has no positions. '
            'Take data.packing: "windows".'
        )


# -- tokens ------------------------------------------------------------------------------------------------------------


def tokenised(documents: sources.Documents, *, tokenizer: Any, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Tokenise documents, each with the end-of-sequence token after it, until there are `most` tokens."""
    count = 0
    for batch in documents.iter(batch_size=_BATCH):
        texts = [list(_parts(text)) for text in map(_checked, batch[sources.TEXT]) if text and text.strip(_NUL)]
        parts = iter(_encode(tokenizer, [part for text in texts for part in text]))
        for text in texts:
            ids = list(itertools.chain.from_iterable(itertools.islice(parts, len(text))))
            yield {"ids": [*ids, tokenizer.eos_token_id]}
            count += len(ids) + 1
            if most is not None and count >= most:
                return
    if not count:
        raise RecipeError("There is no text: all documents are empty, or hold NUL bytes only.")


def _checked(text: Any) -> str | None:
    """Return a document, which may be none; a column can hold different things."""
    if not isinstance(text, str | None):
        raise RecipeError(
            f"A row of the text holds the {type(text).__name__} {text!r:.60}; expected text, as in the first row. "
            "Correct it, or name another data.column."
        )
    return text


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    # What looks like a special token is text here; a long text is not too long, since it is cut into windows.
    found: list[list[int]] = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )["input_ids"]
    return found


def _parts(text: str) -> Iterator[str]:
    """Cut a long text at blank lines; the parts together are the text."""
    start = 0
    while len(text) - start > _PART:
        blank = text.rfind("\n\n", start, start + _PART)
        end = start + _PART if blank < 0 else blank + 2
        yield text[start:end]
        start = end
    yield text[start:]


# -- windows -----------------------------------------------------------------------------------------------------------


def _packed(
    kind: str, tokens: sources.Documents, length: int, padding: int, avoided: frozenset[bytes]
) -> sources.Documents:
    columns = ["input_ids", "labels", *(["position_ids"] if kind == "documents" else [])]
    features = Features({column: List(Value("int32"), length=length) for column in columns})
    pack: Pack = (
        partial(packing.windows, length=length)
        if kind == "windows"
        else partial(packing.whole_documents, length=length, padding=padding)
    )
    key = _key(VERSION, kind, length, padding, sorted(avoided))
    return _generated(partial(_windows, pack=pack, avoided=avoided), tokens, features, key)


def _windows(tokens: sources.Documents, *, pack: Pack, avoided: frozenset[bytes]) -> Iterator[packing.Example]:
    found = pack(ids for ids in _ids(tokens) if _digest(np.asarray(ids, dtype=np.int32)) not in avoided)
    first = next(found, None)
    if first is None:
        raise RecipeError(
            "The text to train on has too few tokens for one window, what is held out not counted. Give more text, or "
            "take a shorter training.length."
        )
    yield first
    yield from found


def _ids(tokens: sources.Documents) -> Iterator[list[int]]:
    return (ids for batch in tokens.iter(batch_size=_BATCH) for ids in batch["ids"])


def _digest(ids: np.ndarray[Any, np.dtype[np.int32]]) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


# -- cache -------------------------------------------------------------------------------------------------------------


def _generated(
    generator: Callable[[sources.Documents], Iterator[Any]], documents: sources.Documents, features: Features, key: str
) -> sources.Documents:
    """Return what a generator makes of documents: from the cache if it is there, as it goes of a stream.

    Args:
        generator: Makes examples.
        documents: What it reads.
        features: Of the examples.
        key: Of everything besides the documents that the examples depend on. `datasets` could hash the generator instead,
            but a tokenizer that has been used has another hash than before.
    """
    if isinstance(documents, IterableDataset):
        return IterableDataset.from_generator(partial(generator, documents), features=features)
    try:
        return Dataset.from_generator(
            partial(generator, documents), features=features, fingerprint=_key(documents._fingerprint, key)
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, RecipeError):
            raise error.__cause__ from None
        raise


def _key(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _content(tokenizer: Any) -> str:
    """Return what a tokenizer makes tokens of, as one string; whether it has been used makes no difference."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        used = {"truncation", "padding"}
        files = {name: value for name, value in state.items() if name not in used}
        return json.dumps([files, tokenizer.eos_token_id])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return repr([(file.name, file.read_bytes()) for file in sorted(Path(folder).iterdir())])
