"""Llama: the plain case of a family."""

from hf_posenc.patches.family import add_family

add_family("llama", globals())
