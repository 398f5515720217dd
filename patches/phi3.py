"""Phi-3 and Phi-4: fused projections, partial rotation, a sliding window."""

from hf_posenc.patches.family import add_family

add_family("phi3", globals())
