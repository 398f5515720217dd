"""What binds the files of an adapter to each other, and to the weights of the model under it."""

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
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_posenc.errors import CheckpointError
from hf_posenc.patches import record

_BOUND = "hf_posenc"
# What may differ between adapter_config.json and the one that the weights were saved with: it says where the base is.
_FREE = {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
# How many values of each tensor count for a fingerprint.
_SAMPLE = 1024


def bind(folder: Path) -> None:
    """Write the digest of a folder's `adapter_config.json` into the metadata of the weights, if there are any.

    Raises:
        CheckpointError: The weights are pickled.
    """
    weights = folder / SAFETENSORS_WEIGHTS_NAME
    if (folder / WEIGHTS_NAME).exists():
        raise CheckpointError(
            f"{folder / WEIGHTS_NAME} is pickled, and cannot be bound to its scheme. Delete it, and save with "
            "safe_serialization=True."
        )
    if not weights.exists():
        return
    beside = weights.with_name(f".{weights.name}.{_BOUND}")
    try:
        save_file(load_file(weights), beside, metadata={"format": "pt", _BOUND: _digest(_config(weights))})
        beside.replace(weights)
    finally:
        beside.unlink(missing_ok=True)


def read(weights: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of an adapter, if the file is whole and belongs to the config beside it.

    Nothing but the header is read. Adapters of earlier releases are bound to nothing.

    Raises:
        CheckpointError: It cannot be read, or one of the two was edited or exchanged.
    """
    try:
        with safe_open(weights, framework="pt") as file:
            bound = (file.metadata() or {}).get(_BOUND)
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        pickled = weights.with_name(WEIGHTS_NAME)
        raise CheckpointError(
            f"{pickled} is pickled, which adapters of converted models never are. Save the adapter again."
            if pickled.exists() and not weights.exists()
            else f"The weights of the adapter, {weights}, cannot be read ({error}): missing, truncated or damaged. "
            "Download or save the adapter again."
        ) from error
    config = _config(weights)
    if (bound is not None or "base_weights" in config) and bound != _digest(config):
        raise CheckpointError(
            f"{weights.with_name(CONFIG_NAME)} is not the one that {weights.name} was saved with: one of them was "
            "edited or exchanged. Restore both, or save the adapter again."
        )
    return shapes


def check_tensors(weights: Path, found: Mapping[str, Collection[int]], expected: Mapping[str, Tensor]) -> None:
    """Raise unless an adapter's file has the tensors that its config asks for.

    Args:
        weights: The file, for the message.
        found: The shape of each tensor in it.
        expected: What would be saved now.

    Raises:
        CheckpointError: One is missing or misshapen, or there are weights of schemes that the adapter has not.
    """
    found = {name.removeprefix("base_model.model."): tuple(shape) for name, shape in found.items()}
    wanted = {name.removeprefix("base_model.model."): tuple(tensor.shape) for name, tensor in expected.items()}
    faults = [f"misses {name}" for name in wanted if name not in found]
    faults += [
        f"has {name} of shape {found[name]} where {shape} is expected"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    faults += [f"has an unknown {name}" for name in found if name not in wanted and ".hf_posenc" in f".{name}"]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(
            f"{weights} {'; '.join(sorted(faults)[:3])}{more}. It does not fit the model, or is damaged: load it onto "
            "the model that it was trained on, or save the adapter again."
        )


def fingerprint(model: nn.Module, held: Collection[str]) -> dict[str, list[str]]:
    """Return what tells the weights under an adapter from others.

    It is of names, shapes, and up to 1024 values of each parameter, evenly spaced. They are rounded twice, to bfloat16
    and by way of float16, so that one checkpoint in float32 and in half precision has a digest in common. Two parts are
    kept apart, because quantisation changes only the first: the matrices of linear layers; and all the rest, which
    includes schemes.

    Args:
        model: Stock or converted, with adapters or without.
        held: The ends of the names of modules that the adapter has weights of its own for, which do not count.

    Returns:
        The SHA-256 of the parts `matrices` and `rest`, rounded in both ways; none for a part that cannot be read:
        quantised, sharded or offloaded.
    """
    digests = {part: (hashlib.sha256(), hashlib.sha256()) for part in ("matrices", "rest")}
    unreadable = set()
    for name, module, parameter in _base_parameters(model):
        place = name.rpartition(".")[0]
        if any(place.endswith(end) or f".{end}." in f".{name}" for end in held):
            continue
        scheme = ".hf_posenc" in f".{name}"
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
    """Return the parts of two fingerprints that can be compared, and differ."""
    return [part for part, own in wanted.items() if own and found.get(part) and set(own).isdisjoint(found[part])]


def _base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield each parameter of a model once, as if there were no adapters in it."""
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
        if isinstance(module, BaseTunerLayer):
            module = module.get_base_layer()
        elif isinstance(module, AuxiliaryTrainingWrapper):
            module = module.original_module
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + name, module, parameter
        for name, child in module.named_children():
            yield from walk(child, f"{prefix}{name}.")

    return walk(model, "")


def _config(weights: Path) -> dict[str, Any]:
    file = weights.with_name(CONFIG_NAME)
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return dict(found)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {file} ({error}). Download or save the adapter again.") from error


def _digest(config: Mapping[str, Any]) -> str:
    """Return the digest of an `adapter_config.json`, without the order of names in lists: PEFT has sets of them."""
    bound = {
        key: sorted(value) if isinstance(value, list) and all(isinstance(entry, str) for entry in value) else value
        for key, value in config.items()
        if key not in _FREE
    }
    scheme = bound.get("posenc")
    return record.digest({**bound, "posenc": record.digest(scheme) if isinstance(scheme, dict) else scheme})
