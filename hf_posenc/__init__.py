"""Replace the positional encoding of a loaded Hugging Face model in one line.

    model = hf_posenc.patch(model, "fire")

Importing this package is cheap: it loads torch and transformers only when something is used. It also makes converted
checkpoints known to the `Auto` classes of transformers.
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
    UnknownSchemeError,
    WrappedModelError,
)

if TYPE_CHECKING:
    from hf_posenc.adapters import PosencLoraConfig
    from hf_posenc.attention import attend
    from hf_posenc.describing import describe
    from hf_posenc.evaluation.running import evaluate
    from hf_posenc.explaining import explain
    from hf_posenc.export.stock import export_stock
    from hf_posenc.patches.architecture import register_architecture
    from hf_posenc.patching import disabled, patch, unpatch
    from hf_posenc.planning import plan, verify
    from hf_posenc.registry import SchemeInfo, build, register_scheme, schemes
    from hf_posenc.scheme import Geometry, Positions, Scheme
    from hf_posenc.strength import drop_native, set_strength

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

# Where each public name lives that needs torch; loaded on first use.
_HOMES = {
    "Geometry": "hf_posenc.scheme",
    "PosencLoraConfig": "hf_posenc.adapters",
    "Positions": "hf_posenc.scheme",
    "Scheme": "hf_posenc.scheme",
    "SchemeInfo": "hf_posenc.registry",
    "attend": "hf_posenc.attention",
    "build": "hf_posenc.registry",
    "describe": "hf_posenc.describing",
    "disabled": "hf_posenc.patching",
    "drop_native": "hf_posenc.strength",
    "evaluate": "hf_posenc.evaluation.running",
    "explain": "hf_posenc.explaining",
    "export_stock": "hf_posenc.export.stock",
    "patch": "hf_posenc.patching",
    "plan": "hf_posenc.planning",
    "register_architecture": "hf_posenc.patches.architecture",
    "register_scheme": "hf_posenc.registry",
    "set_strength": "hf_posenc.strength",
    "unpatch": "hf_posenc.patching",
    "verify": "hf_posenc.planning",
}


def __getattr__(name: str) -> Any:
    if name in ("coordinates", "plots", "schemes"):
        return importlib.import_module(f"hf_posenc.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


_auto.register_on_import()
