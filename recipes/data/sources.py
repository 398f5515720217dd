"""Sources of text: the built-in documents, local files, or a dataset on the hub."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import datasets
from datasets import Dataset, IterableDataset
from datasets.arrow_writer import SchemaInferenceError
from datasets.exceptions import DatasetsError

from hf_posenc.errors import RecipeError, shown
from hf_posenc.patches.atomic_files import reading
from hf_posenc.recipes.data.text import builtin_documents
from hf_posenc.recipes.schema.recipe import Data

BUILTIN = "builtin"
# Column of the text in all datasets returned here.
TEXT = "text"

Documents: TypeAlias = Dataset | IterableDataset

# Parts of a split that are all of it.
_ALL_OF_SPLIT = ("[:]", "[0:]", "[0%:]", "[:100%]", "[0%:100%]")
# Builders of `datasets` by file suffix; .gz may follow.
_BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read(data: Data) -> tuple[Documents, Documents]:
    """Return the training and the held-out documents, each a dataset with one column, `TEXT`.

    A document is a whole .txt file, or one row of any other file. Without `held_out`, the last `held_out_share` of the
    documents is held out; a single document is cut at a blank line near that place. `limit` counts documents before
    the split.

    Raises:
        RecipeError: A source does not exist or holds no text, or the keys contradict each other.
    """
    _check_column(data)
    _check_apart(data)
    held_out, documents = _held_out(data), _source(data)
    if data.limit is not None:
        documents = documents.take(data.limit)
    return _split(documents, data.held_out_share) if held_out is None else (documents, held_out)


def whole(source: str, column: str = TEXT) -> Documents:
    """Return all documents of a source; raise as `read` does."""
    data = Data(source=source, column=column)
    _check_column(data)
    return _source(data)


def _check_column(data: Data) -> None:
    """Raise `RecipeError` if a column is named, and nothing has columns."""
    if data.column != TEXT and not any(name and _has_columns(name) for name in (data.read_from, data.held_out)):
        raise RecipeError(
            f"The column {shown(data.column)} of the text is named, but built-in text and .txt files have none. Leave "
            "it out."
        )


def _check_apart(data: Data) -> None:
    """Raise `RecipeError` if text is both trained on and held out: a file, also by another name, or a split."""
    if data.held_out is None:
        return
    kind = "file" if _holds_out_files(data) else "split"
    if kind == "split":
        shared = _origin(data.read_from) == "hub" and sorted(_shared_splits(data.split, data.held_out))
    elif _origin(data.read_from) == "files":
        trained = {_identity(file) for file in _files(expanded(data.read_from))[1]}
        shared = [file for file in _files(expanded(data.held_out))[1] if _identity(file) in trained]
    else:
        return
    if shared:
        raise RecipeError(
            f"data.held_out is {shown(data.held_out)}, which has {shown(shared[0])}, the {kind} that is trained on. "
            "Name other text, or leave it out: a share of the text is set aside then."
        )


def _identity(file: str) -> tuple[int, int]:
    # The same for all links to a file, hard ones, too.
    found = os.stat(file)
    return found.st_dev, found.st_ino


def _shared_splits(split: str, held_out: str) -> set[str]:
    """Return the splits of which a whole is in one of two instructions and a part in the other, or the same part."""
    one, other = (
        {(name, "" if part in _ALL_OF_SPLIT else part) for name, part in re.findall(r"(\w[\w.-]*)(\[[^]]*\])?", each)}
        for each in (split, held_out)
    )
    return {
        name for name, part in one for again, same in other if name == again and (part == same or not (part and same))
    }


def located(data: Data) -> Data:
    """Return the section with absolute paths of local text, which mean the same in any directory."""
    source = _absolute(data.read_from) if _origin(data.read_from) == "files" else data.source
    held_out = _absolute(data.held_out) if data.held_out and _holds_out_files(data) else data.held_out
    return replace(data, source=source, held_out=held_out)


def expanded(name: str | Path) -> Path:
    """Return a path with `~` replaced by the home directory, if there is such a user."""
    return Path(os.path.expanduser(name))


def _absolute(name: str) -> str:
    return str(expanded(name).absolute())


def _origin(name: str) -> Literal["builtin", "files", "hub"]:
    """Return where a text is: in local files if the path exists, or the name looks like a path."""
    if name == BUILTIN:
        return "builtin"
    return "files" if os.path.exists(expanded(name)) or _is_path(name) else "hub"


def _source(data: Data) -> Documents:
    origin = _origin(data.read_from)
    if origin == "hub":
        return _from_hub(data)
    if data.config is not None or data.split != "train":
        raise RecipeError(
            f"data.config is {shown(data.config)} and data.split {shown(data.split)}, but "
            f"{'local' if origin == 'files' else 'built-in'} text has neither, and data.source is "
            f"{shown(data.read_from)}. Leave them out, or start where no file or folder has the name of the dataset. "
            "data.held_out names the file to measure on."
        )
    if origin == "files":
        return _from_files(data.read_from, data.column, streaming=data.streaming)
    return Dataset.from_dict({TEXT: builtin_documents("train")})


def _held_out(data: Data) -> Documents | None:
    """Return the documents that `held_out` names, or the built-in held-out ones; `None` if there are none."""
    if data.held_out is None:
        return Dataset.from_dict({TEXT: builtin_documents("heldout")}) if data.read_from == BUILTIN else None
    if _holds_out_files(data):
        return _from_files(data.held_out, data.column, streaming=False)
    if _origin(data.read_from) != "hub":
        raise RecipeError(f"data.held_out is {shown(data.held_out)}, and there is no such file or folder.")
    return _from_hub(replace(data, split=data.held_out))


def _holds_out_files(data: Data) -> bool:
    """Whether `held_out` names local files; with a dataset of the hub, a plain name such as "test" is a split."""
    assert data.held_out is not None
    return _is_path(data.held_out) or (_origin(data.read_from) != "hub" and os.path.exists(expanded(data.held_out)))


def _is_path(name: str) -> bool:
    path = expanded(name)
    return path.is_absolute() or name.startswith(".") or _kind(path) is not None


def _kind(path: Path) -> str | None:
    return _BUILDERS.get(Path(path.name.removesuffix(".gz")).suffix)


def _has_columns(name: str) -> bool:
    """Whether a source has columns: a dataset on the hub, or local files other than .txt."""
    origin = _origin(name)
    return origin == "hub" or (origin == "files" and _files(expanded(name))[0] != "text")


def _files(path: Path) -> tuple[str, list[str]]:
    """Return the builder for the files at a path, and the file names."""
    if not os.path.exists(path):  # False also for what no path can be
        pattern = " Patterns are not expanded: give a folder, whose files are all read." * glob.has_magic(str(path))
        raise RecipeError(f"There is no file or folder {path}.{pattern}")
    # Editors and version control keep hidden files next to a text.
    visible = (each for each in path.rglob("*") if not any(part[0] == "." for part in each.relative_to(path).parts))
    files = [path] if path.is_file() else sorted(each for each in visible if each.is_file())
    kinds = {kind for file in files if (kind := _kind(file))}
    if len(kinds) != 1:
        got = f"files of {len(kinds)} kinds, {', '.join(sorted(kinds))}" if kinds else "no file of a known kind"
        raise RecipeError(f"{path}: got {got}; expected one of {', '.join(_BUILDERS)} (or these with .gz).")
    kind = kinds.pop()
    return kind, [str(file.resolve()) for file in files if _kind(file) == kind]


def _from_files(name: str, column: str, *, streaming: bool) -> Documents:
    path = expanded(name)
    kind, named = _files(path)
    if all(Path(file).stat().st_size == 0 for file in named):
        raise RecipeError(f"{path} is empty; expected text.")
    # utf-8-sig drops a byte order mark; the other builders do so by default.
    options = {"sample_by": "document", "encoding": "utf-8-sig"} if kind == "text" else {}
    # The text builder always calls its column "text".
    column = TEXT if kind == "text" else column
    # Or `datasets` would take a name such as "run [1].txt" for a pattern, and read "run 1.txt".
    files = [glob.escape(file) for file in named]
    return _load(str(path), column, path=kind, data_files=files, split="train", streaming=streaming, **options)


def _from_hub(data: Data) -> Documents:
    return _load(
        data.read_from, data.column, path=data.read_from, name=data.config, split=data.split, streaming=data.streaming
    )


@contextlib.contextmanager
def _readable(where: str) -> Iterator[None]:
    """Raise `RecipeError` for missing names, splits, packages or network, and for files that cannot be read."""
    # Some signs have a meaning in the addresses that `datasets` makes of names.
    odd = " If it is there, rename it: only letters, digits and . _ - are safe." * bool(re.search(r"[^\w./ -]", where))
    with reading(f"The text of {where}", odd, RecipeError):
        try:
            yield
        except DatasetsError as error:
            if isinstance(error.__cause__, SchemaInferenceError):  # The file has no rows.
                raise RecipeError(f"{where} holds no text. Give a text file in UTF-8, without NUL bytes.") from error
            if isinstance(error.__cause__, UnicodeDecodeError):
                raise ValueError(f"{error.__cause__}; save it in UTF-8") from error
            raise error.__cause__ or error from error


def _load(where: str, column: str, **arguments: object) -> Documents:
    """Load a dataset and keep one column of it, as `TEXT`."""
    with _readable(where):
        documents = datasets.load_dataset(**arguments)
        first = next(iter(documents), None)
    if first is None:
        raise RecipeError(f"{where} (split {arguments['split']}) holds no documents.")
    if column not in first:
        raise RecipeError(
            f"{where} has no column {shown(column)}; name that of the text, as data.column in a recipe and --column of "
            f"hf-posenc eval. It has: {', '.join(first)}."
        )
    if not isinstance(first[column], str | None):
        raise RecipeError(f"{where}: column {column!r} holds {type(first[column]).__name__}; expected text.")
    documents = documents.select_columns([column])
    return documents if column == TEXT else documents.rename_column(column, TEXT)


def _split(documents: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """Split off the last documents, or the end of a single document."""
    count = len(documents)
    if count == 1:
        text = documents[0][TEXT] or ""
        cut = _before(text, int(len(text) * (1 - share)))
        return Dataset.from_dict({TEXT: [text[:cut]]}), Dataset.from_dict({TEXT: [text[cut:]]})
    kept = min(max(round(count * (1 - share)), 1), count - 1)
    return documents.select(range(kept)), documents.select(range(kept, count))


def _before(text: str, place: int) -> int:
    """Return a place to cut a text: the last blank line or line end in the quarter before `place`, or `place`."""
    for boundary in ("\n\n", "\n"):
        found = text.rfind(boundary, place - len(text) // 4 if place > len(text) // 4 else 0, place)
        if found >= 0:
            return found + len(boundary)
    return place
