"""Converted models in servers, which keep keys and values in pages of their own and attend over these themselves."""

from __future__ import annotations


def register() -> None:
    """Make vLLM know the converted causal language models, by name: it imports the code when it needs one."""
    from vllm import ModelRegistry

    from hf_posenc.patches.architecture import architectures

    for architecture in architectures().values():
        for stock, twin in architecture.twins.items():
            if stock.__name__.endswith("ForCausalLM"):
                ModelRegistry.register_model(
                    twin.__name__, "hf_posenc.patches.serving.vllm:PosencTransformersForCausalLM"
                )
