"""Make converted checkpoints known to transformers' `Auto` classes and adapters to PEFT, without importing any of them.

Both import torch, which takes seconds, and the patched models import the `Auto` modules themselves. So registration
waits until the first import of one of them is complete.
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
    """Modules to wait for, and the module that registers once they are loaded.

    Attributes:
        packages: Packages whose imports are watched. Registration imports from them, so it must not run while one of
            their modules is half loaded.
        modules: Modules of which the first loaded one starts the registration.
        module: Module with the function `register_all`.
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
    """A wrapper of a module's own loader that notices when the outermost import ends."""

    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        # `python -m` asks the loader of a module for its code.
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must not keep the wrapper: inspect and importlib ask it for its own loader.
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
    """A finder that asks the other finders for modules of the watched packages, and wraps their loaders."""

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
        """Register and stop watching once one of the modules is loaded."""
        if self in sys.meta_path and any(module in sys.modules for module in self.watch.modules):
            sys.meta_path.remove(self)
            module = importlib.import_module(self.watch.module)
            # A module without the function is still being imported, and registers at its own end.
            getattr(module, "register_all", lambda: None)()


def register_on_import() -> None:
    """Register with packages that are loaded now, and with the others as soon as they load."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for watch in _WATCHES:
        finder = _Finder(watch)
        sys.meta_path.insert(0, finder)
        finder.settle()
