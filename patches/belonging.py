"""The configs and the name of a model, and the models inside it, all of which change with it.

A model with a head gets a config of its own. A body writes into the config that it has, which a head around it shares.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_posenc.errors import ArchitectureError, CheckpointError
from hf_posenc.patches.architecture import Architecture
from hf_posenc.patches.surgery import configs, is_patched, stock_class

# The name of a model that was changed in memory. Other libraries load a model again by the name in its config, for a
# reference model or a tokenizer, and after `patch` the old name leads to another model. It is a folder, because
# libraries write names that are not folders into model cards, and says what to do, because some loaders show it only.
UNSAVED = str(Path(__file__).parent / "unsaved_model__save_it_or_pass_ref_model_and_processing_class")


class UnsavedConfig(PreTrainedConfig):
    """The config in that folder, which always raises."""

    model_type = "hf_posenc_unsaved"

    def __post_init__(self, **kwargs: Any) -> None:
        raise CheckpointError(
            "A model that hf_posenc changed in memory was to be loaded again by its name, and it has none, since it "
            "was not saved. Save it and load the folder, or pass the object that is missing: "
            "ref_model=copy.deepcopy(model) for a reference model, processing_class=tokenizer for a tokenizer."
        )


AutoConfig.register(UnsavedConfig.model_type, UnsavedConfig)


def rename(model: nn.Module, *, stock: bool = False) -> None:
    """Replace the name of a model that is about to change; the old one is remembered if it names the stock model.

    A model that is about to be unpatched gets that of its `stock` model, where it is known.
    """
    for config in configs(model):
        if not is_patched(config):
            config.posenc_origin = config._name_or_path
        config._name_or_path = (stock and vars(config).get("posenc_origin")) or UNSAVED
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.name_or_path = configs(model)[0]._name_or_path


def origin(config: Any) -> str:
    """Return the name of the model that a config was loaded with, for model cards; empty if it is not known."""
    name = str(getattr(config, "_name_or_path", "") or "")
    return str(vars(config).get("posenc_origin") or "") if name == UNSAVED else name


def own_configs(architecture: Architecture, model: nn.Module) -> None:
    """Give a model with a head copies of its configs, from which other models may have been made."""
    if any(model is body for body in architecture.stacks(model).values()):
        return
    for config in configs(model):
        own = copy.deepcopy(config)
        for module in model.modules():
            for name in [name for name, value in vars(module).items() if value is config]:
                setattr(module, name, own)


def mark_parts(model: nn.Module) -> None:
    """Mark the bodies inside a patched model as its parts, for `refuse_part`."""
    for module in model.modules():
        if module is not model and is_patched(module) and isinstance(module, PreTrainedModel):
            module.posenc_is_part = True


def refuse_part(architecture: Architecture, model: nn.Module) -> None:
    """Raise `ArchitectureError` if a model is only a part of another: configs and records of both change together."""
    name = stock_class(type(model)).__name__
    if stock_class(type(model)) in architecture.parts:
        raise ArchitectureError(
            f"Got a {name}, which is saved with the model around it only, so that one must know of the scheme. Pass "
            "the whole model; patch takes stacks=."
        )
    if getattr(model, "posenc_is_part", False):
        raise ArchitectureError(
            f"Got the {name} inside of a patched model, which would be left half changed. Pass the whole model; to "
            f"change the {name} alone, save and load it first."
        )
