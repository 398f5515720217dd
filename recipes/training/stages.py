"""Stages of a recipe in their order: attention transfer, training, long windows; and the learning rates of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import nn

from hf_posenc.recipes.reports import counted
from hf_posenc.recipes.schema.recipe import Distillation, Recipe, Training
from hf_posenc.scheme import Scheme

# "fit" is a transfer that trains the scheme alone.
Name = Literal["fit", "transfer", "training", "lengthen"]

# Steps of a transfer that `conversion.fit: attention` asks for.
_FITTING = 150
_WORDS = {"transfer": "attention transfer", "training": "training", "lengthen": "long windows"}
# Parameters of the model at which the rates below are the best of a grid, see benchmarks/results/rates.md.
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
    "lengthen": (Rates(5e-4, 2.5e-3), 0.3),
}


def rates(model: nn.Module, stage: Name, tokens: int | None = None) -> Rates:
    """Return the default learning rates of a stage for a model: a power of its number of parameters.

    While attention alone is fitted, schemes have a factor of their own, `Adaptation.rate`. Otherwise rates fall with
    the square root of the tokens of a step where they are few: wholly from 135 million parameters on, not at half a
    million, between them with the logarithm of the size. Without `tokens`, a step counts as large.
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


def with_rates(training: Training, model: nn.Module, stage: Name = "training") -> Training:
    """Return the settings with the default of each rate that is null."""
    found = rates(model, stage, training.length and training.length * training.batch_size)
    return replace(
        training,
        learning_rate=found.model if training.learning_rate is None else training.learning_rate,
        scheme_learning_rate=found.scheme if training.scheme_learning_rate is None else training.scheme_learning_rate,
    )


@dataclass(frozen=True)
class Stage:
    """One stage of a run.

    Attributes:
        name: Name of its section in the recipe.
        recipe: Recipe with the settings of this stage in `training`, rates included.
        begins: Optimizer steps of the stages before it.
    """

    name: Name
    recipe: Recipe
    begins: int

    @property
    def title(self) -> str:
        """Name in words."""
        return _WORDS[self.name]

    def tokens(self, length: int) -> int:
        """Return the tokens of a step; `length` is that of windows whose length is null."""
        training = self.recipe.training
        return training.batch_size * (training.length or length)

    def words(self, *, has_new: bool) -> str:
        """Return the settings in words; without new weights, their rate is left out."""
        training = self.recipe.training
        size = f"{counted(training.steps, 'step')} x {counted(training.batch_size, 'window')}"
        rates = f"rate {training.learning_rate:.2g}"
        is_fit = self.name == "transfer" and not self.recipe.transfer.projections
        if is_fit or self.recipe.adapter.kind == "scheme":  # nothing of the model is trained
            rates = f"rate {training.scheme_learning_rate:.2g} (scheme)"
        elif has_new:
            rates = f"rates {training.learning_rate:.2g} and {training.scheme_learning_rate:.2g} (scheme)"
        return f"{self.title}: {size}, {rates}"


def stages(recipe: Recipe, model: nn.Module) -> list[Stage]:
    """Return the stages of a recipe for a model, from whose size rates follow that are null."""
    training, transfer, lengthen = recipe.training, recipe.transfer, recipe.lengthen
    # What the training of all weights has, and the other stages do not.
    plain = replace(recipe, conversion=replace(recipe.conversion, scheme=None), distillation=Distillation())
    found: list[Stage] = []
    if recipe.conversion.fit == "attention":
        transfer = replace(transfer, steps=transfer.steps or _FITTING, projections=False)
    if transfer.steps:
        settings = replace(
            training,
            steps=transfer.steps,
            skip_to=None,
            batch_size=transfer.batch_size or training.batch_size,
            micro_batch_size=transfer.micro_batch_size or (None if transfer.batch_size else training.micro_batch_size),
            learning_rate=transfer.learning_rate,
            scheme_learning_rate=transfer.scheme_learning_rate,
            gradient_checkpointing=False,
        )
        settings = with_rates(settings, model, "transfer" if transfer.projections else "fit")
        found.append(Stage("transfer", replace(plain, transfer=transfer, training=settings), 0))
    found.append(Stage("training", replace(recipe, training=with_rates(training, model)), transfer.steps))
    if lengthen.steps:
        settings = with_rates(recipe.lengthening, model, "lengthen")
        found.append(Stage("lengthen", replace(plain, training=settings), transfer.steps + training.steps))
    return found
