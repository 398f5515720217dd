"""Loading of models and tokenizers."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.utils import CONFIG_NAME

from hf_posenc.errors import ArchitectureError, CheckpointError, RecipeError, cut
from hf_posenc.patches.architecture import of_config, stated_length
from hf_posenc.patches.atomic_files import reading
from hf_posenc.recipes.storage import MODEL, RECIPE

# Name of the built-in model.
TINY_LLAMA = "tiny-llama"
# File of a folder of sentence-transformers that lists its modules.
MODULES = "modules.json"


def place(name: str) -> str:
    """Return the folder of the built-in model, or any other name unchanged."""
    return str(importlib.resources.files("hf_posenc") / "tiny_llama") if name == TINY_LLAMA else name


def located(name: str) -> str:
    """Return the absolute path of a local model, which means the same in any directory; any other name unchanged."""
    return str(Path(name).absolute()) if name != TINY_LLAMA and os.path.isdir(name) else name


def check_place(name: str) -> None:
    """Raise `CheckpointError` unless a checkpoint is local, cached or on a reachable hub.

    A mistyped directory looks like a name on the hub; without a network, transformers would retry for half a minute.
    """
    if os.path.isdir(name):  # False also for what no path can be
        return
    # For a name with two slashes the hub's own error would be misleading.
    if not re.fullmatch(r"\w[\w.-]{,95}(/\w[\w.-]{,95})?", name):
        raise CheckpointError(
            f"There is no directory {cut(name)}. Give a directory with a checkpoint, or a name on the hub."
        )
    if isinstance(huggingface_hub.try_to_load_from_cache(name, CONFIG_NAME), str):
        return
    try:
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, CONFIG_NAME))
    except HfHubHTTPError:
        pass  # The hub is reachable; loading reports errors of the name.
    # The HTTP library and its exceptions differ between versions of the client.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(
            f"There is no directory {name}, and the hub, which may know the name, is not reached: {reason}. Correct "
            "the path, or download the model where there is a network."
        ) from error


def auto_class(config: Any) -> Any:
    """Return the `Auto` class of a language model: the one for encoder-decoders, masked or causal language models."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    # As a causal language model, an encoder that is no decoder would see the token that it predicts.
    is_encoder = type(config) in AutoModelForMaskedLM._model_mapping and not getattr(config, "is_decoder", False)
    return AutoModelForMaskedLM if is_encoder else AutoModelForCausalLM


def language_class(name: str, config: Any) -> Any:
    """Return the `Auto` class of a language model; raise `RecipeError`, which names the model, if it is none."""
    kind = auto_class(config)
    if type(config) not in kind._model_mapping:
        raise RecipeError(
            f"The model {name!r} is a {config.model_type}, which writes no text; recipes and measures are for "
            "language models. Patch this one in Python, and train and measure it as any other of its kind."
        )
    own = kind._model_mapping[type(config)].__name__
    if Path(place(name), MODULES).is_file() and own not in (config.architectures or ()):
        raise RecipeError(
            f"The folder {name} is one of sentence-transformers, whose encoder predicts no words; recipes and measures "
            f"are for language models. Train its embeddings: hf-posenc embed {name} SCHEME OUT --text FILE"
        )
    return kind


def is_masked(model: Any) -> bool:
    return auto_class(model.config) is AutoModelForMaskedLM


def load_config(name: str) -> Any:
    """Return the config of a model, given as in `load`; raise `CheckpointError` if it cannot be read."""
    name = place(name)
    check_place(name)
    if os.path.isdir(name) and not Path(name, CONFIG_NAME).is_file():
        raise CheckpointError(f"There is no config.json in {name}. {_instead_of(Path(name))}")
    with reading(f"The config of {name}"):
        return AutoConfig.from_pretrained(name)


def _instead_of(folder: Path) -> str:
    """Return advice about a folder without a config, which is often the folder of a run."""
    if (folder / MODEL / CONFIG_NAME).is_file():
        return f"The model is in {folder / MODEL}: give that."
    if (folder / MODEL / "adapter_config.json").is_file():
        return f"The run trained an adapter, {folder / MODEL}: give the model that it is for."
    if (folder / RECIPE).is_file():
        return f"It holds a run that is not finished. Go on with it first: hf-posenc resume {shlex.quote(str(folder))}"
    return "Give the directory of a checkpoint."


def load(name: str, **options: Any) -> tuple[Any, Any]:
    """Return the language model in a local directory, on the hub or "tiny-llama", which is built in; and its tokenizer.

    `options` are keywords of `from_pretrained`. Raise `CheckpointError` if either cannot be read.
    """
    config, folder = load_config(name), place(name)
    with reading(f"The model {name!r}"):
        return language_class(name, config).from_pretrained(folder, **options).eval(), load_tokenizer(folder)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw new parameters, within the context, from a seed; the caller's random state does not change."""
    # They are drawn on the CPU.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer in a local directory or on the hub; raise `CheckpointError` if it cannot be read."""
    advice = (
        " Expected are the files that its save_pretrained writes, tokenizer.json and tokenizer_config.json for most: "
        "save them there again, or download them again."
    )
    with reading(f"The tokenizer of {name}", advice=advice):
        return AutoTokenizer.from_pretrained(name)


def load_tiny_llama(**options: Any) -> tuple[Any, Any]:
    return load(TINY_LLAMA, **options)


def trained_length(config: PreTrainedConfig) -> int | None:
    """Return the trained length in a model's config; `None` if it states none."""
    try:
        return of_config(config).trained_length(config)
    except ArchitectureError:  # A teacher may be any model.
        return stated_length(config)
