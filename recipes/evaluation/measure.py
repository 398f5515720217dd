"""The base class of all measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch

from hf_posenc.errors import OptionError
from hf_posenc.patches.patch import evaluating
from hf_posenc.recipes.evaluation.grid import Grid, Point
from hf_posenc.recipes.evaluation.workers import Workers

Places = TypeVar("Places", bound=Point)


class Measure(ABC):
    """A measurement of language models, on the same inputs for all of them.

    Attributes:
        name: Name on the command line and in file names.
        title: Title of its table and picture.
        note: Definition of the measured quantity, for the report.
        tokens: Number of tokens that one model reads.
        mark: Labelled point on the first numeric axis of the picture; `None` without.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    note: str
    tokens: int
    mark: tuple[float, str] | None = None

    def __call__(self, model: Any, workers: Workers | None = None) -> tuple[Grid, ...]:
        """Return the results for a model, one grid per quantity.

        Args:
            model: A language model of transformers, on any device; its mode is left as it was.
            workers: Processes that share the work; `None` means this process, or those started by accelerate.
        """
        self.check(model)
        with evaluating(model), torch.no_grad():
            return self._measure(model, Workers() if workers is None else workers)

    def check(self, model: Any) -> None:  # noqa: B027 - most measures accept all models
        """Raise an `HfPosencError` if the measure is undefined for a model, before any work is done."""

    @abstractmethod
    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        """Return the results for a model in evaluation mode; gradients are off."""


def different(name: str, places: Sequence[Places]) -> tuple[Places, ...]:
    """Return the points of an axis unchanged, after a check.

    Raises:
        OptionError: The points are empty or repeated.
    """
    if not places or len(set(places)) < len(places):
        raise OptionError(f"{name}={tuple(places)}: expected one or more, each once.")
    return tuple(places)


def trained_mark(length: int | None) -> tuple[float, str] | None:
    """Return the mark of the trained length, or `None` if the length is unknown."""
    return None if length is None else (length, f"trained on {length:,} tokens")
