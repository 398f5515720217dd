"""Every error that hf_posenc raises on purpose, by task.

    PosencError (ValueError)    one line: what was got, what was expected, what to do
    |-- choose a scheme         UnknownSchemeError, OptionError, DirectionError
    |-- patch a model           ArchitectureError, WrappedModelError, LayerSelectionError
    |-- run a patched model     AttentionBackendError, ShapeError, PositionError, CacheError, NotPatchedError
    |-- save, load, export      CheckpointError (RuntimeError), StorageError (OSError), ExportError
    `-- train and measure       RecipeError, MissingPackageError (ImportError)

An error leaves the model as it was. A `CheckpointError` is also a `RuntimeError`, which callers of transformers catch
when weights do not fit.
"""

import reprlib
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

# What recipes and the command line import beyond the library: the extra `recipes` of pyproject.toml.
RECIPES = ("datasets", "filelock", "jinja2", "matplotlib", "pydantic", "rich", "typer", "yaml")
# Characters of a value in a message, and of a message.
_VALUE, _MESSAGE = 200, 1200
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxfrozenset = 12
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _VALUE


class PosencError(ValueError):
    """Base class of the errors of this package; the middle of a very long message is left out."""

    def __init__(self, message: object = "") -> None:
        super().__init__(cut(str(message), _MESSAGE))


class UnknownSchemeError(PosencError):
    """The name of a scheme is not in the registry."""


class OptionError(PosencError):
    """An option of a scheme does not exist, or its value has a wrong type or range."""


class ArchitectureError(PosencError):
    """The model cannot be patched: its class is not supported, or it was altered."""


class WrappedModelError(PosencError):
    """The model is already inside PEFT, DDP, FSDP or `torch.compile`."""


class DirectionError(PosencError):
    """The scheme is not defined for the direction of a stack."""


class LayerSelectionError(PosencError):
    """`layers` or `stacks` match nothing, or overlap an earlier patch."""


class NotPatchedError(PosencError):
    """A patched model was expected."""


class PositionError(PosencError):
    """Positions are missing, misshapen, or beyond the table of the scheme."""


class ShapeError(PosencError):
    """Tensors or masks have shapes that do not fit together."""


class CacheError(PosencError):
    """The key/value cache cannot hold the state that the scheme needs."""


class AttentionBackendError(PosencError):
    """The attention implementation would ignore the scheme."""


class CheckpointError(PosencError, RuntimeError):
    """A converted checkpoint is damaged, incomplete, or of a newer format."""


class StorageError(PosencError, OSError):
    """A disk or quota is full, or a file would be larger than the limit on files."""


class ExportError(PosencError):
    """No stock model computes what a converted model does, or it or its graph cannot be written."""


class RecipeError(PosencError):
    """A recipe is not as its schema says, or cannot be run."""


class MissingPackageError(PosencError, ImportError):
    """Recipes or the command line need a package that is not installed."""


def require_recipes() -> None:
    """Raise `MissingPackageError` if a package of the extra `recipes` is not installed."""

    def installed(name: str) -> bool:
        try:
            return sys.modules.get(name) is not None or find_spec(name) is not None
        except ImportError:  # A finder says so itself.
            return False

    missing = [name for name in RECIPES if not installed(name)]
    if missing:
        raise MissingPackageError(
            f"Recipes and the command line need packages that are not installed: {', '.join(missing)}. "
            'Run pip install "hf-posenc[recipes]".'
        )


def cut(text: str, most: int = _VALUE) -> str:
    """Return a text of at most so many characters, without its middle if it has more."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[5 - most // 3 :]}"


def shown(value: Any) -> str:
    """Return a value as it is written in Python, cut for a message; the whole text, which may be huge, is not made."""
    try:
        return cut(_SHORT.repr(value))
    except ValueError:  # Python writes no number of so many digits.
        return f"a number of type {type(value).__name__} with more than 4,000 digits"


def suggest(got: str, known: Iterable[str]) -> str:
    """Return a sentence that names the nearest known word, and all of them."""
    words = sorted(known)
    near = get_close_matches(got[:_VALUE].lower(), words, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Known: {', '.join(words) if words else 'none'}."
