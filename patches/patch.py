"""`patch`, `unpatch`, `disabled`, and evaluation mode for a while: the operations on a loaded model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from hf_posenc.errors import NotPatchedError
from hf_posenc.patches import belonging, surgery
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.context import DISABLED, Switch
from hf_posenc.patches.preparation import Layers, prepare, refuse_wrapped

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


# Under inference mode new parameters could never be trained.
@torch.inference_mode(False)
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

    Only this instance changes, and after an error it is as before. Patching again replaces the scheme; calls on
    disjoint `layers` compose. New parameters are float32 whatever the model's dtype, on the device of their layer. The
    model's old name (`config._name_or_path`) names another model now, so loading by it raises until the model is saved.

    Args:
        model: A model of transformers of a known architecture, with any head, not wrapped by anything.
        scheme: Name of a scheme, see `hf_posenc.schemes()`.
        native: `"remove"` the model's own encoding, or `"keep"` it under the new scheme; in the latter case options
            that make the start exact are chosen unless given (`describe` names them).
        layers: Layers of each stack: indices (negative from the end), a slice, `"every:N"` for layers N-1, 2N-1,
            ..., or a predicate on the index. `None` is all.
        stacks: `"encoder"`, `"decoder"` or both, for models with two stacks. `None` is all.
        **options: The scheme's options, see `hf_posenc.describe(scheme)`; and for every scheme `window`, the distance
            from which keys are hidden in the chosen layers.

    Returns:
        The same model.

    Raises:
        PosencError: One of its subclasses says what is wrong; the model is then as it was.
    """
    prepared = prepare(model, scheme, native=native, layers=layers, stacks=stacks, options=options)
    architecture, group = prepared.architecture, prepared.group
    with surgery.all_or_nothing(model):
        belonging.own_configs(architecture, model)
        belonging.rename(model)
        # The new group may have the number of one that it replaces.
        surgery.drop_shared(architecture, model, prepared.kept)
        surgery.install(architecture, model, [(group, prepared.built)])
        belonging.mark_parts(model)
        surgery.write_record(model, [*prepared.kept, group])
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
    surgery.check_patched("unpatch", model, "Nothing was done.")
    architecture = of_model(model)
    belonging.refuse_part(architecture, model)
    with surgery.all_or_nothing(model):
        belonging.own_configs(architecture, model)
        belonging.rename(model, stock=True)
        for _, _, _, attention in surgery.patched_layers(architecture, model):
            attention._modules.pop(surgery.OWN, None)
            surgery.restore(attention)
        surgery.drop_shared(architecture, model, [])
        surgery.settle_native(architecture, model)
        for body in architecture.stacks(model).values():
            vars(body).pop("posenc_frozen", None)
        for module in model.modules():
            if surgery.is_patched(module):
                surgery.restore(module)
        surgery.settle_layers(architecture, model)
        for config in surgery.configs(model):
            surgery.restore(config)
    return model


@contextlib.contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Give a patched model its original function for a while, for instance as the teacher of a distillation.

    It acts on the calling thread and on the replicas that `DataParallel` makes for it. Other threads, even those
    started meanwhile, and copies of the model keep the schemes. Do not await another task inside: the tasks of an event
    loop share a thread.

    It works through wrappers (PEFT, DDP, `torch.compile`). Nothing is rebuilt: the stock forward of every layer runs
    instead of the patched one.

    Args:
        model: A patched model, or something that holds one.

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
