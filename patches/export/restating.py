"""Translation of a converted model into the config and weights of a stock one."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc.equivalents import Equivalent, Nothing, PositionTable, Rotation
from hf_posenc.errors import ExportError
from hf_posenc.forms import DistanceTable
from hf_posenc.operands import Geometry
from hf_posenc.patches import record, surgery
from hf_posenc.patches.architecture import Architecture, config_named
from hf_posenc.patches.share import with_share
from hf_posenc.scheme import Scheme
from hf_posenc.schemes.families.additive import Buckets

# The remedy where an export is impossible.
KEEP = "Load the converted checkpoint where hf-posenc is installed instead."
# The angle of the slowest rotation that float32 can tell from none, per position: 1e-7 at a million positions.
_SLOWEST = 1e-13
# Frequencies closer than this, as a share, are one: their angles differ by no more than float32 rounds them.
_SAME = 2.0**-22
# The field of a config that says of each layer whether it turns queries and keys, 1 or 0.
_LIST = "no_rope_layers"
# Stands for no rotation, since stock models store reciprocals of frequencies: the angle at a million positions is
# 1e-24, whose cosine is 1 in any precision.
_STILL = 1e-30

_DOES = {
    Rotation: "turns queries and keys by their positions",
    PositionTable: "adds a vector per position to the embeddings of the tokens",
    DistanceTable: "adds a bias of the distance to the logits",
}


@dataclass(frozen=True)
class Layer:
    """One layer: geometry, whether the model's own encoding is there, what the scheme adds, and place for messages.

    `kept` is the geometry with the share of the rotation that stays.
    """

    geometry: Geometry
    kept: Geometry
    native: bool
    added: Equivalent
    place: str


@dataclass(frozen=True)
class Stack:
    """The layers with one encoding."""

    name: str
    body: nn.Module
    layers: list[Layer]


def read_stack(architecture: Architecture, model: PreTrainedModel, name: str) -> Stack:
    """Return the positional encodings of the layers of a stack, or raise if one has no equivalent in stock models."""
    body = architecture.stacks(model)[name]
    groups = {group.id: group for group in record.from_config(model.config)}
    layers: list[Layer] = []
    known: dict[nn.Module, Equivalent] = {}
    attention: Any
    attentions = architecture.attentions(body)
    for index, attention in enumerate(attentions):
        added: Equivalent = Nothing()
        native, geometry = not surgery.native_removed(architecture, attentions), architecture.geometry(body, index)
        kept = geometry
        place = f"layer {index} of the {name} (without a scheme)"
        if surgery.is_patched(attention):
            group, scheme = groups[attention.posenc_group], surgery.scheme_of(body, attention)
            place = f"the scheme {group.scheme!r} on layer {index} of the {name}"
            if scheme not in known:
                known[scheme] = _equivalent(scheme, place)
            native, added = group.keeps_native, known[scheme]
            kept = with_share(geometry, group.native, architecture.attributes(body, index).get("posenc_kind", ""))
        layers.append(Layer(geometry, kept, native, added, place))
    return Stack(name, body, layers)


def _equivalent(scheme: Scheme, place: str) -> Equivalent:
    if scheme.window is not None:
        raise ExportError(f"Cannot export: {place} hides keys from a distance of {scheme.window} on. {KEEP}")
    try:
        found = scheme.stock_equivalent()
    except ExportError as error:
        raise ExportError(f"Cannot export: {place} {error}. {KEEP}") from error
    return Nothing() if isinstance(found, Rotation) and found.is_identity() else found


def unfit(layer: Layer, what: str) -> ExportError:
    """Return the `ExportError` for a layer; `what` completes "The scheme ..."."""
    return ExportError(f"Cannot export: {layer.place} {what}. {KEEP}")


class Draft:
    """The stock model in the making: a copy of the config, references to the weights, and what has changed."""

    def __init__(self, model: PreTrainedModel, architecture: Architecture) -> None:
        self.model, self.architecture = model, architecture
        self.kind: Any = surgery.stock_class(type(model))
        self.config: Any = copy.deepcopy(model.config)
        surgery.restore(self.config)
        self.names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
        self.weights: dict[str, Tensor] = {
            name: tensor for name, tensor in model.state_dict().items() if not surgery.is_of_scheme(name)
        }
        self.replaced = False
        self.changes: list[str] = []
        self.positions: int | None = None

    def replace(self, parameter: Tensor, value: Tensor) -> None:
        self.replaced = True
        self.weights[self.names[id(parameter)]] = value.detach().to(parameter.device, parameter.dtype).contiguous()

    def become(self, name: str) -> None:
        """Change to the stock classes of another model type, whose weights have the same names."""
        found = config_named(name)
        assert found is not None
        config, path = found
        old, new = (kind.__name__.removesuffix("Config") for kind in (type(self.config), config))
        head = self.kind.__name__.removeprefix(old)
        kind = getattr(importlib.import_module(path), f"{new}{head}", None)
        if kind is None:
            raise ExportError(
                f"Cannot export: there is no {new}{head}, which could leave layers without rotation. {KEEP}"
            )
        values = self.config.to_dict()
        for own in ("model_type", "architectures", "transformers_version"):
            values.pop(own, None)
        self.kind, self.config = kind, config(**values)

    def build(self) -> PreTrainedModel:
        with torch.device("meta"):
            stock: PreTrainedModel = self.kind(copy.deepcopy(self.config))
        stock.load_state_dict(self.weights, assign=True)
        stock.tie_weights()
        if getattr(self.model, "generation_config", None) is not None:
            stock.generation_config = copy.deepcopy(self.model.generation_config)
        return stock


def restate(draft: Draft, stacks: Sequence[Stack], *, max_positions: int | None) -> None:
    """Write the positional encodings of a model into the config and weights of a stock one, see `export_stock`."""
    geometry = stacks[0].layers[0].geometry
    if geometry.inv_freq is not None:
        for stack in stacks:
            _restate_rotations(draft, stack)
    elif geometry.native is not None and geometry.native.max_distance is not None:
        _restate_distances(draft, stacks)
    elif geometry.native is not None:
        for stack in stacks:
            _restate_positions(draft, stack, max_positions)
    else:
        raise ExportError(
            f"Cannot export: a stock {draft.kind.__name__} computes its own encoding ({draft.architecture.native}) and "
            f"no other. {KEEP}"
        )


# -- rotations ---------------------------------------------------------------------------------------------------------


def _restate_rotations(draft: Draft, stack: Stack) -> None:
    """Bring the rotations of all layers into the one table of frequencies that a stock model has."""
    rotations = [rotation_of(layer) for layer in stack.layers]
    native = [_is_native(rotation, layer) for layer, rotation in zip(stack.layers, rotations, strict=True)]
    if all(native):
        return
    falling = [_falling(rotation) for rotation in rotations]
    turns = [bool(rotation.frequencies.any()) for rotation in falling]
    if any(turns):
        _choose_layers(draft, stack, turns)
    # A rotation by nothing may still hold a factor.
    changed = {
        index: rotation
        for index, rotation in enumerate(falling)
        if turns[index] or not any(turns) or not rotation.is_identity()
    }
    if not all(native[index] for index in changed):
        _restate_frequencies(draft, stack, changed, turns)


def _choose_layers(draft: Draft, stack: Stack, turns: list[bool]) -> None:
    """Let the stock model turn these layers only, by the list that some configs have."""
    could = [layer.geometry.inv_freq is not None and bool(layer.geometry.inv_freq.any()) for layer in stack.layers]
    if turns == could:
        return
    config = draft.config
    if not hasattr(config, _LIST):
        if draft.architecture.with_list is None:
            layer, turning = next(pair for pair in zip(stack.layers, turns, could, strict=True) if pair[1] != pair[2])[
                :2
            ]
            does = "turns queries and keys" if turning else "turns none of its queries and keys"
            raise unfit(layer, f"{does}, and this layer of the stock model does{' not' if turning else ''}")
        draft.become(draft.architecture.with_list)
    setattr(draft.config, _LIST, [int(turning) for turning in turns])
    count = f"{turns.count(False)} of {len(turns)} layers without rotation"
    draft.changes.append(f"config: {count} ({_LIST}), in a {draft.kind.__name__}")
    if turns != [(index + 1) % 4 != 0 for index in range(len(turns))]:
        draft.changes.append("note: llama.cpp reads no such list, and would leave out every fourth layer instead")


def _restate_frequencies(draft: Draft, stack: Stack, changed: Mapping[int, Rotation], turns: list[bool]) -> None:
    """Write rotations of layers into the config and the projections; all that turn share their frequencies."""
    if "rope_theta" not in draft.config.rope_parameters:
        raise unfit(stack.layers[0], "needs other frequencies, and the model has several tables of them")
    frequencies = next(changed[index].frequencies[0] for index in changed if turns[index] or not any(turns))
    attentions: Any = draft.architecture.attentions(stack.body)
    for index, rotation in changed.items():
        layer = stack.layers[index]
        if layer.native and layer.geometry.rotary_limit is not None:
            raise unfit(
                layer,
                f"keeps frequencies that change beyond {layer.geometry.rotary_limit} tokens, and other layers have "
                "others. Rotary schemes freeze theirs; patch these layers with one",
            )
        if turns[index] and bool(((rotation.frequencies - frequencies).abs() > _SAME * frequencies).any()):
            raise unfit(
                layer,
                "turns some heads by other frequencies than others, and a stock model has one table for all heads of "
                "all layers",
            )
        projections = draft.architecture.projections(attentions[index])
        between = [name for name in dict(attentions[index].named_children()) if name not in (*projections, surgery.OWN)]
        if not is_unit(rotation.basis) and any(list(getattr(attentions[index], name).parameters()) for name in between):
            names = ", ".join(between)
            raise unfit(layer, f"needs other projections, and between these and the rotation the model has {names}")
        _turn_projections(draft, projections, rotation.basis, layer)
    draft.config.rope_parameters = _rope_parameters(draft.config, frequencies)
    # A Llama ignores this with default frequencies, but not with these.
    vars(draft.config).pop("partial_rotary_factor", None)
    moving = frequencies[frequencies > 0]
    if len(moving):
        span = f"{len(moving)} from {moving[-1]:.3g} to {moving[0]:.3g} per token"
        draft.changes.append(f"config: rotary frequencies, {span}")
        draft.changes.append(
            "note: llama.cpp's converter drops frequencies of this type: add them to its file by hf-posenc gguf"
        )
    else:
        draft.changes.append("config: rotary frequencies, all zero, no positions")
    if draft.replaced:
        draft.changes.append("weights: projections of queries and keys, brought to the planes of the rotation")


def rotation_of(layer: Layer) -> Rotation:
    """Return the total rotation of queries and keys in a layer."""
    geometry = layer.geometry
    if not isinstance(layer.added, Nothing | Rotation):
        raise unfit(layer, f"{_DOES[type(layer.added)]}, and a model with rotary encoding has no table for that")
    if not layer.native:
        return layer.added if isinstance(layer.added, Rotation) else _native_rotation(geometry, there=False)
    if isinstance(layer.added, Rotation):
        raise unfit(layer, "turns queries and keys besides the model's own rotation. Patch with native='remove'")
    return _native_rotation(layer.kept)


def _native_rotation(geometry: Geometry, *, there: bool = True) -> Rotation:
    """Return the model's own rotation, or none in the same planes."""
    assert geometry.inv_freq is not None
    frequencies = there * geometry.inv_freq.double().expand(geometry.kv_heads, -1)
    factor = geometry.rotary_scaling if there else 1.0
    return Rotation.of_pairs(frequencies, geometry.head_dim, "half", factor)


def _is_native(rotation: Rotation, layer: Layer) -> bool:
    native = _native_rotation(layer.geometry)
    return (
        (layer.geometry.rotary_limit is None or (layer.native and layer.kept is layer.geometry))
        and torch.equal(rotation.frequencies.float(), native.frequencies.float())
        and torch.equal(rotation.basis, native.basis)
    )


def is_unit(matrices: Tensor) -> bool:
    """Whether all matrices are the identity."""
    return torch.equal(matrices, torch.eye(matrices.shape[-1], dtype=matrices.dtype).expand_as(matrices))


def _turn_projections(draft: Draft, projections: Mapping[str, nn.Module | None], basis: Tensor, layer: Layer) -> None:
    """Bring queries and keys to the axes of a rotation, `basis` `[G, D, D]`."""
    if is_unit(basis):
        return
    of_queries = basis.repeat_interleave(layer.geometry.heads // len(basis), dim=0)
    for name, matrix in (("q_proj", of_queries), ("k_proj", basis)):
        linear = projections.get(name)
        if type(linear) is not nn.Linear:
            raise unfit(
                layer,
                f"needs other projections, and {name} is a {type(linear).__name__}, not a torch.nn.Linear. Load the "
                "model without quantisation or fused projections",
            )
        for parameter in (linear.weight, linear.bias):
            if parameter is not None:
                rows = parameter.detach().double().cpu().view(len(matrix), matrix.shape[-1], -1)
                draft.replace(parameter, (matrix @ rows).reshape(parameter.shape))


def _rope_parameters(config: Any, frequencies: Tensor) -> dict[str, Any]:
    theta = config.rope_parameters["rope_theta"]
    if not bool(frequencies.any()):
        # All wavelengths are longer than the original length over the low factor, so each frequency is divided by the
        # factor. This also holds for readers that miss the length and take 8,192 (llama.cpp's converter).
        return {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": 1 / _STILL,
            "low_freq_factor": 8192.0,
            "high_freq_factor": 32768.0,
            "original_max_position_embeddings": 1,
        }
    # The one type that takes any frequencies: a factor for each, the same at all lengths.
    # In float32, as transformers computes them.
    width = 2 * len(frequencies)
    wavelengths = (theta ** (torch.arange(0, width, 2).float() / width)).double()
    factors = (1 / (frequencies.clamp_min(_STILL) * wavelengths)).tolist()
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
        "short_factor": factors,
        "long_factor": factors,
    }


def _falling(rotation: Rotation) -> Rotation:
    """Return the same rotation with frequencies that fall and are not negative.

    A plane seen from its other side turns forward, and planes may change places.
    """
    speed = rotation.frequencies.abs()
    order = speed.argsort(dim=-1, descending=True, stable=True)
    u, w = rotation.basis.chunk(2, dim=1)
    w = torch.where(rotation.frequencies[..., None] < 0, -w, w)
    u, w = (x.gather(1, order[..., None].expand_as(x)) for x in (u, w))
    speed = speed.where(speed > _SLOWEST, speed.new_zeros(())).gather(-1, order)
    return Rotation(speed, torch.cat((u, w), dim=1))


# -- tables ------------------------------------------------------------------------------------------------------------


def _tables(draft: Draft, stack: Stack) -> list[tuple[Tensor, list[Layer]]]:
    """Return each table of a stack's own encoding with the layers that read it: all of them, or one."""
    tables = draft.architecture.native_parameters(stack.body)
    readers = [stack.layers] if len(tables) == 1 else [[layer] for layer in stack.layers]
    return list(zip(tables, readers, strict=True))


def _restate_positions(draft: Draft, stack: Stack, max_positions: int | None) -> None:
    """Write a scheme's vectors per position into the model's own table of positions."""
    for one in stack.layers:
        if not isinstance(one.added, Nothing | PositionTable):
            raise unfit(one, f"{_DOES[type(one.added)]}, and the model has a table of positions only")
    layer = stack.layers[0]  # A table that enters before the first layer is the same for all.
    ((table, _),), geometry = _tables(draft, stack), layer.geometry
    own = table.detach().double().cpu().view(-1, geometry.hidden_size)
    assert geometry.native is not None
    # Rows for padding come first, where there are any.
    first = len(own) - geometry.native.weight.numel() // geometry.hidden_size
    padding, own = own[:first], own[first:]
    added = layer.added if isinstance(layer.added, PositionTable) else None
    limits = ([len(own)] if layer.native else []) + ([added.limit] if added is not None and added.limit else [])
    rows = min(limits, default=len(own)) if max_positions is None else max_positions
    if rows > min(limits, default=rows):
        raise ExportError(
            f"Cannot export a table of {rows} positions (max_positions): expected at most {min(limits)}, which the "
            "converted model has."
        )
    if geometry.axes > 1 and rows != len(own):
        raise ExportError(
            f"Cannot export a table of {rows} positions: a stock {draft.kind.__name__} has {len(own)}, one for each "
            "patch of an image of its size. Leave max_positions out, and patch with that many."
        )
    values = torch.zeros(rows, geometry.hidden_size, dtype=torch.float64)
    if layer.native:
        values += own[:rows]
    if added is not None:
        values += added.rows(rows).double().cpu()
    draft.replace(table, torch.cat((padding, values)).view(*table.shape[:-2], first + rows, -1))
    draft.positions = rows
    if geometry.axes == 1:
        draft.config.max_position_embeddings = first + rows
    draft.changes.append("weights: table of positions" + ("" if bool(values.any()) else ", which is zero"))


def _restate_distances(draft: Draft, stacks: Sequence[Stack]) -> None:
    """Write biases of the distance into the model's own tables of buckets, one for each stack or layer."""
    for stack in stacks:
        for table, layers in _tables(draft, stack):
            draft.replace(table, _bucket_table(layers))
    draft.changes.append("weights: biases of the distance")


def _bucket_table(layers: Sequence[Layer]) -> Tensor:
    """Return the bias of all layers that read a table as values of its buckets, float64 `[buckets, H]`."""
    geometry = layers[0].geometry
    native = geometry.native
    assert native is not None
    assert native.max_distance is not None
    far = native.max_distance
    distance = torch.arange(0 if geometry.causal else -far, far + 1)
    index = Buckets(num_buckets=len(native.weight), max_distance=far, causal=geometry.causal)(distance)
    own = native.weight.detach().double().cpu()
    table = torch.zeros_like(own)
    first: Tensor | None = None
    for layer in layers:
        bias = layer.native * own[index]
        if isinstance(layer.added, DistanceTable):
            if layer.added.reach is None or layer.added.reach > far:
                raise unfit(
                    layer, f"adds a bias that goes on changing beyond {far} tokens, where the model's table ends"
                )
            with torch.no_grad():
                bias = bias + layer.added.at(distance, torch.float64).cpu().T
        elif not isinstance(layer.added, Nothing):
            raise unfit(layer, f"{_DOES[type(layer.added)]}, and the model has a table for distances only")
        table[index] = bias
        if not torch.equal(table[index], bias):
            raise unfit(layer, "adds a bias that changes within a bucket of the model's table of distances")
        if first is not None and not torch.equal(bias, first):
            raise unfit(
                layer,
                f"gives the layer another bias than that of {layers[0].place}, and a stock model has one table for all "
                "layers of a stack",
            )
        first = bias
    return table
