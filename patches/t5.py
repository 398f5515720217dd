"""T5 1.0 and 1.1: one table of distance buckets for each stack."""

from hf_posenc.patches.buckets import add_encoder_decoder

add_encoder_decoder("t5", globals())
