"""The name of a model that was changed in memory: a folder whose loading says that nothing was saved.

Other libraries load a model again by the name in its config, for a reference model or a tokenizer. After `patch` the
old name leads to another model, so it is replaced by this folder. A folder, because libraries write names that are
not folders into model cards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_posenc.errors import CheckpointError
from hf_posenc.patches.surgery import Undo, configs, is_patched

# Some loaders show the name only, so it says what to do.
NAME = str(Path(__file__).parent / "unsaved_model__save_it_or_pass_ref_model_and_processing_class")


class UnsavedConfig(PreTrainedConfig):
    """The config in the folder, which always raises."""

    model_type = "hf_posenc_unsaved"

    def __post_init__(self, **kwargs: Any) -> None:
        raise CheckpointError(
            "A model that hf_posenc changed in memory was to be loaded again by its name, and it has none, since it "
            "was not saved. Save it and load the folder, or pass the object that is missing: "
            "ref_model=copy.deepcopy(model) for a reference model, processing_class=tokenizer for a tokenizer."
        )


def rename(undo: Undo, model: nn.Module) -> None:
    """Replace the name of a model that is about to change; the old one is remembered if it names the stock model."""
    for config in configs(model):
        stock = vars(config).get("posenc_origin") if is_patched(config) else config._name_or_path
        undo.set(config, "posenc_origin", stock)
        undo.set(config, "_name_or_path", NAME)
    _name_modules(undo, model, NAME)


def rename_stock(undo: Undo, model: nn.Module) -> None:
    """Give a model that is about to be unpatched the name of its stock model, where that is known."""
    for config in configs(model):
        undo.set(config, "_name_or_path", vars(config).get("posenc_origin") or NAME)
    _name_modules(undo, model, configs(model)[0]._name_or_path)


def origin(config: Any) -> str:
    """Return the name of the model that a config was loaded with, for model cards; empty if it is not known."""
    name = str(getattr(config, "_name_or_path", "") or "")
    return str(vars(config).get("posenc_origin") or "") if name == NAME else name


def _name_modules(undo: Undo, model: nn.Module, name: str) -> None:
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            undo.set(module, "name_or_path", name)


AutoConfig.register(UnsavedConfig.model_type, UnsavedConfig)
