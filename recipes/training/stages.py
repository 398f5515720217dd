"""Stages of a recipe in their order: attention transfer, training, long windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from hf_posenc.recipes.reports import counted
from hf_posenc.recipes.schema.recipe import Distillation, Recipe
from hf_posenc.recipes.training.rates import with_rates

Name = Literal["transfer", "training", "lengthen"]

# Steps of a transfer that `conversion.fit: attention` asks for.
_FITTING = 150
_WORDS = {"transfer": "attention transfer", "training": "training", "lengthen": "long windows"}


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
