"""ONNX files that generate: prefill and step as one graph, with earlier keys, values and state as tensors."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from hf_posenc.errors import ExportError
from hf_posenc.patches.atomic_files import whole_files
from hf_posenc.patches.cache import NAMES, POSITIONS, PosencDynamicLayer, cache_of
from hf_posenc.patches.context import Request, resolve_positions
from hf_posenc.patches.patch import refuse_wrapped
from hf_posenc.patches.surgery import Sites, is_patched

_KEYS, _VALUES = "key", "value"
_ANY = torch.export.Dim.DYNAMIC


def export_onnx(model: PreTrainedModel, file: str | os.PathLike[str]) -> list[str]:
    """Write a converted decoder as one ONNX graph for prefill and steps, of any batch and length, with a cache.

    Inputs are `input_ids` `[B, S]`, `attention_mask` `[B, P + S]`, with 0 for padding on the left, and
    `past_key_values.<layer>.<name>`: `key` and `value` `[B, G, P, D]`, and what the scheme keeps of each token,
    `[B, P, ...]`. Before the first call P is 0. Outputs are `logits`, and `present.<layer>.<name>` for the next call.

    Args:
        model: A converted decoder in eval mode, in memory. It does not change.
        file: The file to write; weights beyond 2 GB go into another one beside it.

    Returns:
        The names of the inputs.

    Raises:
        ExportError: No growing tensor holds what the scheme keeps, or torch.onnx lacks something that it computes.
    """
    refuse_wrapped(model, "Take it out first.")
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ExportError(f'Packages are missing: {", ".join(missing)}. Run pip install "hf-posenc[onnx]".')
    if not is_patched(model) or list(Sites.of(model).stacks) != ["decoder"] or model.training:
        mode = "training" if model.training else "eval"
        raise _unfit(f"got a {type(model).__name__} in {mode} mode; expected a converted decoder in eval mode")
    ids = torch.zeros(2, 4, dtype=torch.long, device=model.device)
    with torch.no_grad():
        cache = cache_of(model(input_ids=ids[:, :3], use_cache=True))
        if any(getattr(layer, "recent_state", None) for layer in cache.layers):
            raise _unfit("the scheme keeps a state of the last tokens only, which is no tensor that grows")
        past = _tensors(cache)
        given = {"input_ids": ids, "attention_mask": ids.new_ones(2, 7), "past": past}
        try:
            program = _program(_Step(model), given)
        # Exporters fail in as many ways as there are operations.
        except Exception as error:
            reason = " ".join(str(error.__cause__ or error).split())
            raise _unfit(f"torch.onnx says: {reason[:200]}") from error
    target = Path(file)
    with whole_files(target.parent) as folder:
        program.save(folder / target.name)
    return [value.name for value in program.model.graph.inputs]


def _unfit(why: str) -> ExportError:
    return ExportError(
        f"Cannot write this model as an ONNX file: {why}. Use model.generate of transformers, or "
        "hf_posenc.export_stock where it has a stock form."
    )


def _tensors(cache: Any) -> dict[str, Tensor]:
    """Return what a cache holds by layer and name, but for positions, which follow from the mask."""
    found: dict[str, Tensor] = {}
    for number, layer in enumerate(cache.layers):
        state = {name: tensor for name, tensor in getattr(layer, "token_state", {}).items() if name != POSITIONS}
        for name, tensor in {_KEYS: layer.keys, _VALUES: layer.values, **state}.items():
            found[f"{number}.{name}"] = tensor
    return found


def _tokens_of(name: str) -> int:
    """Return the dimension of the tokens in a tensor of the cache."""
    return 2 if name.partition(".")[2] in (_KEYS, _VALUES) else 1


class _Layer(PosencDynamicLayer):
    """A layer of the cache in a graph, which may be empty, though the graph was made from one that is not."""

    def _last_token(self, tensor: Tensor) -> Tensor:
        return F.pad(tensor, (*(0, 0) * (tensor.ndim - 2), 1, 0))[:, -1:]


class _Step(nn.Module):
    """A model with tensors in place of a cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.cache = next(name for name in NAMES if name in inspect.signature(model.forward).parameters)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        (rows, fresh), held = input_ids.shape, past[f"0.{_KEYS}"].shape[2]
        torch._check(attention_mask.shape[1] == held + fresh)  # type: ignore[no-untyped-call]
        positions = resolve_positions(Request(rows, held, input_ids.device, mask=attention_mask))
        layers: dict[int, dict[str, Tensor]] = {}
        for place, tensor in past.items():
            number, _, name = place.partition(".")
            layers.setdefault(int(number), {})[name] = tensor
        cache = DynamicCache()
        for state in layers.values():
            keys, values = state.pop(_KEYS), state.pop(_VALUES)
            layer = _Layer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            layer.token_state, layer.recent_state, layer.others = {POSITIONS: positions, **state}, {}, {}
            cache.layers.append(layer)
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **{self.cache: cache})
        return found.logits, _tensors(cache)


def _program(step: _Step, given: dict[str, Any]) -> Any:
    """Return the ONNX program of a step, with names as other programs expect them."""
    past = given["past"]
    sizes = {
        **{name: {0: _ANY, 1: _ANY} for name in ("input_ids", "attention_mask")},
        "past": {name: {0: _ANY, _tokens_of(name): _ANY} for name in past},
    }
    graph = torch.export.export(step, (), given, dynamic_shapes=sizes, strict=False)
    names = [[f"{word}.{name}" for name in past] for word in ("past_key_values", "present")]
    return torch.onnx.export(
        graph,
        input_names=["input_ids", "attention_mask", *names[0]],
        output_names=["logits", *names[1]],
        verbose=False,
    )
