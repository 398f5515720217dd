"""Adapters of recipes, and 4-bit weights under them."""

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
from hf_posenc.recipes.loading import is_masked
from hf_posenc.recipes.schema.recipe import Adapter

# PEFT's name for all linear layers but the head. Its default, a few of them, is too little to learn new positions.
_ALL = "all-linear"


def trained_dtype(adapter: Adapter) -> dict[str, Any]:
    """Return the dtype for loading the model: weights that are trained are float32, others as in the checkpoint."""
    return {"dtype": torch.float32} if adapter.kind == "none" else {}


def quantization(
    adapter: Adapter, *, precision: Literal["float32", "bfloat16", "float16"] = "float32"
) -> BitsAndBytesConfig | None:
    """Return the config for loading the model in 4 bits (NF4, as in QLoRA); `None` without `four_bit`."""
    if not adapter.four_bit:
        return None
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
    """Return a model with its adapter, or the model itself with `kind: none`; a stock one gets plain LoRA."""
    if adapter.kind == "none":
        return model
    if getattr(model, "is_quantized", False):
        keep_unpacked(model)
        # The trainer turns on gradient checkpointing.
        prepare: Any = prepare_model_for_kbit_training
        model = prepare(model, use_gradient_checkpointing=False)
    return get_peft_model(model, config(model, adapter))


def check_targets(model: Any, adapter: Adapter) -> None:
    """Raise `RecipeError` for LoRA targets that do not exist, and for a rank that no weight can have.

    PEFT would raise only after the data is prepared, and make matrices of any rank.
    """
    if adapter.kind == "lora" and adapter.rank > (size := model.config.get_text_config().hidden_size):
        raise RecipeError(f"adapter.rank is {adapter.rank}; expected at most {size}, the width of the model.")
    # Modules that PEFT supports, except in schemes, whose weights are trained directly.
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
    # PEFT has no task for masked language models.
    task = None if is_masked(model) else "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
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
    """Keep 4-bit weights on a CPU in the layout that supports gradients, in place.

    On some CPUs bitsandbytes repacks them at the first forward without gradients, such as an evaluation. The repacked
    weights pass no gradients on.
    """
    module: Any
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
            module.state_dict()  # unpacks what is packed
