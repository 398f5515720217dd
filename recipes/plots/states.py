"""Lengths of the position states that TaPE carries from layer to layer, over the tokens of a text."""

from __future__ import annotations

from matplotlib.colors import Normalize
from matplotlib.figure import FigureBase
from torch import Tensor

from hf_posenc.recipes.plots import over_tokens, style
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.probe import asked
from hf_posenc.recipes.plots.subject import Layer, Part
from hf_posenc.schemes.tape import TaPE


def lengths(part: Part, layer: Layer) -> Tensor:
    """Return the root mean square over frequencies of each token's position state, `[H, S]`; 1 before any update."""
    (states,) = asked(part, layer).block.state.values()  # [1, S, H, R]: real parts, then imaginary ones
    real, imaginary = states.detach()[0].transpose(0, 1).chunk(2, dim=-1)
    return (real.square() + imaginary.square()).mean(-1).sqrt()


def _draw(canvas: FigureBase, part: Part) -> None:
    found = [lengths(part, layer)[list(part.heads)] for layer in part.layers]
    # The same room on either side of 1, and enough that rounding shows nothing.
    room = max(0.05, *(float((values - 1).abs().max()) for values in found))
    over_tokens.draw_strips(
        canvas,
        part,
        [("length", lengths, style.SIGNED, Normalize(1 - room, 1 + room), "length of the state (1 at the start)")],
    )


KIND = Kind(
    name="states",
    summary="lengths of TaPE's position states over a text, with its tokens",
    fits=lambda part: isinstance(part.scheme, TaPE),
    title=lambda part: "lengths of the position states",
    size=over_tokens.strips_size,
    draw=_draw,
)
