"""Folders for mlx-lm: the stock weights of a converted Llama, tables of its encoding, and a file that computes them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.utils import CONFIG_NAME

from hf_posenc.equivalents import Nothing
from hf_posenc.errors import ExportError
from hf_posenc.forms import DistanceTable
from hf_posenc.patches.atomic_files import OutputError, whole_directory
from hf_posenc.patches.export.restating import Draft, Layer, is_unit, read_stack, rotation_of, unfit
from hf_posenc.patches.export.stock import check_model

# mlx-lm imports this file from the folder, see `model_file` there.
_FILE = '''"""A Llama of mlx-lm whose positions are tables of numbers, as hf_posenc wrote them."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

ModelArgs = llama.ModelArgs


class Rope(nn.Module):
    def __init__(self, pairs):
        super().__init__()
        self.periods = mx.zeros(pairs)  # of each pair of channels, over 2 pi

    def __call__(self, x, offset=0):
        turned = 2 * self.periods.size
        return mx.fast.rope(x, turned, traditional=False, base=None, scale=1.0, offset=offset, freqs=self.periods)


class Attention(llama.Attention):
    def __init__(self, args):
        super().__init__(args)
        self.rope = Rope(self.head_dim // 2)
        self.bias = mx.zeros((self.n_heads, args.max_position_embeddings))  # of each distance

    def __call__(self, x, mask=None, cache=None):
        count = total = x.shape[1]
        if isinstance(mask, mx.array):
            total = mask.shape[-1]
        elif cache is not None:
            total += cache.offset
        if total > self.bias.shape[1]:
            raise ValueError(f"got {total} tokens; expected at most {self.bias.shape[1]}")
        distance = mx.arange(total - count, total)[:, None] - mx.arange(total)
        seen = mask if isinstance(mask, mx.array) else distance >= 0
        bias = mx.take(self.bias, mx.maximum(distance, 0), axis=1)[None]
        return super().__call__(x, mx.where(seen, bias, mx.finfo(mx.float32).min / 2).astype(x.dtype), cache)


class Model(llama.Model):
    def __init__(self, args):
        super().__init__(args)
        for layer in self.layers:
            layer.self_attn = Attention(args)
'''


def export_mlx(model: PreTrainedModel, directory: str | os.PathLike[str]) -> None:
    """Write a converted Llama as a folder that mlx-lm loads with `trust_remote_code=True`, and nothing else.

    Each layer may turn pairs of channels by frequencies of its own, and add a bias of the distance, up to
    `max_position_embeddings`.

    Args:
        model: A patched Llama, in memory. It does not change.
        directory: Where to write; must not exist, or be empty.

    Raises:
        ExportError: The schemes do something else, or the folder cannot be written. Nothing is written then.
        NotPatchedError: The model is not patched.
        WrappedModelError: It is inside of a wrapper.
    """
    try:
        with whole_directory(Path(directory)) as folder:
            architecture = check_model(model)
            if not isinstance(model, LlamaForCausalLM):
                raise ExportError(f"Got a {type(model).__name__}; mlx-lm gets Llamas with a language head only.")
            config: Any = model.config
            tables: dict[str, Tensor] = {}
            for index, layer in enumerate(read_stack(architecture, model, "decoder").layers):
                periods, bias = _tables(layer, config.max_position_embeddings)
                place = f"model.layers.{index}.self_attn"
                tables |= {f"{place}.rope.periods": periods, f"{place}.bias": bias}
            Draft(model, architecture).build().save_pretrained(folder)
            save_file(tables, folder / "model-posenc.safetensors", {"format": "mlx"})
            (folder / "posenc_mlx.py").write_text(_FILE, encoding="utf-8")
            file, (field, refused) = folder / CONFIG_NAME, config.posenc_lock
            written = json.loads(file.read_text(encoding="utf-8"))
            # So no class of transformers takes it for a stock Llama.
            written |= {"model_type": "hf_posenc_mlx", "model_file": "posenc_mlx.py", field: refused}
            file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    except OutputError as error:
        raise ExportError(str(error)) from error


def _tables(layer: Layer, count: int) -> tuple[Tensor, Tensor]:
    """Return the periods of the pairs of channels, over 2 pi, and the biases of each head at that many distances."""
    bias = torch.zeros(layer.geometry.heads, count)
    if isinstance(layer.added, DistanceTable):
        with torch.no_grad():
            bias = layer.added.at(torch.arange(count), torch.float64).float().contiguous()
        layer = replace(layer, added=Nothing())
    rotation = rotation_of(layer)
    frequencies, changes = rotation.frequencies[0], layer.native and layer.geometry.rotary_limit is not None
    if changes or not is_unit(rotation.basis) or bool((rotation.frequencies != frequencies).any()):
        raise unfit(layer, "needs a rotation of other pairs, by head, by a factor, or by the length")
    return 1 / frequencies.clamp_min(1e-30).float(), bias
