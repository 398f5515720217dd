"""The configs and the name of a model, and the models inside it, all of which change with it.

A model with a head gets a config of its own. A body writes into the config that it has, which a head around it shares.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posenc.errors import ArchitectureError
from hf_posenc.patches.architecture import Architecture
from hf_posenc.patches.locks import UNSAVED
from hf_posenc.patches.surgery import configs, is_patched, parts, stock_class


def rename(part: Any, outers: Iterable[Any] = (), *, stock: bool = False) -> None:
    """Mark the configs of a model, and of the models around it, as unsaved; remember the name of the stock model.

    With `stock=True`, before the model is unpatched, restore that name.
    """
    for config in {id(config): config for config in (*configs(part), *(outer.config for outer in outers))}.values():
        if not is_patched(config):
            config.posenc_origin = config._name_or_path
        config._name_or_path = (stock and vars(config).get("posenc_origin")) or UNSAVED
    for module in (*part.modules(), *outers):
        if isinstance(module, PreTrainedModel):
            module.name_or_path = module.config._name_or_path


def origin(config: Any) -> str:
    """Return the name of the model that a config was loaded with, for model cards; empty if it is not known."""
    name = str(getattr(config, "_name_or_path", "") or "")
    return str(vars(config).get("posenc_origin") or "") if name == UNSAVED else name


def own_configs(architecture: Architecture, model: nn.Module, outers: Iterable[Any] = ()) -> None:
    """Give a model with a head copies of its configs, from which other models may have been made.

    The configs of the models around it hold these copies from now on.
    """
    if any(model is body for body in architecture.stacks(model).values()):
        return
    for config in configs(model):
        own = copy.deepcopy(config)
        holders = [nested for outer in outers for nested in all_configs(outer.config)]
        for holder in (*model.modules(), *holders):
            for name in [name for name, value in vars(holder).items() if value is config]:
                setattr(holder, name, own)


def all_configs(config: Any) -> list[Any]:
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(found for value in inner for found in all_configs(value))]


def around(model: Any) -> list[Any]:
    """Return the models that a model is a part of, innermost first.

    A module does not know what it is inside of. But the config of a composite holds those of its parts, so whatever
    refers to a part's config leads there. Most models are alone with theirs, and nothing is searched.
    """
    own = sum(value is model.config for module in model.modules() for value in vars(module).values())
    if _references([model.config]) - _references([object()]) <= own:
        return []
    seen = [model.config]
    for config in seen:
        seen += [holder for holder in _holders(config, PreTrainedConfig) if all(holder is not each for each in seen)]
    found = {id(outer): outer for config in seen for outer in _holders(config, PreTrainedModel)}
    sizes = {key: sum(1 for _ in outer.modules()) for key, outer in found.items()}
    inside = [
        outer for outer in found.values() if outer is not model and any(module is model for module in outer.modules())
    ]
    return sorted(inside, key=lambda outer: sizes[id(outer)])


def _references(held: list[Any]) -> int:
    """Return the number of references to the one object in a list, with some of this call."""
    return sys.getrefcount(held[0])


def _holders(thing: Any, kind: type) -> list[Any]:
    direct = gc.get_referrers(thing)
    tables = [holder for holder in direct if isinstance(holder, dict)]
    owners = [*direct, *(gc.get_referrers(*tables) if tables else ())]
    found = {id(owner): owner for owner in owners if isinstance(owner, kind)}
    return [owner for owner in found.values() if any(value is thing for value in vars(owner).values())]


def mark_parts(model: nn.Module) -> None:
    """Mark the bodies inside a patched model as its parts, for `refuse_part`."""
    for whole in parts(model).values():
        for module in whole.modules():
            if isinstance(module, PreTrainedModel) and module is not whole and is_patched(module):
                module.posenc_is_part = True


def refuse_part(architecture: Architecture, model: nn.Module) -> None:
    """Raise `ArchitectureError` if a model is only a part of another: configs and records of both change together."""
    name = stock_class(type(model)).__name__
    if stock_class(type(model)) in architecture.parts:
        raise ArchitectureError(
            f"Got a {name}, which is saved with the model around it only, so that one must know of the scheme. Pass "
            "the whole model; patch takes stacks=."
        )
    if getattr(model, "posenc_is_part", False):
        raise ArchitectureError(
            f"Got the {name} inside of a patched model, which would be left half changed. Pass the whole model; to "
            f"change the {name} alone, save and load it first."
        )
