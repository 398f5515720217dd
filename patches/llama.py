"""Llama: the plain case of a family."""

from hf_posenc.patches.family import RotaryFamily, add_family


class PlainFamily(RotaryFamily):
    """A family with a twin in transformers that leaves layers without rotation."""

    with_list = "smollm3"


add_family("llama", globals(), PlainFamily)
