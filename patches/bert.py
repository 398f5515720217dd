"""BERT: a learned table of positions; also as a decoder with cross-attention."""

from hf_posenc.patches.family import add_family

add_family("bert", globals())
