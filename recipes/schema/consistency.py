"""Cross-field validation of recipes, and validation of their schemes and options."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from hf_posenc.errors import PosencError, RecipeError

if TYPE_CHECKING:
    from hf_posenc.recipes.schema.recipe import Conversion, Data, Recipe, Training
    from hf_posenc.scheme import Scheme


def check(recipe: Recipe, where: str) -> None:
    """Raise `RecipeError` if keys contradict each other, or a given key has no effect; `where` names the recipe."""
    for problem in (*_without_effect(recipe), *_contradictions(recipe)):
        raise RecipeError(f"{where}: {problem}")


def check_scheme(recipe: Recipe, where: str) -> None:
    """Raise `RecipeError` if scheme or options do not exist, or the scheme lacks weights that are to be trained."""
    if recipe.conversion.scheme is not None:
        for problem in _of_scheme(recipe, recipe.conversion.scheme):
            raise RecipeError(f"{where}: {problem}")


def anneals(conversion: Conversion) -> bool:
    """Whether the scheme is brought in gradually."""
    return conversion.scheme is not None and conversion.options.get("anneal") is True


def warmup_steps(training: Training) -> int:
    """Return the number of warmup steps."""
    return round(training.warmup * training.steps)


def _without_effect(recipe: Recipe) -> Iterator[str]:
    conversion, data, distillation, kind = recipe.conversion, recipe.data, recipe.distillation, recipe.adapter.kind
    has_scheme, distils = conversion.scheme is not None, distillation.share > 0 or distillation.hidden > 0
    # Section, its keys, whether they have an effect, and what they need for it.
    needs = (
        ("conversion", "options native layers window stacks fit", has_scheme, "a scheme"),
        ("conversion", "window", conversion.layers is not None, "conversion.layers"),
        ("conversion", "handover", conversion.native == "handover", "conversion.native: handover"),
        ("conversion", "anneal", anneals(conversion), "anneal: true among conversion.options"),
        ("data", "config split column held_out_share", data.source != "builtin", "another data.source than builtin"),
        ("data", "held_out_share", data.held_out is None, "data.held_out: null"),
        ("transfer", _but_steps(recipe.transfer), recipe.transfer.steps > 0, "transfer.steps above 0"),
        ("lengthen", _but_steps(recipe.lengthen), recipe.lengthen.steps > 0, "lengthen.steps above 0"),
        ("distillation", "until teacher", distils, "distillation.share or distillation.hidden above 0"),
        ("adapter", "rank alpha dropout targets", kind == "lora", "adapter.kind: lora"),
        ("adapter", "four_bit", kind != "none", "adapter.kind: lora or scheme"),
    )
    for name, keys, is_met, words in needs:
        section = getattr(recipe, name)
        for entry in dataclasses.fields(section):
            made = entry.default_factory
            default = entry.default if made is dataclasses.MISSING else made()
            value = getattr(section, entry.name)
            if entry.name in keys.split() and not is_met and value != default:
                key = f"{name}.{entry.name}"
                yield f"{key} is {value!r}, which does nothing without {words}. Give that, or leave {key} out."


def _but_steps(section: object) -> str:
    assert dataclasses.is_dataclass(section)
    return " ".join(entry.name for entry in dataclasses.fields(section) if entry.name != "steps")


def _contradictions(recipe: Recipe) -> Iterator[str]:
    conversion, data, training = recipe.conversion, recipe.data, recipe.training
    if conversion.fit == "native" and conversion.native == "keep":
        yield (
            "conversion.fit is 'native', but conversion.native is 'keep': the model would have its encoding twice. "
            "Set conversion.native to remove or handover, or leave fit out."
        )
    moves = {"conversion.fit is 'attention'": conversion.fit == "attention"}
    moves[f"transfer.steps is {recipe.transfer.steps}"] = recipe.transfer.steps > 0
    for given in (words for words, is_given in moves.items() if is_given):
        if conversion.scheme is None:
            yield f"{given}, but conversion.scheme is null: attention is what it was. Give a scheme, or leave it out."
        elif conversion.native != "remove":
            yield (
                f"{given}, but conversion.native is {conversion.native!r}: with its own encoding in force, attention "
                "is what it was. Set conversion.native to remove, or leave it out."
            )
    if conversion.window is not None and conversion.native == "handover":
        yield (
            f"conversion.window is {conversion.window}, but conversion.native is 'handover', in which the layers that "
            "keep their encoding would fade, too. Set conversion.native to remove, or leave window out."
        )
    if conversion.rope and (conversion.scheme is not None or recipe.adapter.kind != "none"):
        yield (
            "conversion.rope changes the config of the model, which neither a scheme nor an adapter holds. Give "
            "conversion.scheme=null adapter.kind=none, or leave rope out."
        )
    if data.streaming and data.source == "builtin":
        yield "data.streaming is true, but the builtin text is there at once. Set data.source, or leave streaming out."
    if data.streaming and data.held_out is None:
        yield "data.streaming is true, so no share can be set aside. Give data.held_out, a split or a file."
    if recipe.adapter.kind == "scheme" and conversion.scheme is None:
        yield "adapter.kind is 'scheme', but conversion.scheme is null: nothing would be trained. Give a scheme."
    if training.steps == warmup_steps(training) == 1 and training.schedule != "constant":
        yield (
            f"training.warmup is {training.warmup}: the rates rise from 0, which would be the rate of the only step. "
            "Give less warmup, or more steps."
        )
    yield from _of_windows(training, data)
    if recipe.lengthen.steps:
        yield from (words.replace("training.", "lengthen.") for words in _of_windows(recipe.lengthening, data))


def _of_windows(training: Training, data: Data) -> Iterator[str]:
    if training.micro_batch_size and training.batch_size % training.micro_batch_size:
        yield (
            f"training.micro_batch_size is {training.micro_batch_size}; expected a divisor of "
            f"training.batch_size = {training.batch_size}."
        )
    if training.length is not None:
        yield from contradictions_of_length(training, training.length)
    if training.skip_to is not None and data.packing == "documents":
        yield (
            "training.skip_to gives each window the positions of one long text, but data.packing is 'documents'. "
            "Set data.packing to windows, or leave skip_to out."
        )


def contradictions_of_length(training: Training, length: int) -> Iterator[str]:
    """Yield what contradicts a window length, which may be the model's own."""
    if training.skip_to is not None and training.skip_to <= length:
        yield (
            f"training.skip_to is {training.skip_to}; expected more than training.length = {length}: there are no "
            "positions to skip. Recipes come with the skip_to of a small model; give for instance "
            f"training.skip_to={8 * length}."
        )


def _of_scheme(recipe: Recipe, name: str) -> Iterator[str]:
    from hf_posenc import registry

    conversion = recipe.conversion
    try:
        info = registry.get(name)
    except PosencError as error:
        yield f"conversion.scheme: {error}"
        return
    try:
        registry.check_options(info, conversion.options)
    except PosencError as error:
        yield f"conversion.options: {error} Set conversion.options={{}} for its defaults."
        return
    scheme = _example(name, conversion)
    if conversion.fit is not None:
        yield from _of_fit(name, conversion.fit, scheme)
    if scheme is not None and not any(parameter.requires_grad for parameter in scheme.parameters()):
        without = f"{name} has no weights with these options"
        if conversion.fit is not None:
            yield f"conversion.fit is {conversion.fit!r}, but {without}. Set conversion.fit to null, or other options."
        if recipe.adapter.kind == "scheme":
            yield (
                f"adapter.kind is 'scheme', but {without}: nothing would be trained. Set adapter.kind to none or lora."
            )


def _of_fit(name: str, like: Literal["native", "attention"], scheme: Scheme | None) -> Iterator[str]:
    from hf_posenc.recipes.training.fit_bias import additive

    if like == "attention":
        if scheme is not None and scheme.overrides("embed"):
            yield (
                f"conversion.fit is 'attention', but {name} is added to the inputs of the model, not in attention. "
                "Leave fit out."
            )
    elif name not in additive():
        yield (
            f"conversion.fit is {like!r}, but {name} adds no bias of the distance. Set it to attention, leave it out, "
            f"or choose one of {', '.join(additive())}."
        )


def _example(name: str, conversion: Conversion) -> Scheme | None:
    """Return the scheme built for an example attention; `None` if it does not support that attention."""
    import torch

    from hf_posenc import registry
    from hf_posenc.operands import Geometry

    geometry = Geometry(heads=8, kv_heads=8, head_dim=64, hidden_size=512, max_positions=512)
    # Reading a recipe must neither change the caller's random state nor allocate the weights.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        try:
            return registry.build(name, geometry, **conversion.options)
        except PosencError:
            return None
