"""Qwen2: biases on queries, keys and values; a sliding window in some layers, if its config says so."""

from hf_posenc.patches.family import add_family

add_family("qwen2", globals())
