"""Inventory of a converted model: the encoding of each layer, in terms of stock models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import ExportError
from hf_posenc.operands import Geometry
from hf_posenc.patches import record, surgery
from hf_posenc.patches.architecture import Architecture
from hf_posenc.scheme import Scheme
from hf_posenc.structures import Equivalent, Nothing, Rotation

# The remedy where an export is impossible.
KEEP = "Load the converted checkpoint where hf-posenc is installed instead."


@dataclass(frozen=True)
class Layer:
    """One layer: whether the model's own encoding is there, what the scheme adds, and its place for messages."""

    native: bool
    added: Equivalent
    place: str


@dataclass(frozen=True)
class Stack:
    """The layers with one encoding."""

    name: str
    body: nn.Module
    geometries: list[Geometry]
    layers: list[Layer]


def read_stack(architecture: Architecture, model: PreTrainedModel, name: str) -> Stack:
    """Return the positional encodings of the layers of a stack.

    Raises:
        ExportError: A scheme has no equivalent in stock models.
    """
    body = architecture.stacks(model)[name]
    groups = {group.id: group for group in record.from_config(model.config)}
    layers: list[Layer] = []
    known: dict[nn.Module, Equivalent] = {}
    attention: Any
    for index, attention in enumerate(architecture.attentions(body)):
        if not surgery.is_patched(attention):
            native = not surgery.native_removed(architecture, body)
            layers.append(Layer(native, Nothing(), f"layer {index} of the {name} (without a scheme)"))
            continue
        group = groups[attention.posenc_group]
        scheme = surgery.scheme_of(body, attention)
        place = f"the scheme {group.scheme!r} on layer {index} of the {name}"
        if scheme not in known:
            known[scheme] = _equivalent(scheme, place)
        layers.append(Layer(group.native == "keep", known[scheme], place))
    return Stack(name, body, [architecture.geometry(body, index) for index in range(len(layers))], layers)


def _equivalent(scheme: Scheme, place: str) -> Equivalent:
    if scheme.window is not None:
        raise ExportError(f"Cannot export: {place} hides keys from a distance of {scheme.window} on. {KEEP}")
    try:
        found = scheme.stock_equivalent()
    except ExportError as error:
        raise ExportError(f"Cannot export: {place} {error}. {KEEP}") from error
    return Nothing() if isinstance(found, Rotation) and found.is_identity() else found


def unfit(layer: Layer, what: str) -> ExportError:
    """Return the error for a layer whose encoding a stock model cannot have; the subject of `what` is the scheme."""
    return ExportError(f"Cannot export: {layer.place} {what}. {KEEP}")
