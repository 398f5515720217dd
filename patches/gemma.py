"""Gemma: wide heads, and embeddings that grow with the width of the model."""

from hf_posenc.patches.family import add_family

add_family("gemma", globals())
