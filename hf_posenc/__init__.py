"""Replace the positional encoding of a loaded Hugging Face model in one line.

    model = hf_posenc.patch(model, "fire")

Importing this package is cheap: torch and transformers load on first use. It also makes converted checkpoints known to
the `Auto` classes of transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hf_posenc import _auto

if TYPE_CHECKING:
    from hf_posenc.attention import attend as attend
    from hf_posenc.errors import ArchitectureError as ArchitectureError
    from hf_posenc.errors import AttentionBackendError as AttentionBackendError
    from hf_posenc.errors import CacheError as CacheError
    from hf_posenc.errors import CheckpointError as CheckpointError
    from hf_posenc.errors import DirectionError as DirectionError
    from hf_posenc.errors import ExportError as ExportError
    from hf_posenc.errors import LayerSelectionError as LayerSelectionError
    from hf_posenc.errors import MissingPackageError as MissingPackageError
    from hf_posenc.errors import NotPatchedError as NotPatchedError
    from hf_posenc.errors import OptionError as OptionError
    from hf_posenc.errors import PosencError as PosencError
    from hf_posenc.errors import PositionError as PositionError
    from hf_posenc.errors import RecipeError as RecipeError
    from hf_posenc.errors import ShapeError as ShapeError
    from hf_posenc.errors import StorageError as StorageError
    from hf_posenc.errors import UnknownSchemeError as UnknownSchemeError
    from hf_posenc.errors import WrappedModelError as WrappedModelError
    from hf_posenc.operands import Geometry as Geometry
    from hf_posenc.operands import Positions as Positions
    from hf_posenc.patches.adapters import PosencLoraConfig as PosencLoraConfig
    from hf_posenc.patches.architecture import register_architecture as register_architecture
    from hf_posenc.patches.export.stock import export_stock as export_stock
    from hf_posenc.patches.patch import disabled as disabled
    from hf_posenc.patches.patch import drop_native as drop_native
    from hf_posenc.patches.patch import patch as patch
    from hf_posenc.patches.patch import set_strength as set_strength
    from hf_posenc.patches.patch import unpatch as unpatch
    from hf_posenc.patches.plan import explain as explain
    from hf_posenc.patches.plan import plan as plan
    from hf_posenc.patches.plan import verify as verify
    from hf_posenc.recipes.evaluation.measure import evaluate as evaluate
    from hf_posenc.registry import SchemeInfo as SchemeInfo
    from hf_posenc.registry import build as build
    from hf_posenc.registry import describe as describe
    from hf_posenc.registry import register_scheme as register_scheme
    from hf_posenc.registry import schemes as schemes
    from hf_posenc.scheme import Scheme as Scheme

__version__ = "0.1.0"

# The public names of each module, and modules that are attributes of the package; all load on first use.
_NAMES = {
    "attention": "attend",
    "errors": "ArchitectureError AttentionBackendError CacheError CheckpointError DirectionError ExportError "
    "LayerSelectionError MissingPackageError NotPatchedError OptionError PosencError PositionError RecipeError "
    "ShapeError StorageError UnknownSchemeError WrappedModelError",
    "operands": "Geometry Positions",
    "patches.adapters": "PosencLoraConfig",
    "patches.architecture": "register_architecture",
    "patches.export.stock": "export_stock",
    "patches.patch": "disabled drop_native patch set_strength unpatch",
    "patches.plan": "explain plan verify",
    "recipes.evaluation.measure": "evaluate",
    "registry": "SchemeInfo build describe register_scheme",
    "scheme": "Scheme",
}
_HOMES = {name: f"hf_posenc.{module}" for module, names in _NAMES.items() for name in names.split()}
_MODULES = {"coordinates": "coordinates", "errors": "errors", "plots": "recipes.plots", "schemes": "schemes"}

__all__ = sorted([*_HOMES, "schemes"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hf_posenc.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


_auto.register_on_import()
