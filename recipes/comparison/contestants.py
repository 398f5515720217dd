"""The models of a comparison: the native one and the schemes, with recipes that differ only in their conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from hf_posenc import registry
from hf_posenc.errors import OptionError, RecipeError
from hf_posenc.recipes import library
from hf_posenc.recipes.evaluation.perplexity import TARGETS
from hf_posenc.recipes.loading import auto_class
from hf_posenc.recipes.schema import fields, suitability
from hf_posenc.recipes.schema.recipe import Conversion, Distillation, Evaluation, Recipe, Transfer

# The native model with the same training: the control.
NATIVE = "native"
# The model as it was given.
ORIGINAL = "original"
# Keys that overrides must not change, with the reasons.
_SETTLED = {
    "model": "it is the model that is compared",
    "conversion": "it is what is compared; give a recipe of your own (a .yaml file) among the schemes",
    "training.steps": "the budget says it",
    "evaluation": "all are measured alike",
}


@dataclass(frozen=True)
class Contestant:
    """A model to train."""

    name: str
    recipe: Recipe
    folder: Path


def contestants(
    model: str,
    config: Any,
    folder: Path,
    *,
    schemes: Sequence[str] | None,
    budget: int,
    overrides: Sequence[str],
    samples: int = 32,
) -> tuple[Contestant, ...]:
    """Return the native model and each scheme, with the conversion of its built-in recipe for the architecture.

    Training, teacher and adapter are the same for all, except for recipes that are named themselves.

    Raises:
        OptionError: An override changes a fixed key or is no use to the native model, or a scheme is named twice.
        RecipeError: A recipe is missing or invalid.
        UnknownSchemeError: A scheme is unknown.
    """
    for pair in overrides:
        key = ".".join(next(iter(fields.override(Recipe, {}, [pair]))))
        for settled, reason in _SETTLED.items():
            if key == settled or key.startswith(f"{settled}."):
                raise OptionError(f"{pair!r}: {key} is the same for all schemes or each one's own: {reason}.")
    wanted = tuple(_usual(config) if schemes is None else schemes)
    names = [Path(source).stem for source in wanted]
    if not wanted or len(set(names)) < len(names) or NATIVE in names:
        raise OptionError(
            f"Got the schemes {', '.join(wanted) or 'none'}; expected different ones, none called {NATIVE!r}."
        )
    named = [f"model={model}", *overrides]
    # Not the first one named: all must stay the same when a comparison is extended.
    common = Recipe.read("swap", [f"scheme={_usual(config)[0]}", *named], config=config)
    if common.adapter.kind == "scheme":
        raise OptionError(
            "adapter.kind is 'scheme', but the native model is trained alike and has no weights of a scheme. Give "
            "adapter=lora, or leave it out."
        )
    length, _ = suitability.lengths(common, config)

    def entered(name: str, recipe: Recipe) -> Contestant:
        training = replace(recipe.training, steps=budget, length=length)
        # The examiner measures more after training, by the same measures for all.
        evaluation = Evaluation(contexts=[max(length, TARGETS)], windows=min(Evaluation.windows, samples))
        recipe = replace(recipe, model=model, training=training, evaluation=evaluation)
        return Contestant(name, recipe, folder / name)

    control = replace(
        common,
        summary="The native model with the same training.",
        conversion=Conversion(scheme=None),
        distillation=Distillation(),
        transfer=Transfer(),
    )
    first = entered(NATIVE, control)
    others = []
    for name, source in zip(names, wanted, strict=True):
        if library.is_file(source):
            own = Recipe.read(source, overrides)
        elif source in library.names():
            own = Recipe.read(source, named, config=config)
        else:
            # Unknown scheme names raise their own error.
            its_own = [f"scheme={registry.get(source).name}", f"model={model}", f"training.length={length}"]
            own = Recipe.read("swap", its_own, config=config)
            # What is kept in force has nothing to transfer.
            own = replace(common, conversion=own.conversion, transfer=own.transfer)
        suitability.check_unconverted(own, config)
        others.append(entered(name, own))
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


def _usual(config: Any) -> list[str]:
    """Return the schemes that declare themselves usual and are defined for the model."""
    direction = "causal" if auto_class(config) is AutoModelForCausalLM or config.is_encoder_decoder else "bidirectional"
    return [name for name, info in registry.schemes().items() if info.usual and direction in info.directions]


def settings(entered: Sequence[Contestant]) -> dict[str, str]:
    """Return the keys in which the schemes of a comparison differ from each other, in words, by name."""
    found = {each.name: each.recipe.flat() for each in entered}
    first, *others = (own for name, own in found.items() if name != NATIVE)
    told = {"summary", "conversion.scheme"}
    differing = [key for key in first if key not in told and any(own[key] != first[key] for own in others)]
    usual = Recipe(model=NATIVE, conversion=Conversion(scheme=None)).flat()
    return {
        name: ", ".join(f"{key}={own[key]}" for key in differing if own[key] != usual[key]) or "-"
        for name, own in found.items()
    } | {NATIVE: "no scheme, no teacher"}
