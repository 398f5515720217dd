"""Make converted checkpoints known to transformers' `Auto` classes and adapters to PEFT, without importing any of them.

Both bring in torch, which takes seconds, and the models import the `Auto` modules in turn. So registration waits until the
first import that needs one of them has run to its end.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple


class _Watch(NamedTuple):
    """What to wait for, and what to do then.

    Attributes:
        packages: Whose imports are watched: registering imports from them, so it must not happen while a module of one is
            half done.
        modules: Any of these must be there.
        module: Holds the function `register_all`, which is then called.
    """

    packages: tuple[str, ...]
    modules: tuple[str, ...]
    module: str


_WATCHES = (
    _Watch(
        ("transformers", "hf_posenc"),
        ("transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto"),
        "hf_posenc.patches.auto",
    ),
    _Watch(("peft",), ("peft",), "hf_posenc.patches.adapters"),
)


class _Depth(threading.local):
    value = 0


class _Loader(importlib.abc.Loader):
    """Runs a module as its own loader would, and notices when the outermost import ends."""

    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        # `python -m` asks the loader of a module for its code.
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is as if this package were not there.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        depth = self._finder.depth
        depth.value += 1
        try:
            self._loader.exec_module(module)
        finally:
            depth.value -= 1
        if depth.value == 0:
            self._finder.settle()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of the watched packages through the other finders, and watches them load."""

    def __init__(self, watch: _Watch) -> None:
        self.watch = watch
        self.depth = _Depth()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.watch.packages:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def settle(self) -> None:
        """Register and stop watching, once one of the modules is there."""
        if self in sys.meta_path and any(module in sys.modules for module in self.watch.modules):
            sys.meta_path.remove(self)
            module = importlib.import_module(self.watch.module)
            # Without the function it is being imported right now, for its own sake, and registers at its end.
            getattr(module, "register_all", lambda: None)()


def register_on_import() -> None:
    """Register now what is loaded, the rest as soon as it is."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for watch in _WATCHES:
        finder = _Finder(watch)
        sys.meta_path.insert(0, finder)
        finder.settle()
