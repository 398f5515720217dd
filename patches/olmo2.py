"""OLMo 2: norms over all heads of queries and keys, and after each part of a layer."""

from hf_posenc.patches.family import add_family

add_family("olmo2", globals())
