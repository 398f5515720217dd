"""`patch`, `unpatch` and `disabled`: the public operations on a loaded model."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_posenc import record, registry
from hf_posenc.errors import (
    ArchitectureError,
    DirectionError,
    LayerSelectionError,
    NotPatchedError,
    OptionError,
    WrappedModelError,
)
from hf_posenc.patches import surgery
from hf_posenc.patches.architecture import Architecture, of_model
from hf_posenc.patches.seams import check_backend, embeds
from hf_posenc.record import Group, Native, Part
from hf_posenc.scheme import Scheme

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

# Which layers: indices, a slice, "every:N" (the first of each N), or a predicate on the index.
Layers = Sequence[int] | slice | str | Callable[[int], bool] | None


@dataclass(frozen=True)
class Preparation:
    """All that `patch` is about to do, computed and checked without touching the model.

    Attributes:
        architecture: Of the model.
        group: The new group.
        built: Its schemes, by stack and layer.
        kept: Earlier groups that stay.
        replaced: Earlier groups whose layers are all given to the new one.
        warnings: What the user should know.
    """

    architecture: Architecture
    group: Group
    built: dict[str, dict[int, Scheme]]
    kept: list[Group]
    replaced: list[Group]
    warnings: list[str]

    @property
    def schemes(self) -> list[Scheme]:
        """The new schemes, each once."""
        found = {id(scheme): scheme for part in self.built.values() for scheme in part.values()}
        return list(found.values())


def patch(
    model: Model,
    scheme: str,
    *,
    native: Literal["remove", "keep"] = "remove",
    layers: Layers = None,
    stacks: str | Sequence[str] | None = None,
    **options: Any,
) -> Model:
    """Replace the positional encoding of a loaded model, in place.

    Only this instance changes, and only if everything can be done. Patching again replaces the scheme; calls on disjoint
    `layers` compose. New parameters are float32 whatever the model's dtype, on the device of their layer.

    Args:
        model: A Llama, GPT-2 or T5 model of transformers with any head, not wrapped by anything.
        scheme: Name of a scheme, see `hf_posenc.schemes()`.
        native: `"remove"` the model's own encoding, or `"keep"` it under the new scheme; in the latter case options
            that make the start exact are chosen unless given (`describe` names them).
        layers: Which layers of each stack: indices (negative from the end), a slice, `"every:N"` for layers N-1, 2N-1,
            ..., or a predicate on the index. `None` is all.
        stacks: `"encoder"`, `"decoder"` or both, for models with two stacks. `None` is all.
        **options: The scheme's options, see `hf_posenc.describe(scheme)`.

    Returns:
        The same model.

    Raises:
        PosencError: One of its subclasses says what is wrong; the model is then as it was.
    """
    prepared = prepare(model, scheme, native=native, layers=layers, stacks=stacks, options=options)
    architecture, group = prepared.architecture, prepared.group
    with surgery.all_or_nothing() as undo:
        chosen = {name: set(part.layers) for name, part in group.stacks.items()}
        surgery.swap_classes(undo, architecture, model, chosen)
        # Before attaching: the new group may have the number of one that it replaces.
        for name, body in architecture.stacks(model).items():
            surgery.drop_shared(undo, body, {g.id for g in prepared.kept if name in g.stacks})
        surgery.attach(undo, architecture, model, group, prepared.built)
        groups = [*prepared.kept, group]
        for body in architecture.stacks(model).values():
            surgery.settle_native(undo, architecture, body)
        for config in surgery.configs(model):
            undo.set(config, "posenc", record.to_dict(groups))
    for warning in prepared.warnings:
        logger.warning("%s", warning)
    return model


def unpatch(model: Model) -> Model:
    """Restore the stock classes and the model's own encoding, in place.

    The model's other weights stay as they are, trained or not; the schemes' parameters are gone.

    Args:
        model: A patched model.

    Returns:
        The same model.

    Raises:
        NotPatchedError: The model is not patched.
    """
    refuse_wrapped(model)
    if not surgery.is_patched(model):
        raise NotPatchedError(f"unpatch: the {type(model).__name__} is not patched. Nothing was done.")
    architecture = of_model(model)
    with surgery.all_or_nothing() as undo:
        for body in architecture.stacks(model).values():
            patched = {i for i, module in enumerate(architecture.attentions(body)) if surgery.is_patched(module)}
            surgery.release(undo, architecture, body, patched)
            surgery.drop_shared(undo, body, set())
            surgery.settle_native(undo, architecture, body)
            undo.unset(body, "posenc_frozen")
        for module in model.modules():
            if surgery.is_patched(module):
                surgery.restore(undo, module)
        for config in surgery.configs(model):
            surgery.restore(undo, config)
    return model


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Give a patched model its original function for a while, for instance as the teacher of a distillation.

    Works through wrappers (PEFT, DDP, `torch.compile`). Nothing is rebuilt: the stock forward of every layer runs instead of
    the patched one.

    Args:
        model: A patched model, or something that holds one.

    Raises:
        NotPatchedError: There is no patched model in it.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    switches: list[Any] = [m for m in modules if surgery.is_patched(m) and hasattr(type(m), "posenc_switch")]
    if not switches:
        raise NotPatchedError(f"disabled: there is no patched model in the {type(model).__name__}. Patch it first.")
    before = [vars(module).get("posenc_disabled", False) for module in switches]
    for module in switches:
        module.posenc_disabled = True
    try:
        yield
    finally:
        for module, value in zip(switches, before, strict=True):
            module.posenc_disabled = value


def prepare(
    model: nn.Module,
    scheme: str,
    *,
    native: str,
    layers: Layers,
    stacks: str | Sequence[str] | None,
    options: dict[str, Any],
) -> Preparation:
    """Check everything about a patch and build its schemes, without touching the model."""
    refuse_wrapped(model)
    architecture = of_model(model)
    info = registry.get(scheme)
    if native not in ("remove", "keep"):
        raise OptionError(f"native={native!r}: expected 'remove' (the model's own encoding goes) or 'keep'.")
    registry.check_options(info, options)
    check_backend(getattr(model.config, "_attn_implementation", None))
    bodies = choose_stacks(architecture, model, stacks)
    chosen = {name: choose_layers(layers, len(architecture.attentions(body))) for name, body in bodies.items()}
    check_layers(architecture, bodies, chosen)
    for name, body in bodies.items():
        direction: registry.Direction = "causal" if architecture.geometry(body, 0).causal else "bidirectional"
        if direction not in info.directions:
            raise DirectionError(
                f"{scheme} is defined for {' and '.join(info.directions)} attention, and the {name} is {direction}. "
                + (
                    "Pass stacks='decoder' to leave the encoder as it is."
                    if len(architecture.stacks(model)) > 1
                    else "Choose another scheme, see hf_posenc.schemes()."
                )
            )
    kept, replaced = divide(record.from_config(model.config), chosen)
    if native == "keep" and info.cls.neutral_options:
        options = {**info.cls.neutral_options, **options} if not exclusive(info, options) else options
    draft = Group(free_id(kept), scheme, _native(native), {n: Part(c, options) for n, c in chosen.items()})
    built = surgery.build_group(architecture, model, draft)
    for name, schemes in built.items():
        count = len(architecture.attentions(bodies[name]))
        if embeds(next(iter(schemes.values()))) and len(schemes) < count:
            raise LayerSelectionError(
                f"{scheme} acts on the input of the first layer, before any layer is chosen: it takes all {count} layers, "
                f"got {len(schemes)}. Leave out layers=."
            )
    group = Group(
        draft.id,
        scheme,
        draft.native,
        {name: Part(chosen[name], next(iter(schemes.values())).options()) for name, schemes in built.items()},
    )
    warnings = advise(architecture, model, info, group, kept)
    return Preparation(architecture, group, built, kept, replaced, warnings)


def exclusive(info: registry.SchemeInfo, options: dict[str, Any]) -> bool:
    """Whether the caller already decided on the start: an option that a neutral start would set is given."""
    return any(name in options for name in info.cls.neutral_options or {})


def advise(
    architecture: Architecture, model: nn.Module, info: registry.SchemeInfo, group: Group, kept: list[Group]
) -> list[str]:
    """Return what a user should know before patching."""
    found = []
    bodies = architecture.stacks(model)
    for name, part in group.stacks.items():
        geometry = architecture.geometry(bodies[name], 0)
        if info.name == "nope" and not geometry.causal and group.native == "remove":
            found.append(f"Without any encoding the {name} is a bag of words: it cannot tell orders of tokens apart.")
        covered = set(part.layers).union(*(g.stacks[name].layers for g in kept if name in g.stacks))
        missing = len(architecture.attentions(bodies[name])) - len(covered)
        if missing and group.native == "remove" and not architecture.native_per_layer:
            found.append(
                f"The {architecture.native} of {architecture.name} enters before the first layer: removing it leaves the "
                f"{missing} layers that are not patched without positions of their own. Patch them too, or use native='keep'."
            )
    if any(g.native != group.native for g in kept) and not architecture.native_per_layer:
        raise LayerSelectionError(
            f"The {architecture.native} of {architecture.name} enters before the first layer, so it is there for all layers "
            f"or for none: earlier layers were patched with native={kept[0].native!r}, got native={group.native!r}. "
            "Use the same, or unpatch first."
        )
    return found


def choose_stacks(
    architecture: Architecture, model: nn.Module, stacks: str | Sequence[str] | None
) -> dict[str, nn.Module]:
    """Return the chosen bodies by stack name."""
    bodies = architecture.stacks(model)
    if stacks is None:
        return bodies
    wanted = [stacks] if isinstance(stacks, str) or not isinstance(stacks, Iterable) else list(stacks)
    unknown = [name for name in wanted if name not in bodies]
    if unknown or not wanted:
        raise LayerSelectionError(
            f"stacks={stacks!r}: a {type(model).__name__} has the stacks {', '.join(bodies)}. Choose among these."
        )
    return {name: body for name, body in bodies.items() if name in wanted}


def choose_layers(layers: Layers, count: int) -> tuple[int, ...]:
    """Turn a selector into sorted layer indices.

    Raises:
        LayerSelectionError: It is malformed, out of range, or matches nothing.
    """
    everything = range(count)
    expected = "a list of indices, a slice, 'every:N' or a function of the index"
    if layers is None:
        return tuple(everything)
    if isinstance(layers, slice):
        try:
            chosen = set(everything[layers])
        except (TypeError, ValueError):
            raise LayerSelectionError(f"layers={layers!r}: expected {expected}.") from None
    elif isinstance(layers, str):
        kind, _, step = layers.partition(":")
        if kind != "every" or not step.isdecimal() or int(step) < 1:
            raise LayerSelectionError(f"layers={layers!r}: expected {expected}.")
        chosen = set(everything[int(step) - 1 :: int(step)])
    elif callable(layers):
        chosen = {index for index in everything if layers(index)}
    else:
        try:
            indices = list(layers)
        except TypeError:
            raise LayerSelectionError(f"layers={layers!r}: expected {expected}.") from None
        for index in indices:
            if isinstance(index, bool) or not isinstance(index, int) or not -count <= index < count:
                raise LayerSelectionError(
                    f"layers={layers!r}: {index!r} is no layer; the stack has layers 0 to {count - 1}."
                )
        chosen = {index % count for index in indices}
        if len(chosen) < len(indices):
            raise LayerSelectionError(f"layers={layers!r} names a layer twice.")
    if not chosen:
        raise LayerSelectionError(f"layers={layers!r} matches none of the {count} layers.")
    return tuple(sorted(chosen))


def divide(groups: Sequence[Group], chosen: dict[str, tuple[int, ...]]) -> tuple[list[Group], list[Group]]:
    """Return the earlier groups that stay and those that are replaced.

    Raises:
        LayerSelectionError: A group would lose some of its layers but not all.
    """
    kept, replaced = [], []
    for group in groups:
        theirs = {(name, layer) for name, part in group.stacks.items() for layer in part.layers}
        ours = {(name, layer) for name, part in chosen.items() for layer in part}
        if not theirs & ours:
            kept.append(group)
        elif theirs <= ours:
            replaced.append(group)
        else:
            name, layer = sorted(theirs & ours)[0]
            raise LayerSelectionError(
                f"Layer {layer} of the {name} already has the scheme {group.scheme!r}, from a patch that also covers layers "
                "outside this selection. Select all of its layers or none of them, or unpatch first."
            )
    return kept, replaced


def free_id(kept: Sequence[Group]) -> int:
    """Return the smallest number that no kept group has."""
    taken = {group.id for group in kept}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def check_layers(architecture: Architecture, bodies: dict[str, nn.Module], chosen: dict[str, tuple[int, ...]]) -> None:
    """Raise unless every chosen attention is a plain one of the architecture, with all it needs."""
    for name, body in bodies.items():
        attentions = architecture.attentions(body)
        for layer in chosen[name]:
            attention = attentions[layer]
            if surgery.stock_class(type(attention)) is not architecture.attention:
                raise ArchitectureError(
                    f"Layer {layer} of the {name}: expected a {architecture.attention.__name__}, found "
                    f"{type(attention).__module__}.{type(attention).__qualname__}: the model was altered after loading "
                    "(quantisation with fused attention, or another patch). Load it plainly and patch it first."
                )
            missing = [part for part, module in architecture.projections(attention).items() if module is None]
            if missing:
                raise ArchitectureError(
                    f"Layer {layer} of the {name}: the attention has no {', '.join(missing)}; its projections were fused or "
                    "renamed after loading (quantisation, tensor parallelism). Load the model plainly and patch it first."
                )


def refuse_wrapped(model: object) -> None:
    """Raise if the model is inside a wrapper, which would keep running what it wrapped."""
    advice = "Patch the plain model first, then wrap it."
    if not isinstance(model, nn.Module):
        raise ArchitectureError(f"Expected a transformers model, got {type(model).__name__}: {str(model)[:80]!r}.")
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(model).__mro__}
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        raise WrappedModelError(f"Got a model inside {type(model).__name__}. {advice}")
    if "torch._dynamo.eval_frame.OptimizedModule" in names or getattr(model, "_compiled_call_impl", None) is not None:
        raise WrappedModelError(f"Got a model compiled with torch.compile. {advice}")
    if any(name.startswith("peft.") for name in names) or _has_adapters(model):
        raise WrappedModelError(f"Got a model with PEFT adapters ({type(model).__name__}). {advice}")
    for module in model.modules():
        if any("torch.distributed.fsdp" in kind.__module__ for kind in type(module).__mro__):
            raise WrappedModelError(f"Got a model sharded with FSDP ({type(module).__name__}). {advice}")


def _has_adapters(model: nn.Module) -> bool:
    if getattr(model, "_hf_peft_config_loaded", False):
        return True
    # A tuner cannot be in the model unless its package is loaded.
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())


def _native(value: str) -> Native:
    return "keep" if value == "keep" else "remove"
