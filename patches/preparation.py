"""The part of a patch that is computed and checked before the model is touched."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_posenc import registry
from hf_posenc.errors import (
    ArchitectureError,
    DirectionError,
    LayerSelectionError,
    OptionError,
    WrappedModelError,
)
from hf_posenc.patches import belonging, record, surgery
from hf_posenc.patches.architecture import Architecture, of_model
from hf_posenc.patches.record import Group, Native, Part
from hf_posenc.patches.seams import check_backend
from hf_posenc.patches.selection import Layers, choose_layers, choose_stacks, divide, free_id
from hf_posenc.scheme import Scheme

_OPTIMIZED = "torch._dynamo.eval_frame.OptimizedModule"


@dataclass(frozen=True)
class Preparation:
    """A patch that is computed and checked, before the model is touched.

    Attributes:
        architecture: Architecture of the model.
        group: The new group.
        built: Its schemes, by stack and layer.
        kept: Earlier groups that stay.
        replaced: Earlier groups whose layers are all given to the new one.
        warnings: Warnings for the user.
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
    belonging.refuse_part(architecture, model)
    surgery.check_record(architecture, model)
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
        if direction == "causal" and getattr(model.config, "is_causal", True) is False:
            raise DirectionError(
                f"The config says is_causal=False, but the {name} of {architecture.name} is patched as causal "
                "attention only. Use a model whose tokens see earlier ones."
            )
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
    check_native(architecture, native, kept)
    if native == "keep" and info.cls.neutral_options:
        options = {**info.cls.neutral_options, **options} if not exclusive(info, options) else options
    draft = Group(free_id(kept), scheme, _native(native), {n: Part(c, options) for n, c in chosen.items()})
    built = surgery.build_group(architecture, model, draft)
    group = Group(
        draft.id,
        scheme,
        draft.native,
        {name: Part(chosen[name], next(iter(schemes.values())).options()) for name, schemes in built.items()},
    )
    warnings = advise(architecture, bodies, group, kept, built)
    return Preparation(architecture, group, built, kept, replaced, warnings)


def exclusive(info: registry.SchemeInfo, options: dict[str, Any]) -> bool:
    """Whether the caller already decided on the start: an option that a neutral start would set is given."""
    return any(name in options for name in info.cls.neutral_options or {})


def advise(
    architecture: Architecture,
    bodies: dict[str, nn.Module],
    group: Group,
    kept: list[Group],
    built: dict[str, dict[int, Scheme]],
) -> list[str]:
    """Return the warnings of a patch."""
    found = []
    for name, part in group.stacks.items():
        scheme = next(iter(built[name].values()))
        found += [f"{name}: {caution}" for caution in scheme.cautions(native_kept=group.native == "keep")]
        covered = set(part.layers).union(*(g.stacks[name].layers for g in kept if name in g.stacks))
        missing = len(architecture.attentions(bodies[name])) - len(covered)
        if missing and group.native == "remove" and not architecture.native_per_layer:
            found.append(
                f"The {architecture.native} of {architecture.name} enters before the first layer: removing it leaves "
                f"the {missing} layers that are not patched without positions of their own. Patch them too, or use "
                "native='keep'."
            )
    return found


def check_native(architecture: Architecture, native: str, kept: list[Group]) -> None:
    """Raise if an encoding that is there for all layers or for none would be both kept and removed."""
    if any(group.native != native for group in kept) and not architecture.native_per_layer:
        raise LayerSelectionError(
            f"The {architecture.native} of {architecture.name} enters before the first layer, so it is there for all "
            f"layers or for none: earlier layers were patched with native={kept[0].native!r}, got native={native!r}. "
            "Use the same, or unpatch first."
        )


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
                    f"Layer {layer} of the {name}: the attention has no {', '.join(missing)}; its projections were "
                    "fused or renamed after loading (quantisation, tensor parallelism). Load the model plainly and "
                    "patch it first."
                )


def refuse_wrapped(model: object) -> None:
    """Raise if the model is inside a wrapper, which would keep running the unpatched model."""
    advice = "Patch the plain model first, then wrap it."
    if not isinstance(model, nn.Module):
        raise ArchitectureError(f"Expected a transformers model, got {type(model).__name__}: {str(model)[:80]!r}.")
    names = _class_names(model)
    if isinstance(model, (DistributedDataParallel, nn.DataParallel)):
        raise WrappedModelError(f"Got a model inside {type(model).__name__}. {advice}")
    if any(name.startswith("peft.") for name in names) or _has_adapters(model):
        raise WrappedModelError(f"Got a model with PEFT adapters ({type(model).__name__}). {advice}")
    for name, module in model.named_modules():
        kinds = _class_names(module)
        # Compiled code would keep the old behaviour.
        if _OPTIMIZED in kinds or getattr(module, "_compiled_call_impl", None) is not None:
            what = f"whose {name.removesuffix('._orig_mod')} is compiled" if name else "compiled"
            raise WrappedModelError(f"Got a model {what} with torch.compile. {advice}")
        if any("torch.distributed.fsdp" in kind for kind in kinds):
            raise WrappedModelError(f"Got a model sharded with FSDP ({type(module).__name__}). {advice}")


def _class_names(module: object) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}


def _has_adapters(model: nn.Module) -> bool:
    if getattr(model, "_hf_peft_config_loaded", False):
        return True
    # A tuner cannot be in the model unless its package is loaded.
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())


def _native(value: str) -> Native:
    return "keep" if value == "keep" else "remove"
