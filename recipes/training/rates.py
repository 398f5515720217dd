"""Learning rates that follow from stage and size of a model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

from torch import nn

from hf_posenc.recipes.schema.recipe import Training
from hf_posenc.scheme import Scheme

# "fit" is a transfer that trains the scheme alone.
Stage = Literal["fit", "transfer", "training", "lengthen"]

# Parameters of the model at which the rates below are the best of a grid, see benchmarks/results/rates.md.
_SIZE = 470_000
# Parameters of a model that learns noise from steps of fewer tokens than these. At `_SIZE` such steps do no harm.
_NOISY, _TOKENS = 135_000_000, 2048


class Rates(NamedTuple):
    """Peak learning rates.

    Attributes:
        model: Rate of the model's own weights.
        scheme: Rate of the scheme's weights, which are new.
    """

    model: float
    scheme: float


# Rates of each stage, and the power of the size with which they fall.
_RATES: dict[Stage, tuple[Rates, float]] = {
    "fit": (Rates(1e-2, 1e-2), 0.3),
    "transfer": (Rates(5e-3, 2.5e-2), 0.1),
    "training": (Rates(1e-3, 5e-3), 0.3),
    "lengthen": (Rates(5e-4, 2.5e-3), 0.3),
}


def rates(model: nn.Module, stage: Stage, tokens: int | None = None) -> Rates:
    """Return the default learning rates of a stage for a model: a power of its number of parameters.

    While attention alone is fitted, schemes have a factor of their own, `Adaptation.rate`. Otherwise rates fall with
    the square root of the tokens of a step where there are few: not at half a million parameters, wholly from 135
    million on, and in between with the logarithm of the size.

    Args:
        model: Model, with all its weights.
        stage: Stage of the adaptation.
        tokens: Tokens of a step; `None` is enough of them.
    """
    found, power = _RATES[stage]
    size = sum(parameter.numel() for parameter in model.parameters())
    factor = min(1.0, (_SIZE / max(1, size)) ** power)
    of_attention = stage in ("fit", "transfer")
    if tokens is not None and not of_attention:
        share = math.log(max(1.0, size / _SIZE)) / math.log(_NOISY / _SIZE)
        factor *= min(1.0, tokens / _TOKENS) ** (0.5 * min(1.0, share))
    own = [module.adaptation.rate for module in model.modules() if isinstance(module, Scheme)] if of_attention else []
    return Rates(found.model * factor, found.scheme * factor * min(own, default=1.0))


def with_rates(training: Training, model: nn.Module, stage: Stage = "training") -> Training:
    """Return the settings with the default of each rate that is null."""
    found = rates(model, stage, training.length and training.length * training.batch_size)
    return replace(
        training,
        learning_rate=found.model if training.learning_rate is None else training.learning_rate,
        scheme_learning_rate=found.scheme if training.scheme_learning_rate is None else training.scheme_learning_rate,
    )
