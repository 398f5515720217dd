"""Mixtral: Mistral with a mixture of experts."""

from hf_posenc.patches.family import add_family

add_family("mixtral", globals())
