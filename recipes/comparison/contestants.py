"""Who takes part: each scheme with its recipe, the same for all but what belongs to the scheme, and the native model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_posenc import registry
from hf_posenc.errors import OptionError, RecipeError
from hf_posenc.patches.architecture import of_config
from hf_posenc.recipes import library
from hf_posenc.recipes.loading import TINY_LLAMA, load_tiny_llama, trained_length
from hf_posenc.recipes.schema.recipe import Conversion, Distillation, Evaluation, Recipe

# The native model with the same training: the control.
NATIVE = "native"
# The model as it was given.
UNTRAINED = "native, untrained"
# Of all families, and those that did well at small budgets; by architecture.
_USUAL = {
    "llama": ("alibi", "cope", "fire", "fox", "kerple", "nope", "rope", "t5"),
    "gpt2": ("alibi", "cope", "fire", "fox", "kerple", "nope", "rope", "sinusoidal"),
    "t5": ("alibi", "cope", "disentangled", "fire", "fox", "kerple", "rope", "sinusoidal"),
}
# Whose recipes have nothing of their own in `training`.
_PLAINEST = "alibi"
# What an override may not say, and who says it.
_SETTLED = {
    "model": "it is the model that is compared",
    "conversion": "it is what is compared; give a recipe of your own (a .yaml file) among the schemes",
    "training.steps": "the budget says it",
    "evaluation": "all are measured alike",
}


@dataclass(frozen=True)
class Contestant:
    """One that is trained.

    Attributes:
        name: In the report: of the scheme or of the recipe.
        recipe: What is run.
        folder: Of the run.
    """

    name: str
    recipe: Recipe
    folder: Path


def contestants(
    model: str, config: Any, folder: Path, *, schemes: Sequence[str] | None, budget: int, overrides: Sequence[str]
) -> tuple[Contestant, ...]:
    """Return the native model and each scheme with the recipe that the package has for the architecture.

    Args:
        model: As in a recipe.
        config: Of the model.
        folder: In which each run has a folder of its own.
        schemes: Names of schemes or recipes, or YAML files; `None` takes eight that fit.
        budget: Optimizer steps of each.
        overrides: `section.key=value` for all recipes.

    Raises:
        OptionError: An override says what is settled, or one is named twice.
        RecipeError: There is no recipe, or a recipe is not as it must be.
        UnknownSchemeError: There is no such scheme.
    """
    for pair in overrides:
        key = pair.partition("=")[0]
        for settled, reason in _SETTLED.items():
            if key == settled or key.startswith(f"{settled}."):
                raise OptionError(f"{pair!r}: {key} is the same for all schemes or each one's own: {reason}.")
    architecture = of_config(config).name
    wanted = tuple(_usual(architecture) if schemes is None else schemes)
    names = [Path(source).stem for source in wanted]
    if not wanted or len(set(names)) < len(names) or NATIVE in names:
        raise OptionError(
            f"Got the schemes {', '.join(wanted) or 'none'}; expected different ones, none called {NATIVE!r}."
        )
    sources = {name: _source(source, architecture) for name, source in zip(names, wanted, strict=True)}
    control = Recipe.parse(_training_of(architecture, next(iter(sources.values()))), overrides)
    length = control.training.length or trained_length(config)
    if length is None:
        raise RecipeError(
            f"The config of {model} has no trained length. Give a number of tokens, for instance training.length=512."
        )

    def entered(name: str, recipe: Recipe) -> Contestant:
        training = replace(recipe.training, steps=budget, length=length)
        # More is measured afterwards, of all by the same measures.
        evaluation = Evaluation(contexts=[length])
        recipe = replace(recipe, model=model, training=training, evaluation=evaluation)
        return Contestant(name, recipe, folder / name)

    # A learning rate that an architecture needs stays.
    control = replace(
        control,
        summary="The native model with the same training.",
        conversion=Conversion(scheme=None),
        distillation=Distillation(),
        training=replace(control.training, skip_to=None, new_parameters_first=0.0),
    )
    first = entered(NATIVE, control)
    reach = trained_length(config) or length
    others = [
        entered(name, Recipe.read(source, [*overrides, *_reaching(source, overrides, reach, length)]))
        for name, source in sources.items()
    ]
    for other in others:
        _check_same(first, other)
    return first, *others


def _check_same(first: Contestant, other: Contestant) -> None:
    """Raise unless two are trained on the same tokens."""
    pairs = [
        *((f"data.{key}", value, getattr(other.recipe.data, key)) for key, value in vars(first.recipe.data).items()),
        *(
            (f"training.{key}", getattr(first.recipe.training, key), getattr(other.recipe.training, key))
            for key in ("batch_size", "seed", "precision")
        ),
    ]
    for key, value, own in pairs:
        if own != value:
            raise RecipeError(
                f"{other.name} has {key}={own!r}, and {first.name} {value!r}: schemes that are compared are trained on the same text in "
                f"the same batches. Say it for all, for instance {key}={own}."
            )


def _training_of(architecture: str, first: str) -> str:
    """Return a recipe that is trained as all of an architecture are: one of the package, or the first that was named."""
    own = f"{architecture}-{_PLAINEST}"
    return own if own in library.names() else first


def _usual(architecture: str) -> tuple[str, ...]:
    if architecture not in _USUAL:
        raise RecipeError(f"The package has no recipes for {architecture} models. Name YAML files in place of schemes.")
    return _USUAL[architecture]


def _source(source: str, architecture: str) -> str:
    """Return the recipe that is meant: a file, the one of a scheme, or one by its own name."""
    own = f"{architecture}-{source}"
    if Path(source).suffix in library.SUFFIXES or source in library.names():
        return source
    if own in library.names():
        return own
    # Of a word that is not even a scheme, that is said.
    registry.get(source)
    known = (name.removeprefix(f"{architecture}-") for name in library.names() if name.startswith(f"{architecture}-"))
    raise RecipeError(
        f"There is no recipe for {source} on {architecture} models. Give a YAML file of your own, or some of: "
        f"{', '.join(known)}."
    )


def _reaching(source: str, overrides: Sequence[str], trained: int, length: int) -> list[str]:
    """Return what else is to be said of a recipe that skips positions: those of the model that comes along do it for its length.

    What is measured afterwards goes by the trained length, too, so that is what positions are in proportion to, and not the
    windows. Windows that reach as far skip none. Who says himself how far, is taken at his word.
    """
    keys = [pair.partition("=")[0] for pair in overrides]
    if "training" in keys or "training.skip_to" in keys:
        return []
    # Without the length of the windows, which may be beyond what the recipe says.
    recipe = Recipe.parse(source, [pair for key, pair in zip(keys, overrides, strict=True) if key != "training.length"])
    far = recipe.training.skip_to
    if far is None or recipe.model != TINY_LLAMA:
        return []
    own = trained_length(load_tiny_llama()[0].config)
    assert own is not None
    far = far * trained // own
    return [f"training.skip_to={far if far > length else 'null'}"]
