"""Registration of the converted architectures with transformers' `Auto` classes."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from hf_posenc.patches import belonging  # noqa: F401 - registers itself
from hf_posenc.patches.architecture import Architecture, architectures


def register_all() -> None:
    """Register every architecture: each does so when it is loaded."""
    architectures()


def register(architecture: Architecture) -> None:
    """Teach `AutoConfig` the converted model type, and every `AutoModel...` the converted model classes."""
    stock, twin = config_pair(architecture)
    AutoConfig.register(twin.model_type, twin, exist_ok=True)
    for name, model in classes_for(stock).items():
        if model in architecture.twins:
            getattr(modeling_auto, name).register(twin, architecture.twins[model], exist_ok=True)


def config_pair(architecture: Architecture) -> tuple[Any, Any]:
    """Return the stock config class of an architecture and its twin."""
    return next((stock, twin) for stock, twin in architecture.twins.items() if hasattr(stock, "model_type"))


def classes_for(config_class: type) -> dict[str, type]:
    """Return the model class that each `Auto` class has for a config class, stock or patched."""
    found: dict[str, type] = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if isinstance(auto, type) and mapping is not None and config_class in mapping:
            model = mapping[config_class]
            found[name] = model[0] if isinstance(model, tuple) else model
    return found


def name_for(config_class: type, head: str) -> str | None:
    """Return the name of the `Auto` class that loads the patched model class of a name; `None` if none does."""
    names = [name for name, kind in classes_for(config_class).items() if kind.__name__ == head]
    # The class for pretraining is a second name of a head that has a better known one.
    return min(names, key=lambda name: name == "AutoModelForPreTraining", default=None)
