"""What all measures have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch

from hf_posenc.errors import OptionError
from hf_posenc.patches.modes import evaluating
from hf_posenc.recipes.evaluation.grid import Grid, Point
from hf_posenc.recipes.evaluation.workers import Workers

Places = TypeVar("Places", bound=Point)


class Measure(ABC):
    """Something to be measured of language models, on the same inputs for all of them.

    Attributes:
        name: In file names and on the command line.
        title: Stands above its table and picture.
        note: What exactly is measured.
        tokens: How many tokens one model reads.
        mark: A point on the first numeric axis with what it means, drawn in the picture; `None` without.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    note: str
    tokens: int
    mark: tuple[float, str] | None = None

    def __call__(self, model: Any, workers: Workers | None = None) -> tuple[Grid, ...]:
        """Measure a model.

        Args:
            model: A language model of transformers, on any device; its mode is left as it was.
            workers: The processes that measure together; `None` is this one, or those that accelerate started.
        """
        self.check(model)
        with evaluating(model), torch.no_grad():
            return self._measure(model, Workers() if workers is None else workers)

    def check(self, model: Any) -> None:  # noqa: B027 - most are defined for all models
        """Raise an `HfPosencError` if it is not defined for a model; costs nothing, so that no work is done for it in vain."""

    @abstractmethod
    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        """Measure a model in evaluation mode, without gradients."""


def different(name: str, places: Sequence[Places]) -> tuple[Places, ...]:
    """Return the points of an axis as they were given.

    Raises:
        OptionError: There is none, or one is given twice.
    """
    if not places or len(set(places)) < len(places):
        raise OptionError(f"{name}={tuple(places)}: expected one or more, each once.")
    return tuple(places)


def trained_mark(length: int | None) -> tuple[float, str] | None:
    """Return where the training ended, for the picture, if that is known."""
    return None if length is None else (length, f"trained on {length:,} tokens")
