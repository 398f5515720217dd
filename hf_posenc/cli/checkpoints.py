"""Checkpoints as input of commands."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.cli.application import one_line
from hf_posenc.errors import ArchitectureError, CheckpointError, PosencError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


def load_config(model: str) -> PreTrainedConfig:
    """Return the config of a checkpoint."""
    from transformers import AutoConfig

    from hf_posenc.recipes.loading import check_place

    check_place(model)
    if Path(model).is_dir() and not Path(model, "config.json").is_file():
        raise CheckpointError(f"There is no config.json in {model}. {_instead_of(Path(model))}")
    with _reading(model, "config"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(model)
    return config


def _instead_of(folder: Path) -> str:
    """Return advice about a folder without a config, which is often the folder of a run."""
    from hf_posenc.recipes.runs.run import MODEL, RECIPE

    if (folder / MODEL / "config.json").is_file():
        return f"The model is in {folder / MODEL}: give that."
    if (folder / MODEL / "adapter_config.json").is_file():
        return f"The run trained an adapter, {folder / MODEL}: give the model that it is for."
    if (folder / RECIPE).is_file():
        return f"It holds a run that is not finished. Go on with it first: hf-posenc resume {shlex.quote(str(folder))}"
    return "Give the directory of a checkpoint."


def load_model(model: str, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """Return the model of a checkpoint, in the class named by its config."""
    kind = _model_class(config)
    with _reading(model, "weights"):
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


@contextlib.contextmanager
def _reading(model: str, what: str) -> Iterator[None]:
    """Turn the errors of a damaged or unreachable checkpoint into one; our own errors pass unchanged."""
    from safetensors import SafetensorError

    try:
        yield
    except PosencError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"The {what} of {model} cannot be read: {one_line(error)}") from error


def find_tokenizer(model: str) -> Any:
    """Return the tokenizer of a checkpoint, or `None` if it has none."""
    from transformers.utils import cached_file

    from hf_posenc.recipes.loading import load_tokenizer

    with _reading(model, "tokenizer"):
        if not any(cached_file(model, name, _raise_exceptions_for_missing_entries=False) for name in _TOKENIZER_FILES):
            return None
    return load_tokenizer(model)


def copy_companions(model: str, folder: Path) -> tuple[bool, str]:
    """Copy tokenizer and image processor of a checkpoint into a folder.

    Returns:
        Whether there is a tokenizer, and a line for the user, which is empty if there is either.
    """
    from transformers.utils import cached_file

    tokenizer, name = find_tokenizer(model), "preprocessor_config.json"
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    with _reading(model, "image processor"):
        processor = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        if processor:
            shutil.copyfile(processor, folder / name)
    is_bare = tokenizer is None and not processor
    return tokenizer is not None, f"{model} has no tokenizer, so none was written.\n" if is_bare else ""


def load_converted(directory: Path, otherwise: str) -> PreTrainedModel:
    """Return the model of a converted checkpoint; raise with a remedy if it is not converted."""
    from hf_posenc.patches import record
    from hf_posenc.recipes.loading import place

    config = load_config(place(str(directory)))
    if not record.from_config(config):
        raise CheckpointError(
            f"{directory} is not a converted checkpoint: its config.json names no scheme. {otherwise}"
        )
    return load_model(str(directory), config, "auto")


def how_to_load(model: PreTrainedModel, out: Path, has_tokenizer: bool) -> str:
    """Return the lines of Python that load a written checkpoint."""
    from hf_posenc.patches import auto

    name = auto.name_for(type(model.config), type(model).__name__) or "AutoModel"
    lines = [
        "    import hf_posenc",
        f"    from transformers import {name}{', AutoTokenizer' if has_tokenizer else ''}",
        f'    model = {name}.from_pretrained("{out}")',
        f'    tokenizer = AutoTokenizer.from_pretrained("{out}")',
    ]
    return "\n".join(lines if has_tokenizer else lines[:-1])
