"""The stages of a run, in their order and each in its file: what it refuses, what it does, and what is done of it."""

from __future__ import annotations

from hf_posenc.recipes.runs.stages.adapt import Adapt
from hf_posenc.recipes.runs.stages.base import Stage
from hf_posenc.recipes.runs.stages.convert import Convert
from hf_posenc.recipes.runs.stages.fit import Fit
from hf_posenc.recipes.runs.stages.lengthen import Lengthen
from hf_posenc.recipes.runs.stages.train import Train
from hf_posenc.recipes.runs.stages.trained import Trained
from hf_posenc.recipes.runs.stages.transfer import Transfer
from hf_posenc.recipes.schema.recipe import Recipe


def preparing(recipe: Recipe) -> list[Stage]:
    """Return the stages that make the model to train."""
    return [Convert(recipe), *([Fit(recipe)] if recipe.conversion.fit == "native" else []), Adapt(recipe)]


def training(recipe: Recipe) -> list[Trained]:
    """Return the stages that train it."""
    kinds: dict[str, type[Trained]] = {kind.section: kind for kind in (Transfer, Train, Lengthen)}
    found: list[Trained] = []
    for section in recipe.stages():
        found.append(kinds[section](recipe, begins=sum(stage.settings.steps for stage in found)))
    return found


def stages(recipe: Recipe) -> list[Stage]:
    return [*preparing(recipe), *training(recipe)]
