"""The model of a recipe, with its tokenizer."""

from __future__ import annotations

import importlib.resources
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedConfig

from hf_posenc.errors import CheckpointError, PosencError, RecipeError

# The name of the model that comes with the package.
TINY_LLAMA = "tiny-llama"


def place(name: str) -> str:
    """Return where a checkpoint is: the folder of the model that comes with the package; of any other, its name."""
    return str(importlib.resources.files("hf_posenc") / "tiny_llama") if name == TINY_LLAMA else name


def load(name: str, **options: Any) -> tuple[Any, Any]:
    """Return a language model and its tokenizer.

    Args:
        name: A local directory, a name on the hub, or "tiny-llama", which comes with the package.
        **options: Of `from_pretrained` of the model.

    Raises:
        RecipeError: The model cannot be read.
        CheckpointError: The tokenizer cannot.
    """
    if name == TINY_LLAMA:
        return load_tiny_llama(**options)
    try:
        config = AutoConfig.from_pretrained(name)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        if type(config) not in kind._model_mapping:
            raise RecipeError(
                f"The model {name!r} is a {config.model_type}, which writes no text: expected a language model. To train this "
                "one, patch it and train it as any other of its kind."
            )
        return kind.from_pretrained(name, **options).eval(), load_tokenizer(name)
    except PosencError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RecipeError(f"The model {name!r} cannot be loaded: {' '.join(str(error).split())}") from error


def load_tokenizer(name: str) -> Any:
    """Return a tokenizer.

    Args:
        name: A local directory or a name on the hub.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(name)
    # A damaged file fails wherever its content is used first; the tokenizers library raises bare exceptions.
    except Exception as error:
        raise CheckpointError(
            f"The tokenizer of {name} cannot be read ({type(error).__name__}: {' '.join(str(error).split())}); expected the files that its "
            "save_pretrained writes, tokenizer.json and tokenizer_config.json for most. Save them there again, or download them again."
        ) from error


def load_tiny_llama(**options: Any) -> tuple[Any, Any]:
    """Return the model that comes with the package, and its tokenizer."""
    folder = place(TINY_LLAMA)
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval(), AutoTokenizer.from_pretrained(folder)


def trained_length(config: PreTrainedConfig) -> int | None:
    """Return how many tokens per window a model was trained on, as its config says; T5's often says nothing."""
    for name in ("max_position_embeddings", "n_positions"):
        length = getattr(config, name, None)
        if length:
            return int(length)
    return None
