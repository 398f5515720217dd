"""Models of a few thousand random weights, for what does not depend on trained ones."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

import hf_posenc
from hf_posenc import registry
from hf_posenc.patches.architecture import architectures
from hf_posenc.patches.surgery import stock_class
from hf_posenc.scheme import Scheme

# Class of the config, class of the model, its Auto class, and what is not the default.
KINDS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama": (
        "LlamaConfig", "LlamaForCausalLM", "AutoModelForCausalLM",
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1},
    ),
    "gpt2": (
        "GPT2Config", "GPT2LMHeadModel", "AutoModelForCausalLM",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.1, "embd_pdrop": 0.0,
         "attn_pdrop": 0.0, "resid_pdrop": 0.0, "summary_first_dropout": 0.0},
    ),
    "t5": (
        "T5Config", "T5ForConditionalGeneration", "AutoModelForSeq2SeqLM",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0,
         "decoder_start_token_id": 0},
    ),
    "vit": (
        "ViTConfig", "ViTForImageClassification", "AutoModelForImageClassification",
        {"image_size": 8, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "initializer_range": 0.1},
    ),
}  # fmt: skip
TEXTS = ("llama", "gpt2", "t5")
# T5 1.1, whose head is not tied.
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 2}

# Every stock class of a model of text that has a twin.
HEADS = [
    (name, stock)
    for name in TEXTS
    for stock in architectures()[name].twins
    if issubclass(stock, PreTrainedModel) and stock not in architectures()[name].parts
]


def config(name: str, **changes: Any) -> PreTrainedConfig:
    """Return a config without dropout."""
    # Two labels, since T5's question answering head asks for just that many.
    text = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "classifier_dropout": 0.0}
    shape = {"num_labels": 2, **KINDS[name][3], **({} if name == "vit" else text)}
    found: PreTrainedConfig = getattr(transformers, KINDS[name][0])(**{**shape, **changes})
    return found


def make(kind: type, configured: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = kind(configured)
    return model.eval()


def stock(name: str, kind: Any = None, **changes: Any) -> Any:
    """Return a stock model; the same at each call."""
    return make(kind or getattr(transformers, KINDS[name][1]), config(name, **changes))


def converted(name: str, scheme: str = "fire", *, moved: bool = False, **options: Any) -> Any:
    """Return a patched model; the parameters of its schemes can be moved from their start."""
    causal_only = "bidirectional" not in registry.get(scheme).directions
    stacks = {"stacks": "decoder"} if name == "t5" and causal_only else {}
    model = stock(name)
    torch.manual_seed(1)
    hf_posenc.patch(model, scheme, **{**stacks, **options})
    for parameter in parameters(model) if moved else ():
        nn.init.uniform_(parameter, 0.1, 0.9)
    return model


def auto(name: str) -> Any:
    """Return the Auto class that loads a converted model."""
    return getattr(transformers, KINDS[name][2])


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the schemes of a model."""
    return [parameter for module in model.modules() if isinstance(module, Scheme) for parameter in module.parameters()]


def ids(rows: int = 4, length: int = 11) -> Tensor:
    tokens = torch.randint(5, 60, (rows, length), generator=torch.Generator().manual_seed(0))
    tokens[:, -1] = 1  # T5's classifier reads the state at the one end token of each row
    return tokens


def call(model: PreTrainedModel, tokens: Tensor | None = None) -> dict[str, Tensor]:
    """Return the keywords of a forward that any head accepts."""
    name = stock_class(type(model)).__name__
    if name.startswith("ViT"):
        return {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)}
    tokens = ids() if tokens is None else tokens
    if "DoubleHeads" in name:
        return {"input_ids": tokens.view(2, 2, -1), "mc_token_ids": torch.tensor([[3, 5], [7, 2]])}
    if name.endswith("MultipleChoice"):
        return {"input_ids": tokens.view(2, 2, -1)}
    if name.removeprefix("U").removeprefix("M") in ("T5Model", "T5ForConditionalGeneration", "T5ForQuestionAnswering"):
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)}
    return {"input_ids": tokens}


@torch.no_grad()
def outputs(model: PreTrainedModel, tokens: Tensor | None = None) -> list[Tensor]:
    """Return every tensor that a forward gives."""
    return [value for value in model(**call(model, tokens)).values() if isinstance(value, Tensor)]


def first_output(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return outputs(model, tokens)[0]


def same(first: Any, second: Any) -> bool:
    """Whether two models give the same, bit for bit."""
    ours, theirs = outputs(first), outputs(second)
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))
