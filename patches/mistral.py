"""Mistral: a sliding window in all layers, if its config says so."""

from hf_posenc.patches.family import add_family

add_family("mistral", globals())
