"""Weights that go into a model that is patched already: they must be of the same record.

A state dict has no record, and other schemes and options may have the same names and shapes. So models put the digest
of theirs into the metadata that torch keeps with a state dict. Files of safetensors lose these, and libraries that read
a folder hand on the tensors alone; so the folder is looked up among the arguments of their running functions.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from transformers.utils import CONFIG_NAME

from hf_posenc.errors import CheckpointError
from hf_posenc.patches import record
from hf_posenc.patches.atomic_files import reading
from hf_posenc.patches.checkpoint import DAMAGED

# The functions of libraries that read weights from a folder, or a file in it, and the variable that names it.
READERS = {
    ("transformers.trainer", "_load_from_checkpoint"): "resume_from_checkpoint",
    ("transformers.trainer", "_load_best_model"): "best_model_path",
    ("transformers.trainer_utils", "load_sharded_checkpoint"): "folder",
    ("accelerate.checkpointing", "load_accelerator_state"): "input_dir",
    ("accelerate.utils.fsdp_utils", "load_fsdp_model"): "input_dir",
    ("accelerate.utils.modeling", "load_checkpoint_in_model"): "checkpoint",
    ("safetensors.torch", "load_model"): "filename",
    ("peft.peft_model", "load_adapter"): "model_id",
}
# Key of the digest in the metadata of a state dict.
DIGEST = "hf_posenc_record"


def digest(config: Any) -> str:
    """Return the digest of what a config, or its JSON, says of schemes, in composites of those of all parts.

    Strengths are left to callbacks, which set them again.
    """
    return " ".join(sorted(record.digest({"groups": posenc["groups"]}) for posenc in _records(config)))


def _records(config: Any) -> list[Any]:
    """Return the records in a config or its JSON: its own, or those of the parts of a composite."""
    if isinstance(config, Mapping):
        inside = [found for value in config.values() if isinstance(value, Mapping) for found in _records(value)]
        return [config["posenc"]] if config.get("posenc") else inside
    return [config.posenc] if getattr(config, "posenc", None) else [each.posenc for each in record.converted(config)]


def check_metadata(config: Any, metadata: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a state dict is that of a model with another record."""
    if metadata.get(DIGEST, digest(config)) != digest(config):
        raise CheckpointError(_message("The state dict", config))


def check_folder(config: Any, name: str = CONFIG_NAME) -> Path | None:
    """Raise `CheckpointError` if the folder that a library reads is that of a model or adapter with another record.

    Returns:
        The folder; `None` if no library reads one, or it has no config of that name.
    """
    place = _being_read()
    folder = place.parent if place is not None and place.is_file() else place
    if folder is None or not (folder / name).is_file():
        return None
    with reading(str(folder / name), advice=DAMAGED):
        same = digest(json.loads((folder / name).read_text(encoding="utf-8"))) == digest(config)
    if not same:
        raise CheckpointError(_message(str(folder), config))
    return folder


def _being_read() -> Path | None:
    """Return what the innermost of those functions that runs is reading."""
    for function, frame in running():
        found = frame.f_locals.get(READERS.get(function, ""))
        if isinstance(found, (str, os.PathLike)):
            return Path(found)
    return None


def running() -> Iterator[tuple[tuple[str, str], FrameType]]:
    """Yield each function that runs, by the name of its module and its own, with its frame; innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield (frame.f_globals.get("__name__", ""), frame.f_code.co_name), frame
        frame = frame.f_back


def _message(what: str, config: Any) -> str:
    names = ", ".join(repr(group["scheme"]) for posenc in _records(config) for group in posenc["groups"])
    return (
        f"{what} is that of a model with other schemes, options or layers than this one, which has {names}. Patch the "
        "model as that one was, or load the checkpoint with from_pretrained."
    )
