"""Make converted checkpoints known to transformers' `Auto` classes and adapters to PEFT, without importing any of them.

Both import torch, which takes seconds, and the patched models import the `Auto` modules themselves. So registration
waits until one of these modules is loaded and the outermost import of a watched package ends: it imports from these
packages, and must not meet a half loaded module.
"""

import importlib
import importlib.abc
import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Hook(importlib.abc.MetaPathFinder):
    """An import hook that delegates every search, and registers when the outermost import of a watched package ends.

    It calls `register_all` of `module` as soon as one of `triggers` is loaded.
    """

    def __init__(self, packages: tuple[str, ...], triggers: tuple[str, ...], module: str) -> None:
        self.packages, self.triggers, self.module = packages, triggers, module
        self._running = threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        # Ask later finders only, or two copies of this hook would call each other forever.
        behind = itertools.islice(itertools.dropwhile(lambda finder: finder is not self, sys.meta_path), 1, None)
        found = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._execute(execute, module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], object], module: ModuleType) -> None:
        depth = getattr(self._running, "depth", 0)
        self._running.depth = depth + 1
        try:
            execute(module)
        finally:
            self._running.depth = depth
        if depth == 0:
            self.settle()

    def settle(self) -> None:
        if self in sys.meta_path and any(trigger in sys.modules for trigger in self.triggers):
            sys.meta_path.remove(self)
            # A module without the function is still being imported, and registers at its own end.
            getattr(importlib.import_module(self.module), "register_all", lambda: None)()


def register_on_import() -> None:
    """Register with packages that are loaded now, and with the others as soon as they load."""
    if any(isinstance(finder, _Hook) for finder in sys.meta_path):
        return
    auto = "transformers.models.auto."
    for hook in (
        _Hook(
            ("transformers", "hf_posenc"),
            (auto + "configuration_auto", auto + "modeling_auto"),
            "hf_posenc.patches.architecture",
        ),
        _Hook(("peft",), ("peft",), "hf_posenc.patches.adapters"),
    ):
        sys.meta_path.insert(0, hook)
        hook.settle()
