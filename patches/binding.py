"""The binding of an adapter's files to each other, and to the weights of the model under it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_posenc.errors import CheckpointError
from hf_posenc.patches import record
from hf_posenc.patches.checkpoint import DAMAGED, check_complete, misshapen, read_header
from hf_posenc.patches.directories import published, reading
from hf_posenc.patches.surgery import is_of_scheme

_BOUND = "hf_posenc"
# Fields that are not bound, since they only tell how to find and load the base.
_FREE = {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
# Largest number of values of each tensor that enter a fingerprint.
_SAMPLE = 1024


def bind(folder: Path) -> None:
    """Write the digest of a folder's `adapter_config.json` into the metadata of the weights, if there are any."""
    _refuse_pickled(folder)
    weights = folder / SAFETENSORS_WEIGHTS_NAME
    if weights.exists():
        with published(weights) as unfinished:
            save_file(load_file(weights), unfinished, metadata={"format": "pt", _BOUND: _digest(_config(weights))})


def read(weights: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of an adapter, after checking that the file belongs to its config.

    Only the header is read. Adapters of earlier releases are not bound.
    """
    _refuse_pickled(weights.parent)
    with reading(f"The adapter {weights}", advice=DAMAGED):
        metadata, tensors = read_header(weights)
    bound, config = metadata.get(_BOUND), _config(weights)
    if (bound is not None or "base_weights" in config) and bound != _digest(config):
        raise CheckpointError(
            f"{weights.with_name(CONFIG_NAME)} is not the one that {weights.name} was saved with: one of them was "
            "edited or exchanged. Restore both, or save the adapter again."
        )
    return {name.removeprefix("base_model.model."): tuple(tensor.shape) for name, tensor in tensors.items()}


def check(weights: Path, expected: Mapping[str, Tensor]) -> None:
    """Raise unless an adapter's file has the tensors that saving the adapter would write."""
    found = read(weights)
    wanted = {name.removeprefix("base_model.model."): tuple(tensor.shape) for name, tensor in expected.items()}
    check_complete(
        f"adapter {weights}",
        missing=[name for name in wanted if name not in found and not is_of_base(name)],  # not in earlier releases
        unknown=[name for name in found if name not in wanted and is_of_scheme(name)],
        misshapen=[misshapen(n, found[n], wanted[n]) for n in found if found[n] != wanted.get(n, found[n])],
        remedy="Load it onto the model that it was trained on, or save the adapter again",
    )


def is_of_base(name: str) -> bool:
    """Whether the name of a tensor in an adapter is that of a scheme's weight in the base model."""
    return is_of_scheme(name) and "original_module" in name.split(".")


def fingerprint(model: nn.Module, held: Collection[str]) -> dict[str, list[str]]:
    """Return a fingerprint of the weights under an adapter.

    It digests names, shapes, and up to 2047 evenly spaced values of each parameter. Values are rounded in two ways, to
    bfloat16 and through float16, so that the float32 and half-precision forms of a checkpoint share a digest. The
    matrices of linear layers have a part of their own, because quantisation changes only them; schemes are in the rest.
    Modules whose names end as in `held`, which the adapter saves as a whole, are left out.

    Returns:
        The SHA-256 of the parts `matrices` and `rest`, rounded in both ways; empty for a part that is quantised,
        sharded or offloaded.
    """
    digests = {part: (hashlib.sha256(), hashlib.sha256()) for part in ("matrices", "rest")}
    unreadable = set()
    for name, module, parameter in _base_parameters(model, "", set()):
        place = name.rpartition(".")[0]
        if any(place.endswith(end) or f".{end}." in f".{name}" for end in held):
            continue
        scheme = is_of_scheme(name)
        part = "matrices" if parameter.ndim > 1 and not scheme and not isinstance(module, nn.Embedding) else "rest"
        values = parameter.data
        if type(values) is not Tensor or values.is_meta or not values.is_floating_point() or not values.numel():
            unreadable.add(part)
            continue
        flat = values.reshape(-1)
        sample = flat[:: max(1, len(flat) // _SAMPLE)].cpu()
        for digest, rounded in zip(digests[part], (sample, sample.to(torch.float16)), strict=True):
            digest.update(f"{name} {tuple(values.shape)}".encode())
            digest.update(rounded.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return {
        part: [] if part in unreadable else [digest.hexdigest() for digest in both] for part, both in digests.items()
    }


def differing(wanted: Mapping[str, Collection[str]], found: Mapping[str, Collection[str]]) -> list[str]:
    """Return the parts of two fingerprints that are known and differ."""
    return [part for part, own in wanted.items() if own and found.get(part) and set(own).isdisjoint(found[part])]


def _base_parameters(
    module: nn.Module, prefix: str, seen: set[nn.Parameter]
) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield each parameter of a module that is not seen yet, as if there were no adapters in it."""
    if isinstance(module, BaseTunerLayer):
        module = module.get_base_layer()
    elif isinstance(module, AuxiliaryTrainingWrapper):
        module = module.original_module
    for name, parameter in module.named_parameters(recurse=False):
        if parameter not in seen:
            seen.add(parameter)
            yield prefix + name, module, parameter
    for name, child in module.named_children():
        yield from _base_parameters(child, f"{prefix}{name}.", seen)


def _refuse_pickled(folder: Path) -> None:
    if (folder / WEIGHTS_NAME).exists():
        raise CheckpointError(
            f"{folder / WEIGHTS_NAME} is pickled, and cannot be bound to its scheme. Delete it, and save the adapter "
            "again, with safe_serialization=True."
        )


def _config(weights: Path) -> dict[str, Any]:
    file = weights.with_name(CONFIG_NAME)
    with reading(str(file), advice=DAMAGED):
        return dict(json.loads(file.read_text(encoding="utf-8")))


def _digest(config: Mapping[str, Any]) -> str:
    """Return the digest of an `adapter_config.json`; lists of names are sorted, since PEFT keeps them as sets."""
    bound = {
        key: sorted(value) if isinstance(value, list) and all(isinstance(entry, str) for entry in value) else value
        for key, value in config.items()
        if key not in _FREE
    }
    scheme = bound.get("posenc")
    return record.digest({**bound, "posenc": record.digest(scheme) if isinstance(scheme, dict) else scheme})
