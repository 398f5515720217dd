"""Results of one measure on one model: samples of a quantity over an axis."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor

from hf_posenc.errors import ShapeError
from hf_posenc.recipes import intervals
from hf_posenc.recipes.intervals import Interval
from hf_posenc.recipes.reports import Table

# A point on an axis: a number of tokens, a depth, the name of a task.
Point = int | float | str

# A share this much better than guessing, of what is possible, is seen without an interval.
_SEEN = 0.05
# JSON has no infinite number; this one is the largest, and no sample.
_INFINITE = sys.float_info.max
_ESTIMATORS = {
    "mean": intervals.of_mean,
    "mean share": intervals.of_mean_share,
    "share": intervals.of_share,
    "exponential": intervals.of_exponential,
}


def _plain(values: Any) -> Any:
    """Return numbers as JSON values: null for NaN, the largest number for an infinite one."""
    if isinstance(values, list):
        return [_plain(value) for value in values]
    return None if math.isnan(values) else max(-_INFINITE, min(values, _INFINITE))


def _tensor(values: Any) -> Tensor:
    """Return samples of numbers as they are, or as `_plain` wrote them."""
    if isinstance(values, Tensor):
        return values
    # numpy reads null as NaN.
    found = torch.from_numpy(np.array(values, dtype=np.float64))
    return torch.where(found.abs() < _INFINITE, found, found * math.inf)


@dataclass(frozen=True)
class Quantity:
    """A measured quantity, and the estimate from its samples; an exponential is that of their mean.

    The scale converts an estimate to the unit in which it is written. A guessing model would reach the guess.
    """

    name: str
    estimator: Literal["mean", "mean share", "share", "exponential"]
    unit: str = ""
    scale: float = 1.0
    guess: float | None = None

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def noun(self) -> str:
        """Name without what it is of."""
        return self.name.partition(" of ")[0]

    def interval(self, samples: Tensor) -> Interval:
        return _ESTIMATORS[self.estimator](samples)

    def shows(self, samples: Tensor) -> bool:
        """Whether samples of a share are better than guessing: significantly, or by a twentieth of what is possible."""
        if self.guess is None or "share" not in self.estimator:
            return False
        found = self.interval(samples.flatten())
        return found.low > self.guess or found.mean > self.guess + _SEEN * (1 - self.guess)

    def write(self, found: Interval) -> str:
        """Return an estimate with its interval as text, without the unit, rounded to the precision of the interval."""
        if math.isnan(found.mean):
            return "-"
        found = found.times(self.scale)
        width = found.high - found.low
        if math.isnan(width) or not found.is_known:
            return f"{found.mean:.4g}"
        # Two digits of the width, and at most three decimals.
        decimals = 3 if width == 0 else min(3, max(0, 1 - math.floor(math.log10(width)))) if width < math.inf else 0
        # A model that computes nonsense has a perplexity of many digits.
        form = f",.{decimals}f" if found.high < 1e7 else ".2g"
        # Adding zero turns a rounded -0.0 into 0.0.
        mean, low, high = (f"{round(end, decimals) + 0.0:{form}}" for end in (found.mean, *found.ends))
        return f"{mean} [{low}, {high}]"

    def say(self, found: Interval) -> str:
        """Return an estimate like `write`, with the unit behind the number, for a sentence."""
        mean, bracket, rest = self.write(found).partition(" [")
        return f"{mean} {self.unit}".rstrip() + bracket + rest


# Samples are losses in nats per token.
PERPLEXITY = Quantity("perplexity", "exponential")
# A masked token is predicted from the text on both sides, so this is no probability of a text.
MASKED_PERPLEXITY = Quantity("pseudo-perplexity of masked tokens", "exponential")
# Perplexity as a share of another one; samples are differences of losses.
RATIO = Quantity("relative perplexity", "exponential", "%", 100)


def successes(name: str, guess: float | None = None) -> Quantity:
    """Return a success rate: samples are right (1) or wrong (0), or shares of few trials."""
    return Quantity(name, "share", "%", 100, guess)


def share(name: str, guess: float | None = None) -> Quantity:
    """Return a mean share: samples are shares of many trials, from 0 to 1."""
    return Quantity(name, "mean share", "%", 100, guess)


@dataclass(frozen=True, eq=False)
class Grid:
    """Samples of one quantity over an axis.

    Attributes:
        quantity: The sampled quantity.
        axes: Points of the axis, by its name with its unit.
        samples: float64 `[points, samples]`; NaN where the model cannot be measured, such as beyond its position table.

    Raises:
        ShapeError: The samples do not fit the axes.
    """

    quantity: Quantity
    axes: Mapping[str, tuple[Point, ...]]
    samples: Annotated[Tensor, PlainValidator(_tensor), PlainSerializer(lambda samples: _plain(samples.tolist()))]

    def __post_init__(self) -> None:
        expected = [len(points) for points in self.axes.values()]
        if len(expected) != 1 or list(self.samples.shape[:-1]) != expected:
            raise ShapeError(f"Got samples of shape {list(self.samples.shape)} on axes of {expected} points.")

    @property
    def axis(self) -> str:
        return next(iter(self.axes))

    @property
    def points(self) -> tuple[Any, ...]:
        return self.axes[self.axis]

    def measured(self) -> int:
        """Return the number of points up to the last one that has samples."""
        known = (~self.samples.isnan()).any(-1)
        return int(known.nonzero().max()) + 1 if known.any() else 1

    def first(self, count: int) -> Grid:
        return Grid(self.quantity, {self.axis: self.points[:count]}, self.samples[:count])

    def values(self, point: Point) -> Tensor:
        """Return the samples at a point, float64 `[samples]`; raise `ShapeError` if it is not on the axis."""
        if point not in self.points:
            raise ShapeError(f"{self.axis} = {point}: measured were {', '.join(map(str, self.points))}.")
        return self.samples[self.points.index(point)]

    def at(self, point: Point) -> Interval:
        """Return the estimate at a point; raise `ShapeError` if it is not on the axis."""
        return self.quantity.interval(self.values(point))

    def write(self, point: Point) -> str:
        """Return the estimate at a point as text; a dash where nothing could be measured."""
        return self.quantity.write(self.at(point))

    def reads(self, point: Point) -> bool:
        return bool(self.values(point).isfinite().all())

    def relative_to(self, other: Grid) -> Grid:
        """Return a perplexity as a share of another model's, sample by sample: hard text is hard for both.

        Raises:
            ShapeError: The grids differ in axes or number of samples.
        """
        if self.axes != other.axes or self.samples.shape != other.samples.shape:
            raise ShapeError(
                f"Got samples of shapes {list(self.samples.shape)} and {list(other.samples.shape)} on "
                f"{self.axes} and {other.axes}; a paired comparison takes the same. Measure both models with the same "
                "text, lengths and windows."
            )
        return Grid(RATIO, self.axes, self.samples - other.samples)

    def growth(self, context: Point, trained: Point) -> Interval:
        """Return the perplexity at a length as a share of the perplexity at the trained length."""
        return RATIO.interval(self.values(context) - self.values(trained))

    def estimates(self) -> list[dict[str, Any]]:
        """Return the estimate at each point as JSON values, in the unit of the quantity."""
        found = ((point, self.at(point).times(self.quantity.scale)) for point in self.points)
        return [{self.axis: point, **{name: _plain(end) for name, end in vars(ends).items()}} for point, ends in found]


def table(grids: Mapping[str, Grid], caption: str | None = None, corner: str | None = None) -> Table:
    """Return a table of one quantity with a row per model, which ends where no model was measured.

    The corner is the heading of the names, by default the axis.
    """
    first = next(iter(grids.values())).first(max(grid.measured() for grid in grids.values()))
    quantity = first.quantity
    if caption is None:
        guess = "" if quantity.guess is None else f"; guessing gives {quantity.guess * quantity.scale:.3g}"
        caption = f"{quantity.label[0].upper()}{quantity.label[1:]} by {first.axis}{guess}:"
    heads = [f"{point:,}" if isinstance(point, int) else str(point) for point in first.points]
    rows = [[model, *(grid.write(point) for point in first.points)] for model, grid in grids.items()]
    return Table([corner or first.axis, *heads], rows, caption)
