"""Checkpoints as input of commands."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import ArchitectureError, CheckpointError
from hf_posenc.patches.directories import reading

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def load_model(model: str, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """Return the model of a checkpoint, in the class named by its config."""
    kind = _model_class(config)
    with reading(f"The weights of {model}"):
        loaded: PreTrainedModel = kind.from_pretrained(model, dtype=dtype)
    return loaded


def _model_class(config: PreTrainedConfig) -> Any:
    """Return the class named by a config, or else the class of a language model."""
    from hf_posenc.patches.architecture import of_config
    from hf_posenc.recipes.loading import auto_class

    known = {kind.__name__: kind for pair in of_config(config).twins.items() for kind in pair}
    named = [known[name] for name in config.architectures or [] if name in known]
    if config.architectures and not named:
        raise ArchitectureError(
            f"The checkpoint holds a {config.architectures[0]}, which cannot be patched. "
            f"Known: {', '.join(sorted(known))}."
        )
    return named[0] if named else auto_class(config)


def find_tokenizer(model: str) -> Any:
    """Return the tokenizer of a checkpoint, or `None` if it has none."""
    from transformers.utils import cached_file

    from hf_posenc.recipes.loading import load_tokenizer

    with reading(f"The tokenizer of {model}"):
        if not any(cached_file(model, name, _raise_exceptions_for_missing_entries=False) for name in _TOKENIZER_FILES):
            return None
    return load_tokenizer(model)


def copy_companions(model: str, folder: Path) -> tuple[bool, str]:
    """Copy tokenizer and image processor into a folder; return whether there is a tokenizer, and a line if neither."""
    from transformers.utils import cached_file

    tokenizer, name = find_tokenizer(model), "preprocessor_config.json"
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    with reading(f"The image processor of {model}"):
        processor = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        if processor:
            shutil.copyfile(processor, folder / name)
    is_bare = tokenizer is None and not processor
    return tokenizer is not None, f"{model} has no tokenizer, so none was written.\n" if is_bare else ""


def load_converted(directory: Path, otherwise: str) -> PreTrainedModel:
    """Return the model of a converted checkpoint; raise with a remedy if it is not converted."""
    from hf_posenc.patches import record
    from hf_posenc.recipes.loading import load_config

    config = load_config(str(directory))
    if not record.from_config(config):
        raise CheckpointError(
            f"{directory} is not a converted checkpoint: its config.json names no scheme. {otherwise}"
        )
    return load_model(str(directory), config, "auto")


def how_to_load(model: PreTrainedModel, out: Path, has_tokenizer: bool) -> str:
    """Return the lines of Python that load a written checkpoint."""
    from hf_posenc.patches.architecture import auto_name

    name = auto_name(type(model.config), type(model).__name__) or "AutoModel"
    lines = [
        "    import hf_posenc",
        f"    from transformers import {name}{', AutoTokenizer' if has_tokenizer else ''}",
        f'    model = {name}.from_pretrained("{out}")',
        f'    tokenizer = AutoTokenizer.from_pretrained("{out}")',
    ]
    return "\n".join(lines if has_tokenizer else lines[:-1])
