"""The patched behaviour that all models share: building, loading and saving."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.base import HfQuantizer

from hf_posenc.errors import CheckpointError, DirectionError, LayerSelectionError, OptionError, UnknownSchemeError
from hf_posenc.patches import belonging, checkpoint, record, surgery, unsaved
from hf_posenc.patches.architecture import Architecture, of_model
from hf_posenc.patches.directories import storing, whole_files
from hf_posenc.patches.seams import check_backend, with_signature_of
from hf_posenc.scheme import Scheme

_RESTORE = "Restore config.json, or convert the model again."
_SHARD = re.compile(r"model(\..+)?-\d{5}-of-\d{5}\.safetensors")


class PosencModel:
    """Mixin of patched models and bodies."""

    config: Any
    _keep_in_fp32_modules: Any
    _keep_in_fp32_modules_strict: Any
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "posenc_stock" in vars(cls):
            # Callers read from the signature what a model takes.
            with_signature_of(vars(cls)["posenc_stock"], cls, "__init__")

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        attach_recorded(of_model(self), self)  # type: ignore[arg-type]
        # Schemes lose their meaning in half precision; transformers keeps modules of these names in float32. Quantizers
        # ask the other list which modules to leave alone, and both lists may hold no name twice.
        parts = {part for name in self.state_dict() for part in name.split(".")}  # type: ignore[attr-defined]
        own = parts & {surgery.OWN, surgery.SHARED}
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), *own}
        self._keep_in_fp32_modules = {*(self._keep_in_fp32_modules or ()), *(rf"(?:.*\.)?{name}" for name in own)}
        belonging.mark_parts(surgery.Undo(), self)  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        belonging.mark_parts(surgery.Undo(), self)  # type: ignore[arg-type]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Scheme):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return whether weights are drawn without looking whether they are loaded, as foreign code may; not here.

        Otherwise transformers skips modules without parameters of their own, from which stock models draw those of
        others.
        """
        return False

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

        Names, shapes and the digest of the record are read from the headers of the files, and compared with the config,
        before any weight is. Heads that the checkpoint was not saved with are made anew, as in transformers.

        Raises:
            CheckpointError: The checkpoint is truncated, of a newer format, names an unknown scheme, does not hold
                exactly the parameters that the model has, or was saved with another record than config.json has.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        try:
            model, info = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise checkpoint.unreadable(pretrained_model_name_or_path, error) from error
        # No path and an empty state dict ask for a model at its start.
        if pretrained_model_name_or_path is not None or kwargs.get("state_dict"):
            # Some of it cannot be told from the headers, such as quantised weights.
            missing = owed(model, info["missing_keys"])
            checkpoint.check_complete(pretrained_model_name_or_path, missing, (), (), accepts_misshapen=True)
        # Loading makes parameters anew, trainable all of them.
        architecture = of_model(model)
        for body in architecture.stacks(model).values():
            surgery.settle_native(surgery.Undo(), architecture, body)
        return (model, info) if wants_info else model

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> Any:
        """Load weights that were found but not read, into a model without values or into its adapter, after checking them."""
        load = PreTrainedModel._load_pretrained_model
        if not getattr(model, "peft_config", None):
            if expected_keys is None:
                check_stored(model, state_dict, checkpoint_files, load_config)
            return load(model, state_dict, checkpoint_files, load_config, expected_keys)
        from hf_posenc.patches import adapters

        with adapters.loading(model, checkpoint_files) as unused:
            found = load(model, state_dict, checkpoint_files, load_config, expected_keys)
            unused += found[0].unexpected_keys
        return found

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save the converted model, or its adapter, with stub and model card, as `PreTrainedModel.save_pretrained`
        does.

        Raises:
            ArchitectureError: The layers of the model are not those that its record names.
            StorageError: It does not fit on the disk. What the directory held is as before, unless it is to be
                uploaded.
        """
        surgery.check_record(of_model(self), self)
        # A stock checkpoint may have had other names for its weights; those of the patched class never changed.
        kwargs["save_original_format"] = False
        folder, parameters = Path(save_directory), self.parameters()  # type: ignore[attr-defined]
        size = sum(parameter.nbytes for parameter in parameters)
        # A folder that is uploaded under its name, or that other processes write too, is written in place.
        is_shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        in_place = bool(args or is_shared or folder.is_file() or kwargs.get("push_to_hub"))
        undo = surgery.Undo()
        undo.set(self, "hf_quantizer", Binding(self, state_dict))
        try:
            with storing(folder, needed=size) if in_place else whole_files(folder, needed=size, stale=_SHARD) as beside:
                place = save_directory if beside is None else beside
                super().save_pretrained(place, is_main_process, state_dict, *args, **kwargs)  # type: ignore[misc]
                if is_main_process and getattr(self, "peft_config", None):
                    # Only now are the weights there; with the configuration came those of an earlier save at most.
                    from hf_posenc.patches import binding

                    binding.bind(Path(place))
        finally:
            undo.roll_back()
        if is_main_process:
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


class Binding(HfQuantizer):
    """Puts the digest of the record into the headers of the weights, when a model is saved.

    transformers asks for what to write there too, but asks a quantizer only.

    Args:
        model: A converted model, quantised or not.
        state_dict: What to save, if the user says.
    """

    def __init__(self, model: Any, state_dict: dict[str, Any] | None) -> None:
        self._true = getattr(model, "hf_quantizer", None)
        self._state_dict = state_dict
        self.quantization_config = getattr(self._true, "quantization_config", None)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Return the tensors to save, `None` for all of the model's, and the metadata to write with them."""
        state_dict, metadata = self._state_dict, {}
        if self._true is not None:
            state_dict, metadata = self._true.get_state_dict_and_metadata(model)
        return state_dict, {**metadata, checkpoint.DIGEST: checkpoint.digests(model.config)[0]}

    def is_serializable(self) -> bool:
        """Whether the model can be saved."""
        return self._true is None or self._true.is_serializable()

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained."""
        return self._true is None or self._true.is_trainable


def check_stored(model: Any, state_dict: Any, files: Sequence[str] | None, load_config: Any) -> None:
    """Raise unless what is about to be loaded is what a model asks for; by the headers of the files, before they are
    read.

    Args:
        model: Just built, without values.
        state_dict: Given by the user in place of files.
        files: Paths of the files.
        load_config: What transformers knows of the loading.

    Raises:
        CheckpointError: See `hf_posenc.patches.checkpoint`.
    """
    source, mapping = load_config.pretrained_model_name_or_path, load_config.weight_mapping or ()
    if not record.from_config(model.config):
        raise CheckpointError(
            f"The checkpoint {source} is not that of a converted model. Load it with "
            f"{type(model).__name__.removeprefix('Posenc')} and use hf_posenc.patch."
        )
    if files:
        shards = (load_config.sharded_metadata or {}).get("weight_map", {}).values()
        stored = checkpoint.read_headers(files, shards, model.config)
    elif state_dict:
        stored = {n: checkpoint.Stored(tuple(x.shape), x.is_floating_point()) for n, x in state_dict.items()}
    else:
        return  # An empty one asks for a model at its start.
    wanted = model.state_dict(keep_vars=True)
    found: dict[str, checkpoint.Stored] = {}
    # Quantised and merged tensors have names and shapes of their own.
    exact = load_config.hf_quantizer is None
    for name, tensor in stored.items():
        target, merged = _target(name, model, wanted, mapping)
        found[target] = tensor
        exact = exact and not merged
    misshapen = [n for n, tensor in found.items() if n in wanted and not _fits(tensor, wanted[n])]
    # Of tied tensors one is enough.
    tied = getattr(model, "all_tied_weights_keys", {})
    present = {tied.get(name, name) for name in found}
    left = SimpleNamespace(
        missing_keys={name for name in wanted if name not in found and tied.get(name, name) not in present},
        unexpected_keys=set(found) - set(wanted),
    )
    model._adjust_missing_and_unexpected_keys(left)
    missing, unknown = owed(model, left.missing_keys, mapping), _of_layers(model, left.unexpected_keys)
    lists = [missing, unknown, misshapen]
    if not exact:
        lists = [[name for name in names if checkpoint.is_of_scheme(name)] for names in lists]
    checkpoint.check_complete(source, *lists, accepts_misshapen=load_config.ignore_mismatched_sizes)


def owed(model: Any, missing: Iterable[str], mapping: Iterable[Any] = ()) -> list[str]:
    """Return those of the tensors missing in a checkpoint that it should have; not those of a head that it was not saved with."""
    saved = model.config.architectures or ()
    is_same = type(model).__name__.removeprefix("FSDP") in saved
    architecture, wanted = of_model(model), model.state_dict(keep_vars=True)
    bodies = architecture.stacks(model).values()
    inside = {id(x) for body in bodies for x in body.state_dict(keep_vars=True).values()}
    layers = [layer for body in bodies for layer in architecture.layers(body)]
    in_layers = {id(x) for layer in layers for x in layer.state_dict(keep_vars=True).values()}
    sure = [name for name in missing if id(wanted.get(name)) in in_layers or checkpoint.is_of_scheme(name)]
    rest = [name for name in missing if (is_same or id(wanted.get(name)) in inside) and name not in sure]
    kinds: list[Any] = [kind for kind in architecture.twins.values() if kind.__name__ in saved]
    if rest and kinds:
        # Some heads have a part less in their body, and arguments of a class may ask for more than a config does.
        with torch.device("meta"):
            other = kinds[0](copy.deepcopy(model.config))
        had = {_target(name, model, wanted, mapping)[0] for name in other.state_dict()}
        rest = [name for name in rest if name in had]
    return sure + rest


def _of_layers(model: Any, unknown: Iterable[str]) -> list[str]:
    """Return those of the unknown tensors in a checkpoint that are of schemes, or of more layers than the model has."""
    architecture, prefix = of_model(model), f"{model.base_model_prefix}."
    names = {id(module): name for name, module in model.named_modules()}
    lists = {
        names[id(layer)].rpartition(".")[0].removeprefix(prefix) + "."
        for body in architecture.stacks(model).values()
        for layer in architecture.layers(body)
    }
    return [n for n in unknown if checkpoint.is_of_scheme(n) or n.removeprefix(prefix).startswith(tuple(lists))]


def _target(name: str, model: Any, wanted: dict[str, Any], mapping: Iterable[Any]) -> tuple[str, bool]:
    """Return which of a model's tensors one of a checkpoint becomes, and whether several are merged or one is split for that."""
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
    if target not in wanted and name in wanted:
        return name, False
    return target, pattern is not None


def _fits(stored: checkpoint.Stored, wanted: Any) -> bool:
    """Whether a tensor of a checkpoint can become one of a model. DeepSpeed keeps the shape of what it has divided elsewhere."""
    shape = tuple(getattr(wanted, "ds_shape", wanted.shape))
    return stored.shape == shape and (stored.floating or not wanted.is_floating_point())


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
    strengths = record.strengths_from_config(config)
    layers: dict[str, set[int]] = {name: set() for name in bodies}
    for group in groups:
        for name, part in group.stacks.items():
            what = f"config.json gives the scheme {group.scheme!r} to"
            if name not in {*bodies, *architecture.other_stacks}:
                raise CheckpointError(
                    f"{what} the {name!r} of the model, which has {', '.join(bodies)} only. {_RESTORE}"
                )
            if name not in bodies:
                continue
            count = len(architecture.attentions(bodies[name]))
            if max(part.layers) >= count:
                raise CheckpointError(
                    f"{what} layer {max(part.layers)} of the {name}, which has {count} layers. {_RESTORE}"
                )
            layers[name].update(part.layers)
    natives = {group.native for group in groups}
    if (len(natives) > 1 and not architecture.native_per_layer) or (
        strengths.native != 1 and not architecture.native_fades
    ):
        raise CheckpointError(
            f"config.json has the {architecture.native} of {architecture.name} kept in some layers only, or at part of "
            f"its strength, which it cannot be. {_RESTORE}"
        )
    surgery.swap_classes(undo, architecture, model, layers)
    for group in groups:
        try:
            built = surgery.build_group(architecture, model, group)
        except (DirectionError, LayerSelectionError) as error:
            raise CheckpointError(f"config.json has a scheme where it cannot be. {error} {_RESTORE}") from error
        except OptionError as error:
            raise CheckpointError(
                f"config.json gives the scheme {group.scheme!r} an option that it does not take. {error} Upgrade "
                "hf-posenc, or restore config.json."
            ) from error
        except UnknownSchemeError as error:
            raise CheckpointError(
                f"The checkpoint uses the scheme {group.scheme!r}, which this installation does not know. {error} "
                "Upgrade hf-posenc, or import the module that registers the scheme before loading."
            ) from error
        surgery.attach(undo, architecture, model, group, built)
    surgery.set_strengths(undo, architecture, model, strengths)
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
