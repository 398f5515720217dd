"""The style of all pictures: figures, panels, colours, axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import EngFormatter, FixedLocator
from torch import Tensor

# For what grows from nothing, and for what has two signs; told apart with any colour vision.
GROWING, SIGNED = "viridis", "RdBu_r"
GREY, FAINT = "0.35", "0.9"
# Okabe and Ito's colours; dashes repeat the distinction in grey.
STYLES = (("#0072B2", "-"), ("#D55E00", "--"), ("#000000", ":"))
# Okabe and Ito's palette for any colour vision, the reference in black. Markers and dashes are distinct in grey, too.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS, _DASHES = ("o", "s", "^", "D", "v", "P", "X"), ("-", "--", "-.", "-", "--", ":", "-.")
# A key this far below another (in nats) has no weight that could be seen.
FLOOR = -16.0
# More labels than this along an axis would touch each other.
_LABELS, _LEGEND = 56, 12
# Of a letter of a title, on average and with some room.
_INCHES = 0.085
# Panels of a row.
COLUMNS = 5
# Inches per token, and for the labels of tokens.
_TOKEN, TOKEN_LABELS = 0.125, 0.7


def figure(width: float, height: float, title: str, *, dpi: float = 110) -> Figure:
    """Return an empty figure, in inches, with a title at the left, as wide as that at least."""
    # Not through pyplot, which would keep the figure and choose a backend for the whole process.
    of_title = _INCHES * max(map(len, title.splitlines()), default=0)
    made = Figure(figsize=(max(width, of_title), height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(made)
    made.suptitle(title, fontsize=10.5, x=0.01, ha="left")
    return made


def caption(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=9, loc="left", color=GREY)


def ramp(count: int) -> list[Any]:
    """Return colours in order, from dark to light, none too light for a white page."""
    return [colormaps[GROWING](0.88 * index / max(count - 1, 1)) for index in range(count)]


def line_styles(count: int) -> list[tuple[Any, str]]:
    return list(STYLES[:count]) if count <= len(STYLES) else [(colour, "-") for colour in ramp(count)]


def look(index: int) -> tuple[str, str, str]:
    """Return colour, marker and dashes of a model; from the eighth on, colours repeat with another marker."""
    again = index + index // len(_COLOURS)
    return _COLOURS[index % len(_COLOURS)], _MARKERS[again % len(_MARKERS)], _DASHES[again % len(_DASHES)]


def legend_beside(axes: Axes, title: str = "") -> None:
    """Name the lines next to a panel, or some of them if there are many."""
    handles, labels = axes.get_legend_handles_labels()
    step = math.ceil(len(handles) / _LEGEND)
    if handles:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False}
        axes.legend(handles[::step], labels[::step], title=title, fontsize=8, title_fontsize=8, **place)


def open_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def spread(last: int) -> Tensor:
    """Return distances from 0 to `last`, dense at first and then evenly on a log scale, int64."""
    far = torch.logspace(0, math.log10(last), 400).round().int().tolist()
    return torch.tensor(sorted({*range(min(65, last)), *far, last}))


def token_ticks(axes: Axes, tokens: Sequence[str], *, x: bool = False, y: bool = False) -> None:
    """Write the tokens of a text along axes on which token i is at i; of many, some."""
    step = math.ceil(len(tokens) / _LABELS)
    places = range(0, len(tokens), step)
    labels = [tokens[place] for place in places]
    for wanted, axis, angle in ((x, axes.xaxis, 90), (y, axes.yaxis, 0)):
        if wanted:
            axis.set_major_locator(FixedLocator(list(places)))
            # A dollar sign is no formula.
            axis.set_ticklabels(labels, fontsize=7.5, rotation=angle, parse_math=False)


# -- panels ------------------------------------------------------------------------------------------------------------


def shape(count: int, most: int = COLUMNS) -> tuple[int, int]:
    """Return the numbers of rows and columns of some panels, in rows of at most so many."""
    columns = min(count, most)
    return math.ceil(count / columns), columns


def grid(
    canvas: Figure,
    count: int,
    most: int = COLUMNS,
    *,
    x: str,
    y: str,
    share_x: bool = True,
    share_y: bool = True,
    size: float = 9,
) -> list[Axes]:
    """Return panels in rows of at most so many; the outer panels have labels."""
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
    for label, value, (colour, dash) in zip(labels, values, line_styles(len(labels)), strict=True):
        axes.plot(distances.numpy(), value.numpy(), color=colour, linestyle=dash, linewidth=width, label=f"{label}")
    frame(axes, distances, log=log)


def frame(axes: Axes, distances: Tensor, *, log: bool) -> None:
    """Finish a panel by distance: a line at zero, and the range of distances."""
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    if log:
        # Distances may have either sign, and be 0.
        axes.set_xscale("symlog", linthresh=1, base=10)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # "4k" for 4,000
    axes.set_xlim(int(distances.min()), max(1, int(distances.max())))
    open_frame(axes)


def heat(
    axes: Axes, values: Tensor, colours: str = GROWING, scale: Normalize | None = None, **options: Any
) -> AxesImage:
    return axes.imshow(values.numpy(), cmap=colours, norm=scale, interpolation="nearest", **options)


def bar(canvas: Figure, image: AxesImage, panels: Any, label: str, size: float = 8, **options: Any) -> None:
    made = canvas.colorbar(image, ax=panels, pad=0.01, **options)
    made.set_label(label, fontsize=size)
    made.ax.tick_params(labelsize=7)


def side(tokens: Sequence[str]) -> float:
    """Return the width in inches of a panel over tokens."""
    return min(max(_TOKEN * len(tokens), 1.6), 7.0)
