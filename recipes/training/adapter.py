"""The adapter that a recipe asks for, put into a model; and the 4-bit weights under it."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from hf_posenc.errors import RecipeError, suggest
from hf_posenc.patches.adapters import PosencLoraConfig
from hf_posenc.patches.surgery import OWN, SHARED, is_patched
from hf_posenc.recipes.schema.recipe import Adapter

# PEFT's word for all linear layers but the head. A few of them, as it would take by itself, are too few to make up for positions.
_ALL = "all-linear"


def quantization(
    adapter: Adapter, *, precision: Literal["float32", "bfloat16", "float16"] = "float32"
) -> BitsAndBytesConfig | None:
    """Return how to load the model's own weights: `None` as they are, otherwise in 4 bits (NF4, as QLoRA does).

    Args:
        adapter: Of the recipe.
        precision: In which the 4-bit weights are multiplied.

    Raises:
        RecipeError: 4 bits cannot be trained without an adapter, or bitsandbytes is not installed.
    """
    if not adapter.four_bit:
        return None
    if adapter.kind == "none":
        raise RecipeError(
            "adapter: four_bit=true with kind='none': weights in 4 bits cannot be trained. Set adapter.kind to 'lora' "
            "or 'scheme', or leave out four_bit."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(
            "adapter: four_bit=true needs bitsandbytes, which is not installed. Run pip install bitsandbytes, or "
            "leave out four_bit."
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, precision),
    )


def attach(model: Any, adapter: Adapter) -> Any:
    """Put the adapter of a recipe into a model.

    Args:
        model: Converted, or stock for the control of an experiment, which gets plain LoRA.
        adapter: Of the recipe.

    Returns:
        The `PeftModel`, or with `kind: none` the model as it was.

    Raises:
        NotPatchedError: The scheme alone was asked for, and there is none.
        OptionError: The scheme has no weights to train alone.
    """
    if adapter.kind == "none":
        return model
    if getattr(model, "is_quantized", False):
        keep_unpacked(model)
        # The trainer decides on gradient checkpointing.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]
    return get_peft_model(model, config(model, adapter))


def check_targets(model: nn.Module, adapter: Adapter) -> None:
    """Raise unless each of the targets of a recipe is there to get LoRA; PEFT looks only after everything was prepared.

    Raises:
        RecipeError: One is not.
    """
    # What PEFT puts LoRA into, without the schemes, whose weights are trained themselves.
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding, Conv1D)) and not {OWN, SHARED} & {*name.split(".")}
    ]
    for target in adapter.targets or ():
        if not any(name == target or name.endswith(f".{target}") for name in names):
            known = sorted({name.rpartition(".")[2] for name in names})
            raise RecipeError(
                f"adapter.targets has {target!r}; expected the end of the name of a linear layer or an embedding, or "
                f"null for all linear layers but the head. {suggest(target, known)}"
            )


def config(model: Any, adapter: Adapter) -> LoraConfig:
    """Return the configuration of the adapter for a model."""
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    if adapter.kind == "scheme":
        return PosencLoraConfig(target_modules=[], task_type=task)
    kind = PosencLoraConfig if is_patched(model) else LoraConfig
    return kind(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # PEFT says int, and scales by any number
        lora_dropout=adapter.dropout,
        target_modules=adapter.targets or _ALL,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type=task,
    )


def keep_unpacked(model: nn.Module) -> None:
    """Keep 4-bit weights on a CPU in the form that gradients flow through, in place.

    On some CPUs bitsandbytes packs them for good at the first forward without gradients, an evaluation for instance, and a
    training after it would not train.
    """
    module: Any
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
            module.state_dict()  # unpacks what is packed
