"""Learning rates of each stage, from the size of the model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import nn

from hf_posenc.recipes.loading import trained_length
from hf_posenc.recipes.schema.recipe import StageName, Training
from hf_posenc.scheme import Scheme

# "fit" is a transfer that trains the scheme alone, "refining" a training after a transfer of the whole attention.
Name = StageName | Literal["fit", "refining"]

# Parameters of the model at which the rates below are the best of a grid, see benchmarks/results/README.md.
_SIZE = 470_000
# Parameters of a model that learns noise from steps of fewer tokens than these. At `_SIZE` such steps do no harm.
_NOISY, _TOKENS = 135_000_000, 2048


class Rates(NamedTuple):
    """Peak learning rates of the model's own weights and of the scheme's, which are new."""

    model: float
    scheme: float


# Rates of each stage, and the power of the size with which they fall.
_RATES: dict[Name, tuple[Rates, float]] = {
    "fit": (Rates(1e-2, 1e-2), 0.3),
    "transfer": (Rates(5e-3, 2.5e-2), 0.1),
    "training": (Rates(1e-3, 5e-3), 0.3),
    # At the rates of a training, it would undo a part of the transfer.
    "refining": (Rates(1e-4, 5e-4), 0.3),
    "lengthen": (Rates(5e-4, 2.5e-3), 0.3),
}


def rates(model: nn.Module, stage: Name, tokens: int | None = None, *, fitted: bool = True) -> Rates:
    """Return the default learning rates of a stage for a model: a power of its number of parameters.

    While attention alone is fitted, and in a training that follows no fit (`fitted=False`), schemes have a factor of
    their own, `Adaptation.rate`. Outside of a fit, rates fall with the square root of the tokens of a step where they
    are few: wholly from 135 million parameters on, not at half a million, between them with the logarithm of the size.
    Without `tokens`, a step counts as large. In every stage, the rates of some schemes fall with the width of the
    model, `Adaptation.rate_width`.
    """
    found, power = _RATES[stage]
    size = sum(parameter.numel() for parameter in model.parameters())
    factor = min(1.0, (_SIZE / max(1, size)) ** power)
    of_attention = stage in ("fit", "transfer")
    if tokens is not None and not of_attention:
        share = math.log(max(1.0, size / _SIZE)) / math.log(_NOISY / _SIZE)
        factor *= min(1.0, tokens / _TOKENS) ** (0.5 * min(1.0, share))
    own = []
    for scheme in (module for module in model.modules() if isinstance(module, Scheme)):
        rate, width = scheme.adaptation.rate if of_attention or not fitted else 1.0, scheme.adaptation.rate_width
        own.append(rate if width is None else rate * min(1.0, width / scheme.geometry.hidden_size))
    return Rates(found.model * factor, found.scheme * factor * min(own, default=1.0))


def with_rates(training: Training, model: Any, stage: Name = "training", *, fitted: bool = True) -> Training:
    """Return the settings with the default of each rate that is null."""
    if None not in (training.learning_rate, training.scheme_learning_rate):
        return training
    length = training.length or trained_length(model.config)
    found = rates(model, stage, length and length * training.batch_size, fitted=fitted)
    return replace(
        training,
        learning_rate=found.model if training.learning_rate is None else training.learning_rate,
        scheme_learning_rate=found.scheme if training.scheme_learning_rate is None else training.scheme_learning_rate,
    )
