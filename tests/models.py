"""The checkpoints that the tests convert, and how each architecture is called."""

from __future__ import annotations

import copy
import functools
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from hf_posenc import registry

HERE = Path(__file__).parent
DIRECTORIES = {
    "llama": Path(str(files("hf_posenc") / "tiny_llama")),
    "gpt2": HERE / "checkpoints" / "gpt2",
    "t5": HERE / "checkpoints" / "t5",
}
ARCHITECTURES = tuple(DIRECTORIES)

# Differences between two orders of the same float32 arithmetic, on logits of size 10.
SAME = {"atol": 2e-4, "rtol": 1e-4}


def auto(architecture: str) -> Any:
    """Return the Auto class that loads a checkpoint with its language modelling head."""
    return AutoModelForSeq2SeqLM if architecture == "t5" else AutoModelForCausalLM


@functools.cache
def _original(architecture: str, **config: Any) -> PreTrainedModel:
    model = auto(architecture).from_pretrained(DIRECTORIES[architecture], **config).eval()
    model.config._name_or_path = model.name_or_path = ""  # It is no checkpoint any more: tests change it.
    return model


def stock(architecture: str, **config: Any) -> PreTrainedModel:
    """Return a fresh copy of a checkpoint; attention implementation and the like go into the config."""
    return copy.deepcopy(_original(architecture, **config))


def tokens(architecture: str, rows: int, length: int, seed: int = 0) -> Tensor:
    """Return token ids that are neither padding nor special, `[rows, length]`."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = _original(architecture).config.vocab_size
    return torch.randint(20, vocabulary - 20, (rows, length), generator=generator)


def inputs(architecture: str, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Return the keywords of a forward on token ids; T5 reads them in both stacks."""
    call = {"input_ids": ids}
    if mask is not None:
        call["attention_mask"] = mask
    if architecture == "t5":
        call["decoder_input_ids"] = ids.flip(1) if mask is None else ids
        if mask is not None:
            call["decoder_attention_mask"] = mask
    return call


@torch.no_grad()
def logits(model: PreTrainedModel, architecture: str, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the logits of a forward, float32 `[B, S, V]`."""
    return model(**inputs(architecture, ids, mask), use_cache=False).logits.float()


def loss(model: PreTrainedModel, architecture: str, ids: Tensor) -> Tensor:
    """Return the language modelling loss of a forward with gradients."""
    return model(input_ids=ids, labels=ids).loss


def new_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters that the patch added."""
    return {name: p for name, p in model.named_parameters() if "hf_posenc" in name}


def stacks_for(architecture: str, scheme: str) -> dict[str, str]:
    """Return the argument of `patch` that a scheme needs on an architecture: one for decoders only says so on T5."""
    causal_only = "bidirectional" not in registry.get(scheme).directions
    return {"stacks": "decoder"} if architecture == "t5" and causal_only else {}
