"""The patched behaviour that all models share: building, loading and saving; and generation, for those that do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import registry
from hf_posenc.errors import (
    ArchitectureError,
    CacheError,
    CheckpointError,
    DirectionError,
    LayerSelectionError,
    OptionError,
    PositionError,
    UnknownSchemeError,
)
from hf_posenc.operands import check_coords
from hf_posenc.patches import checkpoint, identity, locks, model_card, record, surgery
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.atomic_files import saving
from hf_posenc.patches.attention import check_backend
from hf_posenc.patches.body import REAL, tokens_in, with_signature_of
from hf_posenc.patches.cache import cache_of
from hf_posenc.patches.context import (
    Mixin,
    Request,
    check_length,
    real_tokens,
    resolve_positions,
    sequences,
    stated_samples,
)
from hf_posenc.patches.record import NativeSetting
from hf_posenc.patches.serving.outside import layers_for
from hf_posenc.patches.surgery import Sites
from hf_posenc.scheme import Scheme


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
            # Callers read a model's arguments from the signature.
            with_signature_of(vars(cls)["posenc_stock"], cls, "__init__")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        token = locks.BUILDING.set(True)
        try:
            super().__init__(*args, **kwargs)
        finally:
            locks.BUILDING.reset(token)
        self.attach_recorded()
        # Schemes lose their meaning in half precision; transformers keeps modules of these names in float32. Quantizers
        # ask the other list which modules to leave alone, and both lists may hold no name twice.
        model: Any = self
        inside = [item for module in model.modules() for item in module._modules.items()]
        schemes = [(name, part) for name, part in inside if name in (surgery.OWN, surgery.SHARED)]
        own = {name for name, part in schemes if any(True for _ in chain(part.parameters(), part.buffers()))}
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), *own}
        self._keep_in_fp32_modules = {*(self._keep_in_fp32_modules or ()), *(rf"(?:.*\.)?{name}" for name in own)}
        identity.mark_parts(self)  # type: ignore[arg-type]

    def attach_recorded(self) -> None:
        """Give a new model the schemes that its config names."""
        attach_recorded(self, is_new=True)  # type: ignore[arg-type]

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        known = set(self.state_dict())
        foreign = [name for name in state_dict if surgery.is_of_scheme(name) and name not in known]
        remedy = "Patch the model with the scheme that they are of, and the same options"
        checkpoint.check_complete("state dict", (), foreign, remedy=remedy)
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    # Of models inside of wrappers, torch calls these alone.
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        kept = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if kept is not None:
            kept[checkpoint.DIGEST] = locks.groups_digest(self.config)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        locks.check_metadata(self.config, local_metadata)
        locks.check_folder(self.config)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        for function, frame in locks.running() if kwargs.get("prefix") else ():
            is_saving = function == ("transformers.modeling_utils", "save_pretrained")
            if is_saving and not surgery.is_patched(saving := frame.f_locals["self"]):
                raise ArchitectureError(
                    f"The {type(saving).__name__} was given a converted {self._get_name()} after it was made, and "
                    "would be saved without its scheme. Put the stock model there, use hf_posenc.patch on the whole, "
                    "and load the weights with load_state_dict."
                )
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Scheme):
            module.reset_parameters()
            return
        # A table that shows itself at part of its strength is a whole one here.
        kind = type(module)
        is_part = surgery.is_patched(module) and not isinstance(module, PreTrainedModel)
        if is_part:
            module.__class__ = surgery.stock_class(kind)
        try:
            super()._init_weights(module)  # type: ignore[misc]
        finally:
            if is_part:
                module.__class__ = kind

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: weights are initialised only where they are not loaded.

        Otherwise transformers skips modules without parameters of their own, from which stock models draw those of
        others.
        """
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for a decorator in the source of the class's module.
        stock: Any = surgery.stock_class(cls)
        return bool(stock._can_set_experts_implementation())

    def _get_name(self) -> str:
        # Trainer decides by this name whether its smoothed loss needs shifted labels.
        stock: type = surgery.stock_class(type(self))
        return stock.__name__

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        check_backend(requested_attention, chosen=True)
        chosen: str = super().get_correct_attn_implementation(requested_attention, is_init_check)  # type: ignore[misc]
        return chosen

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a converted checkpoint, as `PreTrainedModel.from_pretrained` does, or raise if it is not whole.

        The names, shapes and record digest in the headers of the files are compared with the config before any weight
        is read. Heads that the checkpoint was saved without are initialised, as in transformers.

        Raises:
            ArchitectureError: Layers are to be split between devices.
            CheckpointError: The checkpoint is truncated, of a newer format, names an unknown scheme, does not hold
                exactly the parameters that the model has, or was saved with another record than config.json has.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        surgery.refuse_split(kwargs)
        if pretrained_model_name_or_path is not None:
            folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
            checkpoint.check_index(folder, kwargs.get("variant"))
        try:
            model, info = super().from_pretrained(  # type: ignore[misc]
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise CheckpointError(
                f"{pretrained_model_name_or_path} cannot be read ({error}).{checkpoint.DAMAGED}"
            ) from error
        # No path and an empty state dict ask for a freshly initialised model.
        if pretrained_model_name_or_path is not None or kwargs.get("state_dict"):
            # Headers do not tell all, for instance of quantised weights.
            missing = checkpoint.owed(model, info["missing_keys"])
            checkpoint.check_complete(f"checkpoint {pretrained_model_name_or_path}", missing)
        # Loading makes new parameters, all trainable.
        for part in surgery.parts(model).values():
            surgery.settle_native(Sites.of(part))
        return (model, info) if wants_info else model

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> Any:
        """Check the weights that transformers found, then load them into the model."""
        checkpoint.check_stored(model, state_dict, checkpoint_files, load_config)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Raise `OptionError`: transformers itself can neither bind an adapter to its scheme nor check it."""
        raise OptionError(
            "transformers itself puts no adapter into a converted model. Use peft.get_peft_model(model, config), or "
            "PeftModel.from_pretrained(model, folder)."
        )

    load_adapter = add_adapter

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save the converted model, with stub and model card, as `PreTrainedModel.save_pretrained` does.

        Raises:
            ArchitectureError: The layers of the model are not those that its record names.
            OutputError: The directory cannot be written.
            StorageError: It does not fit on the disk. What the directory held is as before, unless it is to be
                uploaded.
        """
        for part in surgery.parts(self).values():  # type: ignore[arg-type]
            surgery.check_record(Sites.of(part))
        # A stock checkpoint may have had other names for its weights; those of the patched class never changed.
        kwargs["save_original_format"] = False
        folder = Path(save_directory)
        # Other threads may use and save this model, so what saving changes is on a copy of its surface.
        double: Any = object.__new__(type(self))
        vars(double).update(vars(self))
        double.hf_quantizer = locks.StampedWeights(self, state_dict)
        # A folder that is uploaded under its name is written in place.
        exposed = bool(args or kwargs.get("push_to_hub"))
        with saving(folder, checkpoint.variant, exposed=exposed) as place:
            stock: Any = super(PosencModel, double)
            stock.save_pretrained(place, is_main_process, state_dict, *args, **kwargs)
            if is_main_process:
                self._write_companions(place, folder)

    def _upload_modified_files(self, working_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        # transformers puts a card of its own here, just before uploading.
        self._write_companions(working_dir, working_dir)
        return super()._upload_modified_files(working_dir, *args, **kwargs)  # type: ignore[misc]

    def _write_companions(self, directory: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """Complete what transformers wrote to a directory, whose files go to a target with a card, perhaps."""
        checkpoint.seal(Path(directory))
        model_card.write(
            Path(directory),
            Path(target),
            self.config,
            type(self).__name__.removeprefix("FSDP").removeprefix("Posenc"),
            starts(self),
            identity.origin(self.config),
        )

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: saving must write the stub, not a copy of this package's source."""


class PosencGenerator(PosencModel, Mixin):
    """Mixin of patched models that generate."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Start it as `ContinuousMixin` does, if all schemes leave attention itself alone.

        Raises:
            AttentionBackendError: One does not: the pages of its cache hold keys and values, and nothing else.
        """
        layers_for(self, "The continuous batching of transformers")
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]

    def generate(
        self, inputs: Tensor | None = None, *args: Any, position_coords: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Generate as `GenerationMixin.generate` does; tokens may have coordinates.

        Args:
            inputs: Token ids or other inputs of the prompt.
            *args: Other arguments of `GenerationMixin.generate`.
            position_coords: Coordinates of the prompt, `[B|1, S, n]`; in an encoder-decoder model, of the encoder's
                tokens, and those of the decoder have none. A new token gets one more than the largest coordinate so
                far, on every axis.
            **kwargs: Other keywords of `GenerationMixin.generate`.

        Raises:
            PositionError: Coordinates do not fit the inputs or the schemes, those of an assistant model included.
        """
        if position_coords is not None:
            kwargs["position_coords"] = position_coords
            if "continuation" not in kwargs:  # else an assisted model calls its assistant
                kwargs |= self._check_generation_coords(inputs, position_coords, kwargs)
        given = () if inputs is None and not args else (inputs, *args)  # some models give the inputs another name
        return super().generate(*given, **kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *args: Any,
        inputs_embeds: Tensor | None = None,  # transformers looks for this name and the next two in the signature
        position_coords: Tensor | None = None,
        continuation: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of the next forward, as `GenerationMixin` does, with coordinates and padding."""
        call: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, *args, inputs_embeds=inputs_embeds, **kwargs
        )
        prefix = "decoder_" if self.config.is_encoder_decoder else ""
        mask, cache = kwargs.get(f"{prefix}attention_mask"), cache_of(kwargs)
        inputs = call.get("inputs_embeds") if call.get(f"{prefix}input_ids") is None else call[f"{prefix}input_ids"]
        assert inputs is not None
        (batch, length), past = inputs.shape[:2], tokens_in(cache)
        if mask is not None and mask.ndim == 2 and call.get(f"{prefix}attention_mask") is not mask:
            # For a static cache it is 4-D by now, which does not tell what is padding.
            request = Request(batch, length, inputs.device, past, mask)
            check_length(request, counts=True)
            real = real_tokens(mask, past, length)
            if real is not None:
                call[REAL] = real
            if call.get(f"{prefix}position_ids") is None:
                positions = resolve_positions(request)
                call[f"{prefix}position_ids"] = positions + of_model(self).first_position(self)
            stated = {} if past else stated_samples({}, request)
            if not past and sequences(call[f"{prefix}position_ids"], real, stated) is not None:
                raise CacheError(
                    "Got packed sequences, with which a static cache cannot go on. Use a row for each sequence."
                )
        if continuation is not None:
            assert position_coords is not None
            call["position_coords"] = continued(position_coords, mask, int(past) - continuation, length)
        return call

    def _prepare_position_ids_for_generation(self, *args: Any) -> Tensor:
        # transformers counts from 0 in `generate`, also where the model does not.
        positions: Tensor = super()._prepare_position_ids_for_generation(*args)  # type: ignore[misc]
        first: int = of_model(self).first_position(self)
        return positions + first

    def _check_generation_coords(self, inputs: Tensor | None, coords: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return coordinates, and the number of tokens in the cache before them, as steps of generation need them."""
        sequence_to_sequence = self.config.is_encoder_decoder
        ids, embedded = inputs if inputs is not None else kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        tokens = next((given for given in (embedded, ids) if given is not None), None)
        if tokens is None:
            raise PositionError("Got coordinates without input_ids or inputs_embeds to which they belong.")
        model: Any = self
        body: Any = of_model(model).stacks(model)["encoder" if sequence_to_sequence else "decoder"]
        batch, length = tokens.shape[:2]
        coords = check_coords(coords, body.axes(), batch, length, tokens.device).expand(batch, -1, -1)
        if sequence_to_sequence:
            return {"position_coords": coords}
        begin, mask = 0, kwargs.get("attention_mask")
        if mask is not None and mask.shape[1] > length:
            begin = int(tokens_in(cache_of(kwargs)))  # only new tokens were passed
        return {"position_coords": coords, "continuation": begin}


def continued(prompt: Tensor, mask: Tensor | None, first: int, length: int) -> Tensor:
    """Return the coordinates of the tokens of the next forward, `[B, length, n]`, given those of the prompt.

    After the prompt they follow the rule for texts: one more than the largest, on every axis. The last entries of the
    padding mask, 2-D, are those of all tokens so far. `first` counts from the first token of the prompt.
    """
    count = first + length - prompt.shape[1]
    if count <= 0:
        return prompt[:, first : first + length]
    real = prompt
    if mask is not None:
        before = mask.shape[1] - prompt.shape[1] - count
        hidden = mask[:, before : before + prompt.shape[1], None].to(prompt.device) == 0
        real = prompt.masked_fill(hidden, float("-inf"))
    largest = real.amax(dim=(1, 2)).nan_to_num(neginf=-1.0)  # a prompt of padding alone has none
    following = largest[:, None] + torch.arange(1, count + 1).to(prompt)  # [B, count]
    return torch.cat((prompt, following[..., None].expand(-1, -1, prompt.shape[2])), dim=1)[:, first:]


def attach_recorded(model: nn.Module, *, is_new: bool = False) -> None:
    """Patch a model with the groups recorded in its config; a new one has tables that nobody trained."""
    config: Any = model.config
    groups = record.from_config(config)
    sites = Sites.of(model)
    if all(
        surgery.SHARED in stack.body._modules or any(surgery.OWN in part._modules for part in stack.attentions)
        for stack in sites.stacks.values()
    ):
        return  # A head builds its body through `AutoModel`, which has done it.
    counts = {name: len(stack.attentions) for name, stack in sites.stacks.items()}
    built = []
    for group in groups:
        for name, layer in sorted(group.places()):
            is_there = layer < counts[name] if name in counts else name in sites.architecture.other_stacks
            if not is_there:
                raise CheckpointError(
                    f"config.json gives the scheme {group.scheme!r} to layer {layer} of the {name}, and the model has "
                    f"these numbers of layers: {counts}. Restore config.json, or convert the model again."
                )
    for group in groups:
        try:
            info = registry.get(group.scheme)
            built.append((group, surgery.build_group(sites, group, info, is_new=is_new)))
        except (DirectionError, LayerSelectionError, OptionError, UnknownSchemeError) as error:
            raise CheckpointError(
                f"This installation cannot build the scheme {group.scheme!r} that config.json names. {error} Upgrade "
                f"hf-posenc, {record.remedy(config)}, or restore config.json."
            ) from error
    surgery.install(sites, built, record.strengths_from_config(config))


def starts(model: Any) -> list[tuple[str, str]]:
    """Return the words of the model card for each group of a converted model, in the order of `record.converted`."""
    found = []
    for config in record.converted(model.config):
        part = next(part for part in surgery.parts(model).values() if part.config is config)
        groups = record.from_config(config)
        schemes: dict[int, dict[Scheme, None]] = {group.id: {} for group in groups}  # each once
        sites = Sites.of(part)
        for _, body, _, attention in sites.patched():
            schemes[attention.posenc_group][surgery.scheme_of(body, attention)] = None
        for group in groups:
            base = "the model's own encoding" if isinstance(group.native, str) else surgery.kept_native(sites, group)
            found.append((base, describe_start(list(schemes[group.id]), group.native)[0]))
    return found


def describe_start(schemes: list[Scheme], native: NativeSetting) -> tuple[str, float | None]:
    """Return the start and its tolerance, as `Plan` has them."""
    if not isinstance(native, str):
        return "break", None  # A stopped pair is a change that nothing undoes.
    kept = native == "keep"
    bounds = [None if scheme.hides_keys() else scheme.facts(native_kept=kept).start for scheme in schemes]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds):
        return "break", None
    return ("near" if any(known) else "exact") + (" with native kept" if kept else ""), max(known, default=0.0)
