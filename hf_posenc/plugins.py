"""Modules of other projects that register schemes and architectures.

They are imported by an installed package (an entry point of the group `hf_posenc.plugins`), by `hf-posenc --import`, or
by the key `plugins` of a recipe.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from hf_posenc.errors import OptionError, shown

GROUP = "hf_posenc.plugins"
# Entry points that are not loaded yet; `None` before they are looked for.
_WAITING: list[EntryPoint] | None = None


def load(modules: Iterable[str], *, here: bool = False) -> None:
    """Import modules by their dotted names: installed ones, and files of the current folder if these are meant, too.

    A recipe means installed ones only, since it may come from somebody else, with files next to it.

    Raises:
        OptionError: A module is not there, or fails.
    """
    for name in modules:
        if here and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever another project raises
            raise OptionError(
                f"Cannot import the module {shown(name)} ({type(error).__name__}: {error}); expected the dotted name "
                "of an installed module, or with --import of a file of the current folder, without .py."
            ) from error


def load_installed() -> None:
    """Import the modules that installed packages name, once. One that fails is left out with a warning."""
    global _WAITING
    if _WAITING is None:
        _WAITING = list(entry_points(group=GROUP))
    while _WAITING:
        entry = _WAITING.pop()
        try:
            entry.load()
        except Exception as error:  # whatever another project raises
            warnings.warn(f"The plugin {entry.name!r} ({entry.value}) cannot be imported: {error}", stacklevel=2)


def is_built_in(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]
