"""Pictures over the tokens of a text: strips of one value per head and token, and maps of one per query and key."""

from __future__ import annotations

import math
from collections.abc import Callable

from matplotlib.colors import Normalize
from matplotlib.figure import FigureBase
from torch import Tensor

from hf_posenc.recipes.plots import style
from hf_posenc.recipes.plots.subject import Layer, Part

# Gives one value for each head and token, `[H, S]`, or for each head, query and key, `[H, S, S]`.
Values = Callable[[Part, Layer], Tensor]

_COLUMNS = 4
# Inches per token, and what labels take.
_TOKEN, _LABELS = 0.09, 0.6


def _width(tokens: int) -> float:
    return min(max(_TOKEN * tokens, 1.6), 7.0)


def strips_size(part: Part, columns: int = 1) -> tuple[float, float]:
    """Return width and height in inches of strips of all layers."""
    strip = 0.3 + 0.11 * min(len(part.heads), 16)
    return 1.3 + columns * max(1.25 * _width(len(part.tokens)), 3), 0.9 + _LABELS + strip * len(part.layers)


def draw_strips(canvas: FigureBase, part: Part, columns: list[tuple[str, Values, str, Normalize, str]]) -> None:
    """Draw rows of heads over the tokens, a strip for each layer; and several such columns side by side.

    Args:
        canvas: Where to.
        part: Part of the model.
        columns: Title, values, colour map, scale, and what the colours are.
    """
    tokens = part.tokens
    panels = canvas.subplots(len(part.layers), len(columns), squeeze=False, sharex=True, sharey=True)
    for side, (title, values, colours, scale, what) in enumerate(columns):
        for row, layer in enumerate(part.layers):
            axes = panels[row, side]
            found = values(part, layer)[list(part.heads)].cpu()
            image = axes.imshow(found.numpy(), aspect="auto", cmap=colours, norm=scale, interpolation="nearest")
            style.caption(axes, f"layer {layer.index}" if row else f"{title}, layer {layer.index}")
            _head_ticks(axes, part.heads)
            if side == 0:
                axes.set_ylabel("head", fontsize=8)
        style.token_ticks(panels[-1, side], tokens, x=True)
        panels[-1, side].set_xlabel("token", fontsize=8)
        bar = canvas.colorbar(image, ax=panels[:, side], pad=0.01, fraction=0.04, format="%g")
        bar.set_label(what, fontsize=8)
        bar.ax.tick_params(labelsize=7)


def _head_ticks(axes: object, heads: tuple[int, ...]) -> None:
    step = math.ceil(len(heads) / 8)
    axes.set_yticks(range(0, len(heads), step), [str(head) for head in heads[::step]], fontsize=7)  # type: ignore[attr-defined]


def maps_size(part: Part) -> tuple[float, float]:
    """Return width and height in inches of maps of the heads of one layer."""
    columns, side = min(len(part.heads), _COLUMNS), _width(len(part.tokens))
    rows = math.ceil(len(part.heads) / columns)
    return 1.9 + columns * (side + 0.15), 0.5 + _LABELS + rows * (side + 0.25)


def draw_maps(canvas: FigureBase, part: Part, values: Values, scale: Normalize, what: str) -> None:
    """Draw queries over keys, a map for each head of the first layer, with the tokens at the outer edges."""
    tokens, layer = part.tokens, part.layers[0]
    found = values(part, layer).cpu()
    if part.geometry.causal:
        found = found.masked_fill(found.new_ones(found.shape[-2:]).triu(1).bool(), math.nan)
    columns = min(len(part.heads), _COLUMNS)
    rows = math.ceil(len(part.heads) / columns)
    panels = canvas.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for place, axes in enumerate(panels.flat):
        if place >= len(part.heads):
            axes.set_visible(False)
            continue
        image = axes.imshow(found[part.heads[place]].numpy(), cmap=style.GROWING, norm=scale, interpolation="nearest")
        style.caption(axes, f"head {part.heads[place]}")
        style.open_frame(axes)
        # Panels share their axes: labels of the outer ones are those of all.
        if place % columns == 0:
            style.token_ticks(axes, tokens, y=True)
            axes.set_ylabel("query", fontsize=8)
        if place + columns >= len(part.heads):
            axes.tick_params(labelbottom=True)
            style.token_ticks(axes, tokens, x=True)
            axes.set_xlabel("key", fontsize=8)
    bar = canvas.colorbar(image, ax=panels, pad=0.01, fraction=0.04, format="%g")
    bar.set_label(what, fontsize=8)
    bar.ax.tick_params(labelsize=7)
