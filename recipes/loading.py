"""The model of a recipe, with its tokenizer."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import CONFIG_NAME

from hf_posenc.errors import CheckpointError, PosencError, RecipeError

# The name of the model that comes with the package.
TINY_LLAMA = "tiny-llama"


def place(name: str) -> str:
    """Return where a checkpoint is: the folder of the model that comes with the package; of any other, its name."""
    return str(importlib.resources.files("hf_posenc") / "tiny_llama") if name == TINY_LLAMA else name


def check_place(name: str) -> None:
    """Raise unless a checkpoint is here, or the hub can be asked for it.

    A directory that is mistyped looks like a name on the hub. Where that is not reached, transformers asks again and again, for
    half a minute.

    Args:
        name: A local directory or a name on the hub.

    Raises:
        CheckpointError: It is neither, or nobody can say.
    """
    if Path(name).is_dir():
        return
    # A hub name has at most one slash. Anything else that is not there would be answered by a puzzling line on the hub.
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise CheckpointError(
            f"There is no directory {name}. Give a directory with a checkpoint, or a name on the hub."
        )
    if isinstance(huggingface_hub.try_to_load_from_cache(name, CONFIG_NAME), str):
        return
    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, CONFIG_NAME))
    except HfHubHTTPError:
        pass  # The hub answers; what is wrong with the name is said by whoever reads it.
    # The client that the hub library asks through has errors of its own, one kind in each of its versions.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(
            f"There is no directory {name}, and the hub, which may know the name, is not reached: {reason}. Correct "
            "the path, or download the model where there is a network."
        ) from error


def load(name: str, **options: Any) -> tuple[Any, Any]:
    """Return a language model and its tokenizer.

    Args:
        name: A local directory, a name on the hub, or "tiny-llama", which comes with the package.
        **options: Of `from_pretrained` of the model.

    Raises:
        RecipeError: The model cannot be read.
        CheckpointError: The tokenizer cannot, or there is no model of this name.
    """
    if name == TINY_LLAMA:
        return load_tiny_llama(**options)
    check_place(name)
    try:
        config = AutoConfig.from_pretrained(name)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        if type(config) not in kind._model_mapping:
            raise RecipeError(
                f"The model {name!r} is a {config.model_type}, which writes no text: expected a language model. To "
                "train this one, patch it and train it as any other of its kind."
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
            f"The tokenizer of {name} cannot be read ({type(error).__name__}: {' '.join(str(error).split())}); "
            "expected the files that its save_pretrained writes, tokenizer.json and tokenizer_config.json for most. "
            "Save them there again, or download them again."
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
