"""GPT-NeoX and Pythia: fused projections, partial rotation, attention parallel to the feed-forward."""

from hf_posenc.patches.family import add_family

add_family("gpt_neox", globals())
