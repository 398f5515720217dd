"""English text from the Python installation itself, for demos and tests that run offline.

The documents are the language reference that `help()` prints (`pydoc_data.topics`) and the docstrings of the standard
library: a few megabytes of prose and code. The text differs a little between Python versions. The split goes by
document name, so a document held out on one version is held out on all.
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

# Tests and demos hold no library prose, IDLE and lib2to3 are not always installed, packages are not the library's.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
)


def builtin_documents(split: Split) -> list[str]:
    """Return the reference topics and standard-library docstrings of a split, sorted by name, none of them empty.

    About one document in ten is held out. A few topics quote others, so held-out documents lose every paragraph that
    also stands in a training document.
    """
    train, heldout = _split_documents()
    return list(train if split == "train" else heldout)


def builtin_text(split: Split) -> str:
    """Return the documents of a split as one string, separated by empty lines."""
    return "\n\n".join(builtin_documents(split))


# Parsing some six hundred modules takes a few seconds.
@lru_cache(maxsize=1)
def _split_documents() -> tuple[tuple[str, ...], tuple[str, ...]]:
    train: list[str] = []
    heldout: list[str] = []
    of_topics = [(f"topic {name}", topics[name].strip()) for name in sorted(topics)]
    for name, document in [*of_topics, *_module_documents()]:
        # A checksum, since `hash` differs between processes.
        (train if zlib.crc32(name.encode()) % 10 else heldout).append(document)
    seen = {_normalised(paragraph) for document in train for paragraph in document.split("\n\n")}
    fresh = (
        "\n\n".join(paragraph for paragraph in document.split("\n\n") if _normalised(paragraph) not in seen)
        for document in heldout
    )
    return tuple(train), tuple(document for document in fresh if document.strip())


def _normalised(paragraph: str) -> str:
    # Quotations may be indented or wrapped differently.
    return " ".join(paragraph.split())


def _module_documents() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    modules: dict[str, Path] = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS.isdisjoint(parts[:-1]):
            # The import name, so a module that grew into a package stays in its split.
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for name in sorted(modules):
        document = "\n\n".join(_docstrings(modules[name]))
        if document:
            yield name, document


def _docstrings(path: Path) -> list[str]:
    with warnings.catch_warnings():
        # Old modules may hold escapes that newer parsers warn about.
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
