"""Gemma 2: local and global layers, and a softcap on the logits of attention."""

from hf_posenc.patches.family import add_family

add_family("gemma2", globals())
