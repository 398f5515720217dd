"""Data of a recipe: windows to train on and a stream of tokens to measure on.

`datasets` caches the tokens and the windows (`HF_DATASETS_CACHE`) by the content of text and tokenizer. It renames
finished files and holds a lock, so a killed process leaves no partial files, and of several processes that start
together one does the work.
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
from hf_posenc.patches.atomic_files import reading
from hf_posenc.recipes.data import sources
from hf_posenc.recipes.data.collation import Corruptor, corruptor
from hf_posenc.recipes.schema.recipe import Data

# Part of the cache keys. Raise it when the same text gives other tokens or windows.
VERSION = 2
# Maximum number of held-out tokens: 16 windows of a quarter of a million tokens, in 32 MB of memory.
HELD_OUT_TOKENS = 2**22
# Held-out tokens that a check reads: enough for the windows of most measurements.
_CHECKED = 2**16
# Windows in the shuffle buffer of a stream.
SHUFFLE_BUFFER = 1024

# Characters per tokenizer input, which needs some hundred bytes per character; longer texts are cut at blank lines.
_PART = 2**20
_BATCH = 64
# Windows that are digested at once.
_HASHED = 1024
# Characters that are tokenised at once, some more for the last part.
_TOGETHER = 2**21
# Files that were not written to their end are full of NUL bytes.
_NUL = "\0"

_IDS = Features({"ids": List(Value("int32"))})

Ids = list[int]
Example = dict[str, Ids]


@dataclass(frozen=True, eq=False)
class Prepared:
    """Data for training and evaluation.

    Windows to train on have `input_ids` and `labels`, int64 `[length]`, and `position_ids` where documents are packed.
    A stream is shuffled here, a dataset by the trainer. Held-out documents are concatenated, int64 `[tokens]`. The
    number of training tokens is `None` for a stream. Causal models take the trainer's default collator.
    """

    train: Dataset | IterableDataset
    held_out: Tensor
    tokens: int | None
    collate: Corruptor | None

    def digest(self) -> str:
        """Return a digest of all tokens, or for a stream of those that are held out."""
        found = hashlib.blake2b(self.held_out.numpy().tobytes(), digest_size=16)
        if isinstance(self.train, Dataset):
            for batch in self.train.with_format("numpy").iter(batch_size=_HASHED):
                found.update(np.ascontiguousarray(batch["input_ids"], dtype=np.int32).tobytes())
        return found.hexdigest()

    @property
    def corrupt(self) -> Callable[[Tensor], Tensor] | None:
        """Function from token ids to the encoder's inputs, for `context_curve`; `None` for causal models."""
        return None if self.collate is None else self.collate.corrupt


def load_data(
    data: Data, tokenizer: Any, *, length: int, seed: int = 0, config: Any = None, checks: bool = False
) -> Prepared:
    """Read and tokenise the text of a recipe, and cut it into windows of `length` tokens.

    Each document ends with the tokenizer's end-of-sequence token, or its separator if it has none. Each window of a
    causal model, or in packed rows each document, begins with the token that the tokenizer puts before a text. No other
    special token is added, and special tokens in the text are read as plain text. Copies of held-out documents are not
    trained on either. By its `config`, an encoder-decoder or an encoder restores corrupted windows. If it only
    `checks`, it reads about a window of the text, and little of what is held out, to find errors, and `tokens` is an
    estimate. Raise `RecipeError` if the text is missing, too short for a window, or unsuitable for the model.
    """
    documents, set_aside = sources.read(data)
    about = None
    if checks:
        if isinstance(documents, Dataset):
            about = _estimated(documents, tokenizer)
        documents, set_aside = (
            part.to_iterable_dataset() if isinstance(part, Dataset) else part for part in (documents, set_aside)
        )
    most, end = max(length + 1, _CHECKED) if checks else HELD_OUT_TOKENS, end_token(tokenizer)
    collate = None if config is None else corruptor(config, tokenizer, seed=seed)
    if collate is not None and data.packing == "documents":
        raise RecipeError(
            'data.packing is "documents", which an encoder as it was cannot tell apart. Take data.packing: "windows".'
        )
    start = start_token(tokenizer) if collate is None else None
    of_tokenizer = _key(VERSION, content_of(tokenizer))
    tokens = _generated(partial(tokenised, tokenizer=tokenizer), documents, _IDS, of_tokenizer)
    measured = _generated(partial(tokenised, tokenizer=tokenizer, most=most), set_aside, _IDS, _key(of_tokenizer, most))
    held_out = [np.asarray(ids, dtype=np.int32) for ids in _ids(measured)]
    if sum(map(len, held_out)) <= length:
        raise RecipeError(
            f"The held-out text has {sum(map(len, held_out))} tokens; expected more than a window, {length}. Set more "
            "aside with data.held_out_share, name another data.held_out, or take a shorter training.length."
        )
    avoided, is_packed = frozenset(map(_digest, held_out)), data.packing == "documents"
    columns = ("input_ids", "labels", "position_ids")[: 3 if is_packed else 2]
    features = Features({column: List(Value("int32"), length=length) for column in columns})
    cut = partial(_windows, length=length, start=start, end=end if is_packed else None, avoided=avoided)
    train = _generated(cut, tokens, features, _key(VERSION, data.packing, length, start, end, sorted(avoided)))
    # Fail now if a stream is too short for a window, not when the training begins.
    next(iter(train))
    if isinstance(train, IterableDataset):
        train = train.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    return Prepared(
        train=train.with_format("torch"),
        held_out=torch.from_numpy(np.concatenate(held_out)[:most]).long(),
        tokens=len(train) * length if isinstance(train, Dataset) else about,
        collate=collate,
    )


def _estimated(documents: Dataset, tokenizer: Any) -> int:
    """Estimate the tokens of documents, to two digits, from their bytes and the tokens of some of the text."""
    texts = [_checked(text) or "" for text in documents[:_BATCH][sources.TEXT]]
    some = "".join(texts)[:_PART]
    share = documents.data.nbytes / max(1, len(some.encode()))
    return int(float(f"{share * sum(map(len, encode(tokenizer, [some]))):.1e}"))


def end_token(tokenizer: Any) -> int:
    """Return the id of the end-of-sequence token, or else of the separator; raise `RecipeError` if there is neither."""
    found: int | None = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if found is None:
        raise RecipeError(
            f"The {type(tokenizer).__name__} has no end-of-sequence token to put between documents; set eos_token in "
            "the tokenizer_config.json of the model."
        )
    return found


def start_token(tokenizer: Any) -> int | None:
    """Return the id of the beginning-of-sequence token if the tokenizer puts it before each text, else `None`."""
    start: int | None = tokenizer.bos_token_id
    return start if tokenizer("a")["input_ids"][:1] == [start] else None


# -- tokens ------------------------------------------------------------------------------------------------------------


def tokenised(documents: sources.Documents, *, tokenizer: Any, most: int | None = None) -> Iterator[dict[str, Any]]:
    """Tokenise documents, each followed by the end-of-sequence token, until there are `most` tokens."""
    count, end = 0, end_token(tokenizer)
    for batch in _batches(documents):
        texts = [list(_parts(text)) for text in map(_checked, batch[sources.TEXT]) if text and text.strip(_NUL)]
        groups = _grouped(part for text in texts for part in text)
        parts = itertools.chain.from_iterable(encode(tokenizer, group) for group in groups)
        for text in texts:
            ids = [np.asarray(part, dtype=np.int32) for part in itertools.islice(parts, len(text))]
            yield {"ids": np.concatenate([*ids, np.asarray([end], dtype=np.int32)])}
            count += sum(map(len, ids)) + 1
            if most is not None and count >= most:
                return
    if not count:
        raise RecipeError("There is no text: all documents are empty, or hold NUL bytes only.")


def token_ids(documents: sources.Documents, tokenizer: Any, most: int = HELD_OUT_TOKENS) -> Tensor:
    """Return the concatenated documents, each with an end-of-sequence token, int64 `[tokens]`, `most` at most."""
    parts = [torch.as_tensor(row["ids"]).long() for row in tokenised(documents, tokenizer=tokenizer, most=most)]
    return torch.cat(parts)[:most]


def _batches(documents: sources.Documents) -> Iterator[dict[str, Any]]:
    # A stream may turn out to be damaged, or out of reach, at any row.
    with reading("The text", kind=RecipeError):
        yield from documents.iter(batch_size=_BATCH)


def _grouped(parts: Iterable[str]) -> Iterator[list[str]]:
    """Yield parts of texts together, as many as the tokenizer reads at once."""
    group: list[str] = []
    for part in parts:
        if group and sum(map(len, group)) + len(part) > _TOGETHER:
            yield group
            group = []
        group.append(part)
    yield group


def _checked(text: Any) -> str | None:
    """Return a document, which may be null; raise if a row holds no text."""
    if not isinstance(text, str | None):
        raise RecipeError(
            f"A row of the text holds the {type(text).__name__} {text!r:.60}; expected text, as in the first row. "
            "Correct it, or name another data.column."
        )
    return text


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the tokens of texts, in which special tokens are plain text."""
    if not texts:
        return []
    # verbose=False avoids the warning for texts longer than the model reads.
    found: list[list[int]] = tokenizer(
        texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False, verbose=False
    )["input_ids"]
    return found


def _parts(text: str) -> Iterator[str]:
    """Cut a long text at blank lines; the concatenated parts are the text."""
    start = 0
    while len(text) - start > _PART:
        blank = text.rfind("\n\n", start, start + _PART)
        end = start + _PART if blank < 0 else blank + 2
        yield text[start:end]
        start = end
    yield text[start:]


# -- windows -----------------------------------------------------------------------------------------------------------


def cut_windows(documents: Iterable[Any], length: int, start: int | None = None) -> Iterator[Example]:
    """Cut the concatenated documents, each token ids, into windows of `length` tokens; the remainder is dropped.

    Each begins with the `start` token, if there is one.
    """
    first, rest = [] if start is None else [start], np.empty(0, dtype=np.int32)
    fresh = length - len(first)
    for ids in documents:
        rest = np.concatenate([rest, np.asarray(ids, dtype=np.int32)])
        whole = len(rest) - len(rest) % fresh
        for begin in range(0, whole, fresh):
            window = first + rest[begin : begin + fresh].tolist()
            yield {"input_ids": window, "labels": window}
        rest = rest[whole:]


def restarting(window: Example, *, end: int) -> Example:
    """Return a window with positions that restart after each end of a document, which tells its documents apart.

    The first token of a document is no label, since the token before it belongs to another one.
    """
    positions: Ids = []
    for before in (end, *window["input_ids"][:-1]):
        positions.append(0 if before == end else positions[-1] + 1)
    labels = [token if position else -100 for token, position in zip(window["input_ids"], positions, strict=True)]
    return window | {"labels": labels, "position_ids": positions}


def _windows(
    tokens: sources.Documents, *, length: int, start: int | None, end: int | None, avoided: frozenset[bytes]
) -> Iterator[Example]:
    found = False
    fresh = (ids for ids in _ids(tokens) if _digest(np.asarray(ids, dtype=np.int32)) not in avoided)
    # Where one token begins and ends texts, the one before a document will do.
    if end is not None and start not in (None, end):
        fresh = (np.concatenate([[start], ids]) for ids in fresh)
    for window in cut_windows(fresh, length, start if end is None else None):
        found = True
        yield window if end is None else restarting(window, end=end)
    if not found:
        raise RecipeError(
            "The text to train on has too few tokens for one window; documents that are held out, and copies of them, "
            "do not count. Give more text, or take a shorter training.length."
        )


def _ids(tokens: sources.Documents) -> Iterator[Any]:
    """Return the tokens of each document; in arrays, since a list takes ten times the memory."""
    return (ids for batch in tokens.with_format("numpy").iter(batch_size=_BATCH) for ids in batch["ids"])


def _digest(ids: np.ndarray[Any, np.dtype[np.int32]]) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


# -- cache -------------------------------------------------------------------------------------------------------------


def _generated(
    generator: Callable[[sources.Documents], Iterator[Any]], documents: sources.Documents, features: Features, key: str
) -> sources.Documents:
    """Return the examples that a generator makes of documents: cached for a dataset, lazy for a stream.

    The key stands for all that they depend on, except the documents: the hash that `datasets` takes of a generator
    changes when its tokenizer is used.
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


def content_of(tokenizer: Any) -> str:
    """Return a tokenizer's content as one string, without the state that use changes."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        files = {name: value for name, value in state.items() if name not in ("truncation", "padding")}
        return json.dumps([files, end_token(tokenizer)])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return repr([(file.name, file.read_bytes()) for file in sorted(Path(folder).iterdir())])
