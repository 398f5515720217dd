"""mT5: T5, multilingual."""

from hf_posenc.patches.buckets import add_encoder_decoder

add_encoder_decoder("mt5", globals())
