"""Files of LoRA adapters: a digest binds them to each other, and a fingerprint to the weights of their base."""

from __future__ import annotations

import hashlib
import json
import math
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
from hf_posenc.patches.atomic_files import published, reading
from hf_posenc.patches.checkpoint import DAMAGED, check_complete, misshapen, read_header, sort_metadata
from hf_posenc.patches.surgery import is_of_scheme

_BOUND = "hf_posenc"
# Fields that are not bound, since they only tell how to find and load the base.
_FREE = {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
# Number of values of each large tensor that enter a fingerprint, at the least.
_SAMPLE = 1024
# The version of the fingerprints that are made now. The first, which did not say so, read one column of some matrices.
_VERSION = 2
# Types that weights are saved in. Others are quantised, or the tensors of something else.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def bind(folder: Path) -> None:
    """Write the digest of a folder's `adapter_config.json` into the metadata of the weights, if there are any."""
    refuse_pickled(folder)
    weights = folder / SAFETENSORS_WEIGHTS_NAME
    if weights.exists():
        with published(weights) as unfinished:
            save_file(load_file(weights), unfinished, metadata={"format": "pt", _BOUND: _digest(_config(weights))})
            sort_metadata(unfinished)


def read(weights: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter, without values, after checking that the file belongs to its config.

    Only the header is read.
    """
    refuse_pickled(weights.parent)
    with reading(f"The adapter {weights}", advice=DAMAGED):
        metadata, tensors = read_header(weights)
    config = weights.with_name(CONFIG_NAME)
    if _BOUND not in metadata:
        raise CheckpointError(
            f"{weights} has no digest of its {config.name} in its header, as every adapter of a converted model has: "
            "another tool wrote it. Restore both files from the original adapter, or save the adapter again."
        )
    if metadata[_BOUND] != _digest(_config(weights)):
        raise CheckpointError(
            f"{config} is not the one that {weights.name} was saved with: one of them was edited or exchanged. "
            "Restore both, or save the adapter again."
        )
    return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}


def check(weights: Path, expected: Mapping[str, Tensor]) -> None:
    """Raise unless an adapter's file has the tensors that saving the adapter would write."""
    found = read(weights)
    wanted = {name.removeprefix("base_model.model."): tensor for name, tensor in expected.items()}
    both = [(name, found[name], wanted[name]) for name in found if name in wanted]
    check_complete(
        f"adapter {weights}",
        missing=[name for name in wanted if name not in found],
        unknown=[name for name in found if name not in wanted and is_of_scheme(name) and not is_of_base(name)],
        misshapen=[
            *(misshapen(n, tuple(x.shape), tuple(y.shape)) for n, x, y in both if x.shape != y.shape),
            *(f"{n} ({x.dtype}, expected {y.dtype})" for n, x, y in both if not _is_kin(x.dtype, y.dtype)),
        ],
        remedy="Load it onto the model that it was trained on, or save the adapter again",
    )


def _is_kin(found: torch.dtype, wanted: torch.dtype) -> bool:
    return found == wanted or (found in _FLOATS and wanted in _FLOATS)


def is_of_base(name: str) -> bool:
    """Whether a tensor in an adapter is a scheme's weight in the base model, which earlier adapters hold, too."""
    return is_of_scheme(name) and "original_module" in name.split(".")


def fingerprint(model: nn.Module, held: Collection[str], version: int = _VERSION) -> dict[str, Any]:
    """Return a fingerprint of the weights under an adapter.

    It digests names, shapes, and values from every row and column of each parameter. Values are rounded in two ways, to
    bfloat16 and through float16, so that the float32 and half-precision forms of a checkpoint share a digest. The
    matrices of linear layers have a part of their own, because quantisation changes only them; schemes are in the rest.
    Modules whose names end as in `held`, which the adapter saves as a whole, are left out.

    Returns:
        The SHA-256 of the parts `matrices` and `rest`, rounded in both ways, and the version; the list is empty for a
        part that is quantised, sharded or offloaded.
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
        sample = values.reshape(-1)[:: _stride(values, version)].cpu()
        for digest, rounded in zip(digests[part], (sample, sample.to(torch.float16)), strict=True):
            digest.update(f"{name} {tuple(values.shape)}".encode())
            digest.update(rounded.to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    found = {
        part: [] if part in unreadable else [digest.hexdigest() for digest in both] for part, both in digests.items()
    }
    return {**found, "version": version}


def _stride(values: Tensor, version: int) -> int:
    """Return the distance of the values of a tensor that enter a fingerprint."""
    count = values.numel()
    if version == 1:
        return max(1, count // _SAMPLE)
    # At most a row or a column apart, so that no row or column is left out; coprime to all sizes, so that the values
    # of neighbouring rows are in different columns.
    width = values.shape[-1] if values.ndim else 1
    stride = max(1, min(width, count // width, count // _SAMPLE))
    return next(number for number in range(stride, 0, -1) if math.gcd(number, count) == 1)


def differing(wanted: Mapping[str, Any] | None, model: nn.Module, held: Collection[str]) -> list[str]:
    """Return the parts of a model's weights that differ from a fingerprint; what cannot be read does not."""
    if not wanted:
        raise CheckpointError(
            "The adapter has no fingerprint of its base ('base_weights' in adapter_config.json), as every adapter of a "
            "converted model has. Restore the file from the original adapter, or save the adapter again."
        )
    version = wanted.get("version", 1)
    if version not in range(1, _VERSION + 1):
        raise CheckpointError(
            f"The adapter has a fingerprint of its base of version {version!r}, and this release knows versions up to "
            f"{_VERSION}. Upgrade: pip install -U hf-posenc."
        )
    return apart(wanted, fingerprint(model, held, version))


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the parts in which two fingerprints of one version differ; a part that either lacks does not."""
    parts = [part for part in ("matrices", "rest") if one.get(part) and other.get(part)]
    return [part for part in parts if set(one[part]).isdisjoint(other[part])]


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


def refuse_pickled(folder: Path) -> None:
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
