"""Gradual replacement of a model's own encoding by a scheme."""

from __future__ import annotations

import dataclasses

from transformers import PreTrainedModel

from hf_posenc.errors import NotPatchedError, OptionError
from hf_posenc.patches import belonging, record, surgery, unsaved
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.record import Group, Strengths


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
    """Remove a kept native encoding, in place; the schemes stay, at full strength.

    After `set_strength(model, native=0)` this changes no output. The result is that of `patch(..., native="remove")`,
    except for the options and the training of the schemes.

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
            f"{caller}: the {type(model).__name__} is not patched. Call hf_posenc.patch first; of a wrapped model, "
            "pass the one inside."
        )
    belonging.refuse_part(of_model(model), model)
    return record.from_config(model.config)


def _write(model: PreTrainedModel, groups: list[Group], strengths: Strengths) -> None:
    with surgery.all_or_nothing() as undo:
        surgery.set_strengths(undo, of_model(model), model, strengths)
        unsaved.rename(undo, model)
        for config in surgery.configs(model):
            undo.set(config, "posenc", record.to_dict(groups, strengths))
