"""Guards against half a change: a model, its parts and their configs change together or not at all."""

from __future__ import annotations

import copy
import gc
import sys
import weakref

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import ArchitectureError
from hf_posenc.patches.architecture import Architecture
from hf_posenc.patches.surgery import Undo, configs, is_patched, stock_class


class Whole:
    """The patched model that a body is a part of. A copy or pickle of the body alone is a part of nothing.

    Args:
        model: That model, held by a weak reference.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)

    def __reduce__(self) -> tuple[type[Whole], tuple[()]]:
        return Whole, ()  # a copy of the whole model marks its own parts

    def of(self, part: nn.Module) -> nn.Module | None:
        """Return the model, if it still is one, is patched, and has the part in it."""
        model = None if self._model is None else self._model()
        if model is None or not is_patched(model) or not any(module is part for module in model.modules()):
            return None
        return model


def mark_parts(undo: Undo, model: nn.Module) -> None:
    """Mark the bodies inside a patched model as its parts, for `refuse_part`; the model itself gets no mark."""
    undo.unset(model, "posenc_whole")
    for module in model.modules():
        if module is not model and is_patched(module) and isinstance(module, PreTrainedModel):
            undo.set(module, "posenc_whole", Whole(model))


def refuse_part(architecture: Architecture, model: nn.Module) -> None:
    """Raise if a model is only a part of another: classes, configs and records of both change together.

    Raises:
        ArchitectureError: It is a part of a patched model, or its class never stands alone.
    """
    name = stock_class(type(model)).__name__
    if stock_class(type(model)) in architecture.parts:
        raise ArchitectureError(
            f"Got a {name}, which is saved with the model around it only, so that one must know of the scheme. Pass "
            "the whole model; patch takes stacks=."
        )
    whole = vars(model).get("posenc_whole", Whole()).of(model)
    if whole is not None:
        raise ArchitectureError(
            f"Got the {name} inside of a patched {stock_class(type(whole)).__name__}, which would be left half "
            f"changed. Pass the whole model, or a copy.deepcopy of the {name}."
        )


def own_configs(undo: Undo, model: nn.Module) -> None:
    """Copy the configs of a model that somebody else holds too: other models may have been made from them.

    A part of another model, such as the body under a head, keeps the shared config: through that object, the outer
    model knows of the schemes when it is saved.
    """
    alone = nn.Module()
    vars(alone)["config"] = object()
    # Both counts are taken in the same kind of loop, so its own references cancel out.
    (least,) = [_references(alone, config) for config in [vars(alone)["config"]]]
    held = [_references(model, config) > least for config in configs(model)]
    if not any(held) or _is_inside(model):
        return
    for config in configs(model):
        own = copy.deepcopy(config)
        for module in model.modules():
            for name in [name for name, value in vars(module).items() if value is config]:
                undo.set(module, name, own)


def _references(model: nn.Module, config: object) -> int:
    """Count the references to a config that are not held by a model's modules."""
    inside = sum(value is config for module in model.modules() for value in vars(module).values())
    return sys.getrefcount(config) - inside


def _is_inside(model: nn.Module) -> bool:
    """Whether a living module holds the model. torch keeps no link from a module to its parent."""
    holders = [x for x in gc.get_referrers(model) if type(x) is dict and any(value is model for value in x.values())]
    # A holder is a module's dict of parts, or any other dict of models. A module's attributes may lie in a dict or in
    # the module itself.
    return any(_parts_of(owner) is holder for holder in holders for owner in gc.get_referrers(holder))


def _parts_of(owner: object) -> object:
    if type(owner) is dict:
        return owner.get("_modules")
    # `type`, since reading `__class__` would trigger objects that load on first use.
    return vars(owner).get("_modules") if issubclass(type(owner), nn.Module) else None
