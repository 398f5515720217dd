"""Learning rates of each stage, from the size of the model and from the size of its weights."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from peft import PeftModel
from torch import nn

from hf_posenc.recipes.loading import trained_length
from hf_posenc.recipes.schema.recipe import StageName, Training
from hf_posenc.scheme import Scheme

# "fit" is a transfer that trains the scheme alone, "refining" a training after a transfer of the whole attention.
Name = StageName | Literal["fit", "refining"]

# Parameters of the model at which the rates below are the best of a grid, see benchmarks/results/README.md.
_SIZE = 470_000
# Magnitude of the weights of the models in the grid: it grows with their number by this power.
_MAGNITUDE, _GROWTH = 0.1, 0.113
# Distance of SmolLM2's attention from the original's before its transfer, at the rates below.
_DISTANCE = 0.18
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


def magnitude(model: nn.Module) -> float | None:
    """Return the median over all matrices of a model of their root mean square; `None` if it has no weights yet."""
    matrices = [
        weight.detach()
        for weight in model.parameters()
        if weight.dim() == 2 and weight.is_floating_point() and weight.numel()
    ]
    if not matrices or matrices[0].is_meta:
        return None
    squares = (float(torch.linalg.vector_norm(each, dtype=torch.float32)) ** 2 / each.numel() for each in matrices)
    return math.sqrt(median(squares))


def rates(
    model: nn.Module,
    stage: Name,
    tokens: int | None = None,
    *,
    fitted: bool = True,
    weights: float | None = None,
    distance: float | None = None,
) -> Rates:
    """Return the default learning rates of a stage for a model: a power of its number of parameters.

    While attention alone is fitted, and in a training that follows no fit (`fitted=False`), schemes have a factor of
    their own, `Adaptation.rate`. Outside of a fit, rates fall with the square root of the tokens of a step where they
    are few: wholly from 135 million parameters on, not at half a million, between them with the logarithm of the size.
    Without `tokens`, a step counts as large. In every stage, the rates of some schemes fall with the width of the
    model, `Adaptation.rate_width`.

    A step of Adam is as long as the rate, whatever it changes. So the rate of the model's own weights is also
    proportional to their `magnitude`, relative to the one of models of this size in the grid; not for an adapter, which
    is alike in all models. While attention alone is fitted, it is also proportional to the root of the `distance` from
    the original attention before, where that is less than in the grid: there is less to learn. `weights` is the
    magnitude before a run, which a resumed run must not measure again.
    """
    found, power = _RATES[stage]
    size = sum(parameter.numel() for parameter in model.parameters())
    growth = max(1.0, size / _SIZE)
    factor = growth**-power
    of_attention = stage in ("fit", "transfer")
    if tokens is not None and not of_attention:
        share = math.log(growth) / math.log(_NOISY / _SIZE)
        factor *= min(1.0, tokens / _TOKENS) ** (0.5 * min(1.0, share))
    own = []
    for scheme in (module for module in model.modules() if isinstance(module, Scheme)):
        rate, width = scheme.adaptation.rate if of_attention or not fitted else 1.0, scheme.adaptation.rate_width
        own.append(rate if width is None else rate * min(1.0, width / scheme.geometry.hidden_size))
    usual = _MAGNITUDE * growth**_GROWTH
    if of_attention and distance is not None:
        factor *= min(1.0, distance / _DISTANCE) ** 0.5
    relative = 1.0 if isinstance(model, PeftModel) else (weights or magnitude(model) or usual) / usual
    return Rates(found.model * factor * relative, found.scheme * factor * min(own, default=1.0))


def with_rates(
    training: Training,
    model: Any,
    stage: Name = "training",
    *,
    fitted: bool = True,
    weights: float | None = None,
    distance: float | None = None,
) -> Training:
    """Return the settings with the default of each rate that is null."""
    if None not in (training.learning_rate, training.scheme_learning_rate):
        return training
    length = training.length or trained_length(model.config)
    found = rates(
        model, stage, length and length * training.batch_size, fitted=fitted, weights=weights, distance=distance
    )
    return replace(
        training,
        learning_rate=found.model if training.learning_rate is None else training.learning_rate,
        scheme_learning_rate=found.scheme if training.scheme_learning_rate is None else training.scheme_learning_rate,
    )
