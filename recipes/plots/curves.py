"""Pictures of measurements: lines with 95 % intervals, and heat maps."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import offset_copy

from hf_posenc.recipes.intervals import Interval
from hf_posenc.recipes.plots import style

# Estimates of one model by the place on the axis.
Line = Sequence[tuple[Any, Interval]]
Mark = tuple[float, str]

# Panels per row, and labels per axis.
_ACROSS, _TICKS = 4, 8
# Horizontal offset between models at one point, and its maximum over all models, in points.
_APART, _WIDEST = 2.5, 20.0
_DPI = 130


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of lines, one for each model.

    Attributes:
        lines: Estimates by the name of the model.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        title: Small title.
        is_log: Whether the vertical axis is logarithmic, as for perplexities.
        scale: Factor that converts estimates to the unit of the axis.
        top: Upper end of the vertical axis; `None` fits it to the estimates.
        level: Labelled value, drawn as a horizontal line.
        mark: Labelled place, drawn as a vertical line.
    """

    lines: Mapping[str, Line]
    x: str = "context length (tokens read)"
    y: str = "perplexity (per token; lower is better)"
    title: str = ""
    is_log: bool = True
    scale: float = 1.0
    top: float | None = None
    level: Mark | None = None
    mark: Mark | None = None


def trained_mark(length: int | None) -> Mark | None:
    """Return the mark of the trained length, or `None` if the length is unknown."""
    return None if length is None else (length, f"trained on {length:,} tokens")


def plot_panels(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write a PNG of some panels with one legend.

    Args:
        path: File to write.
        title: Title of the picture.
        panels: Panels; several with titles of their own share their axes.
    """
    lines_figure(title, panels).savefig(path, format="png")


def lines_figure(title: str, panels: Sequence[Panel]) -> Figure:
    """Return the figure of `plot_panels`."""
    shares = len(panels) > 1 and bool(panels[0].title)
    across = min(_ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    size = (3.2 * across + 0.6, 2.6 * down + 0.9) if shares else (7.5 if across == 1 else 5.5 * across, 4.8)
    figure = style.figure(*size, title, dpi=_DPI)
    places = figure.subplots(down, across, squeeze=False, sharex=shares, sharey=shares)
    for index, axes in enumerate(places.flat):
        if index >= len(panels):
            axes.set_visible(False)
            continue
        panel = panels[index]
        if shares:
            # Every panel has the marked line; only the first has its label.
            panel = replace(
                panel,
                mark=panel.mark if panel.mark is None or index == 0 else (panel.mark[0], ""),
                x=panel.x if index + across >= len(panels) else "",
                y=panel.y if index % across == 0 else "",
            )
        draw_lines(axes, panel)
    _legend(figure, len(panels[0].lines))
    return figure


def plot_run(
    path: Path,
    title: str,
    panel: Panel,
    *,
    losses: Sequence[tuple[int, float]],
    course: Line,
    native: Interval | None,
    course_length: int,
    strength: Sequence[tuple[int, float]] = (),
) -> None:
    """Write a PNG of perplexity by context length and, next to it, the course of a training.

    Args:
        path: File to write.
        title: Title of the picture.
        panel: Perplexity by context length; the last line is that of the trained model.
        losses: Training loss in nats per token, by step.
        course: Perplexity on held-out text by step.
        native: Perplexity of the native model, drawn as a level.
        course_length: Tokens read in `course`.
        strength: Strength of the scheme by step, from 0 to 1; empty without a handover.
    """
    figure = style.figure(12, 5.0, title, dpi=_DPI)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1))
    draw_lines(figure.add_subplot(grid[:, 0]), panel)
    upper = figure.add_subplot(grid[0, 1])
    lower = figure.add_subplot(grid[1, 1], sharex=upper)
    if strength:
        _draw_strength(upper, strength)
    trained = style.look(len(panel.lines) - 1)[0]
    upper.plot([step for step, _ in losses], [loss for _, loss in losses], color=trained, linewidth=1.2)
    upper.set_ylabel("training loss on text (nats)")
    upper.tick_params(labelbottom=False)
    _errorbar(lower, course, (trained, "o", "-"), 1.0)
    shown = [point for _, point in course]
    if native is not None:
        lower.axhline(native.mean, color=style.look(0)[0], linewidth=1.2, linestyle="--", label="native")
        lower.legend(loc="best", framealpha=0.9, edgecolor=style.FAINT, fontsize=9)
        shown.append(native)
    _logarithmic(lower, shown, 1.0, None)
    lower.set_ylabel(f"perplexity at {course_length:,} tokens")
    lower.set_xlabel("optimizer steps")
    lower.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axes in (upper, lower):
        _finish(axes)
    _legend(figure, len(panel.lines))
    figure.savefig(path, format="png")


def draw_lines(axes: Axes, panel: Panel) -> None:
    """Draw lines with 95 % intervals into a panel."""
    points = list(dict.fromkeys(point for line in panel.lines.values() for point, _ in line))
    is_named = any(isinstance(point, str) for point in points)
    count = len(panel.lines)
    apart = min(_APART, _WIDEST / count)
    for index, (name, line) in enumerate(panel.lines.items()):
        places = [(points.index(point) if is_named else point, found) for point, found in line]
        # Horizontal offsets keep intervals from covering each other.
        shift = offset_copy(
            axes.transData, axes.get_figure(root=True), x=apart * (index - (count - 1) / 2), units="points"
        )
        _errorbar(axes, places, style.look(index), panel.scale, label=name, transform=shift)
    _x_axis(axes, sorted(points) if not is_named else points, is_named)
    shown = [found for line in panel.lines.values() for _, found in line]
    if panel.is_log:
        _logarithmic(axes, shown, panel.scale, panel.top)
    else:
        ends = [end * panel.scale for found in shown for end in (found.mean, found.high) if math.isfinite(end)]
        top = panel.top or max([*ends, 0.0 if panel.level is None else panel.level[0], 1e-3])
        axes.set_ylim(-0.03 * top, 1.05 * top)
    if panel.level is not None:
        value, text = panel.level
        axes.axhline(value, color=style.GREY, linewidth=1, linestyle=(0, (5, 3)), zorder=0)
        _note(axes, text, (1, value), ("axes fraction", "data"), (-2, 3), "right", "bottom")
    _mark(axes, panel.mark)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    if panel.title:
        axes.set_title(panel.title, fontsize=10)
    _finish(axes)


def _errorbar(axes: Axes, line: Line, look: tuple[str, str, str], scale: float, **options: Any) -> None:
    colour, marker, dashes = look
    known = [(place, found) for place, found in line if found.is_known]
    arms = [[(f.mean - f.low) * scale for _, f in known], [(f.high - f.mean) * scale for _, f in known]]
    axes.errorbar(
        [place for place, _ in known],
        [found.mean * scale for _, found in known],
        yerr=arms,
        color=colour,
        marker=marker,
        linestyle=dashes,
        linewidth=1.8,
        markersize=4.5,
        elinewidth=1,
        capsize=2,
        **options,
    )


def _draw_strength(axes: Axes, strength: Sequence[tuple[int, float]]) -> None:
    """Shade the strength of a scheme behind another curve, on a scale of its own at the right."""
    behind: Any = axes.twinx()
    behind.fill_between(*zip(*strength, strict=True), color="#E69F00", alpha=0.18, linewidth=0)
    behind.set_ylim(0, 1)
    behind.yaxis.set_major_locator(FixedLocator([0, 1]))
    behind.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    behind.set_ylabel("scheme's strength (shaded)", fontsize=9, color=style.GREY)
    behind.spines[["top"]].set_visible(False)
    # Axes are drawn in this order: the curve lies above the shade.
    axes.set_zorder(behind.get_zorder() + 1)
    axes.patch.set_visible(False)


def _x_axis(axes: Axes, points: Sequence[Any], is_named: bool) -> None:
    """Fit the axis to the points; matplotlib does not count lines drawn with an offset."""
    if is_named:
        axes.set_xticks(range(len(points)), points, rotation=30, ha="right")
        axes.set_xlim(-0.5, len(points) - 0.5)
        return
    low, high = points[0], points[-1]
    # A logarithmic axis suits points that are each well above the one before.
    if len(points) > 1 and high >= 8 * low and all(later >= 1.4 * point for point, later in pairwise(points)):
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


def _logarithmic(axes: Axes, shown: Sequence[Interval], scale: float, top: float | None) -> None:
    """Fit a logarithmic axis to estimates and their intervals, with ticks at round numbers."""
    means = [found.mean * scale for found in shown if found.is_known and found.mean > 0] or [1.0, 10.0]
    ends = [end * scale for found in shown for end in found.ends if math.isfinite(end) and end > 0] + means
    # A very wide interval must not squeeze the curves.
    low, high = max(min(ends), min(means) / 2) / 1.05, min(max(ends), 2 * max(means)) * 1.05
    high = high if top is None else max(min(high, top), 1.05 * low)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator(round_numbers(low, high)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def round_numbers(low: float, high: float) -> list[float]:
    """Return a few round numbers between two bounds, finer ones where the bounds are close."""
    found: list[float] = []
    for digits in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(digit / 10 for digit in range(10, 100))):
        numbers = [digit * 10.0**power for power in range(-3, 12) for digit in digits]
        found = [round(number, 6) for number in numbers if low <= number <= high]
        if len(found) >= 3:
            break
    return found[:: max(1, math.ceil(len(found) / _TICKS))]


def _mark(axes: Axes, mark: Mark | None) -> None:
    low, high = axes.get_xlim()
    if mark is None or not low <= mark[0] <= high:
        return
    place, text = mark
    axes.axvline(place, color=style.GREY, linewidth=1.2, linestyle=(0, (1, 2)), zorder=0)
    # In the right part of the panel the label stands to the left of the line, where there is room.
    across, _ = axes.transAxes.inverted().transform(axes.get_xaxis_transform().transform((place, 1)))
    is_left = across < 0.6
    _note(axes, text, (place, 1), ("data", "axes fraction"), (3 if is_left else -3, -2), "left" if is_left else "right")


def _note(
    axes: Axes,
    text: str,
    place: tuple[float, float],
    units: tuple[str, str],
    shift: tuple[float, float],
    ha: str,
    va: str = "top",
) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
    options: dict[str, Any] = {"xycoords": units, "xytext": shift, "textcoords": "offset points", "bbox": box}
    axes.annotate(text, place, ha=ha, va=va, fontsize=8, color=style.GREY, **options)


def _finish(axes: Axes) -> None:
    axes.grid(True, axis="y", color=style.FAINT)
    axes.set_axisbelow(True)
    style.open_frame(axes)


def _legend(figure: Figure, models: int) -> None:
    """Write the names below the panels."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    # About 0.07 inches per character, and 0.65 for the line sample.
    columns = int(figure.get_figwidth() // (0.07 * max(map(len, labels)) + 0.65))
    columns = max(1, min(models, 4, columns))
    # The figure has room for two rows.
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, math.ceil(models / columns) - 2))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


# -- other pictures ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeatMap:
    """Shares over two axes.

    Attributes:
        title: Title.
        rows: Name and points of the vertical axis.
        columns: Name and points of the horizontal axis.
        values: Shares from 0 to 1 by row and column; NaN where nothing was measured.
    """

    title: str
    rows: tuple[str, Sequence[Any]]
    columns: tuple[str, Sequence[Any]]
    values: Sequence[Sequence[float]]


def plot_heat_maps(path: Path, title: str, groups: Sequence[Sequence[HeatMap]]) -> None:
    """Write a PNG of heat maps with the same axes; each group, one quantity of all models, starts a new row."""
    heat_maps_figure(title, groups).savefig(path, format="png")


def heat_maps_figure(title: str, groups: Sequence[Sequence[HeatMap]]) -> Figure:
    """Return the figure of `plot_heat_maps`."""
    first = groups[0][0]
    (down, rows), (across, columns) = first.rows, first.columns
    width = max(2.4, 0.62 * len(columns) + 1)
    per_row = min(_ACROSS, len(groups[0]))
    levels = math.ceil(len(groups[0]) / per_row) * len(groups)
    size = max(6, width * per_row + 1.2), (0.42 * len(rows) + 1.3) * levels + 0.5
    figure = style.figure(*size, title, dpi=_DPI)
    panels = figure.subplots(levels, per_row, squeeze=False, sharex=True, sharey=True)
    for part, maps in zip(panels.reshape(len(groups), -1, per_row), groups, strict=True):
        for axes in part.flat[len(maps) :]:
            axes.set_visible(False)
        for axes, shown in zip(part.flat, maps, strict=False):
            values = [[100 * value for value in row] for row in shown.values]
            image = axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
            for y, row in enumerate(values):
                for x, value in enumerate(row):
                    text = "-" if math.isnan(value) else f"{value:.0f}"
                    colour = "black" if value > 55 else "white"
                    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
            axes.set_title(textwrap.fill(shown.title, round(13 * width)), fontsize=9)
            axes.set_xticks(range(len(columns)), [f"{column:,}" for column in columns], rotation=30, ha="right")
            axes.set_yticks(range(len(rows)), [f"{row:g}" for row in rows])
            axes.tick_params(length=0)
        for axes in part[:, 0]:
            axes.set_ylabel(down)
        figure.colorbar(image, ax=list(part.flat), label="%", fraction=0.05, pad=0.02)
    for column in panels.T:
        lowest = [axes for axes in column if axes.get_visible()][-1]
        lowest.set_xlabel(across)
        lowest.tick_params(labelbottom=True)
    return figure
