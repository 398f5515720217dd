"""Claim of a recipe on a folder: only one recipe has its run there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_posenc.errors import RecipeError
from hf_posenc.patches.directories import UNFINISHED
from hf_posenc.recipes import loading
from hf_posenc.recipes.data import sources
from hf_posenc.recipes.runs.directory import CHECKPOINTS, KEPT, RECIPE, RUN, has_begun, record_of
from hf_posenc.recipes.schema import fields
from hf_posenc.recipes.schema.recipe import Recipe


def check_folder(folder: Path, recipe: Recipe) -> None:
    """Raise unless a folder may hold the run of a recipe: it is new or empty, or holds a run of the same recipe."""
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"{folder} exists and is a file. Choose another name for the run.")
    if not folder.parent.is_dir():
        raise RecipeError(f"There is no directory {folder.parent} to make {folder.name} in. Make it first.")
    if has_begun(folder):
        changes = "; ".join(f"{key} was {there!r} and is {here!r}" for key, there, here in _changes(folder, recipe))
        if changes:
            raise RecipeError(
                f"{folder} holds a run that began with another recipe: {changes}. Put back what was there (also in "
                f"{RECIPE}), or train the changed recipe in another folder."
            )
    elif (
        folder.is_dir()
        and not (folder / RECIPE).is_file()
        and any(not path.name.startswith(UNFINISHED) and path.name != CHECKPOINTS for path in folder.iterdir())
    ):
        raise RecipeError(f"{folder} exists, and holds no run of a recipe. Choose another folder, or empty this one.")


def located(recipe: Recipe) -> Recipe:
    """Return a recipe with absolute paths: its run may be resumed and measured in another directory."""
    teacher = recipe.distillation.teacher
    return replace(
        recipe,
        model=loading.located(recipe.model),
        data=sources.located(recipe.data),
        distillation=replace(recipe.distillation, teacher=teacher and loading.located(teacher)),
    )


def _changes(folder: Path, recipe: Recipe) -> list[tuple[str, Any, Any]]:
    """Return the keys in which a recipe differs from the one the run began with, with old and new values."""
    kept = record_of(folder).get(KEPT)
    # Without run.json, recipe.yaml says what there was.
    there = Recipe.read(folder / RECIPE) if kept is None else fields.build(Recipe, kept, where=str(folder / RUN))
    before, now = located(there).flat(), recipe.flat()
    return [(key, before[key], value) for key, value in now.items() if value != before[key]]
