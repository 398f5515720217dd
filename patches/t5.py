"""T5 1.0 and 1.1: one table of distance buckets for each stack."""

from hf_posenc.patches.family import add_family

add_family("t5", globals())
