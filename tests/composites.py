"""Tiny random models that are made of several, with their inputs: every kind of composite that people convert."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from models import DECODER, ENCODER, IMAGES
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

_TEXT: dict[str, Any] = {**DECODER, "vocab_size": 64}
IMAGE_TOKEN = 60
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "projection_dim": 16, "vision_use_head": False,
}  # fmt: skip
_SPEECH: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "conv_dim": (16, 16),
    "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer", "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
}  # fmt: skip
_BERT = {**ENCODER, "vocab_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    "resid_pdrop": 0.0, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_QFORMER = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "encoder_hidden_size": 32, "cross_attention_frequency": 1, "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def _dict(kind: str, sizes: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a config as data, with its type, for the config around it."""
    found: dict[str, Any] = CONFIG_MAPPING[kind](**{**sizes, **more}).to_dict()
    return found


def _pair(encoder: dict[str, Any], decoder: dict[str, Any]) -> dict[str, Any]:
    decoder = {**decoder, "is_decoder": True, "add_cross_attention": True}
    return {"encoder": encoder, "decoder": decoder, "decoder_start_token_id": 1, "pad_token_id": 0}


# Name of the model class, the parts of its config, the numbers of image tokens for one image.
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "encoder_decoder": ("EncoderDecoderModel", _pair(_dict("bert", _BERT), _dict("bert", _BERT)), 0),
    "encoder_decoder_gpt2": ("EncoderDecoderModel", _pair(_dict("bert", _BERT), _dict("gpt2", _GPT2)), 0),
    "vision_encoder_decoder": (
        "VisionEncoderDecoderModel", _pair(_dict("vit", IMAGES, num_channels=3), _dict("gpt2", _GPT2)), 0,
    ),
    "speech_encoder_decoder": (
        "SpeechEncoderDecoderModel", _pair(_dict("wav2vec2", _SPEECH), _dict("gpt2", _GPT2)), 0,
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {"vision_config": _dict("clip_vision_model", _VISION), "text_config": _dict("llama", _TEXT),
         "image_token_index": IMAGE_TOKEN, "vision_feature_layer": -1},
        4,
    ),
    "llava_mistral": (
        "LlavaForConditionalGeneration",
        {"vision_config": _dict("siglip_vision_model", _VISION), "text_config": _dict("mistral", _TEXT),
         "image_token_index": IMAGE_TOKEN, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        4,
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"vision_config": _dict("siglip_vision_model", _VISION), "mm_tokens_per_image": 4,
         "text_config": _dict("gemma3_text", _TEXT, layer_types=["sliding_attention", "full_attention"],
                              sliding_window=8),
         "image_token_index": IMAGE_TOKEN},
        4,
    ),
    "shieldgemma2": (  # the model of another type, with a config of its own
        "Gemma3ForConditionalGeneration ShieldGemma2Config",
        {"vision_config": _dict("siglip_vision_model", _VISION), "mm_tokens_per_image": 4,
         "text_config": _dict("gemma3_text", _TEXT, layer_types=["full_attention"] * 2),
         "image_token_index": IMAGE_TOKEN},
        4,
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        {"vision_config": _dict("siglip_vision_model", _VISION), "text_config": _dict("gemma", _TEXT),
         "image_token_index": IMAGE_TOKEN, "projection_dim": 32, "hidden_size": 32},
        4,
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        {"vision_config": _dict("idefics3_vision", _VISION), "text_config": _dict("llama", _TEXT),
         "image_token_id": IMAGE_TOKEN, "scale_factor": 2},
        1,
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {"vision_config": _dict("smolvlm_vision", _VISION), "text_config": _dict("llama", _TEXT),
         "image_token_id": IMAGE_TOKEN, "scale_factor": 2},
        1,
    ),
    "blip_2": (
        "Blip2ForConditionalGeneration",
        {"vision_config": _dict("blip_2_vision_model", _VISION), "qformer_config": _dict("blip_2_qformer", _QFORMER),
         "text_config": _dict("llama", _TEXT), "num_query_tokens": 3, "image_token_index": IMAGE_TOKEN},
        3,
    ),
    "blip_2_t5": (
        "Blip2ForConditionalGeneration",
        {"vision_config": _dict("blip_2_vision_model", _VISION), "qformer_config": _dict("blip_2_qformer", _QFORMER),
         "text_config": _dict("t5", {"vocab_size": 64, "d_model": 32, "d_ff": 40, "d_kv": 8, "num_layers": 2,
                                     "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
                                     "decoder_start_token_id": 0}),
         "num_query_tokens": 3, "image_token_index": IMAGE_TOKEN},
        3,
    ),
}  # fmt: skip


def make(name: str) -> PreTrainedModel:
    """Return a stock composite, the same at each call."""
    return copy.deepcopy(_make(name))


@functools.cache
def _make(name: str) -> PreTrainedModel:
    head, parts, _ = KINDS[name]
    torch.manual_seed(0)
    head, _, config = head.partition(" ")
    kind = getattr(transformers, head)
    model: PreTrainedModel = kind((getattr(transformers, config) if config else kind.config_class)(**parts)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs(name: str) -> dict[str, Tensor]:
    """Return the arguments of a forward: text, with images or sound."""
    head, _, images = KINDS[name]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 60, (2, 12), generator=generator)
    if head == "EncoderDecoderModel":
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)}
    pixels = torch.rand(2, 3, 16, 16, generator=generator)
    if head == "VisionEncoderDecoderModel":
        return {"pixel_values": pixels, "decoder_input_ids": tokens}
    if head == "SpeechEncoderDecoderModel":
        return {"input_values": torch.rand(2, 400, generator=generator), "decoder_input_ids": tokens}
    tokens[:, 1 : 1 + images] = IMAGE_TOKEN
    call = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pixel_values": pixels}
    if head.startswith(("Idefics3", "SmolVLM")):
        call["pixel_values"] = pixels[:, None]
    if head.startswith(("Gemma3", "PaliGemma")):
        call["token_type_ids"] = (tokens == IMAGE_TOKEN).long()
    if name.endswith("t5"):
        call["decoder_input_ids"] = tokens.flip(1)
    return call
