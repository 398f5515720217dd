"""Adapters that carry their positional scheme, with or without LoRA: a small file that converts a stock model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from peft import LoraConfig, LoraModel, PeftConfig, PeftModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils.constants import DUMMY_TARGET_MODULES
from safetensors import SafetensorError
from torch import nn

from hf_posenc.errors import CheckpointError, NotPatchedError, OptionError, PosencError
from hf_posenc.patches import auto, belonging, surgery, unsaved
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.models import attach_recorded
from hf_posenc.patches.preparation import refuse_wrapped


class AdapterType(str, Enum):
    """The name under which adapters are saved. PEFT without this package does not know it, and raises."""

    LORA = "HF_POSENC_LORA"


@dataclass
class PosencLoraConfig(LoraConfig):
    """LoRA on a converted model, with the scheme's own weights in the same adapter.

    Used as `LoraConfig`, on a model that was patched before. What the adapter's `adapter_config.json` then holds converts the
    stock model that it is loaded onto; merging gives a converted model. All weights of the schemes are trained, by way of
    `modules_to_save`, and LoRA is kept out of them. With `target_modules=[]` there is no LoRA, and they alone are trained.

    Attributes:
        posenc: What a converted model's config keeps of its schemes; taken from the model, and again whenever it is saved.
    """

    posenc: dict[str, Any] | None = field(
        default=None, metadata={"help": "The schemes of the converted model; taken from the model."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type: Any = AdapterType.LORA
        self.modules_to_save: list[str] | None = sorted({*(self.modules_to_save or ()), surgery.OWN, surgery.SHARED})
        self._model_config: Any = None

    @property
    def scheme_only(self) -> bool:
        """Whether the weights of the schemes are all that is trained."""
        return self.target_modules is not None and not self.target_modules and not self.target_parameters

    def follow(self, model_config: Any) -> None:
        """Keep to the schemes of a model from now on: its native encoding may fade and be dropped in the training."""
        self.posenc = copy.deepcopy(model_config.posenc)
        self._model_config = model_config

    def to_dict(self) -> dict[str, Any]:
        """Return what `adapter_config.json` holds, with the schemes as they are now."""
        now = getattr(self._model_config, "posenc", None)
        if now is not None:
            self.posenc = copy.deepcopy(now)
        found: dict[str, Any] = super().to_dict()  # type: ignore[no-untyped-call]
        return found

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write `adapter_config.json`."""
        found = kwargs.get("auto_mapping_dict")
        if found:
            kwargs["auto_mapping_dict"] = _auto_class(type(self._model_config), found["base_model_class"]) or found
        super().save_pretrained(save_directory, **kwargs)


class PosencLoraModel(LoraModel):
    """Puts an adapter into a model, after converting it if it is a stock one."""

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Put one more adapter in; all of a model's adapters have the same schemes."""
        agree(model, self.peft_config[adapter_name])
        super().inject_adapter(model, adapter_name, *args, **kwargs)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        if peft_config.scheme_only:
            # What PEFT calls an adapter that may do without targets; what is saved stays as it was given.
            peft_config = copy.copy(peft_config)
            peft_config.target_modules = DUMMY_TARGET_MODULES
        # PEFT knows by the model type which projections to adapt.
        stock = str(model_config.get("model_type", "")).removeprefix("hf_posenc_")
        return super()._prepare_adapter_config(peft_config, {**model_config, "model_type": stock})  # type: ignore[no-untyped-call]


def agree(model: Any, config: PosencLoraConfig) -> None:
    """Make an adapter and the model under it have the same schemes: convert the model, or take what it has.

    Args:
        model: Stock or converted.
        config: Of the adapter.

    Raises:
        NotPatchedError: Neither has a scheme.
        OptionError: They differ, or there is nothing to train.
        CheckpointError: The adapter's schemes cannot be followed.
    """
    own = getattr(getattr(model, "config", None), "posenc", None)
    if own is not None:
        surgery.check_record(of_model(model), model)
    if own is not None and config.posenc is not None:
        _check_same(config.posenc, own)
    elif config.posenc is not None:
        convert(model, config.posenc)
    elif own is None:
        raise NotPatchedError(
            f"PosencLoraConfig: the {type(model).__name__} is not patched, so there is no scheme to carry. Call "
            "hf_posenc.patch(model, ...) first, or use peft.LoraConfig."
        )
    if config.scheme_only and not _has_parameters(model):
        raise OptionError(
            f"PosencLoraConfig(target_modules=[]): {_names(model.config.posenc)} has no parameters, so without LoRA there is "
            "nothing to train. Leave out target_modules, or name the projections to adapt."
        )
    config.follow(model.config)


def convert(model: Any, schemes: dict[str, Any]) -> None:
    """Patch a stock model, in place, with what a converted model's config keeps; all or nothing.

    Args:
        model: A stock model.
        schemes: The entry `posenc` of the config of a converted model.

    Raises:
        CheckpointError: The entry cannot be followed.
        ArchitectureError: The model is of another architecture than any that can be patched.
    """
    refuse_wrapped(model)
    architecture = of_model(model)
    belonging.refuse_part(architecture, model)
    with surgery.all_or_nothing() as undo:
        belonging.own_configs(undo, model)
        unsaved.rename(undo, model)
        for config in surgery.configs(model):
            undo.set(config, "posenc", copy.deepcopy(schemes))
        attach_recorded(architecture, model, undo)
        belonging.mark_parts(undo, model)


def base_of(folder: str) -> str:
    """Return where the weights are that a saved adapter goes onto.

    Raises:
        CheckpointError: The adapter is damaged, or does not say.
    """
    with _reading(folder):
        base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not base:
        raise CheckpointError(
            f"The adapter in {folder} does not say which model it goes onto. Give base_model_name_or_path in its "
            "adapter_config.json."
        )
    return str(base)


def merged(model: Any, folder: str) -> Any:
    """Load a saved adapter, of any type that PEFT has, onto its model, and merge it.

    Raises:
        CheckpointError: The adapter is damaged.
        PosencError: It does not go onto this model.
    """
    with _reading(folder):
        return PeftModel.from_pretrained(model, folder).merge_and_unload()


@contextlib.contextmanager
def _reading(folder: str) -> Iterator[None]:
    """Turn what PEFT raises at a damaged adapter into one error."""
    try:
        yield
    except PosencError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        words = " ".join(str(error).split())
        raise CheckpointError(
            f"The adapter in {folder} cannot be loaded ({type(error).__name__}: {words}). If it is damaged, save it again."
        ) from error


def _check_same(wanted: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise unless an adapter's schemes are those of the model that it goes onto."""
    if wanted["groups"] != own["groups"]:
        raise OptionError(
            f"The adapter was trained with the schemes {_names(wanted)}, and the model has {_names(own)} with other "
            "options or layers. Load it onto the stock model, which it converts, or onto one converted in the same way."
        )
    if wanted.get("strengths") != own.get("strengths"):
        raise OptionError(
            f"The adapter was trained with the strengths {wanted.get('strengths', 'full')}, and the model has "
            f"{own.get('strengths', 'full')}. Load it onto the stock model, or call hf_posenc.set_strength first."
        )


def _has_parameters(model: nn.Module) -> bool:
    """Whether any scheme in a model has weights."""
    return any(not {surgery.OWN, surgery.SHARED}.isdisjoint(name.split(".")) for name, _ in model.named_parameters())


def _auto_class(config_class: type, head: str) -> dict[str, str] | None:
    """Return where `AutoPeftModel` finds what loads the base, stock or converted; `None` if nothing of that kind does."""
    names = [name for name, kind in auto.classes_for(config_class).items() if kind.__name__ == head]
    # The one for pretraining is another name for a head that has a better one.
    names.sort(key=lambda name: name == "AutoModelForPreTraining")
    return {"base_model_class": names[0], "parent_library": "transformers"} if names else None


def _names(schemes: dict[str, Any]) -> str:
    return ", ".join(repr(group["scheme"]) for group in schemes["groups"])


def register_all() -> None:
    """Teach PEFT the type of these adapters."""
    name: Any = AdapterType.LORA
    PEFT_TYPE_TO_CONFIG_MAPPING[name] = PosencLoraConfig
    PEFT_TYPE_TO_TUNER_MAPPING[name] = PosencLoraModel
    PEFT_TYPE_TO_PREFIX_MAPPING[name] = LoraModel.prefix


register_all()
