"""The way from a model's own encoding to a scheme: both at part of their strength, and the end of it."""

from __future__ import annotations

import dataclasses

from transformers import PreTrainedModel

from hf_posenc.errors import NotPatchedError, OptionError
from hf_posenc.patches import belonging, record, surgery, unsaved
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.record import Group, Strengths


def set_strength(model: PreTrainedModel, *, native: float = 1.0, scheme: float = 1.0) -> None:
    """Set how strong a kept native encoding and the schemes over it are, in place.

    At part of its strength a rotary encoding turns by smaller angles, a table or a bias is multiplied; a scheme does at each
    seam something between nothing and what it would do. Layers without a scheme keep the encoding whole, but for a table that enters
    before the first layer. The strengths are part of the model: they are saved and loaded.

    Args:
        model: A model patched with `native="keep"`.
        native: Of the model's own encoding, from 0 to 1.
        scheme: Of the schemes, from 0 to 1.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: A strength is out of range, or the model's own encoding was removed.
    """
    groups = _groups(model, "set_strength")
    for name, value in (("native", native), ("scheme", scheme)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise OptionError(f"set_strength: {name}={value!r}: expected a number from 0 to 1.")
    if any(group.native == "remove" for group in groups):
        raise OptionError(
            "set_strength: the model's own encoding was removed, so there is nothing to hand over from. Patch with "
            "native='keep'."
        )
    architecture = of_model(model)
    if native != 1 and not architecture.native_fades:
        raise OptionError(
            f"set_strength: the {architecture.native} of {architecture.name} cannot be at part of its strength, got "
            f"native={native!r}. Leave it at 1, or teach the architecture to (Architecture.native_fades)."
        )
    _write(model, groups, Strengths(float(native), float(scheme)))


def drop_native(model: PreTrainedModel) -> None:
    """Remove a native encoding that was kept until now, in place; the schemes stay as they are, at full strength.

    After `set_strength(model, native=0)` this changes no output. It is what `patch(model, ..., native="remove")` would have
    made, but for the options and the training of the schemes.

    Args:
        model: A patched model.

    Raises:
        NotPatchedError: The model is not patched.
    """
    groups = [dataclasses.replace(group, native="remove") for group in _groups(model, "drop_native")]
    architecture = of_model(model)
    with surgery.all_or_nothing() as undo:
        for body in architecture.stacks(model).values():
            for attention in architecture.attentions(body):
                if surgery.is_patched(attention):
                    undo.set(attention, "posenc_keeps_native", False)
            surgery.settle_native(undo, architecture, body)
        _write(model, groups, record.FULL)


def _groups(model: PreTrainedModel, caller: str) -> list[Group]:
    if not surgery.is_patched(model):
        raise NotPatchedError(
            f"{caller}: the {type(model).__name__} is not patched. Call hf_posenc.patch first; of a wrapped model, pass the one inside."
        )
    belonging.refuse_part(of_model(model), model)
    return record.from_config(model.config)


def _write(model: PreTrainedModel, groups: list[Group], strengths: Strengths) -> None:
    with surgery.all_or_nothing() as undo:
        surgery.set_strengths(undo, of_model(model), model, strengths)
        unsaved.rename(undo, model)
        for config in surgery.configs(model):
            undo.set(config, "posenc", record.to_dict(groups, strengths))
