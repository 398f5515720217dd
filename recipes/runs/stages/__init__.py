"""The stages of a run, in their order: what each refuses, what it does, and what is done of it."""

from __future__ import annotations

from hf_posenc.recipes.runs.stages.base import Stage
from hf_posenc.recipes.runs.stages.prepared import Adapt, Convert, Fit
from hf_posenc.recipes.runs.stages.trained import Lengthen, Train, Trained, Transfer
from hf_posenc.recipes.schema.recipe import Recipe


def training(recipe: Recipe) -> list[Trained]:
    """Return the stages that train the model."""
    kinds: dict[str, type[Trained]] = {kind.section: kind for kind in (Transfer, Train, Lengthen)}
    found: list[Trained] = []
    for section in recipe.stages():
        found.append(kinds[section](recipe, begins=sum(stage.settings.steps for stage in found)))
    return found


def stages(recipe: Recipe) -> list[Stage]:
    """Return all stages: those that make the model, and those that train it."""
    fits = [Fit(recipe)] * (recipe.conversion.fit == "native")
    return [Convert(recipe), *fits, Adapt(recipe), *training(recipe)]
