"""Converted models in servers, which keep keys and values in pages of their own and attend over these themselves."""

from __future__ import annotations


def register() -> None:
    """Make vLLM know the converted causal language models, by name: it imports the code when it needs one.

    No family is read for it: those of transformers have a name each, and plugins name their own.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm import ModelRegistry

    from hf_posenc.patches.architecture import architectures

    of_transformers = (f"Posenc{name}" for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    read = (twin.__name__ for architecture in architectures().values() for twin in architecture.twins.values())
    for name in sorted({*of_transformers, *read}):
        if name.endswith("ForCausalLM"):
            ModelRegistry.register_model(name, "hf_posenc.patches.serving.vllm:PosencTransformersForCausalLM")
