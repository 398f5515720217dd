"""Patched classes, made of the stock classes in one module of transformers."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from hf_posenc.errors import ArchitectureError
from hf_posenc.patches.checkpoint import PosencConfig
from hf_posenc.patches.generation import PosencGenerator
from hf_posenc.patches.models import PosencModel


def modeling_module(name: str) -> ModuleType:
    """Return `transformers.models.<name>.modeling_<name>`.

    Raises:
        ArchitectureError: transformers has no such module.
    """
    module = f"transformers.models.{name}.modeling_{name}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ArchitectureError(
            f"Cannot add the architecture {name!r}: there is no module {module}. Give the name of a folder in "
            "transformers/models."
        ) from error


def models_in(module: ModuleType) -> list[type[PreTrainedModel]]:
    """Return the model classes that a module defines, without the common base class."""
    found = (kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, PreTrainedModel))
    own = (kind for kind in found if kind.__module__ == module.__name__)
    return [kind for kind in own if not kind.__name__.endswith("PreTrainedModel")]


class Twins(dict[type, type]):
    """The patched twin of each stock class, put where pickle and checkpoints find it.

    Args:
        name: Name of the architecture.
        namespace: `globals()` of the module that the classes go into.
        config: Stock config class.
        lock: Field of the config, and a value that stock classes refuse.
    """

    def __init__(self, name: str, namespace: dict[str, Any], config: type, lock: tuple[str, Any]) -> None:
        super().__init__()
        self.namespace = namespace
        self.config: Any = self.add(
            config,
            PosencConfig,
            __annotations__={"posenc": dict[str, Any] | None},
            posenc=None,
            model_type=f"hf_posenc_{name}",
            posenc_lock=lock,
        )

    def add(self, stock: type, *bases: type, **attributes: Any) -> type:
        """Make the twin of a class, with other bases in front of it."""
        attributes |= {"posenc_stock": stock, "__module__": self.namespace["__name__"]}
        twin = type(f"Posenc{stock.__name__}", (*bases, stock), attributes)
        self.namespace[twin.__name__] = self[stock] = twin
        return twin

    def add_body(self, stock: type, *bases: type) -> None:
        """Make the twin of a body."""
        self.add(stock, *bases, PosencModel, config_class=self.config)

    def add_heads(self, models: Iterable[type]) -> None:
        """Make the twins of models that have none yet."""
        for kind in models:
            if kind not in self:
                head = PosencGenerator if issubclass(kind, GenerationMixin) else PosencModel
                self.add(kind, head, config_class=self.config)
