"""Qwen3: norms of queries and keys; a sliding window in some layers, if its config says so."""

from hf_posenc.patches.family import add_family

add_family("qwen3", globals())
