"""The measured figures of one model, and their file next to its run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_posenc.recipes import intervals
from hf_posenc.recipes.evaluation.grid import RATIO, Grid
from hf_posenc.recipes.evaluation.report import Report, load, save
from hf_posenc.recipes.intervals import Interval


@dataclass(frozen=True)
class Cost:
    """Cost of a scheme, compared with the native encoding.

    Attributes:
        step_ratios: Ratios of training-step times to the native model's, one per pair of steps.
        memory_ratio: Ratio of the memory saved for the backward pass to the native model's.
        parameters: Number of new parameters.
        cache_bytes: Bytes cached per token in addition to keys and values, over all layers.
        own_cache_bytes: Bytes of keys and values per token, over all layers.
    """

    step_ratios: tuple[float, ...]
    memory_ratio: float
    parameters: int
    cache_bytes: int
    own_cache_bytes: int

    @property
    def time(self) -> Interval:
        """Geometric mean of the ratios of step times, with its interval."""
        return intervals.of_exponential(self._logarithms)

    def is_slower_than(self, other: Cost) -> bool:
        """Whether a step is significantly slower than another's; for single pairs, whether it was slower at all."""
        found = intervals.of_mean(self._logarithms - other._logarithms)
        return found.mean > 0 if math.isnan(found.low) else found.low > 0

    @property
    def _logarithms(self) -> Tensor:
        return torch.tensor(self.step_ratios, dtype=torch.float64).log()


@dataclass(frozen=True, eq=False)
class Findings:
    """The measured figures of one model.

    Attributes:
        name: Name in the report.
        report: Results of all measures, perplexity by context length among them.
        cost: Cost, compared with the native model.
        start: Start of the converted model, in words.
        start_ratio: Perplexity at the trained length after conversion and before training, as a multiple of the
            original model's; `None` if not measured.
        keeps_native: Whether the native encoding stays active together with the scheme.
    """

    name: str
    report: Report
    cost: Cost
    start: str = ""
    start_ratio: float | None = None
    keeps_native: bool = False

    @property
    def perplexity(self) -> Grid:
        """Perplexity by context length."""
        return self.report["perplexity"].models[self.name][0]

    @property
    def contexts(self) -> tuple[int, ...]:
        """Context lengths in tokens, ascending."""
        return self.perplexity.points

    def difference(self, context: int, other: Findings) -> Interval:
        """Return the loss minus that of another model, in nats per token, paired by window."""
        return self.perplexity.minus(other.perplexity).at(context)

    def ratio(self, context: int, other: Findings, other_context: int | None = None) -> Interval:
        """Return the perplexity as a share of that of a model, by default at the same length, paired by window."""
        reference = other.perplexity.values(context if other_context is None else other_context)
        return RATIO.interval(self.perplexity.values(context) - reference)

    def growth(self, context: int, trained: int) -> Interval:
        """Return the perplexity at a length as a share of the same model's at the trained length."""
        return self.ratio(context, self, trained)

    def save(self, path: Path) -> None:
        """Write the findings to a file, whole or not at all."""
        save(self, path)

    @classmethod
    def load(cls, path: Path) -> Findings:
        """Read findings written by `save`; raise `CheckpointError` if that is not possible."""
        found: Findings = load(cls, path, "Remove it to measure again.")
        return found
