"""Files for llama.cpp: what its converter leaves out of a GGUF file, and the encoding that it has no class for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_posenc.errors import AttentionBackendError, ExportError
from hf_posenc.patches import record
from hf_posenc.patches.atomic_files import published
from hf_posenc.patches.patch import refuse_wrapped
from hf_posenc.patches.serving.outside import layers_for, terms_of
from hf_posenc.patches.surgery import Sites, native_removed, scheme_of
from hf_posenc.scheme import CHANGED
from hf_posenc.schemes.families.additive import slopes as standard_slopes

_ARCHITECTURE = "general.architecture"
_ROTATING = "llama"
# llama.cpp's own model with the same layers, no rotation, and slopes in proportion to the distance.
_SLOPING = "refact"
# Which of the two a sequence reads depends on its length.
_FACTORS = ("rope_factors_short", "rope_factors_long")
_NORM = "output_norm.weight"


def complete_gguf(model: PreTrainedModel, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> str:
    """Write a GGUF file with which llama.cpp computes what a model does, from the file of its converter.

    There are two cases. Of an export whose `rope_type` is "longrope", the converter drops the factors; they are added.
    A Llama converted to ALiBi with its standard slopes has no class there; `source` is then the file of its
    `hf_posenc.unpatch`, and becomes one of llama.cpp's "refact", which has the same layers and these slopes.

    Args:
        model: The exported or the converted model, in memory.
        source: The file that llama.cpp's converter made, of any precision.
        target: The file to write.

    Returns:
        What was changed, in words.

    Raises:
        ExportError: The file is of another model, is complete already, or llama.cpp cannot compute this.
    """
    refuse_wrapped(model, "Take it out first.")
    gguf = _package()
    try:
        reader = gguf.GGUFReader(source)
        architecture = reader.get_field(_ARCHITECTURE).contents()
    except (OSError, ValueError, AttributeError, IndexError) as error:
        raise ExportError(
            f"{source} cannot be read as a GGUF file ({error}). Make it with llama.cpp's converter."
        ) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if architecture != _ROTATING:
        raise _unfit(f"got a file of the architecture {architecture!r}; expected {_ROTATING!r}")
    body: Any = model.base_model
    norm = body.norm.weight.detach().float().cpu()
    if _NORM not in tensors or not torch.equal(torch.tensor(tensors[_NORM].data), norm):
        raise _unfit(f"{source} is of another model: its last norm has other weights. Convert the folder of this one")
    if record.from_config(model.config):
        if any(name.endswith(".bias") and ".ffn_" in name for name in tensors):
            raise _unfit(f"its feed-forward has biases, which llama.cpp's {_SLOPING!r} ignores")
        _check_slopes(model)
        tensors.pop("rope_freqs.weight", None)
        added: dict[str, Any] = {}
        architecture, change = _SLOPING, f"architecture: {_SLOPING}, whose slopes are those of the scheme"
    else:
        factors = _factors(model, tensors)
        added = {f"{name}.weight": factors for name in _FACTORS}
        change = f"added: {' and '.join(added)}, {len(factors)} numbers each"
    with published(Path(target)) as unfinished:
        _write(gguf.GGUFWriter(unfinished, architecture), reader, tensors, added)
    return change


def _package() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ExportError("The package gguf is missing: pip install gguf") from error


def _unfit(why: str) -> ExportError:
    return ExportError(f"Cannot write a file for llama.cpp: {why}.")


def _factors(model: PreTrainedModel, tensors: Mapping[str, Any]) -> Any:
    """Return the factor of each rotary pair, float32."""
    rope = model.config.rope_parameters
    if rope["rope_type"] != "longrope":
        raise _unfit(f"its rope_type is {rope['rope_type']!r}, for which the file is complete as it is")
    if rope["short_factor"] != rope["long_factor"]:
        raise _unfit("its factors differ between short and long inputs; expected a model of hf_posenc.export_stock")
    if any(f"{name}.weight" in tensors for name in _FACTORS):
        raise _unfit("the file has factors already, and is complete")
    return torch.tensor(rope["short_factor"], dtype=torch.float32).numpy()


def _check_slopes(model: PreTrainedModel) -> None:
    """Raise unless all layers add the standard slopes of ALiBi, and do nothing else."""
    try:
        attentions = layers_for(model, "llama.cpp", frozenset({"slopes"}))
    except AttentionBackendError as error:
        raise ExportError(str(error)) from error
    sites = Sites.of(model)
    stack = sites.stacks["decoder"]
    if any(attention not in attentions.values() for attention in stack.attentions):
        raise _unfit("some layers are as they were; expected all with slopes")
    if not native_removed(sites.architecture, stack.attentions):
        raise _unfit("the model's own rotation was kept")
    if model.config.hidden_act != "silu":
        raise _unfit(f"its activation is {model.config.hidden_act!r}; expected 'silu'")
    for attention in stack.attentions:
        scheme = scheme_of(stack.body, attention)
        slopes = terms_of(scheme).slopes
        if [seam for seam in CHANGED if scheme.overrides(seam)] != ["score"] or slopes is None:
            raise _unfit(f"{scheme.name} does more than adding slopes")
        if not torch.allclose(slopes.detach().double().cpu(), standard_slopes(len(slopes)), rtol=1e-6, atol=0.0):
            raise _unfit(f"the slopes of {scheme.name} are not the standard ones")


def _write(writer: Any, reader: Any, tensors: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    array = importlib.import_module("gguf").GGUFValueType.ARRAY
    for field in reader.fields.values():
        if field.name == _ARCHITECTURE or field.name.startswith("GGUF."):
            continue
        name = field.name
        if name.startswith(f"{_ROTATING}."):
            name = writer.arch + name.removeprefix(_ROTATING)
        writer.add_key_value(
            name, field.contents(), field.types[0], sub_type=field.types[-1] if field.types[0] == array else None
        )
    for name, values in added.items():
        writer.add_tensor(name, values)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
