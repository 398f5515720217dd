"""What was found of one model, in plain numbers, as it is kept beside its run."""

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
from hf_posenc.recipes.evaluation import intervals
from hf_posenc.recipes.evaluation.intervals import Interval
from hf_posenc.recipes.runs.files import write_text

_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Cost:
    """What a scheme costs beside the native encoding.

    Attributes:
        step_ratios: Time of a training step as a share of the native model's, one for each pair of steps.
        memory_ratio: What a forward keeps for its backward pass, as a share of the native model's.
        parameters: New ones.
        cache_bytes: Cached per token beside keys and values, over all layers.
        own_cache_bytes: Keys and values themselves.
    """

    step_ratios: tuple[float, ...]
    memory_ratio: float
    parameters: int
    cache_bytes: int
    own_cache_bytes: int

    @property
    def time(self) -> Interval:
        """Geometric mean of the step times' ratios, with its interval."""
        return intervals.of_exponential(self._logarithms)

    def is_slower_than(self, other: Cost) -> bool:
        """Whether a step takes longer than that of another beyond chance; of single pairs, whether it took longer."""
        found = intervals.of_difference(self._logarithms, other._logarithms)
        return found.mean > 0 if math.isnan(found.low) else found.low > 0

    @property
    def _logarithms(self) -> Tensor:
        return torch.tensor(self.step_ratios, dtype=torch.float64).log()


@dataclass(frozen=True)
class Findings:
    """What was found of one model.

    Attributes:
        name: In the report.
        contexts: How many tokens were read, ascending.
        losses: At each of them, nats per token in each window; NaN where the model cannot read so many.
        cost: Beside the native model.
        start: How the converted model began, in words.
        start_ratio: Perplexity at the trained length before the training as a share of the model's as it was given; `None` if
            that was not measured.
        decay: By how much positions lower the logits of far keys below those of near ones, in nats, with the tokens read; `None`
            where positions do not act on logits.
        keeps_native: Whether the native encoding stays in force beside the scheme.
        sections: All that the measures found, as in the JSON of an evaluation.
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
        """Return the losses in nats per token after a number of tokens read, float64 `[windows]`."""
        return torch.tensor(self.losses[self.contexts.index(context)], dtype=torch.float64)

    def reads(self, context: int) -> bool:
        """Whether the model could read so many tokens, and made something of them."""
        return bool(self.at(context).isfinite().all())

    def difference(self, context: int, other: Findings, other_context: int | None = None) -> Interval:
        """Return by how much the loss is above another's, in nats per token, window by window."""
        return intervals.of_mean(self.at(context) - other.at(context if other_context is None else other_context))

    def ratio(self, context: int, other: Findings, other_context: int | None = None) -> Interval:
        """Return the perplexity as a share of another's, window by window."""
        return intervals.of_exponential(
            self.at(context) - other.at(context if other_context is None else other_context)
        )

    def growth(self, context: int, trained: int) -> Interval:
        """Return the perplexity at a length as a share of the same model's at the trained one."""
        return self.ratio(context, self, trained)

    def save(self, path: Path) -> None:
        """Write a file, whole or not at all."""
        write_text(path, json.dumps({"format_version": _FORMAT_VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Findings:
        """Read what `save` wrote.

        Raises:
            CheckpointError: It cannot be read.
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
    """Return the contexts and losses of the perplexity among the sections of one model."""
    section = next(section for section in sections if section["measure"] == "perplexity")
    (quantity,) = section["quantities"]
    ((contexts),) = quantity["axes"].values()
    (found,) = quantity["models"].values()
    return tuple(contexts), tuple(
        tuple(math.nan if value is None else value for value in row) for row in found["samples"]
    )
