"""Attention maps over the tokens of a text."""

from __future__ import annotations

from matplotlib.colors import LogNorm
from matplotlib.figure import FigureBase

from hf_posenc.recipes.plots import over_tokens
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.subject import Part


def _draw(canvas: FigureBase, part: Part) -> None:
    # One scale for all pictures, so that they can be compared.
    over_tokens.draw_maps(
        canvas,
        part,
        lambda part, layer: part.seen(layer).weights,
        LogNorm(1e-3, 1, clip=True),
        "weight (log scale)",
    )


KIND = Kind(
    name="attention",
    summary="attention weights of each head over a text, with its tokens",
    fits=lambda part: True,
    title=lambda part: f"attention weights, layer {part.layers[0].index}",
    size=over_tokens.maps_size,
    draw=_draw,
    layers=4,
    heads=8,
    per_layer=True,
)
