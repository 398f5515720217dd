"""gpt-oss: a mixture of experts, local and global layers, attention sinks."""

from hf_posenc.patches.family import add_family

add_family("gpt_oss", globals())
