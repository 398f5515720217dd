"""Panels of pictures: grids of them, lines by distance, and colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import FigureBase
from matplotlib.image import AxesImage
from torch import Tensor

from hf_posenc.recipes.plots import style
from hf_posenc.structures import Numbers

COLUMNS = 5
# Inches per token, and for the labels of tokens.
_TOKEN, TOKEN_LABELS = 0.125, 0.7


def shape(count: int, most: int = COLUMNS) -> tuple[int, int]:
    """Return rows and columns of a grid of panels."""
    columns = min(count, most)
    return math.ceil(count / columns), columns


def grid(
    canvas: FigureBase,
    count: int,
    most: int = COLUMNS,
    *,
    x: str,
    y: str,
    share_x: bool = True,
    share_y: bool = True,
    size: float = 9,
) -> list[Axes]:
    """Return panels in rows; labels are written at the outer ones.

    Args:
        canvas: Figure, or part of one.
        count: Number of panels.
        most: Largest number of columns.
        x: Label of the horizontal axes.
        y: Label of the vertical axes.
        share_x: Whether panels share their horizontal axes.
        share_y: Whether they share their vertical axes.
        size: Font size of the labels.
    """
    rows, columns = shape(count, most)
    panels = list(canvas.subplots(rows, columns, squeeze=False, sharex=share_x, sharey=share_y).flat)
    for place, axes in enumerate(panels):
        axes.set_visible(place < count)
        axes.tick_params(labelsize=8)
        if place % columns == 0:
            axes.set_ylabel(y, fontsize=size)
        if place + columns >= count:
            axes.set_xlabel(x, fontsize=size)
            axes.tick_params(labelbottom=True)
    return panels[:count]


def lines(axes: Axes, distances: Tensor, values: Tensor, labels: Sequence[object], *, log: bool, width: float) -> None:
    """Draw values `[H, N]` by distance `[N]`, a line for each head."""
    for label, value, (colour, dash) in zip(labels, values, style.line_styles(len(labels)), strict=True):
        axes.plot(distances.numpy(), value.numpy(), color=colour, linestyle=dash, linewidth=width, label=f"{label}")
    frame(axes, distances, log=log)


def frame(axes: Axes, distances: Tensor, *, log: bool) -> None:
    """Finish a panel by distance: a line at zero, and the range of distances."""
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    if log:
        style.log_distance(axes)
    axes.set_xlim(int(distances.min()), max(1, int(distances.max())))
    style.open_frame(axes)


def heat(
    axes: Axes, values: Tensor, colours: str = style.GROWING, scale: Normalize | None = None, **options: Any
) -> AxesImage:
    """Draw a matrix as colours."""
    return axes.imshow(values.numpy(), cmap=colours, norm=scale, interpolation="nearest", **options)


def bar(canvas: FigureBase, image: AxesImage, panels: Any, label: str, size: float = 8, **options: Any) -> None:
    """Explain colours next to some panels."""
    made = canvas.colorbar(image, ax=panels, pad=0.01, **options)
    made.set_label(label, fontsize=size)
    made.ax.tick_params(labelsize=7)


def colours(numbers: Numbers, found: Sequence[Tensor]) -> tuple[str, Normalize]:
    """Return the colours of some numbers, and their scale."""
    shown = torch.cat([values.flatten() for values in found]).nan_to_num()
    if numbers.centre is not None:
        # With less room, rounding would show.
        room = max(0.05, float((shown - numbers.centre).abs().max()))
        return style.SIGNED, Normalize(numbers.centre - room, numbers.centre + room)
    high = (float(shown.max()) or 1.0) if numbers.high is None else numbers.high
    return style.GROWING, LogNorm(1e-3 * high, high, clip=True) if numbers.log else Normalize(0, high)


def side(tokens: Sequence[str]) -> float:
    """Return the width in inches of a panel over tokens."""
    return min(max(_TOKEN * len(tokens), 1.6), 7.0)
