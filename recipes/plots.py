"""Pictures of measurements."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from hf_posenc.recipes.evaluation import ContextCurve

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


def plot_curves(path: Path, curves: Mapping[str, ContextCurve], *, trained_length: int, title: str) -> None:
    """Draw perplexity by context length for several models, with standard errors.

    Args:
        path: The file to write; its ending says the format.
        curves: What was measured, by the name of the model.
        trained_length: Tokens per window in training, marked in the picture.
        title: Stands above the picture.
    """
    # Not through pyplot, which would keep the figure and choose a backend for the whole process.
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for (name, curve), (colour, marker, line) in zip(curves.items(), cycle(_STYLES), strict=False):
        points = [curve.perplexity(context) for context in curve.contexts]
        axes.errorbar(
            curve.contexts,
            [point.mean for point in points],
            yerr=[point.error for point in points],
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
    means = [curve.perplexity(context).mean for curve in curves.values() for context in curve.contexts]
    low, high = min(means) / 1.6, max(means) * 1.6
    axes.set_ylim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.yaxis.set_major_locator(FixedLocator(_round_numbers(low, high)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.axvline(trained_length, color=_GREY, linewidth=1.2, linestyle=(0, (1, 2)), zorder=0)
    axes.annotate(
        f"trained on {trained_length} tokens",
        (trained_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        verticalalignment="top",
        color=_GREY,
        fontsize=9,
    )
    axes.set_xlabel("context length (tokens read)")
    axes.set_ylabel("perplexity (per token; lower is better)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", framealpha=0.9, edgecolor="0.9", fontsize=9)
    figure.savefig(path)


def _round_numbers(low: float, high: float) -> list[float]:
    """Return the numbers 1, 2 and 5 times a power of ten between two bounds."""
    return [digit * 10.0**power for power in range(-3, 12) for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]
