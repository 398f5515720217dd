"""The operations on a loaded model: `patch`, `unpatch`, `set_strength`, `drop_native`, `disabled` and evaluation mode.

All of a patch is computed and checked (`prepare`) before the model is touched.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_posenc import registry
from hf_posenc.errors import (
    ArchitectureError,
    DirectionError,
    LayerSelectionError,
    NotPatchedError,
    OptionError,
    WrappedModelError,
    shown,
)
from hf_posenc.operands import Geometry
from hf_posenc.patches import composites, identity, record, share, surgery
from hf_posenc.patches.architecture import Architecture, of_model
from hf_posenc.patches.attention import check_backend
from hf_posenc.patches.context import DISABLED, Switch
from hf_posenc.patches.record import FULL, Group, NativeSetting, Part, Strengths
from hf_posenc.patches.rotary import check_scheme
from hf_posenc.patches.surgery import Sites, Stack
from hf_posenc.scheme import Scheme

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

# A selection of layers: indices, a slice, "0,2,5", "0:8", "every:N" (the last of each N), or a predicate on the index.
Layers = Sequence[int] | slice | str | Callable[[int], bool] | None
# The setting of the model's own encoding as callers give it, see `patch`.
Kept = Literal["remove", "keep", "fast"] | float | Mapping[str, float]
# A selection of stacks, by name.
Stacks = str | Sequence[str] | None

_OPTIMIZED = "torch._dynamo.eval_frame.OptimizedModule"


_P = ParamSpec("_P")
_T = TypeVar("_T")
_CHANGING = threading.RLock()


def _one_at_a_time(change: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let threads change models one after another; two that change one model would meet half of each other's."""

    @functools.wraps(change)
    def waiting(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _CHANGING:
            return change(*args, **kwargs)

    return waiting


# Under inference mode new parameters could never be trained.
@_one_at_a_time
@torch.inference_mode(False)
def patch(
    model: Model,
    scheme: str,
    *,
    native: Kept = "remove",
    layers: Layers = None,
    stacks: Stacks = None,
    **options: Any,
) -> Model:
    """Replace the positional encoding of a loaded model, in place.

    Only this instance changes, and after an error it is as before. The model's own encoding must be that of its config:
    one that was changed after loading is refused. Threads that patch wait for each other; do not run the model in
    another thread meanwhile, which would see half of the change. Patching again replaces the scheme; calls on
    disjoint `layers` compose. New parameters are float32 whatever the model's dtype, on the device of their layer. The
    model's old name (`config._name_or_path`) names another model now, so loading by it raises until the model is saved.

    Args:
        model: A model of transformers of a known architecture, with any head, not wrapped by anything.
        scheme: Name of a scheme, see `hf_posenc.schemes()`.
        native: `"remove"` the model's own encoding, or `"keep"` it under the new scheme. Of a rotation a share can
            stay: with 0.375 the fastest 37.5 % of its pairs go on turning and the others stop, `"fast"` keeps the
            pairs that turn at least 16 times within the trained length, and a mapping has a share for each type of
            layer, where each has a rotation of its own. If anything stays, options that make the start exact under
            the whole encoding are chosen unless given (`describe` names them).
        layers: Layers of each stack: indices (negative from the end; also `"0,2,5"`), a slice (also `"0:8"`),
            `"every:N"` for layers N-1, 2N-1, ..., or a predicate on the index. `None` is all.
        stacks: `"encoder"`, `"decoder"` or both, for models with two stacks. `None` is all.
        **options: The scheme's options, see `hf_posenc.describe(scheme)`; and for every scheme `window`, the distance
            from which keys are hidden in the chosen layers.

    Raises:
        PosencError: One of its subclasses says what is wrong; the model is then as it was.
    """
    prepared = prepare(model, scheme, native=native, layers=layers, stacks=stacks, options=options)
    sites, group, part = prepared.sites, prepared.group, prepared.sites.model
    outers = composites.outers_of(part, model)
    with surgery.all_or_nothing(outers[-1] if outers else part):
        identity.own_configs(sites.architecture, part, outers)
        identity.rename(part, outers)
        # The new group may have the number of one that it replaces.
        surgery.drop_shared(sites, prepared.kept)
        surgery.install(sites, [(group, prepared.built)])
        identity.mark_parts(part)
        surgery.write_record(part, [*prepared.kept, group])
        for outer in outers:
            composites.enclose(outer)
    for warning in prepared.warnings:
        logger.warning("%s", warning)
    return model


@_one_at_a_time
def unpatch(model: Model) -> Model:
    """Restore the stock classes and the model's own encoding, in place.

    The model's other weights stay as they are, trained or not; the schemes' parameters are gone.

    Raises:
        NotPatchedError: The model is not patched.
    """
    refuse_wrapped(model)
    surgery.check_patched("unpatch", model, "Nothing was done.")
    for part in surgery.parts(model).values():
        _unpatch(part, composites.outers_of(part, model))
    return model


def _unpatch(part: Any, outers: list[Any]) -> None:
    sites = Sites.of(part)
    identity.refuse_part(sites.architecture, part)
    with surgery.all_or_nothing(outers[-1] if outers else part):
        identity.own_configs(sites.architecture, part, outers)
        identity.rename(part, outers, stock=True)
        for _, _, _, attention in sites.patched():
            attention._modules.pop(surgery.OWN, None)
            surgery.restore(attention)
        surgery.drop_shared(sites, [])
        surgery.settle_native(sites)
        for module in part.modules():
            if surgery.is_patched(module):
                surgery.restore(module)
        surgery.settle_layers(sites)
        for config in surgery.configs(part):
            surgery.restore(config)
        composites.release(outers)


@_one_at_a_time
def set_strength(model: PreTrainedModel, *, native: float = 1.0, scheme: float = 1.0) -> None:
    """Set the strengths of a kept native encoding and of the schemes over it, in place.

    Strength scales the angles of a rotary encoding, and the values of a table or a bias; a scheme's effect at each seam
    is interpolated from none to full. Layers without a scheme keep the encoding at full strength, except for a table
    that enters before the first layer. The strengths are saved and loaded with the model.

    Args:
        model: A model patched with `native="keep"`.
        native: Strength of the model's own encoding, from 0 to 1.
        scheme: Strength of the schemes, from 0 to 1.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: A strength is out of range, or the model's own encoding was removed.
    """
    model = composites.part_to_convert(model)
    sites, groups = _patched(model, "set_strength")
    for name, value in (("native", native), ("scheme", scheme)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise OptionError(f"set_strength: {name}={shown(value)}: expected a number from 0 to 1.")
    if any(group.native == "remove" for group in groups):
        raise OptionError(
            "set_strength: the model's own encoding was removed, so there is nothing to hand over from. Patch with "
            "native='keep'."
        )
    architecture = sites.architecture
    if native != 1 and not architecture.native_fades:
        raise OptionError(
            f"set_strength: the {architecture.native} of {architecture.name} cannot be at part of its strength, got "
            f"native={native!r}. Leave it at 1, or teach the architecture to (Architecture.native_fades)."
        )
    _write(sites, groups, Strengths(float(native), float(scheme)))


@_one_at_a_time
def drop_native(model: PreTrainedModel) -> None:
    """Remove a kept native encoding, in place; the schemes stay, at full strength.

    After `set_strength(model, native=0)` this changes no output. The result is that of `patch(..., native="remove")`,
    except for the options and the training of the schemes.

    Raises:
        NotPatchedError: The model is not patched.
    """
    model = composites.part_to_convert(model)
    sites, groups = _patched(model, "drop_native")
    groups = [replace(group, native="remove") for group in groups]
    with surgery.all_or_nothing(model):
        for _, _, _, attention in sites.patched():
            attention.posenc_keeps_native = False
        surgery.settle_native(sites)
        _write(sites, groups, FULL)


def _patched(model: PreTrainedModel, caller: str) -> tuple[Sites, list[Group]]:
    surgery.check_patched(caller, model)
    sites = Sites.of(model)
    identity.refuse_part(sites.architecture, model)
    return sites, record.from_config(model.config)


def _write(sites: Sites, groups: list[Group], strengths: Strengths) -> None:
    model = sites.model
    with surgery.all_or_nothing(model):
        surgery.set_strengths(sites, strengths)
        identity.rename(model, composites.outers_of(model, model))
        surgery.write_record(model, groups, strengths)


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Give a patched model its original function for a while, for instance as the teacher of a distillation.

    It acts on the calling thread and on the replicas that `DataParallel` makes for it. Other threads, even those
    started meanwhile, and copies of the model keep the schemes. Do not await another task inside: the tasks of an event
    loop share a thread.

    It works through wrappers (PEFT, DDP, `torch.compile`). Nothing is rebuilt: the stock forward of every layer runs
    instead of the patched one.

    Raises:
        NotPatchedError: There is no patched model in it.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    switches = [module for module in modules if isinstance(module, Switch) and surgery.is_patched(module)]
    if not switches:
        raise NotPatchedError(f"disabled: there is no patched model in the {type(model).__name__}. Patch it first.")
    mine = {id(module) for module in switches} - DISABLED.modules
    DISABLED.modules |= mine
    try:
        yield
    finally:
        DISABLED.modules -= mine


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a while; afterwards restore the mode of each module.

    `train(True)` would not restore it: parts of a model in training, such as frozen ones, may be in evaluation mode.
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


# -- before a model is touched -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preparation:
    """A patch that is computed and checked: the model that changes, the new group, its schemes, and groups that stay.

    Of a composite, its language model changes.
    """

    sites: Sites
    group: Group
    built: dict[str, dict[int, Scheme]]
    kept: list[Group]
    warnings: list[str]

    @property
    def native(self) -> str:
        """What stays of the model's own encoding, in words."""
        chosen = {name: part.layers for name, part in self.group.stacks.items()}
        return share.described(self.group.native, _rotations(self.sites, chosen))

    @property
    def schemes(self) -> list[Scheme]:
        found = {id(scheme): scheme for part in self.built.values() for scheme in part.values()}
        return list(found.values())


def prepare(
    model: nn.Module, scheme: str, *, native: Any, layers: Layers, stacks: Stacks, options: dict[str, Any]
) -> Preparation:
    """Check everything about a patch and build its schemes, without touching the model."""
    refuse_wrapped(model)
    model = composites.part_to_convert(model)
    sites = Sites.of(model)
    architecture = sites.architecture
    identity.refuse_part(architecture, model)
    surgery.check_record(sites)
    check_scheme(scheme)
    info = registry.get(scheme)
    check_backend(getattr(model.config, "_attn_implementation", None))
    wanted = _choose_stacks(sites, stacks)
    chosen = {name: choose_layers(layers, len(stack.attentions)) for name, stack in wanted.items()}
    _check_stacks(sites, wanted, chosen)
    stays = share.resolve(
        native, _rotations(sites, chosen), what=architecture.native, shares=architecture.native_shares
    )
    kept = _kept(record.from_config(model.config), chosen)
    _check_kept(sites, kept, stays)
    neutral = info.cls.neutral_options or {}
    # The caller already decided on the start if an option is given that a neutral start would set.
    if stays != "remove" and neutral.keys().isdisjoint(options):
        options = {**neutral, **options}
    taken = {group.id for group in kept}
    number = next(number for number in range(len(taken) + 1) if number not in taken)
    group = Group(number, scheme, stays, {n: Part(part, options) for n, part in chosen.items()})
    built = surgery.build_group(sites, group, info)
    resolved = {name: Part(chosen[name], next(iter(part.values())).options()) for name, part in built.items()}
    group = replace(group, stacks=resolved)
    return Preparation(sites, group, built, kept, _warnings(sites, group, kept, built))


def _rotations(sites: Sites, chosen: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Geometry]]:
    """Yield the type of each chosen layer, where each type has a rotation of its own, and its geometry."""
    architecture = sites.architecture
    for name, layers in chosen.items():
        body = sites.stacks[name].body
        for layer in layers:
            kind = architecture.attributes(body, layer).get("posenc_kind", "")
            yield kind, architecture.geometry(body, layer)


def _check_stacks(sites: Sites, stacks: dict[str, Stack], chosen: dict[str, tuple[int, ...]]) -> None:
    """Raise unless the chosen layers are as the architecture and the config describe them."""
    architecture = sites.architecture
    for name, stack in stacks.items():
        for layer in chosen[name]:
            _check_layer(architecture, name, layer, stack.attentions[layer])
        architecture.check_native(stack.body)
    is_causal = any(architecture.geometry(stack.body, 0).causal for stack in stacks.values())
    if is_causal and getattr(sites.model.config, "is_causal", True) is False:
        raise DirectionError(
            f"The config says is_causal=False, but {architecture.name} is patched as causal attention only. Use a "
            "model whose tokens see earlier ones."
        )


def _check_kept(sites: Sites, kept: list[Group], native: NativeSetting) -> None:
    """Raise unless a new group goes together with those that stay."""
    architecture, strengths = sites.architecture, record.strengths_from_config(sites.model.config)
    if any(group.native != native for group in kept) and not architecture.native_per_layer:
        raise LayerSelectionError(
            f"The {architecture.native} of {architecture.name} enters before the first layer, so it is there for all "
            f"layers or for none: earlier layers were patched with native={kept[0].native!r}, got native={native!r}. "
            "Use the same, or unpatch first."
        )
    if kept and strengths != FULL:
        raise OptionError(
            f"Other layers are in the middle of a handover (native={strengths.native:g}, scheme={strengths.scheme:g}), "
            "and all layers share their strengths. Bring both to 1 (hf_posenc.set_strength) first, or drop_native."
        )


def _warnings(sites: Sites, group: Group, kept: list[Group], built: dict[str, dict[int, Scheme]]) -> list[str]:
    architecture, found = sites.architecture, []
    for name, part in group.stacks.items():
        scheme = next(iter(built[name].values()))
        found += [f"{name}: {caution}" for caution in scheme.facts(native_kept=group.keeps_native).cautions]
        covered = set(part.layers).union(*(g.stacks[name].layers for g in kept if name in g.stacks))
        missing = len(sites.stacks[name].attentions) - len(covered)
        if missing and group.native == "remove" and not architecture.native_per_layer:
            found.append(
                f"The {architecture.native} of {architecture.name} enters before the first layer: removing it leaves "
                f"the {missing} layers that are not patched without positions of their own. Patch them too, or use "
                "native='keep'."
            )
    return found


# -- stacks and layers -------------------------------------------------------------------------------------------------


def _choose_stacks(sites: Sites, stacks: Stacks) -> dict[str, Stack]:
    found = dict(sites.stacks)
    if stacks is None:
        return found
    wanted = [stacks] if isinstance(stacks, str) or not isinstance(stacks, Iterable) else list(stacks)
    # A list, since what was given may be unhashable.
    if not wanted or any(name not in list(found) for name in wanted):
        raise LayerSelectionError(
            f"stacks={shown(stacks)}: a {type(sites.model).__name__} has the stacks {', '.join(found)}. Choose among "
            "these."
        )
    return {name: stack for name, stack in found.items() if name in wanted}


def native_scheme(model: nn.Module) -> str | None:
    """Return the scheme that computes a stock model's own encoding with the fewest parameters, if there is one."""
    architecture = of_model(model)
    geometry = architecture.geometry(next(iter(architecture.stacks(model).values())), 0)
    kind = "rotary" if geometry.inv_freq is not None else geometry.native.kind if geometry.native else None
    sizes = {}
    for name, info in registry.schemes().items():
        if kind in info.cls.reproduces:
            try:
                scheme = registry.build(name, geometry)
            except (DirectionError, OptionError):
                continue  # not for encoders, or for heads as narrow
            if scheme.facts(native_kept=False).exact:
                sizes[name] = sum(parameter.numel() for parameter in scheme.parameters())
    return min(sizes, key=sizes.__getitem__, default=None)


def choose_layers(layers: Layers, count: int) -> tuple[int, ...]:
    """Turn a selector into sorted layer indices, or raise `LayerSelectionError`."""
    everything = range(count)
    malformed = LayerSelectionError(
        f"layers={shown(layers)}: expected indices ('0,2,5' or a list), a slice ('0:8'), 'every:N', or a function of "
        "the index."
    )
    if isinstance(layers, str) and not layers.startswith("every:"):
        layers = _parsed(layers, malformed)
    if layers is None:
        chosen: Iterable[int] = everything
    elif isinstance(layers, slice):
        try:
            chosen = everything[layers]
            beyond = [end for end in (layers.start, layers.stop) if end is not None and not -count <= end <= count]
        except (TypeError, ValueError):
            raise malformed from None
        if beyond:
            raise LayerSelectionError(f"layers={layers!r}: {beyond[0]} is out of range; the stack has {count} layers.")
    elif isinstance(layers, str):
        kind, _, step = layers.partition(":")
        if kind != "every" or not step.isdecimal() or int(step) < 1:
            raise malformed
        chosen = everything[int(step) - 1 :: int(step)]
    elif callable(layers):
        try:
            chosen = [index for index in everything if bool(layers(index))]
        except Exception as error:  # of any kind: the function is the user's
            raise LayerSelectionError(f"layers={layers!r} raised {type(error).__name__}: {error}. Mend it.") from error
    elif isinstance(layers, Iterable) and getattr(layers, "ndim", 1) == 1:
        chosen = [_index(layers, name, count) for name in layers]
        if len(set(chosen)) < len(chosen):
            raise LayerSelectionError(f"layers={shown(layers)} names a layer twice.")
    else:
        raise malformed
    if not list(chosen):
        raise LayerSelectionError(f"layers={shown(layers)} matches none of the {count} layers.")
    return tuple(sorted(chosen))


def _parsed(layers: str, malformed: LayerSelectionError) -> Layers:
    """Return the selection that `"0,2,5"` or `"0:8"` is short for."""
    try:
        if ":" in layers:
            return slice(*(int(part) if part.strip() else None for part in layers.split(":")))
        return [int(part) for part in layers.split(",")]
    except (TypeError, ValueError):
        raise malformed from None


def _index(layers: object, name: Any, count: int) -> int:
    """Return a whole number of any library (numpy, torch) as the index of a layer."""
    try:
        index = count if isinstance(name, bool) else operator.index(name)
    except TypeError:
        index = count
    if not -count <= index < count:
        raise LayerSelectionError(
            f"layers={shown(layers)}: {shown(name)} is no layer; the stack has layers 0 to {count - 1}."
        )
    return index % count


def _check_layer(architecture: Architecture, stack: str, layer: int, attention: nn.Module) -> None:
    """Raise unless an attention is a plain one of the architecture, with all it needs."""
    kind = type(attention)
    found = f"a {kind.__module__}.{kind.__qualname__}"
    if surgery.stock_class(kind) is architecture.attention:
        missing = [part for part, module in architecture.projections(attention).items() if module is None]
        if not missing:
            return
        found = f"one without {', '.join(missing)}"
    raise ArchitectureError(
        f"Layer {layer} of the {stack}: expected a {architecture.attention.__name__}, found {found}: the model was "
        "altered after loading (quantisation, fused projections, tensor parallelism, or another patch). Load it "
        "plainly and patch it first."
    )


def _kept(groups: Sequence[Group], chosen: dict[str, tuple[int, ...]]) -> list[Group]:
    """Return the earlier groups that stay; raise if one would lose some of its layers but not all."""
    ours = {(name, layer) for name, part in chosen.items() for layer in part}
    for group in groups:
        lost = group.places() & ours
        if lost and lost != group.places():
            name, layer = min(lost)
            raise LayerSelectionError(
                f"Layer {layer} of the {name} already has the scheme {group.scheme!r}, from a patch that also covers "
                "layers outside this selection. Select all of its layers or none of them, or unpatch first."
            )
    return [group for group in groups if group.places().isdisjoint(ours)]


# -- wrappers ----------------------------------------------------------------------------------------------------------


def refuse_wrapped(model: object, advice: str = "Patch the plain model first, then wrap it.") -> None:
    """Raise, with advice, if the model is inside a wrapper, which would keep running the unpatched model."""
    if not isinstance(model, nn.Module):
        raise ArchitectureError(f"Expected a transformers model, got {type(model).__name__}: {str(model)[:80]!r}.")
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        raise WrappedModelError(f"Got a model inside {type(model).__name__}. {advice}")
    surgery.refuse_split({name: getattr(model, f"_{name}", None) for name in ("tp_size", "pp_size", "ep_size")})
    for name, module in model.named_modules():
        kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
        if any(kind.startswith("peft.") for kind in kinds):
            raise WrappedModelError(f"Got a model with PEFT adapters ({type(model).__name__}). {advice}")
        # Compiled code would keep the old behaviour.
        if _OPTIMIZED in kinds or getattr(module, "_compiled_call_impl", None) is not None:
            what = f"whose {name.removesuffix('._orig_mod')} is compiled" if name else "compiled"
            raise WrappedModelError(f"Got a model {what} with torch.compile. {advice}")
        if any("torch.distributed.fsdp" in kind for kind in kinds):
            raise WrappedModelError(f"Got a model sharded with FSDP ({type(module).__name__}). {advice}")
