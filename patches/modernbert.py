"""ModernBERT: an encoder with local and global layers, each type with a rotation of its own."""

from hf_posenc.patches.family import add_family

add_family("modernbert", globals())
