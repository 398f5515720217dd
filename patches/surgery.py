"""Changes to a model: swap the classes of its modules, attach schemes, and take both back.

Nothing global is touched. A class swap survives `deepcopy`, `pickle`, output recording and `torch.compile`, where
replaced methods do not.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import ArchitectureError, LayerSelectionError, NotPatchedError
from hf_posenc.operands import Geometry
from hf_posenc.patches import record
from hf_posenc.patches.architecture import Architecture, of_model
from hf_posenc.patches.record import FULL, Group, Part, Strengths
from hf_posenc.patches.share import share_of
from hf_posenc.registry import SchemeInfo, make
from hf_posenc.scheme import Scheme

# The schemes of a group: by stack, one for each layer; one that layers share is the same object for all of them.
Schemes = Mapping[str, Mapping[int, Scheme]]

# Where schemes live: on each attention, or, shared by the layers of a stack, once on its body.
OWN = "hf_posenc"
SHARED = "hf_posenc_shared"


class SharedSchemes(nn.Module):
    """Holds the schemes of a body that serve several layers, named by group."""

    def schemes(self) -> list[Scheme]:
        """Return them in order. (PEFT's wrapper passes a method on to its active copy, but not the children.)"""
        return [scheme for scheme in self.children() if isinstance(scheme, Scheme)]


@contextlib.contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Give a function that restores a model and its configs to what they are now, but no values of parameters.

    It is called if the block raises.
    """

    def copied(value: Any) -> Any:
        return copy.copy(value) if isinstance(value, (dict, list, set)) else value

    touched = (*model.modules(), *configs(model))
    kept = [(part, type(part), {name: copied(value) for name, value in vars(part).items()}) for part in touched]
    values = [(parameter, parameter.data, parameter.requires_grad) for parameter in model.parameters()]

    def back() -> None:
        for part, kind, state in kept:
            part.__class__ = kind
            vars(part).clear()
            vars(part).update(state)
        for parameter, data, trained in values:
            parameter.data = data
            parameter.requires_grad_(trained)

    try:
        yield back
    except BaseException:
        back()
        raise


def swap_class(target: Any, new: type) -> None:
    """Swap the class of an object, and make an accelerate hook on it call the forward of the new one."""
    target.__class__ = new
    if "_old_forward" in vars(target):
        target._old_forward = new.forward.__get__(target)  # type: ignore[attr-defined]


def is_patched(module: object) -> bool:
    return getattr(type(module), "posenc_stock", None) is not None


def parts(model: nn.Module) -> dict[str, Any]:
    """Return the converted models in a model, by their names in it, and none that is inside of another.

    A converted model is its own part, of empty name; only composites, which are made of several models, have others.
    """
    if _is_part(model):
        return {"": model}
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if _is_part(module) and not name.startswith(tuple(f"{outer}." for outer in found)):
            found[name] = module
    return found


def _is_part(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel) and is_patched(module) and not getattr(module, "posenc_encloses", False)


@dataclass(frozen=True)
class Stack:
    """A series of layers with one encoding: its body, and its layers and their attentions, in order."""

    body: nn.Module
    layers: Sequence[nn.Module]
    attentions: Sequence[nn.Module]


@dataclass(frozen=True)
class Sites:
    """The places of schemes in a model, by name of the stack, from one walk over it.

    An operation makes one record and hands it on. It holds while no layer is added, cut or replaced; a patch only
    changes classes, and adds modules inside of attentions and bodies.
    """

    architecture: Architecture
    model: Any
    stacks: Mapping[str, Stack]

    @classmethod
    def of(cls, model: nn.Module) -> Sites:
        """Find the places of a model. The errors are those of its architecture."""
        known = of_model(model)
        bodies = known.stacks(model)
        stacks = {name: Stack(body, known.layers(body), known.attentions(body)) for name, body in bodies.items()}
        return cls(known, model, stacks)

    def patched(self) -> Iterator[tuple[str, nn.Module, int, Any]]:
        """Yield each layer that has a scheme: name of the stack, its body, index of the layer, and its attention."""
        for name, stack in self.stacks.items():
            for layer, attention in enumerate(stack.attentions):
                if is_patched(attention):
                    yield name, stack.body, layer, attention


def is_of_scheme(name: str) -> bool:
    return not {OWN, SHARED}.isdisjoint(name.split("."))


def stock_class(kind: type) -> type:
    stock: type = getattr(kind, "posenc_stock", kind)
    return stock


def swap(architecture: Architecture, target: Any) -> None:
    if is_patched(target):
        return
    twin = architecture.twins.get(type(target))
    if twin is None:
        raise ArchitectureError(
            f"Expected a stock module of {architecture.name}, found {type(target).__module__}."
            f"{type(target).__qualname__}: the model was altered after loading. Load it plainly and patch it first."
        )
    if "forward" in vars(target) and "_old_forward" not in vars(target):
        raise ArchitectureError(
            f"The {type(target).__name__} has a forward of its own on the instance: another library patched it. Patch "
            "with hf_posenc first."
        )
    swap_class(target, twin)


def build_group(sites: Sites, group: Group, info: SchemeInfo, *, is_new: bool = False) -> dict[str, dict[int, Scheme]]:
    """Build the schemes of a group: by stack, one per layer; a shared one is the same object for all its layers.

    A new model, built from a config, has tables that nobody trained: its schemes see their shapes only.

    A part that layers share is left in the first layer's scheme, from where `attach` takes it.
    """
    # Without this, `torch.device("meta")` around the call would leave the schemes without values.
    where = contextlib.nullcontext() if next(sites.model.parameters()).is_meta else torch.device("cpu")
    built = {}
    for name, stack in sites.stacks.items():
        if name in group.stacks:
            part = group.stacks[name]
            with where:
                built[name] = _build_stack(_geometries(sites.architecture, stack, part, is_new), part, info)
            _check_embedded(sites.architecture, stack, group.scheme, built[name])
    return built


def _geometries(architecture: Architecture, stack: Stack, part: Part, is_new: bool) -> list[Geometry]:
    """Describe the layers of a part of a stack, each with what its scheme is to know of the others."""
    found = [architecture.geometry(stack.body, layer) for layer in part.layers]
    rms = architecture.embedding_rms(stack.body)
    known: dict[str, Any] = {} if rms is None else {"embedding_rms": rms}
    own = [geometry.inv_freq for geometry in found if geometry.inv_freq is not None]
    known["uniform"] = all(torch.equal(frequencies, own[0]) for frequencies in own)
    for number, geometry in enumerate(found):
        native = geometry.native
        if is_new and native is not None:
            native = replace(native, weight=native.weight.to("meta"))
        last = number == len(found) - 1
        found[number] = replace(geometry, native=native, first=number == 0, last=last, **known)
    return found


def _build_stack(geometries: list[Geometry], part: Part, info: SchemeInfo) -> dict[int, Scheme]:
    first, *others = zip(part.layers, geometries, strict=True)
    schemes = {first[0]: make(info, first[1], part.options)}
    for layer, geometry in others:
        if schemes[first[0]].shared:
            schemes[layer] = schemes[first[0]]
        else:
            schemes[layer] = make(info, geometry, part.options)
            take_common(schemes[layer])
    return schemes


def _check_embedded(architecture: Architecture, stack: Stack, name: str, schemes: dict[int, Scheme]) -> None:
    """Raise if schemes act on embeddings, and these have another width or not all layers were chosen."""
    scheme, count = next(iter(schemes.values())), len(stack.attentions)
    if not scheme.overrides("embed"):
        return
    size, width = scheme.geometry.hidden_size, architecture.embedding_size(stack.body)
    if width != size:
        raise ArchitectureError(
            f"{name} adds positions of width {size} to the embeddings, and those of {type(stack.body).__name__} have "
            f"{width}. Choose a scheme that acts inside of attention."
        )
    if len(schemes) < count:
        raise LayerSelectionError(
            f"{name} acts on the input of the first layer, before any layer is chosen: it takes all {count} layers, "
            f"got {len(schemes)}. Leave out layers=."
        )


def take_common(scheme: Scheme) -> Scheme | None:
    """Take the part that layers share out of a scheme."""
    common = scheme.common
    del scheme.common
    scheme.common = None
    return common


def install(sites: Sites, built: Sequence[tuple[Group, Schemes]], strengths: Strengths = FULL) -> None:
    """Give a model its patched classes and the schemes of groups, and settle all that depends on them."""
    architecture, model = sites.architecture, sites.model
    for name, stack in sites.stacks.items():
        layers = sorted({layer for _, schemes in built for layer in schemes.get(name, ())})
        swapped = architecture.swapped(stack.body) if layers else ()
        for module in (*(stack.attentions[layer] for layer in layers), *swapped):
            swap(architecture, module)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and type(module) in architecture.twins:
            swap(architecture, module)
    for config in configs(model):
        swap(architecture, config)
    for group, schemes in built:
        attach(sites, group, schemes)
    settle_layers(sites)
    settle_native(sites)
    set_strengths(sites, strengths)


def attach(sites: Sites, group: Group, built: Schemes) -> None:
    """Put the schemes of one group into a model whose classes are swapped already."""
    for name, stack in sites.stacks.items():
        body = stack.body
        for layer, scheme in built.get(name, {}).items():
            attention: Any = stack.attentions[layer]
            # Layers that torch.ao quantised have no parameters.
            device = next(chain(attention.parameters(), body.parameters())).device
            attention.posenc_group = group.id
            attention.posenc_keeps_native = group.keeps_native
            attributes = sites.architecture.attributes(body, layer)
            for attribute, value in attributes.items():
                setattr(attention, attribute, value)
            attention.posenc_share = None
            if not isinstance(group.native, str):
                geometry = sites.architecture.geometry(body, layer)
                attention.posenc_share = share_of(group.native, attributes.get("posenc_kind", ""), geometry)
            attention._modules.pop(OWN, None)
            common = scheme if scheme.shared else take_common(scheme)
            if not scheme.shared:
                attention.add_module(OWN, _placed(scheme, device))
            if common is not None:
                if SHARED not in body._modules:
                    body.add_module(SHARED, SharedSchemes())
                container: Any = body._modules[SHARED]
                container.add_module(str(group.id), _placed(common, next(body.parameters()).device))


def kept_native(sites: Sites, group: Group) -> str:
    """Return what stays of a model's own encoding under a group, in words, such as "12 of 32 rotary pairs"."""
    if isinstance(group.native, str):
        return group.native
    layers = [attention for _, _, _, attention in sites.patched() if attention.posenc_group == group.id]
    return ", ".join(
        dict.fromkeys("all pairs" if (share := layer.posenc_share) is None else share.words for layer in layers)
    )


def settle_layers(sites: Sites) -> None:
    """Give layers whose scheme carries state their patched class, and all others their stock class.

    The name of a layer's class tells accelerate what must not be split between devices.
    """
    architecture = sites.architecture
    layer: Any
    attention: Any
    for stack in sites.stacks.values():
        for layer, attention in zip(stack.layers, stack.attentions, strict=True):
            scheme = attention._modules.get(OWN)
            if isinstance(scheme, Scheme) and scheme.overrides("carry"):
                swap(architecture, layer)
                layer.posenc_group = attention.posenc_group
            elif is_patched(layer):
                restore(layer)
    modules = list(sites.model.modules())
    there = {type(module).__name__ for module in modules}
    pairs = [{stock.__name__, twin.__name__} for stock, twin in architecture.twins.items()]
    for module in (module for module in modules if isinstance(module, PreTrainedModel)):
        unsplit = set(getattr(module, "_no_split_modules", None) or ())
        concerned = set().union(*(pair for pair in pairs if pair & unsplit and pair & there))
        wanted = (unsplit - concerned) | (there & concerned)
        if wanted != unsplit:
            vars(module)["_no_split_modules"] = wanted


def set_strengths(sites: Sites, strengths: Strengths) -> None:
    """Set the strengths of the model's own encoding and of the schemes, in all modules that read them."""
    for stack in sites.stacks.values():
        module: Any
        for module in (stack.body, *sites.architecture.swapped(stack.body)):
            if is_patched(module):
                module.posenc_strengths = strengths


def write_record(model: nn.Module, groups: Sequence[Group], strengths: Strengths = FULL) -> None:
    for config in configs(model):
        config.posenc = record.to_dict(groups, strengths)


def restore(target: Any) -> None:
    """Restore the stock class of an object, and remove the attributes of the patch."""
    for name in [name for name in vars(target) if name == "posenc" or name.startswith("posenc_")]:
        delattr(target, name)
    swap_class(target, stock_class(type(target)))


def check_patched(
    caller: str, model: object, advice: str = "Call hf_posenc.patch first; of a wrapped model, pass the one inside."
) -> None:
    if not is_patched(model):
        raise NotPatchedError(f"{caller}: the {type(model).__name__} is not patched. {advice}")


def check_record(sites: Sites) -> None:
    """Raise `ArchitectureError` unless a model's patched layers are those that its config names, each in its group."""
    model = sites.model
    groups = record.from_config(model.config)
    named = {place: group.id for group in groups for place in group.places() if place[0] in sites.stacks}
    patched = {(name, layer): attention.posenc_group for name, _, layer, attention in sites.patched()}
    if named != patched:
        raise ArchitectureError(
            f"The config of the {stock_class(type(model)).__name__} names schemes for {len(named)} layers, and "
            f"{len(patched)} have one, or others do: layers were cut, added or moved after the patch, or another "
            "model, made from the same config object, was patched or unpatched. Cut layers first and patch then; make "
            "each model from a config of its own, copy.deepcopy(config)."
        )


# Names, in arguments of `from_pretrained` and attributes of a model, of what divides a layer between devices.
_SPLITS = ("tp_plan", "tp_size", "ep_size", "pp_size", "enable_expert_parallel")


def refuse_split(chosen: Mapping[str, Any]) -> None:
    """Raise `ArchitectureError` if keywords or a distributed config ask for layers that are split between devices."""
    distributed = chosen.get("distributed_config")
    stated = distributed if isinstance(distributed, Mapping) else vars(distributed) if distributed else {}
    for name in _SPLITS:
        value = chosen.get(name, stated.get(name))
        if value is not None and value is not False and value != 1:
            raise ArchitectureError(
                f"Got {name}={value!r}: layers that are split between devices (tensor, expert or pipeline parallel) "
                "have no positional schemes, which read all heads of a layer. Use device_map, DDP or FSDP2."
            )


def scheme_of(body: nn.Module, attention: nn.Module) -> Any:
    """Return the scheme of a patched attention, or PEFT's wrapper of it."""
    own = attention._modules.get(OWN)
    return own if own is not None else getattr(body._modules[SHARED], str(attention.posenc_group))


def drop_shared(sites: Sites, kept: Sequence[Group]) -> None:
    for stack, body in ((name, stack.body) for name, stack in sites.stacks.items()):
        container = body._modules.get(SHARED)
        if container is None:
            continue
        used = {str(group.id) for group in kept if stack in group.stacks}
        for name in container._modules.keys() - used:
            del container._modules[name]
        if not container._modules:
            del body._modules[SHARED]


def settle_native(sites: Sites) -> None:
    """Freeze the parameters of the model's own encoding where nothing reads them, and thaw them where something does.

    A parameter that is trained but unused makes distributed training fail; it stays in checkpoints for `unpatch`.
    """
    architecture = sites.architecture
    body: Any
    module: Any
    for stack in sites.stacks.values():
        body, attentions = stack.body, stack.attentions
        removed = native_removed(architecture, attentions)
        for module in architecture.swapped(body):
            module.posenc_removed = removed
        frozen = set(vars(body).get("posenc_frozen", []))
        parameters = architecture.native_parameters(body)
        for index, parameter in enumerate(parameters):
            unread = removed or (len(parameters) == len(attentions) and _has_removed(attentions[index]))
            if unread and parameter.requires_grad:
                parameter.requires_grad_(False)
                frozen.add(index)
            elif not unread and index in frozen:
                parameter.requires_grad_(True)
                frozen.remove(index)
        body.posenc_frozen = sorted(frozen)


def native_removed(architecture: Architecture, attentions: Sequence[nn.Module]) -> bool:
    removed = [attention for attention in attentions if _has_removed(attention)]
    return bool(removed) and (not architecture.native_per_layer or len(removed) == len(attentions))


def _has_removed(attention: Any) -> bool:
    return is_patched(attention) and not attention.posenc_keeps_native


def configs(model: nn.Module) -> list[Any]:
    """Return every config object in a model once, the model's own first."""
    found: list[Any] = []
    for module in model.modules():
        if not hasattr(type(module), "save_pretrained"):
            continue
        config: Any = getattr(module, "config", None)
        if config is not None and not any(config is other for other in found):
            found.append(config)
    return found


def _placed(scheme: Scheme, device: torch.device) -> Scheme:
    # PEFT makes all parameters without values if it is to save memory.
    return scheme._apply(lambda tensor: tensor if "meta" in (tensor.device.type, device.type) else tensor.to(device))
