"""The models that the tests convert: small trained checkpoints, and tiny random models of every architecture."""

from __future__ import annotations

import copy
import functools
import inspect
import tempfile
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedImageModeling,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    LlamaModel,
    PreTrainedModel,
    TrainingArguments,
)

from hf_posenc import Scheme, registry

HERE = Path(__file__).parent
DIRECTORIES = {
    "llama": Path(str(files("hf_posenc") / "tiny_llama")),
    "gpt2": HERE / "checkpoints" / "gpt2",
    "t5": HERE / "checkpoints" / "t5",
}
ARCHITECTURES = tuple(DIRECTORIES)

# The name of a cache among arguments and outputs: that from transformers 5.24 on, and that before.
CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"
# Differences between two orders of the same float32 arithmetic, on logits of size 10.
SAME = {"atol": 2e-4, "rtol": 1e-4}


# The windows of random models are shorter than the texts.
WINDOW = 8
DECODER = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 160, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BOTH = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
PART = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 1.0, **BOTH},
    "gemma3": BOTH,
    "phi3": {"sliding_window": WINDOW, "rope_parameters": PART},
    "gpt_neox": {"rope_parameters": PART},
    "qwen3_moe": {**EXPERTS, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    "mixtral": {**EXPERTS, "sliding_window": WINDOW},
    "gpt_oss": {**EXPERTS, **BOTH, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
PADDING = 1
ENCODER = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": PADDING,
}  # fmt: skip
_TABLES = {
    "vocab_size": 60, "d_model": 32, "d_ff": 40, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "dropout_rate": 0.0,
    "pad_token_id": PADDING, "decoder_start_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_WINDOWS = {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 3, "sep_token_id": 4}
_WHOLE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**ENCODER, **_WHOLE, "type_vocab_size": 2},
    "roberta": {**ENCODER, **_WHOLE, "max_position_embeddings": 66},
    "modernbert": {**ENCODER, **_WINDOWS, "bos_token_id": 3, "eos_token_id": 4},
    "t5": _TABLES,
    "mt5": _TABLES,
    "umt5": _TABLES,
}
if Version(transformers.__version__) < Version("5.18"):
    del ENCODERS["umt5"]  # its stock decoder sees later tokens, so it is refused
IMAGES = {
    "image_size": 16, "patch_size": 4, "encoder_stride": 4, "num_channels": 2, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "initializer_range": 0.1,
}  # fmt: skip
TINY = [name for name in (*DECODERS, *ENCODERS, "vit") if name not in DIRECTORIES]
_HEADS = {
    **dict.fromkeys(("t5", "mt5", "umt5"), AutoModelForSeq2SeqLM),
    **dict.fromkeys(("bert", "roberta", "modernbert"), AutoModelForMaskedLM),
    "vit": AutoModelForMaskedImageModeling,
}


def auto(architecture: str) -> Any:
    """Return the Auto class that loads a checkpoint with its head."""
    return _HEADS.get(architecture, AutoModelForCausalLM)


@functools.cache
def _tiny(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    kind = CONFIG_MAPPING[f"{name}_text" if name in ("gemma3", "gemma4") else name]
    sizes = IMAGES if name == "vit" else ENCODERS.get(name) or {**DECODER, **DECODERS.get(name, {})}
    # Before 5.23, transformers offered Gemma 2 the "sdpa" that leaves out the softcap.
    backend = {"attn_implementation": "eager"} if name == "gemma2" else {}
    model: PreTrainedModel = auto(name).from_config(kind(**sizes), **backend).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms, biases and sinks start at numbers that hide mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny(name: str) -> PreTrainedModel:
    """Return a fresh copy of a random model."""
    return copy.deepcopy(_tiny(name))


@functools.cache
def _original(architecture: str, **config: Any) -> PreTrainedModel:
    model = auto(architecture).from_pretrained(DIRECTORIES[architecture], **config).eval()
    model.config._name_or_path = model.name_or_path = ""  # It is no checkpoint any more: tests change it.
    return model


def stock(architecture: str, **config: Any) -> PreTrainedModel:
    """Return a fresh copy of a checkpoint, where there is one: its first two layers, unless the config says more."""
    config = {"num_hidden_layers": 2, **config}
    return copy.deepcopy(_original(architecture, **config)) if architecture in DIRECTORIES else tiny(architecture)


def checkpoint(architecture: str) -> PreTrainedModel:
    """Return a fresh copy of a checkpoint with all of its layers, for what only a trained model shows."""
    return copy.deepcopy(_original(architecture))


def tokens(architecture: str, rows: int, length: int, seed: int = 0) -> Tensor:
    """Return token ids that are neither padding nor special, `[rows, length]`."""
    generator = torch.Generator().manual_seed(seed)
    config = (_original if architecture in DIRECTORIES else _tiny)(architecture).config
    vocabulary = getattr(config, "vocab_size", 60)
    return torch.randint(20, vocabulary - 20, (rows, length), generator=generator)


def inputs(architecture: str, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Return the keywords of a forward on token ids; T5 reads them in both stacks, and images are drawn by them."""
    if architecture == "vit":
        return {
            "pixel_values": torch.randn(len(ids), 2, 16, 16, generator=torch.Generator().manual_seed(int(ids.sum())))
        }
    call = {"input_ids": ids}
    if mask is not None:
        call["attention_mask"] = mask
    if auto(architecture) is AutoModelForSeq2SeqLM:
        call["decoder_input_ids"] = ids.flip(1) if mask is None else ids
        if mask is not None:
            call["decoder_attention_mask"] = mask
    return call


@torch.no_grad()
def logits(model: PreTrainedModel, architecture: str, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the logits of a forward, float32 `[B, S, V]`; of images what is made of their patches."""
    uncached = {} if architecture == "vit" else {"use_cache": False}
    found: Tensor = model(**inputs(architecture, ids, mask), **uncached)[0].float()
    return found


def loss(model: PreTrainedModel, architecture: str, ids: Tensor) -> Tensor:
    """Return the loss of the head of a model in a forward with gradients."""
    if architecture == "vit":
        hidden = torch.arange(16)[None].expand(len(ids), -1) % 3 == 0
        return model(**inputs(architecture, ids), bool_masked_pos=hidden).loss
    return model(input_ids=ids, labels=ids).loss


def new_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the parameters that the patch added."""
    return {name: p for name, p in model.named_parameters() if "hf_posenc" in name}


def moved(module: Any, size: float = 0.1, *, only: str = "hf_posenc", seed: int = 0) -> Any:
    """Move a scheme or model from its start, at which many schemes do nothing. Return it in evaluation mode.

    Of a model, only trained parameters with a word in their name are moved.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and (isinstance(module, Scheme) or only in name):
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return module.eval()


_FOLDER = tempfile.TemporaryDirectory(prefix="hf-posenc-tests-")


@functools.cache
def windows(architecture: str, count: int, length: int = 16) -> list[dict[str, Any]]:
    """Return windows of text for a `Trainer`."""
    return [{"input_ids": row, "labels": row} for row in tokens(architecture, count, length, seed=4)]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Return the arguments of a short, quiet training on the CPU, which saves nothing."""
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    given = {"save_strategy": "no", "per_device_train_batch_size": 2, **quiet, **changes}
    return TrainingArguments(str(folder), **given)


def text_file(characters: int = 60_000) -> Path:
    """Return a file of English text for recipes, a fortieth of the built-in text."""
    path = Path(_FOLDER.name) / f"{characters}.txt"
    path.write_text("\n\n".join(topics[name] for name in sorted(topics))[:characters], encoding="utf-8")
    return path


def in_turn(choices: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return each choice with one of the architectures, where a choice and an architecture have little to do with each
    other."""
    return [(ARCHITECTURES[number % len(ARCHITECTURES)], choice) for number, choice in enumerate(choices)]


def stacks_for(architecture: str, scheme: str) -> dict[str, str]:
    """Return the argument of `patch` that a scheme needs on an architecture: one for decoders only says so on T5."""
    causal_only = "bidirectional" not in registry.get(scheme).directions
    return {"stacks": "decoder"} if auto(architecture) is AutoModelForSeq2SeqLM and causal_only else {}


class Largest(TorchDispatchMode):
    """Keeps how many elements the largest tensor has that any operation makes, in backward passes, too."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                # What is expanded takes no memory.
                self.size = max(self.size, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made
