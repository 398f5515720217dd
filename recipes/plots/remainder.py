"""What attention leaves of 1, over the tokens of a text."""

from __future__ import annotations

from matplotlib.colors import Normalize
from matplotlib.figure import FigureBase
from torch import Tensor

from hf_posenc.recipes.plots import over_tokens, style
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.subject import Layer, Part


def remainder(part: Part, layer: Layer) -> Tensor:
    """Return one minus the sum of each query's weights, `[H, S]`."""
    return 1 - part.seen(layer).weights.sum(-1)


def _draw(canvas: FigureBase, part: Part) -> None:
    over_tokens.draw_strips(
        canvas,
        part,
        [("share left over", remainder, style.GROWING, Normalize(0, 1), "share of the stick that is left")],
    )


KIND = Kind(
    name="remainder",
    summary="the share that weights leave over, where they do not sum to 1 (stick-breaking)",
    fits=lambda part: not part.scheme.weights_sum_to_one(),
    title=lambda part: "what each query leaves over",
    size=over_tokens.strips_size,
    draw=_draw,
)
