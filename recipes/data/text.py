"""English text that every Python installation carries, for demos and tests that must run offline.

The documents are the language reference that `help()` prints (`pydoc_data.topics`) and the docstrings of the
standard library's own modules. Together they hold a few megabytes of real prose and code, split into a part
to train or tune on and a part that is never trained on.

The exact text differs a little from one Python version to the next, but the split is made by document name,
so a document that is held out on one version is held out on all of them.
"""

import ast
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

Split = Literal["train", "heldout"]

# Not prose about the library (tests, demos), not present everywhere (IDLE, lib2to3), or not part of the
# standard library at all (installed packages).
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
)


def builtin_documents(split: Split) -> list[str]:
    """Documents from Python's own reference topics and standard-library docstrings, in sorted order.

    About one document in ten is held out. A few reference topics quote others whole, so paragraphs of a
    held-out document that also stand in a training document are left out of it: no paragraph returned for
    `"heldout"` is in `"train"`.

    Args:
        split: `"train"` for the documents to learn from, `"heldout"` for the ones to measure on.

    Returns:
        The documents' texts, none of them empty.
    """
    train, heldout = _split_documents()
    return list(train if split == "train" else heldout)


def builtin_text(split: Split) -> str:
    """The documents of a split as one string, with an empty line between documents.

    Args:
        split: `"train"` for the documents to learn from, `"heldout"` for the ones to measure on.

    Returns:
        The joined text.
    """
    return "\n\n".join(builtin_documents(split))


# Parsing some six hundred modules takes a few seconds, so it is done once per process.
@lru_cache(maxsize=1)
def _split_documents() -> tuple[tuple[str, ...], tuple[str, ...]]:
    train: list[str] = []
    heldout: list[str] = []
    for name, document in [*_topic_documents(), *_module_documents()]:
        (heldout if _is_heldout(name) else train).append(document)
    seen = {_normalised(paragraph) for document in train for paragraph in document.split("\n\n")}
    fresh = (
        "\n\n".join(paragraph for paragraph in document.split("\n\n") if _normalised(paragraph) not in seen)
        for document in heldout
    )
    return tuple(train), tuple(document for document in fresh if document.strip())


def _is_heldout(name: str) -> bool:
    # A checksum rather than `hash`, which Python salts anew in every process.
    return zlib.crc32(name.encode()) % 10 == 0


def _normalised(paragraph: str) -> str:
    # Quoted text keeps its words but may be indented or wrapped differently.
    return " ".join(paragraph.split())


def _topic_documents() -> Iterator[tuple[str, str]]:
    for name in sorted(topics):
        yield f"topic {name}", topics[name].strip()


def _module_documents() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    modules: dict[str, Path] = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS.isdisjoint(parts[:-1]):
            # Named as imported, so that a module that grew into a package keeps its name and its split.
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for name in sorted(modules):
        document = "\n\n".join(_docstrings(modules[name]))
        if document:
            yield name, document


def _docstrings(path: Path) -> list[str]:
    with warnings.catch_warnings():
        # Old modules may hold escapes that newer parsers warn about; they are not ours to mend.
        warnings.simplefilter("ignore")
        tree = ast.parse(path.read_bytes())
    docstrings = (ast.get_docstring(node) for node in _documented_nodes(tree))
    return [docstring for docstring in docstrings if docstring]


def _documented_nodes(
    node: ast.Module | ast.ClassDef,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    yield node
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _documented_nodes(child)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("_"):
            yield child
