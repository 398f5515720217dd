"""Pictures of measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from hf_posenc.recipes.evaluation.curve import ContextCurve
from hf_posenc.recipes.evaluation.intervals import Interval

# Okabe and Ito's colours, told apart with any colour vision; markers and dashes repeat the distinction in grey.
_STYLES = (
    ("#000000", "o", "-"),
    ("#56B4E9", "s", "--"),
    ("#E69F00", "^", ":"),
    ("#0072B2", "D", "-"),
    ("#D55E00", "v", "-."),
    ("#CC79A7", "P", "--"),
)
_GREY = "0.35"
_FAINT = "0.9"
# Of a run: the native model, the converted one, and the trained one, whose course has the colour of the last.
_RUN_STYLES = (_STYLES[0], _STYLES[2], _STYLES[3])
_COURSE = _STYLES[3][0]


def plot_curves(path: Path, curves: Mapping[str, ContextCurve], *, trained_length: int, title: str) -> None:
    """Draw perplexity by context length for several models, with 95 % intervals.

    Args:
        path: The file to write; its ending says the format.
        curves: Measured curves, by the name of the model.
        trained_length: Tokens per window in training, marked in the picture.
        title: Stands above the picture.
    """
    figure = _figure(8)
    _draw_curves(figure.add_subplot(), curves, _STYLES, trained_length, title)
    figure.savefig(path)


def plot_run(
    path: Path,
    curves: Mapping[str, ContextCurve],
    *,
    trained_length: int,
    title: str,
    losses: Sequence[tuple[int, float]],
    course: Sequence[tuple[int, Interval]],
    native: Interval | None,
    course_length: int,
    strength: Sequence[tuple[int, float]] = (),
) -> None:
    """Draw perplexity by context length and, next to it, the course of a training.

    Args:
        path: The file to write; its ending says the format.
        curves: Measured curves, by the name of the model.
        trained_length: Tokens per window in the model's own training, marked in the picture.
        title: Stands above the picture.
        losses: Training loss in nats per token, by step.
        course: Perplexity on held-out text by step.
        native: That of the native model, drawn as a level.
        course_length: Tokens read in `course`.
        strength: The scheme's strength by step, from 0 to 1; empty without a handover.
    """
    figure = _figure(12)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1))
    _draw_curves(figure.add_subplot(grid[:, 0]), curves, _RUN_STYLES, trained_length, title)
    upper = figure.add_subplot(grid[0, 1])
    lower = figure.add_subplot(grid[1, 1], sharex=upper)
    if strength:
        _draw_strength(upper, strength)
    upper.plot(*_columns(losses), color=_COURSE, linewidth=1.2)
    upper.set_ylabel("training loss on text (nats)")
    upper.tick_params(labelbottom=False)
    if native is not None:
        lower.axhline(native.mean, color=_STYLES[0][0], linewidth=1.2, linestyle="--", label="native")
        lower.legend(loc="best", framealpha=0.9, edgecolor=_FAINT, fontsize=9)
    steps, points = [step for step, _ in course], [point for _, point in course]
    lower.errorbar(
        steps,
        [point.mean for point in points],
        yerr=[*zip(*(point.arms for point in points), strict=True)],
        color=_COURSE,
        marker="o",
        markersize=4,
        linewidth=1.5,
        capsize=2,
    )
    lower.set_yscale("log")
    _round_ticks(lower, [*points, *([] if native is None else [native])])
    lower.set_ylabel(f"perplexity at {course_length} tokens")
    lower.set_xlabel("optimizer steps")
    lower.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axes in (upper, lower):
        _finish(axes)
    figure.savefig(path)


def _figure(width: float) -> Figure:
    # Not through pyplot, which would keep the figure and choose a backend for the whole process.
    figure = Figure(figsize=(width, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_curves(
    axes: Any,
    curves: Mapping[str, ContextCurve],
    styles: Sequence[tuple[str, str, str]],
    trained_length: int,
    title: str,
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for (name, curve), (colour, marker, line) in zip(curves.items(), cycle(styles), strict=False):
        points = [curve.perplexity(context) for context in curve.contexts]
        axes.errorbar(
            curve.contexts,
            [point.mean for point in points],
            yerr=[*zip(*(point.arms for point in points), strict=True)],
            label=name,
            color=colour,
            marker=marker,
            linestyle=line,
            linewidth=2,
            markersize=6,
            capsize=3,
            elinewidth=1,
        )
    contexts = sorted({context for curve in curves.values() for context in curve.contexts})
    _round_ticks(axes, [curve.perplexity(context) for curve in curves.values() for context in curve.contexts])
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(trained_length, color=_GREY, linewidth=1.2, linestyle=(0, (1, 2)), zorder=0)
    # To the left of a line in the right half, which may have no room at its right.
    low, high = (math.log(end) for end in axes.get_xlim())
    is_left = 2 * math.log(trained_length) < low + high
    axes.annotate(
        f"trained on {trained_length} tokens",
        (trained_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4 if is_left else -4, -4),
        textcoords="offset points",
        horizontalalignment="left" if is_left else "right",
        verticalalignment="top",
        color=_GREY,
        fontsize=9,
    )
    axes.set_xlabel("context length (tokens read)")
    axes.set_ylabel("perplexity (per token; lower is better)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(loc="best", framealpha=0.9, edgecolor=_FAINT, fontsize=9)
    _finish(axes)


def _draw_strength(axes: Any, strength: Sequence[tuple[int, float]]) -> None:
    """Shade the strength of a scheme behind another curve, on a scale of its own at the right."""
    steps, values = _columns(strength)
    behind = axes.twinx()
    behind.fill_between(steps, values, color="#E69F00", alpha=0.18, linewidth=0)
    behind.set_ylim(0, 1)
    behind.yaxis.set_major_locator(FixedLocator([0, 1]))
    behind.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    behind.set_ylabel("scheme's strength (shaded)", fontsize=9, color=_GREY)
    behind.spines[["top"]].set_visible(False)
    # The curve above the shade: axes are drawn in the order of this.
    axes.set_zorder(behind.get_zorder() + 1)
    axes.patch.set_visible(False)


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in pairs], [value for _, value in pairs]


def _finish(axes: Any) -> None:
    axes.grid(True, axis="y", color=_FAINT)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _round_ticks(axes: Any, points: Iterable[Interval]) -> None:
    """Fit a logarithmic axis to perplexities and their intervals, with ticks at round numbers."""
    ends = [end for point in points for end in (point.mean, point.low, point.high)]
    # The values of a diverged model are not finite.
    shown = [end for end in ends if math.isfinite(end) and end > 0] or [1.0]
    room = max(1.05, (max(shown) / min(shown)) ** 0.05)
    low, high = min(shown) / room, max(shown) * room
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator(_round_numbers(low, high)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _round_numbers(low: float, high: float) -> list[float]:
    """Return round numbers between two bounds: 1, 2 and 5 times a power of ten, or finer ones where those are few."""
    found: list[float] = []
    for digits in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), [digit / 10 for digit in range(10, 100)]):
        numbers = [digit * 10.0**power for power in range(-3, 12) for digit in digits]
        found = [round(number, 6) for number in numbers if low <= number <= high]
        if len(found) >= 3:
            break
    # Some twenty of the finest would not be readable.
    return found[:: math.ceil(len(found) / 10)] if found else found
