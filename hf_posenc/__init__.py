"""Replace the positional encoding of a loaded Hugging Face model in one line.

    model = hf_posenc.patch(model, "fire")

Importing this package is cheap: torch and transformers load on first use. It also makes converted checkpoints known to
the `Auto` classes of transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_posenc import _auto
from hf_posenc.errors import (
    ArchitectureError,
    AttentionBackendError,
    CacheError,
    CheckpointError,
    DirectionError,
    ExportError,
    LayerSelectionError,
    NotPatchedError,
    OptionError,
    PosencError,
    PositionError,
    RecipeError,
    ShapeError,
    StorageError,
    UnknownSchemeError,
    WrappedModelError,
)

if TYPE_CHECKING:
    from hf_posenc.attention import attend
    from hf_posenc.operands import Geometry, Positions
    from hf_posenc.patches.adapters import PosencLoraConfig
    from hf_posenc.patches.architecture import register_architecture
    from hf_posenc.patches.export.stock import export_stock
    from hf_posenc.patches.patch import disabled, patch, unpatch
    from hf_posenc.patches.plan import explain, plan, verify
    from hf_posenc.patches.strength import drop_native, set_strength
    from hf_posenc.recipes.evaluation.measure import evaluate
    from hf_posenc.registry import SchemeInfo, build, describe, register_scheme, schemes
    from hf_posenc.scheme import Scheme

__version__ = "0.1.0"

__all__ = [
    "ArchitectureError",
    "AttentionBackendError",
    "CacheError",
    "CheckpointError",
    "DirectionError",
    "ExportError",
    "Geometry",
    "LayerSelectionError",
    "NotPatchedError",
    "OptionError",
    "PosencError",
    "PosencLoraConfig",
    "PositionError",
    "Positions",
    "RecipeError",
    "Scheme",
    "SchemeInfo",
    "ShapeError",
    "StorageError",
    "UnknownSchemeError",
    "WrappedModelError",
    "attend",
    "build",
    "describe",
    "disabled",
    "drop_native",
    "evaluate",
    "explain",
    "export_stock",
    "patch",
    "plan",
    "register_architecture",
    "register_scheme",
    "schemes",
    "set_strength",
    "unpatch",
    "verify",
]

# Public names that need torch, by module; they load on first use.
_NAMES = {
    "attention": ("attend",),
    "operands": ("Geometry", "Positions"),
    "patches.adapters": ("PosencLoraConfig",),
    "patches.architecture": ("register_architecture",),
    "patches.export.stock": ("export_stock",),
    "patches.patch": ("disabled", "patch", "unpatch"),
    "patches.plan": ("explain", "plan", "verify"),
    "patches.strength": ("drop_native", "set_strength"),
    "recipes.evaluation.measure": ("evaluate",),
    "registry": ("SchemeInfo", "build", "describe", "register_scheme"),
    "scheme": ("Scheme",),
}
_HOMES = {name: f"hf_posenc.{module}" for module, names in _NAMES.items() for name in names}

# Modules that are attributes of the package, loaded on first use.
_MODULES = {"coordinates": "coordinates", "plots": "recipes.plots", "schemes": "schemes"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hf_posenc.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_auto.register_on_import()
