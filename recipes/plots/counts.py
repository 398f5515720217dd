"""Positions as CoPE counts them, over the tokens of a text."""

from __future__ import annotations

from matplotlib.colors import Normalize
from matplotlib.figure import FigureBase
from torch import Tensor

from hf_posenc.recipes.plots import over_tokens
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.probe import asked
from hf_posenc.recipes.plots.subject import Layer, Part
from hf_posenc.schemes.cope import CoPE


def positions(part: Part, layer: Layer) -> Tensor:
    """Return the position of each key as each query counts it, float64 `[H, S, S]`."""
    assert isinstance(layer.scheme, CoPE)
    found = asked(part, layer)
    return layer.scheme.count(found.content, found.q, found.k, found.block).detach()[0]


def _draw(canvas: FigureBase, part: Part) -> None:
    found = positions(part, part.layers[0])[list(part.heads)]
    if part.geometry.causal:
        found = found.tril()
    over_tokens.draw_maps(
        canvas, part, positions, Normalize(0, float(found.max())), "position of the key (tokens counted)"
    )


KIND = Kind(
    name="positions",
    summary="positions as CoPE counts them over a text, with its tokens",
    fits=lambda part: isinstance(part.scheme, CoPE),
    title=lambda part: f"positions of keys as each query counts them, layer {part.layers[0].index}",
    size=over_tokens.maps_size,
    draw=_draw,
    layers=4,
    heads=8,
    per_layer=True,
)
