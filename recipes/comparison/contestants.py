"""The models of a comparison: the native one and the schemes, with recipes that differ only in keys of the scheme."""

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
# Keys that overrides must not change, with the reasons.
_SETTLED = {
    "model": "it is the model that is compared",
    "conversion": "it is what is compared; give a recipe of your own (a .yaml file) among the schemes",
    "training.steps": "the budget says it",
    "evaluation": "all are measured alike",
}


@dataclass(frozen=True)
class Contestant:
    """A model to train.

    Attributes:
        name: Name of the scheme or recipe, for the report.
        recipe: Recipe of the run.
        folder: Folder of the run.
    """

    name: str
    recipe: Recipe
    folder: Path


def contestants(
    model: str, config: Any, folder: Path, *, schemes: Sequence[str] | None, budget: int, overrides: Sequence[str]
) -> tuple[Contestant, ...]:
    """Return the native model and each scheme, with the built-in recipe for the architecture.

    Args:
        model: Model, as in a recipe.
        config: Config of the model.
        folder: Folder of the runs; each gets a subfolder.
        schemes: Names of schemes or recipes, or YAML files; `None` means the usual ones.
        budget: Optimizer steps per model.
        overrides: `section.key=value` for all recipes.

    Raises:
        OptionError: An override changes a fixed key, or a scheme is named twice.
        RecipeError: A recipe is missing or invalid.
        UnknownSchemeError: A scheme is unknown.
    """
    for pair in overrides:
        key = pair.partition("=")[0]
        for settled, reason in _SETTLED.items():
            if key == settled or key.startswith(f"{settled}."):
                raise OptionError(f"{pair!r}: {key} is the same for all schemes or each one's own: {reason}.")
    architecture = of_config(config).name
    usual = _usual(architecture)
    if schemes is None and not usual:
        raise RecipeError(f"The package has no recipes for {architecture} models. Name YAML files instead of schemes.")
    wanted = tuple(usual if schemes is None else schemes)
    names = [Path(source).stem for source in wanted]
    if not wanted or len(set(names)) < len(names) or NATIVE in names:
        raise OptionError(
            f"Got the schemes {', '.join(wanted) or 'none'}; expected different ones, none called {NATIVE!r}."
        )
    sources = {name: _source(source, architecture) for name, source in zip(names, wanted, strict=True)}
    # Not the first one named: the control must stay the same when a comparison is extended.
    control = Recipe.parse(f"{architecture}-{usual[0]}" if usual else next(iter(sources.values())), overrides)
    length = control.training.length or trained_length(config)
    if length is None:
        raise RecipeError(
            f"The config of {model} has no trained length. Give a number of tokens, for instance training.length=512."
        )

    def entered(name: str, recipe: Recipe) -> Contestant:
        training = replace(recipe.training, steps=budget, length=length)
        # The examiner measures more after training, by the same measures for all.
        evaluation = Evaluation(contexts=[length])
        recipe = replace(recipe, model=model, training=training, evaluation=evaluation)
        return Contestant(name, recipe, folder / name)

    # Other training keys stay, such as a learning rate that the architecture needs.
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
    """Raise a `RecipeError` unless two contestants are trained on the same tokens."""
    for section, keys in (("data", vars(first.recipe.data)), ("training", ("batch_size", "seed", "precision"))):
        for key in keys:
            value, own = (getattr(getattr(each.recipe, section), key) for each in (first, other))
            if own != value:
                raise RecipeError(
                    f"{other.name} has {section}.{key}={own!r}, and {first.name} {value!r}: schemes that are compared "
                    f"are trained on the same text in the same batches. Say it for all, for instance "
                    f"{section}.{key}={own}."
                )


def _usual(architecture: str) -> list[str]:
    """Return the schemes that declare themselves usual and have a built-in recipe for the architecture."""
    named = (name for name, info in registry.schemes().items() if info.usual)
    return [name for name in named if f"{architecture}-{name}" in library.names()]


def _source(source: str, architecture: str) -> str:
    """Return the recipe for a word of the command line: a file, a scheme, or a recipe by its own name."""
    own = f"{architecture}-{source}"
    if Path(source).suffix in library.SUFFIXES or source in library.names():
        return source
    if own in library.names():
        return own
    # Unknown scheme names raise their own error.
    registry.get(source)
    known = (name.removeprefix(f"{architecture}-") for name in library.names() if name.startswith(f"{architecture}-"))
    raise RecipeError(
        f"There is no recipe for {source} on {architecture} models. Give a YAML file of your own, or some of: "
        f"{', '.join(known)}."
    )


def _reaching(source: str, overrides: Sequence[str], trained: int, length: int) -> list[str]:
    """Return an override that adjusts position skipping to the trained length of the model.

    The built-in recipes skip up to a multiple of the built-in model's length. The evaluation lengths are multiples of
    the trained length, so `training.skip_to` is scaled with it, not with the windows. Windows that already reach so far
    skip no positions. An explicit override by the user wins.
    """
    keys = [pair.partition("=")[0] for pair in overrides]
    if "training" in keys or "training.skip_to" in keys:
        return []
    # An overridden window length may exceed `skip_to`, which parsing would refuse.
    recipe = Recipe.parse(source, [pair for key, pair in zip(keys, overrides, strict=True) if key != "training.length"])
    far = recipe.training.skip_to
    if far is None or recipe.model != TINY_LLAMA:
        return []
    own = trained_length(load_tiny_llama()[0].config)
    assert own is not None
    far = far * trained // own
    return [f"training.skip_to={far if far > length else 'null'}"]
