"""Checkpoints as input and output of commands."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_posenc.cli.application import say_wrote
from hf_posenc.errors import ArchitectureError, CheckpointError
from hf_posenc.patches.atomic_files import reading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENIZER = ("tokenizer_config.json", "tokenizer.json")
_PROCESSOR = "preprocessor_config.json"


def load_model(name: str, dtype: str = "auto") -> PreTrainedModel:
    """Return the model of a checkpoint, in the class named by its config, or else as a language model."""
    from hf_posenc.patches.architecture import of_config
    from hf_posenc.recipes.loading import auto_class, load_config, place

    config = load_config(name)
    known = {kind.__name__: kind for pair in of_config(config).twins.items() for kind in pair}
    named = [known[head] for head in config.architectures or () if head in known]
    if config.architectures and not named:
        raise ArchitectureError(
            f"The checkpoint holds a {config.architectures[0]}, which cannot be patched. "
            f"Known: {', '.join(sorted(known))}."
        )
    kind: Any = named[0] if named else auto_class(config)
    with reading(f"The weights of {name}"):
        loaded: PreTrainedModel = kind.from_pretrained(place(name), dtype=dtype)
    return loaded


def load_converted(directory: Path, otherwise: str) -> PreTrainedModel:
    """Return the model of a converted checkpoint; raise with a remedy if it is not converted."""
    from hf_posenc.patches import record
    from hf_posenc.recipes.loading import load_config

    if not record.from_config(load_config(str(directory))):
        raise CheckpointError(
            f"{directory} is not a converted checkpoint: its config.json names no scheme. {otherwise}"
        )
    return load_model(str(directory))


def find_tokenizer(name: str) -> Any:
    """Return the tokenizer of a checkpoint, or `None` if it has none."""
    from hf_posenc.recipes.loading import load_tokenizer

    with reading(f"The tokenizer of {name}"):
        has_tokenizer = any(_cached(name, file) for file in _TOKENIZER)
    return load_tokenizer(name) if has_tokenizer else None


def copy_companions(name: str, folder: Path) -> None:
    """Copy the tokenizer and the image processor of a checkpoint, where there are any, into a folder."""
    tokenizer = find_tokenizer(name)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    with reading(f"The image processor of {name}"):
        processor = _cached(name, _PROCESSOR)
        if processor:
            shutil.copyfile(processor, folder / _PROCESSOR)


def _cached(name: str, file: str) -> Any:
    """Return the path of a file of a checkpoint, from the hub's cache or a folder; `None` if there is no such file."""
    from transformers.utils import cached_file

    return cached_file(name, file, _raise_exceptions_for_missing_entries=False)


def say_how_to_load(out: Path, kind: str, *imports: str) -> None:
    """Print what a written checkpoint holds, and the lines of Python that load it."""
    say_wrote(out)
    has_tokenizer = any((out / file).is_file() for file in _TOKENIZER)
    if not has_tokenizer and not (out / _PROCESSOR).is_file():
        typer.echo("The checkpoint has no tokenizer, so none was written.")
    names = f"{kind}, AutoTokenizer" if has_tokenizer else kind
    lines = [*imports, f"from transformers import {names}", f'model = {kind}.from_pretrained("{out}")']
    if has_tokenizer:
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{out}")')
    typer.echo("\nTo load it:\n")
    for line in lines:
        typer.echo(f"    {line}")
