"""SmolLM3: every fourth layer without rotation."""

from hf_posenc.patches.family import add_family

add_family("smollm3", globals())
