"""One picture per measure: lines with confidence intervals, or heat maps."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import offset_copy

from hf_posenc.recipes.evaluation.grid import PERPLEXITY, Grid, Point
from hf_posenc.recipes.evaluation.intervals import Interval

# Okabe and Ito's palette for all kinds of colour vision; markers and dashes make lines distinct in grey, too.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS, _DASHES = ("o", "s", "^", "D", "v", "P", "X"), ("-", "--", "-.", "-", "--", ":", "-.")
_GREY, _FAINT = "0.35", "0.9"
# Panels per row.
_ACROSS = 4
# Horizontal offset between models at one point, and its maximum over all models, in points.
_APART, _WIDEST = 2.5, 20.0
_TICKS = 8


def draw(path: Path, title: str, quantities: Sequence[Mapping[str, Grid]], mark: tuple[float, str] | None) -> None:
    """Draw the results of a measure.

    Args:
        path: The file to write, a PNG whatever its name.
        title: Title of the picture.
        quantities: Grids by the name of the model, for each quantity.
        mark: Labelled point on the last axis, drawn as a line.
    """
    axes = list(next(iter(quantities[0].values())).axes.values())
    if len(axes) == 1:
        figure = _lines(title, quantities, mark)
    elif isinstance(axes[0][0], str):
        figure = _lines_by_name(title, quantities[0], mark)
    else:
        figure = _heat_maps(title, quantities)
    figure.savefig(path, format="png")


# -- lines -------------------------------------------------------------------------------------------------------------


def _lines(title: str, quantities: Sequence[Mapping[str, Grid]], mark: tuple[float, str] | None) -> Figure:
    """Draw a panel per quantity with a line per model."""
    figure = _figure(7 if len(quantities) == 1 else 5.5 * len(quantities), 4.6, title)
    for axes, grids in zip(figure.subplots(1, len(quantities), squeeze=False)[0], quantities, strict=True):
        _panel(axes, grids, (), mark)
        axes.set_ylabel(next(iter(grids.values())).quantity.label)
    _legend(figure, len(quantities[0]))
    return figure


def _lines_by_name(title: str, grids: Mapping[str, Grid], mark: tuple[float, str] | None) -> Figure:
    """Draw a panel per name on the first axis with a line per model."""
    first = next(iter(grids.values()))
    names = next(iter(first.axes.values()))
    across = min(_ACROSS, len(names))
    down = math.ceil(len(names) / across)
    figure = _figure(3.2 * across + 0.6, 2.6 * down + 0.9, title)
    panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for index, axes in enumerate(panels.flat):
        if index >= len(names):
            axes.set_visible(False)
            continue
        # Every panel has the line; only the first has its label.
        _panel(axes, grids, (names[index],), mark if mark is None or index == 0 else (mark[0], ""))
        axes.set_title(str(names[index]), fontsize=10)
        axes.set_xlabel(axes.get_xlabel() if index + across >= len(names) else "")
        axes.set_ylabel(first.quantity.label if index % across == 0 else "")
    _legend(figure, len(grids))
    return figure


def _panel(axes: Any, grids: Mapping[str, Grid], before: tuple[Point, ...], mark: tuple[float, str] | None) -> None:
    """Draw one quantity over its last axis."""
    first = next(iter(grids.values()))
    axis, points = list(first.axes.items())[-1]
    scale = first.quantity.scale
    is_named = any(isinstance(point, str) for point in points)
    places = list(range(len(points))) if is_named else list(points)
    found: list[Interval] = []
    apart = min(_APART, _WIDEST / len(grids))
    for index, ((name, grid), (colour, marker, dashes)) in enumerate(zip(grids.items(), _looks(), strict=False)):
        estimates = [grid.at(*before, point) for point in points]
        found += estimates
        known = [(x, e) for x, e in zip(places, estimates, strict=True) if e.is_known]
        means, lows, highs = ([getattr(e, end) * scale for _, e in known] for end in ("mean", "low", "high"))
        errors = [
            [mean - low for mean, low in zip(means, lows, strict=True)],
            [high - mean for mean, high in zip(means, highs, strict=True)],
        ]
        axes.errorbar(
            [x for x, _ in known],
            means,
            yerr=errors,
            color=colour,
            marker=marker,
            linestyle=dashes,
            linewidth=1.8,
            markersize=4.5,
            elinewidth=1,
            capsize=2,
            label=name,
            # Horizontal offsets keep intervals from covering each other.
            transform=offset_copy(
                axes.transData, axes.figure, x=apart * (index - (len(grids) - 1) / 2), units="points"
            ),
        )
    if first.quantity.guess is not None:
        level = first.quantity.guess * scale
        axes.axhline(level, color=_GREY, linewidth=1, linestyle=(0, (5, 3)), zorder=0)
        axes.annotate(
            "guessing",
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=_GREY,
        )
    _x_axis(axes, axis, points, is_named)
    if first.quantity is PERPLEXITY:
        _logarithmic(axes, found)
    else:
        ends = [end * scale for e in found for end in (e.mean, e.high) if math.isfinite(end)]
        top = 100.0 if first.quantity.unit == "%" else max([*ends, (first.quantity.guess or 0.0) * scale, 1e-3])
        axes.set_ylim(-0.03 * top, 1.05 * top)
    _mark(axes, mark)
    axes.grid(True, axis="y", color=_FAINT)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _looks() -> Iterator[tuple[str, str, str]]:
    """Yield a colour, marker and dashes per model; from the eighth on, colours repeat with another marker."""
    for index in count():
        again = index + index // len(_COLOURS)
        yield _COLOURS[index % len(_COLOURS)], _MARKERS[again % len(_MARKERS)], _DASHES[again % len(_DASHES)]


def _x_axis(axes: Any, label: str, points: Sequence[Any], is_named: bool) -> None:
    """Fit the axis to the points; matplotlib does not count lines drawn with an offset."""
    axes.set_xlabel(label)
    if is_named:
        axes.set_xticks(range(len(points)), points, rotation=30, ha="right")
        axes.set_xlim(-0.5, len(points) - 0.5)
        return
    low, high = points[0], points[-1]
    if len(points) > 1 and high >= 8 * low and _doubles(points):
        room = (high / low) ** 0.05
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / room, high * room)
        axes.xaxis.set_minor_locator(NullLocator())
        ticks = points
    else:
        room = (high - low) * 0.05 or 1
        axes.set_xlim(low - room, high + room)
        # Every n-th point, counted from the last, which is always shown.
        ticks = points[:: -math.ceil(len(points) / _TICKS)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _doubles(points: Sequence[float]) -> bool:
    """Whether each point is well above the one before, so that a logarithmic axis suits them."""
    return all(later >= 1.4 * point for point, later in pairwise(points))


def _logarithmic(axes: Any, found: Sequence[Interval]) -> None:
    """Fit a logarithmic axis to perplexities, with ticks at round numbers."""
    ends = [end for e in found for end in (e.mean, e.low, e.high) if math.isfinite(end) and end > 0] or [1.0, 10.0]
    # A very wide interval must not squeeze the curves.
    means = [e.mean for e in found if e.is_known] or ends
    low, high = max(min(ends), min(means) / 2) / 1.05, min(max(ends), 2 * max(means)) * 1.05
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    ticks: list[float] = []
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(d / 10 for d in range(10, 100))):
        numbers = [digit * 10.0**power for power in range(-3, 12) for digit in digits]
        ticks = [round(number, 6) for number in numbers if low <= number <= high]
        if len(ticks) >= 3:
            break
    axes.yaxis.set_major_locator(FixedLocator(ticks[:: max(1, math.ceil(len(ticks) / 8))]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _mark(axes: Any, mark: tuple[float, str] | None) -> None:
    if mark is None:
        return
    place, text = mark
    low, high = axes.get_xlim()
    if not low <= place <= high:
        return
    axes.axvline(place, color=_GREY, linewidth=1.2, linestyle=(0, (1, 2)), zorder=0)
    # In the right part of the panel the label stands to the left of the line, where there is room.
    across, _ = axes.transAxes.inverted().transform(axes.get_xaxis_transform().transform((place, 1)))
    axes.annotate(
        text,
        (place, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3 if across < 0.6 else -3, -2),
        textcoords="offset points",
        ha="left" if across < 0.6 else "right",
        va="top",
        fontsize=8,
        color=_GREY,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
    )


# -- heat maps ---------------------------------------------------------------------------------------------------------


def _heat_maps(title: str, quantities: Sequence[Mapping[str, Grid]]) -> Figure:
    """Draw rows of panels per quantity, a panel per model, a cell per pair of points."""
    grids = list(quantities[0].values())
    (down, rows), (across, columns) = grids[0].axes.items()
    width = max(2.4, 0.62 * len(columns) + 1)
    per_row = min(_ACROSS, len(grids))
    levels = math.ceil(len(grids) / per_row) * len(quantities)
    figure = _figure(max(6, width * per_row + 1.2), (0.42 * len(rows) + 1.3) * levels + 0.5, title)
    panels = figure.subplots(levels, per_row, squeeze=False, sharex=True, sharey=True)
    for part, named in zip(panels.reshape(len(quantities), -1, per_row), quantities, strict=True):
        for axes in part.flat[len(grids) :]:
            axes.set_visible(False)
        for axes, (name, grid) in zip(part.flat, named.items(), strict=False):
            values = [[grid.at(row, column).mean * 100 for column in columns] for row in rows]
            image = axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
            for y, line in enumerate(values):
                for x, value in enumerate(line):
                    text = "-" if math.isnan(value) else f"{value:.0f}"
                    axes.text(
                        x, y, text, ha="center", va="center", fontsize=8, color="black" if value > 55 else "white"
                    )
            axes.set_title(textwrap.fill(f"{name}: {grid.quantity.name}", round(13 * width)), fontsize=9)
            axes.set_xticks(range(len(columns)), [f"{column:,}" for column in columns], rotation=30, ha="right")
            axes.set_yticks(range(len(rows)), [f"{row:g}" for row in rows])
            axes.tick_params(length=0)
        for axes in part[:, 0]:
            axes.set_ylabel(f"{down} (0 is the beginning)")
        figure.colorbar(image, ax=list(part.flat), label="%", fraction=0.05, pad=0.02)
    for column in panels.T:
        lowest = [axes for axes in column if axes.get_visible()][-1]
        lowest.set_xlabel(across)
        lowest.tick_params(labelbottom=True)
    return figure


def _legend(figure: Figure, models: int) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    # About 0.07 inches per character, and 0.65 for the line sample.
    columns = int(figure.get_figwidth() // (0.07 * max(map(len, labels)) + 0.65))
    columns = max(1, min(models, 4, columns))
    # The figure has room for two rows.
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, math.ceil(models / columns) - 2))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _figure(width: float, height: float, title: str) -> Figure:
    # pyplot would keep the figure and choose a backend for the whole process.
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12)
    return figure
