"""What a model is a part of, and who else has its config: a model, its inside and their configs change together or not at all."""

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
        model: That model. It is not kept alive.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)

    def __reduce__(self) -> tuple[type[Whole], tuple[()]]:
        return Whole, ()  # a copy of the whole model marks its parts anew

    def of(self, part: nn.Module) -> nn.Module | None:
        """Return the model, if it still is one, is patched, and has the part in it."""
        model = None if self._model is None else self._model()
        if model is None or not is_patched(model) or not any(module is part for module in model.modules()):
            return None
        return model


def mark_parts(undo: Undo, model: nn.Module) -> None:
    """Leave a mark on the bodies in a patched model by which `refuse_part` knows them, and none on the model."""
    undo.unset(model, "posenc_whole")
    for module in model.modules():
        if module is not model and is_patched(module) and isinstance(module, PreTrainedModel):
            undo.set(module, "posenc_whole", Whole(model))


def refuse_part(architecture: Architecture, model: nn.Module) -> None:
    """Raise if a model is only the inside of one: classes, configs and records of both go together.

    Raises:
        ArchitectureError: It is that of a patched model, or of a class that never stands alone.
    """
    name = stock_class(type(model)).__name__
    if stock_class(type(model)) in architecture.parts:
        raise ArchitectureError(
            f"Got a {name}, which is saved with the model around it only, so that one must know of the scheme. Pass the whole "
            "model; patch takes stacks=."
        )
    whole = vars(model).get("posenc_whole", Whole()).of(model)
    if whole is not None:
        raise ArchitectureError(
            f"Got the {name} inside of a patched {stock_class(type(whole)).__name__}, which would be left half changed. Pass "
            f"the whole model, or a copy.deepcopy of the {name}."
        )


def own_configs(undo: Undo, model: nn.Module) -> None:
    """Give a model configs of its own where others hold the same objects: other models may have been made from them.

    Not if it is inside of another, such as a head or an encoder with a decoder: that one knows of the schemes, when it is saved,
    because both have the same object.
    """
    alone = nn.Module()
    vars(alone)["config"] = object()
    # What a list and the names in these loops hold is the same.
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
    """Return how many references there are to a config beside those of a model's modules."""
    inside = sum(value is config for module in model.modules() for value in vars(module).values())
    return sys.getrefcount(config) - inside


def _is_inside(model: nn.Module) -> bool:
    """Whether a living module holds the model. In torch nothing leads from a module to what is around it."""
    holders = [x for x in gc.get_referrers(model) if type(x) is dict and any(value is model for value in x.values())]
    # The parts of a module, or somebody's own dict of models. What a module has may be in a dict of its own, or in the module.
    return any(_parts_of(owner) is holder for holder in holders for owner in gc.get_referrers(holder))


def _parts_of(owner: object) -> object:
    if type(owner) is dict:
        return owner.get("_modules")
    # By type: what looks at `__class__` would wake up objects that are loaded when they are first used.
    return vars(owner).get("_modules") if issubclass(type(owner), nn.Module) else None
