"""Validation of a recipe against its model; `consistency` validates the keys by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import AutoModelForCausalLM

from hf_posenc.errors import RecipeError
from hf_posenc.patches import record
from hf_posenc.recipes.evaluation.predictions import table_end
from hf_posenc.recipes.loading import auto_class, trained_length
from hf_posenc.recipes.schema import consistency
from hf_posenc.recipes.schema.recipe import Recipe, Training
from hf_posenc.scheme import Scheme


def lengths(recipe: Recipe, config: Any) -> tuple[int, int]:
    """Return the window length and the model's trained length; raise `RecipeError` if none is known or suits it."""
    own = trained_length(config)
    length = recipe.training.length or own
    if length is None:
        raise RecipeError(
            f"training.length is null, which is the model's trained length, and the config of {recipe.model} has none. "
            "Give a number of tokens, for instance training.length=512."
        )
    for section, training in _trainings(recipe):
        for contradiction in consistency.contradictions_of_length(training, training.length or length):
            raise RecipeError(contradiction.replace("training.", f"{section}."))
        if training.skip_to is not None and auto_class(config) is not AutoModelForCausalLM:
            raise RecipeError(
                f"{section}.skip_to skips positions in texts that go on; {config.model_type} models restore corrupted "
                f"windows. Leave it out, or give {section}.skip_to=null."
            )
    return length, own or length


def check_unconverted(recipe: Recipe, config: Any) -> None:
    """Raise `RecipeError` if the model is converted already: a second conversion would lose its trained scheme."""
    groups = record.from_config(config)
    there = ", ".join(group.scheme for group in groups)
    if recipe.conversion.rope and any(group.native == "remove" for group in groups):
        raise RecipeError(
            f"The model {recipe.model} is converted already, to {there}, and its own rotation is gone: other rope "
            "parameters would do nothing. Extend the original model, and convert it then."
        )
    if there and recipe.conversion.scheme is not None:
        raise RecipeError(
            f"The model {recipe.model} is converted already, to {there}: an untrained {recipe.conversion.scheme} would "
            f"replace it. To train it on as it is, give conversion={{scheme: null}} distillation={{}}; or name the "
            "original model."
        )


def check_tables(recipe: Recipe, model: Any, length: int) -> None:
    """Raise `RecipeError` if windows or skipped positions exceed the position table of the model or its scheme."""
    end = table_end(model)
    known = [module.end_of_positions() for module in model.modules() if isinstance(module, Scheme)]
    # Packed documents may all be shorter than the window.
    rows = min((end for end in known if end is not None), default=None) if recipe.data.packing == "windows" else None
    lengths = [
        (f"{section}.{key}", reach)
        for section, training in _trainings(recipe)
        for key, reach in (("length", training.length or length), ("skip_to", training.skip_to))
    ]
    for key, reach in lengths:
        if rows is not None and reach is not None and reach > rows:
            way = "" if recipe.conversion.scheme is None else "; or more of them by conversion.options"
            raise RecipeError(f"{key} is {reach}, and the scheme knows {rows} positions. Give at most as many{way}.")
        if end is not None and reach is not None and reach > end:
            why, way = "", ""
            if recipe.conversion.scheme is not None:
                why = f", which conversion.native={recipe.conversion.native} leaves in force,"
                way = "conversion.native=remove, or "
            raise RecipeError(
                f"{key} is {reach}, and the model's own table{why} has {end} positions. Give {way}at most as many."
            )


def _trainings(recipe: Recipe) -> Iterator[tuple[str, Training]]:
    """Yield the settings of all stages that train on windows of their own, by section."""
    yield "training", recipe.training
    if recipe.lengthen.steps:
        yield "lengthen", recipe.lengthening
