"""LoRA adapters that carry their positional scheme: a few megabytes that convert a stock model when they are loaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from peft import LoraConfig, LoraModel
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from torch import nn

from hf_posenc.errors import NotPatchedError, OptionError
from hf_posenc.patches import surgery
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.models import attach_recorded
from hf_posenc.preparing import refuse_wrapped


class AdapterType(str, Enum):
    """The name under which adapters are saved. PEFT without this package does not know it, and raises."""

    LORA = "HF_POSENC_LORA"


@dataclass
class PosencLoraConfig(LoraConfig):
    """LoRA on a converted model, with the scheme's own weights in the same adapter.

    Used as `LoraConfig`, on a model that was patched before. What the adapter's `adapter_config.json` then holds converts the
    stock model that it is loaded onto; merging gives a converted model. All weights of the schemes are trained, by way of
    `modules_to_save`, and LoRA is kept out of them.

    Attributes:
        posenc: What a converted model's config keeps of its schemes; taken from the model.
    """

    posenc: dict[str, Any] | None = field(
        default=None, metadata={"help": "The schemes of the converted model; taken from the model."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type: Any = AdapterType.LORA
        self.modules_to_save: list[str] | None = sorted({*(self.modules_to_save or ()), surgery.OWN, surgery.SHARED})


class PosencLoraModel(LoraModel):
    """Puts LoRA into a model, after converting it if it is a stock one."""

    def _pre_injection_hook(self, model: nn.Module, config: Any, adapter_name: str) -> None:
        own = getattr(getattr(model, "config", None), "posenc", None)
        if config.posenc is None:
            if not own:
                raise NotPatchedError(
                    f"PosencLoraConfig: the {type(model).__name__} is not patched, so there is no scheme to carry. Call "
                    "hf_posenc.patch(model, ...) first, or use peft.LoraConfig."
                )
            config.posenc = copy.deepcopy(own)
        elif not own:
            convert(model, config.posenc)
        elif own["groups"] != config.posenc["groups"]:
            raise OptionError(
                f"The adapter was trained with the schemes {_names(config.posenc)}, and the model has {_names(own)} with other "
                "options or layers. Load it onto the stock model, which it converts, or onto one converted in the same way."
            )
        super()._pre_injection_hook(model, config, adapter_name)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        # PEFT knows by the model type which projections to adapt.
        stock = str(model_config.get("model_type", "")).removeprefix("hf_posenc_")
        return super()._prepare_adapter_config(peft_config, {**model_config, "model_type": stock})  # type: ignore[no-untyped-call]


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
    with surgery.all_or_nothing() as undo:
        configs = surgery.configs(model)
        for config in configs:
            undo.set(config, "posenc", copy.deepcopy(schemes))
        attach_recorded(architecture, model, undo)


def _names(schemes: dict[str, Any]) -> str:
    return ", ".join(repr(group["scheme"]) for group in schemes["groups"])


def register_all() -> None:
    """Teach PEFT the type of these adapters."""
    name: Any = AdapterType.LORA
    PEFT_TYPE_TO_CONFIG_MAPPING[name] = PosencLoraConfig
    PEFT_TYPE_TO_TUNER_MAPPING[name] = PosencLoraModel
    PEFT_TYPE_TO_PREFIX_MAPPING[name] = LoraModel.prefix


register_all()
