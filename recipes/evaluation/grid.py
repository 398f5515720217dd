"""Results of one measure on one model: samples of a quantity over one or two axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_posenc.errors import ShapeError
from hf_posenc.recipes.evaluation import intervals
from hf_posenc.recipes.evaluation.intervals import Interval

# A point on an axis: a number of tokens, a depth, the name of a task.
Point = int | float | str


@dataclass(frozen=True)
class Quantity:
    """A measured quantity, and the estimate from its samples.

    Attributes:
        name: Name of the estimate.
        interval: Function that turns samples `[n]` into an estimate.
        unit: Unit of the written estimate; empty for a plain number.
        scale: Factor that converts an estimate to the unit.
        guess: Estimate that a guessing model would reach; `None` if undefined.
    """

    name: str
    interval: Callable[[Tensor], Interval]
    unit: str = ""
    scale: float = 1.0
    guess: float | None = None

    @property
    def label(self) -> str:
        """Name and unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def write(self, found: Interval) -> str:
        """Return an estimate with its interval as text, without the unit, rounded to the precision of the interval."""
        if math.isnan(found.mean):
            return "-"
        mean, low, high = (end * self.scale for end in (found.mean, found.low, found.high))
        if math.isnan(low) or not found.is_known:
            return f"{mean:.4g}"
        decimals = _decimals(high - low)
        # Adding zero turns a rounded -0.0 into 0.0.
        mean, low, high = (round(end, decimals) + 0.0 for end in (mean, low, high))
        return f"{mean:,.{decimals}f} [{low:,.{decimals}f}, {high:,.{decimals}f}]"


# Perplexity and loss take the same samples: losses in nats per token.
PERPLEXITY = Quantity("perplexity", intervals.of_exponential)
LOSS = Quantity("loss", intervals.of_mean, "nats per token")
# Perplexity as a share of another model's; samples are differences of losses.
RATIO = Quantity("perplexity relative to the first model", intervals.of_exponential, "%", 100)


def successes(name: str, guess: float | None = None) -> Quantity:
    """Return a success rate: samples are right (1) or wrong (0), or shares of few trials."""
    return Quantity(name, intervals.of_share, "%", 100, guess)


def share(name: str, guess: float | None = None) -> Quantity:
    """Return a mean share: samples are shares of many trials, from 0 to 1."""
    return Quantity(name, intervals.of_mean_share, "%", 100, guess)


@dataclass(frozen=True, eq=False)
class Grid:
    """Samples of one quantity over axes.

    Attributes:
        quantity: The sampled quantity.
        axes: Points of each axis, by the name of the axis with its unit.
        samples: float64 `[*axes, samples]`; NaN where the model cannot be measured, such as beyond its position table.

    Raises:
        ShapeError: The samples do not fit the axes.
    """

    quantity: Quantity
    axes: Mapping[str, tuple[Point, ...]]
    samples: Tensor

    def __post_init__(self) -> None:
        expected = [len(points) for points in self.axes.values()]
        if list(self.samples.shape[:-1]) != expected or self.samples.ndim != len(expected) + 1:
            raise ShapeError(f"Got samples of shape {list(self.samples.shape)} on axes of {expected} points.")

    def at(self, *place: Point) -> Interval:
        """Return the estimate at a point of each axis.

        Raises:
            ShapeError: The point is not on the axes.
        """
        found = self.samples
        if len(place) != len(self.axes):
            raise ShapeError(f"Got the point {place}; expected one on each of: {', '.join(self.axes)}.")
        for point, (axis, points) in zip(place, self.axes.items(), strict=True):
            if point not in points:
                raise ShapeError(f"{axis} = {point}: measured were {', '.join(map(str, points))}.")
            found = found[points.index(point)]
        return self.quantity.interval(found)

    def relative_to(self, other: Grid) -> Grid:
        """Return a perplexity as a share of another model's, sample by sample: hard text is hard for both.

        Raises:
            ShapeError: The grids differ in axes or number of samples.
        """
        if dict(self.axes) != dict(other.axes) or self.samples.shape != other.samples.shape:
            raise ShapeError("Only what was measured on the same samples can be compared with each other.")
        return Grid(RATIO, self.axes, self.samples - other.samples)

    def places(self) -> Iterator[tuple[Point, ...]]:
        """Return all points of the grid, the last axis first."""
        return itertools.product(*self.axes.values())

    def as_json(self) -> dict[str, Any]:
        """Return the estimates and samples as JSON values, with null for NaN."""
        found = [self.at(*place) for place in self.places()]
        return {
            "estimates": [
                {
                    **dict(zip(self.axes, place, strict=True)),
                    **{name: _or_null(value * self.quantity.scale) for name, value in vars(estimate).items()},
                }
                for place, estimate in zip(self.places(), found, strict=True)
            ],
            "samples": _nulls(self.samples.tolist()),
        }


def _decimals(width: float) -> int:
    """Return the decimals to write for a number with an interval of some width: two of its digits, at most three."""
    if not math.isfinite(width) or width <= 0:
        return 3 if width == 0 else 0
    return min(3, max(0, 1 - math.floor(math.log10(width))))


def _or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _nulls(values: Any) -> Any:
    return [_nulls(value) for value in values] if isinstance(values, list) else _or_null(values)
