"""Facts of a model, and hooks on its modules, for those who train, measure and draw it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_posenc.errors import ArchitectureError
from hf_posenc.patches.architecture import of_config
from hf_posenc.patches.context import Switch


def table_end(model: nn.Module) -> int | None:
    """Return the number of positions in a model's own learned table, or `None` without an active one.

    Callers check before the forward, because a lookup beyond a table leaves a CUDA device unusable.
    """
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    try:
        architecture = of_config(getattr(inner, "config", None))
    except ArchitectureError:
        return None
    ends = []
    for body in architecture.stacks(model).values():
        for table in architecture.swapped(body):
            in_force = not vars(table).get("posenc_removed") or (isinstance(table, Switch) and table.is_disabled())
            if isinstance(table, nn.Embedding) and in_force:
                # Some tables begin with rows for padding.
                ends.append(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1))
    return min(ends, default=None)


@contextlib.contextmanager
def hooked(
    modules: Iterable[nn.Module], before: Callable[..., Any], after: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Call `before` and `after` around the forward of modules in this context; `before` gets its keywords, too."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            if after is not None:
                stack.callback(module.register_forward_hook(after).remove)
        yield


@contextlib.contextmanager
def replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module in this context, for instance its forward.

    Afterwards the module has the attribute of its class again, or its own, such as the forward of an offloaded module.
    """
    own = {name: vars(module)[name]} if name in vars(module) else {}
    vars(module)[name] = value
    try:
        yield
    finally:
        del vars(module)[name]
        vars(module).update(own)


@contextlib.contextmanager
def eager(model: Any) -> Iterator[None]:
    """Switch a model to eager attention for a while: fused kernels do not return weights."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
