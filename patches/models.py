"""The patched behaviour that all models share: building, loading and saving."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from hf_posenc.errors import CheckpointError, OptionError, UnknownSchemeError
from hf_posenc.patches import belonging, checkpoint, record, surgery, unsaved
from hf_posenc.patches.architecture import Architecture, of_model
from hf_posenc.patches.directories import storing, whole_files
from hf_posenc.patches.seams import check_backend
from hf_posenc.scheme import Scheme

_SHARD = re.compile(r"model(\..+)?-\d{5}-of-\d{5}\.safetensors")


class PosencModel:
    """Mixin of patched models and bodies."""

    config: Any
    # Schemes lose their meaning in half precision; transformers keeps modules of these names in float32.
    _keep_in_fp32_modules: Any
    _keep_in_fp32_modules_strict = {surgery.OWN, surgery.SHARED}
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        # Quantizers ask this list, and not the strict one, which modules to leave alone.
        own = {rf".*\.{name}" for name in (surgery.OWN, surgery.SHARED)}
        self._keep_in_fp32_modules = {*(self._keep_in_fp32_modules or ()), *own}
        attach_recorded(of_model(self), self)  # type: ignore[arg-type]
        belonging.mark_parts(surgery.Undo(), self)  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        belonging.mark_parts(surgery.Undo(), self)  # type: ignore[arg-type]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Scheme):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def _get_name(self) -> str:
        # By this name Trainer tells whether labels must be shifted for its smoothed loss.
        stock: type = surgery.stock_class(type(self))
        return stock.__name__

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Refuse attention implementations that would ignore schemes."""
        check_backend(requested_attention)
        chosen: str = super().get_correct_attn_implementation(requested_attention, is_init_check)  # type: ignore[misc]
        return chosen

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a converted checkpoint, as `PreTrainedModel.from_pretrained` does, or raise if it is not whole.

        Raises:
            CheckpointError: The checkpoint is truncated, of a newer format, names an unknown scheme, or does not hold
                exactly the parameters that its schemes have.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        accepts_misshapen = kwargs.pop("ignore_mismatched_sizes", False)
        try:
            model, info = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path,
                *args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # Otherwise transformers raises, with the names in the log only.
                **kwargs,
            )
        except SafetensorError as error:
            raise CheckpointError(
                f"Cannot read the weights in {checkpoint.unreadable(pretrained_model_name_or_path)} ({error}): truncated or "
                "damaged. Download or save the checkpoint again."
            ) from error
        if not record.from_config(model.config):
            raise CheckpointError(
                f"The checkpoint {pretrained_model_name_or_path} is not that of a converted model. Load it with "
                f"{cls.__name__.removeprefix('Posenc')} and use hf_posenc.patch."
            )
        checkpoint.check_loaded(pretrained_model_name_or_path, info, accepts_misshapen=accepts_misshapen)
        # Loading makes parameters anew, trainable all of them.
        architecture = of_model(model)
        for body in architecture.stacks(model).values():
            surgery.settle_native(surgery.Undo(), architecture, body)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save the converted model with its stub and model card, as `PreTrainedModel.save_pretrained` does.

        Raises:
            StorageError: It does not fit on the disk. What the directory held is as before, unless it is to be uploaded.
        """
        # A stock checkpoint may have had other names for its weights; those of the patched class have always been these.
        kwargs = {**kwargs, "save_original_format": False}
        folder, size = Path(save_directory), sum(parameter.nbytes for parameter in self.parameters())  # type: ignore[attr-defined]
        # A folder that is uploaded under its name, or that other processes write too, is written as it is.
        is_shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        if args or is_shared or folder.is_file() or kwargs.get("push_to_hub"):
            with storing(folder, needed=size):
                super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        else:
            with whole_files(folder, needed=size, stale=_SHARD) as beside:
                super().save_pretrained(beside, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_main_process", True):
            self._write_companions(save_directory)

    def _upload_modified_files(self, working_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        # transformers puts a card of its own here, just before uploading.
        self._write_companions(working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)  # type: ignore[misc]

    def _write_companions(self, directory: str | os.PathLike[str]) -> None:
        checkpoint.write_companions(
            directory,
            self.config,
            type(self).__name__.removeprefix("FSDP").removeprefix("Posenc"),
            starts(self),
            unsaved.origin(self.config),
        )

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: saving must write the stub, not a copy of this package's source."""


def attach_recorded(architecture: Architecture, model: nn.Module, undo: surgery.Undo | None = None) -> None:
    """Patch a model with the groups recorded in its config.

    Args:
        architecture: Of the model.
        model: Just built from that config, or a stock one that was given the record.
        undo: Remembers the changes, where a failure must take them back.

    Raises:
        CheckpointError: The record cannot be followed.
    """
    config: Any = model.config
    groups = record.from_config(config)
    bodies = architecture.stacks(model)
    if all(surgery.SHARED in body._modules or _has_schemes(architecture, body) for body in bodies.values()):
        return  # A head builds its body through `AutoModel`, which has done it.
    undo = undo or surgery.Undo()
    layers: dict[str, set[int]] = {name: set() for name in bodies}
    for group in groups:
        for name, part in group.stacks.items():
            count = len(architecture.attentions(bodies[name])) if name in bodies else 0
            if any(layer >= count for layer in part.layers) and name in bodies:
                raise CheckpointError(
                    f"config.json gives the scheme {group.scheme!r} to layer {max(part.layers)} of the {name}, which has "
                    f"{count} layers. Restore config.json, or convert the model again."
                )
            if name in bodies:
                layers[name].update(part.layers)
    surgery.swap_classes(undo, architecture, model, layers)
    for group in groups:
        try:
            built = surgery.build_group(architecture, model, group)
        except OptionError as error:
            raise CheckpointError(
                f"config.json gives the scheme {group.scheme!r} an option that it does not take. {error} Upgrade hf-posenc, "
                "or restore config.json."
            ) from error
        except UnknownSchemeError as error:
            raise CheckpointError(
                f"The checkpoint uses the scheme {group.scheme!r}, which this installation does not know. {error} Upgrade "
                "hf-posenc, or import the module that registers the scheme before loading."
            ) from error
        surgery.attach(undo, architecture, model, group, built)
    surgery.set_strengths(undo, architecture, model, record.strengths_from_config(config))
    for body in bodies.values():
        surgery.settle_native(undo, architecture, body)


def _has_schemes(architecture: Architecture, body: nn.Module) -> bool:
    return any(surgery.OWN in attention._modules for attention in architecture.attentions(body))


def starts(model: Any) -> dict[int, str]:
    """Return how each group of a patched model started, by id."""
    architecture = of_model(model)
    found = {}
    for group in record.from_config(model.config):
        schemes = schemes_of(architecture, model, group)
        found[group.id] = describe_start(schemes, group.native)
    return found


def schemes_of(architecture: Architecture, model: nn.Module, group: record.Group) -> list[Scheme]:
    """Return the schemes of a group in a patched model, each once."""
    found: list[Scheme] = []
    for name, body in architecture.stacks(model).items():
        part = group.stacks.get(name)
        shared = body._modules.get(surgery.SHARED)
        if part is None:
            continue
        attentions = architecture.attentions(body)
        own = [attentions[layer] for layer in part.layers if surgery.OWN in attentions[layer]._modules]
        if own:
            found += [getattr(attention, surgery.OWN) for attention in own]
        else:
            found.append(getattr(shared, str(group.id)))
    return found


def describe_start(schemes: list[Scheme], native: str) -> str:
    """Return `"exact"`, `"exact with native kept"`, `"near with native kept"` or `"break"`."""
    kept = native == "keep"
    tolerances = [scheme.start_tolerance(native_kept=kept) for scheme in schemes]
    if None in tolerances:
        return "break"
    return ("near" if any(tolerances) else "exact") + (" with native kept" if kept else "")
