"""95 % confidence intervals from samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Quantile of the normal distribution for 95 %.
_Z = 1.959964


@dataclass(frozen=True)
class Interval:
    """An estimate, NaN if nothing was measured, and the ends of its 95 % interval, NaN for a single sample."""

    mean: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.mean)

    @property
    def ends(self) -> tuple[float, float]:
        return self.low, self.high

    def times(self, factor: float) -> Interval:
        """Return the estimate in another unit."""
        return Interval(self.mean * factor, self.low * factor, self.high * factor)


def of_mean(values: Tensor) -> Interval:
    """Return Student's interval for the mean of samples `[n]`."""
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return Interval(mean, math.nan, math.nan)
    half = _student(count - 1) * float(values.std()) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def of_mean_share(values: Tensor) -> Interval:
    """Return Student's interval for the mean of samples `[n]` between 0 and 1, cut off at 0 and 1."""
    found = of_mean(values)
    # min and max would lose the NaN of a single sample.
    return Interval(found.mean, *(end if math.isnan(end) else min(max(end, 0.0), 1.0) for end in found.ends))


def of_exponential(values: Tensor) -> Interval:
    """Return the interval for `exp` of the mean of samples `[n]`: a perplexity from losses in nats."""
    loss = of_mean(values)
    # With the loss of a diverged model, math.exp would overflow; torch returns infinity.
    return Interval(*torch.tensor((loss.mean, *loss.ends), dtype=torch.float64).exp().tolist())


def of_share(values: Tensor) -> Interval:
    """Return Wilson's interval for the mean of samples `[n]`, each from 0 to 1.

    Wilson's interval keeps its width where all samples are 0 or all are 1. For samples strictly between 0 and 1 it is
    wider than necessary.
    """
    mean, count = float(values.mean()), len(values)
    if math.isnan(mean):
        return Interval(mean, mean, mean)
    shrink = 1 + _Z**2 / count
    centre = (mean + _Z**2 / (2 * count)) / shrink
    half = _Z * math.sqrt(max(mean * (1 - mean), 0.0) / count + (_Z / (2 * count)) ** 2) / shrink
    # Rounding can put an end that equals the mean on its other side.
    return Interval(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))


def _student(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's distribution.

    Abramowitz and Stegun 26.7.5; up to four degrees of freedom, tabulated values.
    """
    exact = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445}
    if freedom in exact:
        return exact[freedom]
    terms = (
        _Z,
        (_Z**3 + _Z) / 4,
        (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96,
        (3 * _Z**7 + 19 * _Z**5 + 17 * _Z**3 - 15 * _Z) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))
