"""Checks of recipes: of their keys together, of their schemes and options, and against a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM

from hf_posenc import registry
from hf_posenc.errors import PosencError, RecipeError, shown
from hf_posenc.patches import record
from hf_posenc.patches.inspection import table_end
from hf_posenc.recipes.loading import TINY_LLAMA, auto_class, trained_length
from hf_posenc.scheme import Scheme

if TYPE_CHECKING:
    from hf_posenc.recipes.schema.recipe import Recipe


def check(recipe: Recipe, where: str) -> None:
    """Raise `RecipeError` if keys contradict each other or have no effect, or a scheme does not exist.

    `where` names the recipe.
    """
    check_scheme_name(recipe, where)
    for problem in (*_without_effect(recipe), *_contradictions(recipe), *_of_scheme(recipe)):
        raise RecipeError(f"{where}: {problem}")


def _without_effect(recipe: Recipe) -> Iterator[str]:
    conversion, data, kind = recipe.conversion, recipe.data, recipe.adapter.kind
    has_scheme, distils = conversion.scheme is not None, recipe.distillation.distils
    stages = (recipe.transfer, recipe.lengthen)
    all_but_steps = " ".join(key.name for stage in stages for key in dataclasses.fields(stage) if key.name != "steps")
    # Section, its keys, whether they have an effect, and what they need for it.
    needs = (
        ("conversion", "options native layers window stacks fit", has_scheme, "a scheme"),
        ("conversion", "window", conversion.layers is not None, "conversion.layers"),
        ("conversion", "handover", conversion.native == "handover", "conversion.native: handover"),
        ("conversion", "anneal", conversion.anneals, "anneal: true among conversion.options"),
        ("data", "config split column held_out_share", data.read_from != "builtin", "another data.source than builtin"),
        ("data", "held_out_share", data.held_out is None, "data.held_out: null"),
        ("transfer", all_but_steps, "transfer" in recipe.stages(), "transfer.steps above 0"),
        ("lengthen", all_but_steps, recipe.lengthen.steps > 0, "lengthen.steps above 0"),
        ("lengthen", "short", recipe.lengthen.length is not None, "lengthen.length"),
        ("lengthen", "short", recipe.lengthen.skip_to is None, "lengthen.skip_to: null"),
        ("distillation", "until teacher", distils, "distillation.share or distillation.hidden above 0"),
        ("adapter", "rank alpha dropout targets", kind == "lora", "adapter.kind: lora"),
        ("adapter", "four_bit", kind != "none", "adapter.kind: lora or scheme"),
    )
    for name, keys, is_met, words in needs:
        section = getattr(recipe, name)
        for entry in dataclasses.fields(section):
            made, value = entry.default_factory, getattr(section, entry.name)
            default = entry.default if made is dataclasses.MISSING else made()
            if entry.name in keys.split() and not is_met and value != default:
                key = f"{name}.{entry.name}"
                yield f"{key} is {shown(value)}, which does nothing without {words}. Give that, or leave {key} out."


def _contradictions(recipe: Recipe) -> Iterator[str]:
    conversion, data, training, native = recipe.conversion, recipe.data, recipe.training, recipe.conversion.native
    has_scheme, steps = conversion.scheme is not None, recipe.transfer.steps
    asked = f"transfer.steps is {steps}" if steps else "conversion.fit is 'transfer'"
    if conversion.fit == "native" and (native == "keep" or conversion.keeps_share):
        yield (
            f"conversion.fit is 'native', but conversion.native is {native!r}: the model would have its encoding "
            "twice. Set conversion.native to remove or handover, or leave fit out."
        )
    if "transfer" in recipe.stages() and not has_scheme:
        yield f"{asked}, but conversion.scheme is null: there is nothing to transfer. Give a scheme, or leave it out."
    if "transfer" in recipe.stages() and native in ("keep", "handover"):
        yield (
            f"{asked}, but conversion.native is {native!r}: with its own encoding in force, there is nothing to "
            "transfer. Set conversion.native to remove or to a share, or leave it out."
        )
    if conversion.window is not None and native == "handover":
        yield (
            f"conversion.window is {conversion.window}, but conversion.native is 'handover', in which the layers that "
            "keep their encoding would fade, too. Set conversion.native to remove, or leave window out."
        )
    if conversion.rope and (has_scheme or recipe.adapter.kind != "none"):
        yield (
            "conversion.rope changes the config of the model, which neither a scheme nor an adapter holds. Give "
            "conversion.scheme=null adapter.kind=none, or leave rope out."
        )
    if data.streaming and data.read_from == "builtin":
        yield "data.streaming is true, but the builtin text is there at once. Set data.source, or leave streaming out."
    if data.streaming and data.held_out is None:
        yield "data.streaming is true, so no share can be set aside. Give data.held_out, a split or a file."
    if recipe.adapter.kind == "scheme" and not has_scheme:
        yield "adapter.kind is 'scheme', but conversion.scheme is null: nothing would be trained. Give a scheme."
    if training.steps == training.warmup_steps == 1 and training.schedule != "constant":
        yield (
            f"training.warmup is {training.warmup}: the rates rise from 0, which would be the rate of the only step. "
            "Give less warmup, or more steps."
        )
    if data.source is None and recipe.model != TINY_LLAMA:
        yield (
            f"no text is named for the model {recipe.model!r}. Give data=FILE (txt, jsonl or parquet), a folder, or a "
            "dataset on the hub; data=builtin takes the documentation of Python."
        )
    if data.packing == "documents":
        if recipe.transfer.repeat:
            yield (
                f"transfer.repeat is {recipe.transfer.repeat}: the second half of a window repeats the first, but "
                "data.packing is 'documents', which do not see each other. Take windows, or leave repeat out."
            )
        for name in (name for name, stage in recipe.stages().items() if stage.skip_to is not None):
            yield (
                f"{name}.skip_to gives each window the positions of one long text, but data.packing is 'documents'. "
                "Set data.packing to windows, or leave skip_to out."
            )


# -- scheme ------------------------------------------------------------------------------------------------------------


def check_scheme_name(recipe: Recipe, where: str) -> None:
    if recipe.conversion.scheme is not None:
        try:
            registry.get(recipe.conversion.scheme)
        except PosencError as error:
            raise RecipeError(f"{where}: conversion.scheme: {error}") from error


def _of_scheme(recipe: Recipe) -> Iterator[str]:
    conversion = recipe.conversion
    if conversion.scheme is not None:
        try:
            registry.check_options(registry.get(conversion.scheme), conversion.options)
        except PosencError as error:
            yield f"conversion.options: {error} Set conversion.options={{}} for its defaults."


# -- model -------------------------------------------------------------------------------------------------------------


def lengths(recipe: Recipe, config: Any) -> tuple[int, int]:
    """Return the window length and the model's trained length; raise `RecipeError` if none is known or suits it."""
    own = trained_length(config)
    length = recipe.training.length or own
    if length is None:
        raise RecipeError(
            f"training.length is null, which is the model's trained length, and the config of {recipe.model} has none. "
            "Give a number of tokens, for instance training.length=512."
        )
    for name, stage in recipe.stages().items():
        if stage.skip_to is not None and stage.skip_to <= (read := stage.length or length):
            raise RecipeError(
                f"{name}.skip_to is {stage.skip_to}; expected more than {name}.length = {read}: there are no positions "
                f"to skip. Give for instance {name}.skip_to={8 * read}."
            )
    skipped = recipe.transfer.skip_to
    if skipped is not None and own is not None and skipped > own:
        raise RecipeError(
            f"transfer.skip_to is {skipped}; expected at most {own}, the trained length of {recipe.model}: the "
            "original reads the same positions, and knows none beyond."
        )
    if auto_class(config) is not AutoModelForCausalLM:
        asked: dict[str, Any] = {f"{name}.skip_to": stage.skip_to for name, stage in recipe.stages().items()}
        asked["transfer.repeat"] = recipe.transfer.repeat
        asked["lengthen.short"] = short if (short := recipe.lengthen.short) != type(recipe.lengthen).short else 0
        for key, value in asked.items():
            if value:
                raise RecipeError(
                    f"{key} is {value}: it is for texts that go on, and {config.model_type} models restore corrupted "
                    f"windows. Leave it out{f', or give {key}=null' * key.endswith('skip_to')}."
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
    has_scheme = recipe.conversion.scheme is not None
    known = (module.facts().end for module in model.modules() if isinstance(module, Scheme))
    # Packed documents may all be shorter than the window.
    ends = (end for end in known if end is not None and recipe.data.packing == "windows")
    rows, end = min(ends, default=None), table_end(model)
    for name, stage in recipe.stages().items():
        for key, reach in (("length", stage.length or length), ("skip_to", stage.skip_to or 0)):
            if rows is not None and reach > rows:
                way = "; or more of them by conversion.options" * has_scheme
                raise RecipeError(
                    f"{name}.{key} is {reach}, and the scheme knows {rows} positions. Give at most as many{way}."
                )
            # A handover is over before the long windows.
            is_gone = name == "lengthen" and has_scheme and recipe.conversion.native == "handover"
            if end is not None and reach > end and not is_gone:
                why = f", which conversion.native={recipe.conversion.native} leaves in force," * has_scheme
                way = "conversion.native=remove, or " * has_scheme
                raise RecipeError(
                    f"{name}.{key} is {reach}, and the model's own table{why} has {end} positions. Give {way}at most "
                    "as many."
                )
