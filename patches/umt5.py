"""UMT5: a table of distance buckets in each layer."""

from hf_posenc.patches.buckets import add_encoder_decoder

add_encoder_decoder("umt5", globals())
