"""The measured figures of one model, and their file next to its run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import CheckpointError
from hf_posenc.patches.directories import write_text
from hf_posenc.recipes.evaluation import intervals
from hf_posenc.recipes.evaluation.intervals import Interval

_FORMAT_VERSION = 1


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
        found = intervals.of_difference(self._logarithms, other._logarithms)
        return found.mean > 0 if math.isnan(found.low) else found.low > 0

    @property
    def _logarithms(self) -> Tensor:
        return torch.tensor(self.step_ratios, dtype=torch.float64).log()


@dataclass(frozen=True)
class Findings:
    """The measured figures of one model.

    Attributes:
        name: Name in the report.
        contexts: Context lengths in tokens, ascending.
        losses: Loss of each window at each context, in nats per token; NaN where the model cannot read so many tokens.
        cost: Cost, compared with the native model.
        start: Start of the converted model, in words.
        start_ratio: Perplexity at the trained length after conversion and before training, as a multiple of the
            original model's; `None` if not measured.
        decay: Long-term decay in nats and the number of tokens read; `None` if positions do not act on logits.
        keeps_native: Whether the native encoding stays active together with the scheme.
        sections: Results of all measures, as in the JSON of an evaluation.
    """

    name: str
    contexts: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]
    cost: Cost
    start: str = ""
    start_ratio: float | None = None
    decay: tuple[float, int] | None = None
    keeps_native: bool = False
    sections: tuple[Mapping[str, Any], ...] = ()

    def at(self, context: int) -> Tensor:
        """Return the losses at a context length in nats per token, float64 `[windows]`."""
        return torch.tensor(self.losses[self.contexts.index(context)], dtype=torch.float64)

    def reads(self, context: int) -> bool:
        """Whether the model can read so many tokens with a finite loss."""
        return bool(self.at(context).isfinite().all())

    def difference(self, context: int, other: Findings, other_context: int | None = None) -> Interval:
        """Return the loss minus that of another model, in nats per token, paired by window."""
        return intervals.of_mean(self.at(context) - other.at(context if other_context is None else other_context))

    def ratio(self, context: int, other: Findings, other_context: int | None = None) -> Interval:
        """Return the perplexity as a share of another model's, paired by window."""
        return intervals.of_exponential(
            self.at(context) - other.at(context if other_context is None else other_context)
        )

    def growth(self, context: int, trained: int) -> Interval:
        """Return the perplexity at a length as a share of the same model's at the trained length."""
        return self.ratio(context, self, trained)

    def save(self, path: Path) -> None:
        """Write the findings to a file, whole or not at all."""
        write_text(path, json.dumps({"format_version": _FORMAT_VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Findings:
        """Read findings written by `save`.

        Raises:
            CheckpointError: The file cannot be read.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format_version") != _FORMAT_VERSION:
                raise ValueError("another format_version")
            cost = content.pop("cost")
            return cls(
                **content
                | {
                    "contexts": tuple(content["contexts"]),
                    "losses": tuple(map(tuple, content["losses"])),
                    "sections": tuple(content["sections"]),
                    "decay": None if content["decay"] is None else tuple(content["decay"]),
                    "cost": Cost(**cost | {"step_ratios": tuple(cost["step_ratios"])}),
                }
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}). Remove it to measure again.") from error


def samples(sections: tuple[Mapping[str, Any], ...]) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]:
    """Return contexts and losses from the perplexity section of one model."""
    section = next(section for section in sections if section["measure"] == "perplexity")
    (quantity,) = section["quantities"]
    ((contexts),) = quantity["axes"].values()
    (found,) = quantity["models"].values()
    return tuple(contexts), tuple(
        tuple(math.nan if value is None else value for value in row) for row in found["samples"]
    )
