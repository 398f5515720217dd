"""Sources of text: the built-in documents, local files, or a dataset on the hub."""

from __future__ import annotations

import contextlib
import glob
import gzip
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
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

# Bytes of a row, and of a file, that a packed file may unpack to; more of a file if that is no more than `_DENSE` times
# its size. gzip packs `_DENSEST` bytes into one at most.
LARGEST_ROW, LARGEST_FILE = 2**26, 2**30
_DENSE, _DENSEST = 100, 1032
_PIECE = 2**20
_GZIP = b"\x1f\x8b"
# Beginnings of files that xz, bzip2, Zstandard, LZ4, zip, 7-Zip and RAR pack.
_PACKED = (b"\xfd7zXZ", b"BZh", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"PK\x03\x04", b"7z\xbc\xaf", b"Rar!")

Documents: TypeAlias = Dataset | IterableDataset
Origin = Literal["builtin", "files", "hub"]

# Parts of a split that are all of it.
_ALL_OF_SPLIT = ("[:]", "[0:]", "[0%:]", "[:100%]", "[0%:100%]")
# Builders of `datasets` by file suffix; .gz may follow.
_BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read(data: Data) -> tuple[Documents, Documents]:
    """Return the training and the held-out documents, each a dataset with one column, `TEXT`.

    A document is a whole .txt file, or one row of any other file. Without `held_out`, the last `held_out_share` of the
    documents is held out; a single document is cut at a blank line near that place. `limit` counts documents before
    the split. Raise `RecipeError` if a source does not exist or holds no text, or keys contradict each other.
    """
    source = Source.of(data.read_from)
    apart = Source.of(data.held_out) if data.held_out and _is_local(data.held_out, source.origin) else None
    _check_column(data.column, source, apart)
    _check_apart(data, source, apart)
    if source.origin != "hub" and (data.config is not None or data.split != "train"):
        raise RecipeError(
            f"data.config is {shown(data.config)} and data.split {shown(data.split)}, but "
            f"{'local' if source.origin == 'files' else 'built-in'} text has neither, and data.source is "
            f"{shown(data.read_from)}. Leave them out, or start where no file or folder has the name of the dataset. "
            "data.held_out names the file to measure on."
        )
    held_out = None
    if apart is not None:
        held_out = apart.documents(data.column)
    elif data.held_out is not None:
        if source.origin != "hub":
            raise RecipeError(f"data.held_out is {shown(data.held_out)}, and there is no such file or folder.")
        held_out = source.documents(data.column, data.held_out, config=data.config, streaming=data.streaming)
    elif source.origin == "builtin":
        held_out = source.documents(data.column, "heldout")
    documents = source.documents(data.column, data.split, config=data.config, streaming=data.streaming)
    if data.limit is not None:
        documents = documents.take(data.limit)
    return _split(documents, data.held_out_share) if held_out is None else (documents, held_out)


def read_text(source: str, column: str = TEXT) -> Documents:
    """Return the documents of a local file or folder (.txt, .jsonl, .parquet), or of "builtin", which is held out.

    Raise `RecipeError` if the file does not exist, holds no text, or has no such column.
    """
    if source == BUILTIN:
        return read(Data(column=column))[1]
    # Not `Source.of`, which would look up any other name on the hub.
    found = Source(source, "files", *_files(expanded(source)))
    _check_column(column, found)
    return found.documents(column)


def located(data: Data) -> Data:
    """Return the section with absolute paths of local text, which mean the same in any directory."""
    origin, held_out = _origin(data.read_from), data.held_out
    source = str(expanded(data.read_from).absolute()) if origin == "files" else data.source
    if held_out and _is_local(held_out, origin):
        held_out = str(expanded(held_out).absolute())
    return replace(data, source=source, held_out=held_out)


@dataclass(frozen=True)
class Source:
    """Text by its name: `files` of one `kind`, or where there are none, the built-in text or a dataset on the hub."""

    name: str
    origin: Origin
    kind: str | None = None
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str) -> Source:
        """Look for the files that a name may mean; raise `RecipeError` if it looks like a path and leads nowhere."""
        origin = _origin(name)
        return cls(name, origin, *(_files(expanded(name)) if origin == "files" else ()))

    @property
    def has_columns(self) -> bool:
        return self.origin == "hub" or self.kind not in (None, "text")

    def documents(
        self, column: str, split: str = "train", *, config: str | None = None, streaming: bool = False
    ) -> Documents:
        if self.origin == "builtin":
            return Dataset.from_dict({TEXT: builtin_documents("train" if split == "train" else "heldout")})
        if self.origin == "hub":
            return _load(self.name, column, path=self.name, name=config, split=split, streaming=streaming)
        path = str(expanded(self.name))
        if all(Path(file).stat().st_size == 0 for file in self.files):
            raise RecipeError(f"{path} is empty; expected text.")
        # utf-8-sig drops a byte order mark; the other builders do so by default.
        options = {} if self.has_columns else {"sample_by": "document", "encoding": "utf-8-sig"}
        for file in self.files:
            found = os.stat(file)
            _check_packed(file, found.st_size, found.st_mtime_ns, has_rows=_suffix(Path(file)) == ".jsonl")
        # Or `datasets` would take a name such as "run [1].txt" for a pattern, and read "run 1.txt".
        files = [glob.escape(file) for file in self.files]
        # The text builder always calls its column "text".
        column = column if self.has_columns else TEXT
        return _load(path, column, path=self.kind, data_files=files, split="train", streaming=streaming, **options)


def _check_column(column: str, *sources: Source | None) -> None:
    """Raise `RecipeError` if a column is named, and nothing has columns."""
    if column != TEXT and not any(source is not None and source.has_columns for source in sources):
        raise RecipeError(
            f"The column {shown(column)} of the text is named, but built-in text and .txt files have none. Leave it "
            "out."
        )


def _check_apart(data: Data, source: Source, apart: Source | None) -> None:
    """Raise `RecipeError` if text is both trained on and held out: a file, also by another name, or a split."""
    if apart is not None:
        trained = set(map(_identity, source.files))
        kind, shared = "file", [file for file in apart.files if _identity(file) in trained]
    else:
        has_splits = source.origin == "hub" and data.held_out is not None
        kind, shared = "split", sorted(_shared_splits(data.split, data.held_out or "")) if has_splits else []
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


def expanded(name: str | Path) -> Path:
    """Return a path with `~` replaced by the home directory, if there is such a user."""
    return Path(os.path.expanduser(name))


def _origin(name: str) -> Origin:
    """Return where a text is: in local files if the path exists, or the name looks like a path."""
    if name == BUILTIN:
        return "builtin"
    return "files" if os.path.exists(expanded(name)) or _is_path(name) else "hub"


def _is_local(held_out: str, origin: Origin) -> bool:
    """Whether held-out text is in local files; with a dataset of the hub, a plain name such as "test" is a split."""
    return _is_path(held_out) or (origin != "hub" and os.path.exists(expanded(held_out)))


def _is_path(name: str) -> bool:
    path = expanded(name)
    return path.is_absolute() or name.startswith(".") or _suffix(path) in _BUILDERS


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _files(path: Path) -> tuple[str, tuple[str, ...]]:
    if not os.path.exists(path):  # False also for what no path can be
        pattern = " Patterns are not expanded: give a folder, whose files are all read." * glob.has_magic(str(path))
        raise RecipeError(f"There is no file or folder {path}.{pattern}")
    # Editors and version control keep hidden files next to a text.
    visible = (each for each in path.rglob("*") if not any(part[0] == "." for part in each.relative_to(path).parts))
    files = [path] if path.is_file() else sorted(each for each in visible if each.is_file())
    kinds = {_BUILDERS[suffix] for suffix in map(_suffix, files) if suffix in _BUILDERS}
    if len(kinds) != 1:
        got = f"files of {len(kinds)} kinds, {', '.join(sorted(kinds))}" if kinds else "no file of a known kind"
        raise RecipeError(f"{path}: got {got}; expected one of {', '.join(_BUILDERS)} (or these with .gz).")
    kind = kinds.pop()
    return kind, tuple(str(file.resolve()) for file in files if _BUILDERS.get(_suffix(file)) == kind)


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


@lru_cache
def _check_packed(file: str, size: int, changed: int, *, has_rows: bool) -> None:
    """Raise `RecipeError` for a packed file of another kind than gzip, and where a little of it unpacks to a lot.

    `datasets` unpacks by the content, whatever the name says, and reads a row, or a text, at once.
    """
    with _readable(file), open(file, "rb") as packed:
        head = packed.read(6)
        if any(map(head.startswith, _PACKED)):
            raise ValueError("it is a packed file of another kind than gzip; unpack it first")
        most = LARGEST_ROW if has_rows else LARGEST_FILE
        if not head.startswith(_GZIP) or size * _DENSEST <= most:
            return
        row = total = 0
        with gzip.open(file) as unpacked:
            while piece := unpacked.read(_PIECE):
                total += len(piece)
                end = piece.rfind(b"\n") if has_rows else -1
                row = row + len(piece) if end < 0 else len(piece) - end - 1
                if row > most or total > max(LARGEST_FILE, _DENSE * size):
                    what = f"a row of more than {most / 1e6:,.0f} MB" if has_rows and row > most else "too much"
                    raise ValueError(
                        f"its {size / 1e6:,.1f} MB unpack to {what}, {total / 1e6:,.0f} MB so far; cut the text into "
                        "more rows or files, or unpack it yourself"
                    )


def _load(where: str, column: str, **arguments: object) -> Documents:
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
