"""Pictures of all models together: perplexity by length, and the trade-off between short and long texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.text import Annotation, Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

from hf_posenc.recipes.comparison.contestants import NATIVE, UNTRAINED
from hf_posenc.recipes.comparison.findings import Findings
from hf_posenc.recipes.plots import style

# Okabe and Ito's palette, and two colours of Tol's; black is reserved for the native model.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#882255")
_MARKERS, _DASHES = ("s", "^", "D", "v", "P", "X", "o"), ("-", "--", "-.", ":")
# Upper limit of the picture, as a multiple of the native perplexity.
_TOP = 3.0
_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3)
# Distance between labels, as a share of the height.
_APART = 0.045
# Half the width of a marker with some room around, in pixels.
_MARKER = 10


def curves(path: Path, found: Mapping[str, Findings], trained: int) -> None:
    """Write a PNG of all models' perplexity by length, as a share of the native model's at the trained length.

    Args:
        path: The file to write.
        found: Findings by name; the equally trained native model under `NATIVE`.
        trained: The trained length, in tokens.
    """
    figure = style.figure(8.6, 5.4, "Perplexity by length: lower is better", dpi=130)
    axes = figure.subplots()
    native = found[NATIVE]
    contexts = native.contexts
    ends: list[tuple[float, float, str, Any]] = []
    low, high = 1.0, 1.0
    for (name, each), (colour, marker, dashes) in zip(found.items(), _looks(list(found)), strict=True):
        points = [(c, each.ratio(c, native, trained).mean) for c in contexts if each.reads(c)]
        axes.plot(
            *zip(*points, strict=True),
            color=colour,
            marker=marker,
            linestyle=dashes,
            linewidth=2.4 if name == NATIVE else 1.6,
            markersize=5,
            zorder=3 if name == NATIVE else 2,
        )
        ends.append((*points[-1], name, colour))
        low, high = min(low, *(y for _, y in points)), max(high, *(y for _, y in points))
    top = min(_TOP, high * 1.04)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(low * 0.97, top)
    axes.set_xlim(contexts[0] / 1.05, contexts[-1] * 1.05)
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if low * 0.97 <= tick <= top]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.axvline(trained, color=style.GREY, linewidth=1.2, linestyle=(0, (1, 2)), zorder=0)
    axes.annotate(
        f"trained on {trained:,} tokens",
        (trained, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8.5,
        color=style.GREY,
    )
    axes.axhline(1, color="0.75", linewidth=0.8, zorder=0)
    axes.set_xlabel("tokens read")
    axes.set_ylabel(f"perplexity, share of the native model's at {trained:,}\n(with the same training)")
    axes.grid(True, axis="y", color=style.FAINT)
    style.open_frame(axes)
    _label(axes, ends, top)
    figure.savefig(path, format="png")


def _label(axes: Any, ends: Sequence[tuple[float, float, str, Any]], top: float) -> None:
    """Write names next to the ends of lines, from the lowest up, without overlaps."""
    to_share = axes.transAxes.inverted()
    placed = -1.0
    wanted = []
    for x, y, name, colour in sorted(ends, key=lambda end: end[1]):
        level = float(to_share.transform(axes.transData.transform((x, min(y, top))))[1])
        placed = max(level, placed + _APART)
        wanted.append([placed, level, name if y <= top else f"{name} ({y:,.0%})", colour])
    # Labels pushed above the frame move down again.
    ceiling = 1.0
    for entry in reversed(wanted):
        entry[0] = min(entry[0], ceiling)
        ceiling = entry[0] - _APART
    for place, level, text, colour in wanted:
        axes.annotate(
            text,
            (1.0, level),
            xycoords="axes fraction",
            xytext=(1.045, place),
            textcoords="axes fraction",
            va="center",
            fontsize=9.5,
            color=colour,
            fontweight="bold" if text.startswith(NATIVE) and not text.startswith(UNTRAINED) else "normal",
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 0,
            },
        )


def trade(path: Path, found: Mapping[str, Findings], trained: int, farthest: int) -> None:
    """Write a PNG of each scheme's perplexity at the trained length against that at the longest.

    Args:
        path: The file to write.
        found: Findings by name; the equally trained native model under `NATIVE`.
        trained: The trained length, in tokens.
        farthest: The longest text, in tokens.
    """
    figure = style.figure(8.6, 5.0, "At the trained length and beyond: the lower left corner is best", dpi=130)
    axes = figure.subplots()
    native = found[NATIVE]
    looks = zip(found, _looks(list(found)), strict=True)
    shown = [(name, look) for name, look in looks if name != UNTRAINED and found[name].reads(farthest)]
    beyond = {name: min(found[name].ratio(farthest, native, trained).mean, _TOP) for name, _ in shown}
    at_hand = {name: min(found[name].ratio(trained, native).mean, _TOP / 2) for name, _ in shown}
    ends = {}
    for name, (colour, marker, _) in shown:
        near = found[name].ratio(trained, native)
        error = [[max(0.0, at_hand[name] - near.low)], [max(0.0, min(near.high, _TOP / 2) - at_hand[name])]]
        ends[name] = at_hand[name] + (0.0 if name == NATIVE else error[1][0])
        axes.errorbar(
            at_hand[name],
            beyond[name],
            xerr=None if name == NATIVE else error,
            color=colour,
            marker=marker,
            markersize=8,
            elinewidth=1,
            capsize=2,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if tick <= 1.03 * max(beyond.values())]))
    axes.yaxis.set_major_formatter(FuncFormatter(partial(_percent, top=_TOP)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(partial(_percent, top=_TOP / 2)))
    axes.axvline(1, color="0.75", linewidth=0.8, zorder=0)
    axes.set_xlabel(f"perplexity at {trained:,} tokens, share of the native model's (with 95 % interval)")
    axes.set_ylabel(f"perplexity at {farthest:,} tokens,\nshare of the native model's at {trained:,}")
    axes.grid(True, color=style.FAINT)
    axes.set_axisbelow(True)
    style.open_frame(axes)
    figure.draw_without_rendering()  # computes the layout, which the labels need
    _name_intervals(axes, [((at_hand[name], ends[name]), beyond[name], name, look[0]) for name, look in shown])
    figure.savefig(path, format="png")


def _name_intervals(axes: Any, intervals: Sequence[tuple[tuple[float, float], float, str, Any]]) -> None:
    """Write names to the right of intervals `((middle, right end), y, name, colour)`, moved up to avoid overlaps."""
    markers = [axes.transData.transform((middle, y)) for (middle, _), y, _, _ in intervals]
    taken = [Bbox.from_bounds(x - _MARKER, y - _MARKER, 2 * _MARKER, 2 * _MARKER) for x, y in markers]
    for (middle, end), y, name, colour in sorted(intervals, key=lambda interval: interval[1]):
        at = axes.transAxes.inverted().transform(axes.transData.transform((end, y)))
        label = axes.annotate(
            name,
            (middle, y),
            xytext=(at[0] + 0.015, at[1]),
            textcoords="axes fraction",
            fontsize=9.5,
            color=colour,
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5},
        )
        while any(_extent(label).overlaps(other) for other in taken):
            label.xyann = (label.xyann[0], label.xyann[1] + 0.01)
        taken.append(_extent(label))
        label.arrow_patch.set_visible(bool(label.xyann[1] - at[1] > 0.03))


def _extent(label: Annotation) -> Bbox:
    """Return the box of a label's text in pixels, without the line to its marker, which would always overlap it."""
    label.get_window_extent()  # updates the position of the text
    return Text.get_window_extent(label)


def _percent(value: float, place: int | None = None, *, top: float) -> str:
    return f"{value:.0%}{' or more' if value >= top else ''}"


def _looks(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return colour, marker and dashes per model; the native one is black."""
    own = {NATIVE: ("#000000", "o", "-"), UNTRAINED: ("0.5", "o", ":")}
    others = zip(cycle(_COLOURS), cycle(_MARKERS), cycle(_DASHES), strict=False)
    return [own[name] if name in own else next(others) for name in names]
