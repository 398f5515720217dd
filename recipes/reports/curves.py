"""Pictures of measurements: lines with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import offset_copy

from hf_posenc.patches.atomic_files import published
from hf_posenc.recipes.intervals import Interval
from hf_posenc.recipes.reports import style

# Estimates of one model by the place on the axis.
Line = Sequence[tuple[Any, Interval]]
Mark = tuple[float, str]

# Panels per row, labels per axis, and points of a line up to which each is marked.
_ACROSS, _TICKS, _MARKED = 5, 8, 20
# Horizontal offset between models at one point, and its maximum over all models, in points.
_APART, _WIDEST = 2.5, 20.0


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture to a PNG file, whole or not at all."""
    with published(path) as draft:
        figure.savefig(draft, format="png")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel of lines, one for each model, by name, with the labels of both axes.

    Attributes:
        is_log: Whether the vertical axis is logarithmic, as for perplexities.
        top: Upper end of a linear vertical axis; `None` fits it to the estimates.
        level: Labelled value, drawn as a horizontal line.
        mark: Labelled place, drawn as a vertical line.
    """

    lines: Mapping[str, Line]
    x: str = "context length (tokens read)"
    y: str = "perplexity (per token; lower is better)"
    is_log: bool = True
    top: float | None = None
    level: Mark | None = None
    mark: Mark | None = None


def trained_mark(length: int | None) -> Mark | None:
    """Return the mark of the trained length, or `None` if the length is unknown."""
    return None if length is None else (length, f"trained on {length:,} tokens")


def lines_figure(title: str, panels: Sequence[Panel]) -> Figure:
    """Return a figure of some panels with one legend; a model looks the same in all of them."""
    across = min(_ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    width, height = (7.5, 4.8) if across == 1 else (5.5, 4.8) if across < _ACROSS else (4.0, 3.4)
    figure = style.figure(width * across, height * down, title, dpi=130)
    places = style.grid(figure, len(panels), across, x="", y="", share_x=False, share_y=False)
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    for axes, panel in zip(places, panels, strict=True):
        _draw_lines(axes, panel, names)
        axes.set_xlabel(panel.x, fontsize=9)
        axes.set_ylabel(panel.y, fontsize=9)
    _legend(figure)
    return figure


def _draw_lines(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    points = list(dict.fromkeys(point for line in panel.lines.values() for point, _ in line))
    is_named = any(isinstance(point, str) for point in points)
    count = len(panel.lines)
    for index, (name, line) in enumerate(panel.lines.items()):
        # Horizontal offsets keep intervals from covering each other.
        apart = min(_APART, _WIDEST / count) * (index - (count - 1) / 2)
        shift = offset_copy(axes.transData, axes.get_figure(root=True), x=apart, units="points")
        known = [(points.index(point) if is_named else point, found) for point, found in line if found.is_known]
        colour, marker, dashes = style.look(names.index(name))
        if len(known) > _MARKED:
            marker, dashes = "", "-"
        axes.errorbar(
            [place for place, _ in known],
            [found.mean for _, found in known],
            yerr=[[found.mean - found.low for _, found in known], [found.high - found.mean for _, found in known]],
            color=colour,
            marker=marker,
            linestyle=dashes,
            linewidth=1.8,
            markersize=4.5,
            elinewidth=1,
            capsize=2,
            label=name,
            transform=shift,
        )
    _x_axis(axes, points if is_named else sorted(points), is_named)
    shown = [found for line in panel.lines.values() for _, found in line]
    if panel.level is not None:
        value, text = panel.level
        shown.append(Interval(value, value, value))
        axes.axhline(value, color=style.GREY, linewidth=1, linestyle=(0, (5, 3)), zorder=0, label=text)
    if panel.is_log:
        _logarithmic(axes, shown)
    else:
        top = panel.top or max(
            [end for found in shown for end in (found.mean, found.high) if math.isfinite(end)] + [1e-3]
        )
        axes.set_ylim(-0.03 * top, 1.05 * top)
    low, high = axes.get_xlim()
    if panel.mark is not None and low <= panel.mark[0] <= high:
        place, text = panel.mark
        axes.axvline(place, color=style.GREY, linewidth=1.2, linestyle=(0, (1, 2)), zorder=0, label=text)
    axes.grid(True, axis="y", color=style.FAINT)
    axes.set_axisbelow(True)
    style.open_frame(axes)


def _x_axis(axes: Axes, points: Sequence[Any], is_named: bool) -> None:
    """Fit the axis to the points; matplotlib does not count lines drawn with an offset."""
    if is_named:
        axes.set_xticks(range(len(points)), points, rotation=30, ha="right")
        axes.set_xlim(-0.5, len(points) - 0.5)
        return
    low, high = points[0], points[-1]
    # A logarithmic axis suits points that are each well above the one before.
    if 0 < low <= high / 8 and all(later >= 1.4 * point for point, later in pairwise(points)):
        room = (high / low) ** 0.05
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / room, high * room)
        axes.xaxis.set_minor_locator(NullLocator())
        are_apart = True
    else:
        room = (high - low) * 0.05 or 1
        axes.set_xlim(low - room, high + room)
        are_apart = all(later - point >= (high - low) / _TICKS for point, later in pairwise(points))
    # Ticks at the points, or at round numbers if these lie close together.
    axes.xaxis.set_major_locator(FixedLocator(points) if are_apart else MaxNLocator(_TICKS, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _logarithmic(axes: Axes, shown: Sequence[Interval]) -> None:
    """Fit a logarithmic axis to estimates and their intervals, with ticks at round numbers."""
    means = [found.mean for found in shown if found.is_known and found.mean > 0] or [1.0, 10.0]
    ends = [end for found in shown for end in found.ends if math.isfinite(end) and end > 0] + means
    # A very wide interval must not squeeze the curves.
    low, high = max(min(ends), min(means) / 2) / 1.05, min(max(ends), 2 * max(means)) * 1.05
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    is_narrow, is_wide = high < 10 * low, high > 1000 * low
    ticks = MaxNLocator(_TICKS, steps=[1, 2, 5, 10]) if is_narrow else LogLocator(subs=(1,) if is_wide else (1, 2, 5))
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _legend(figure: Figure) -> None:
    """Write the names of lines below the panels, each once: models first, then marks and levels."""
    named = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    named = dict(sorted(named.items(), key=lambda entry: isinstance(entry[1], Line2D)))
    # About 0.07 inches per character, and 0.65 for the line sample.
    columns = max(1, min(len(named), int(figure.get_figwidth() // (0.07 * max(map(len, named)) + 0.65))))
    # The figure has room for two rows.
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, math.ceil(len(named) / columns) - 2))
    figure.legend(named.values(), named, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
