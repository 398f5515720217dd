"""All that touches a transformers model: patching, checkpoints, adapters, export; and a module for each family.

A family has a file where its code does not tell all. Any other, such as `hf_posenc.patches.qwen2`, is read from the
code of transformers when it is imported; pickle, and the stub of a checkpoint, find its classes by that name.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Families(MetaPathFinder, Loader):
    """The import of modules of this package that have no file. It comes last, so it is asked for these alone."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, family = name.rpartition(".")
        if package != __name__:
            return None
        known = importlib.import_module(f"{__name__}.architecture").config_named(family)
        return ModuleSpec(name, _Families()) if known else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.rpartition(".")[2]
        importlib.import_module(f"{__name__}.family").add_family(name, vars(module))


sys.meta_path.append(_Families())
