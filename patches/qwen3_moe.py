"""Qwen3-MoE: Qwen3 with a mixture of experts."""

from hf_posenc.patches.family import add_family

add_family("qwen3_moe", globals())
