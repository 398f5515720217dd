"""Layers of a hybrid that a recipe leaves to measurement: `layers: auto:7` becomes the 7 cheapest, before its run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_posenc import registry
from hf_posenc.errors import RecipeError
from hf_posenc.recipes import durations
from hf_posenc.recipes.data.windows import start_token
from hf_posenc.recipes.loading import auto_class, load
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.reports import counted, say
from hf_posenc.recipes.runs import files
from hf_posenc.recipes.runs.case import Case
from hf_posenc.recipes.schema.recipe import Recipe
from hf_posenc.recipes.training.layers import BATCH, STEPS, WINDOWS, LayerCosts, layer_costs, seconds_for, windows_for
from hf_posenc.scheme import Scheme


def stand_in(recipe: Recipe, config: Any) -> Recipe:
    """Return a recipe with as many layers as are to be measured, whichever they are; any other recipe unchanged.

    Raise `RecipeError` if the layers of this recipe, or of a model with this config, cannot be measured.
    """
    count = recipe.conversion.measured_layers
    if count is None:
        return recipe
    conversion, every = recipe.conversion, config.get_text_config().num_hidden_layers
    assert conversion.scheme is not None
    words = None
    if auto_class(config) is not AutoModelForCausalLM:
        words = f"they are chosen by how a causal model copies, and {config.model_type} models are none"
    elif count >= every:
        words = f"the model has {every} layers, and some are to keep their encoding"
    elif registry.get(conversion.scheme).cls.embed is not Scheme.embed:
        words = f"{conversion.scheme} acts on the inputs of the model, not in its layers"
    elif conversion.native == "keep":
        words = "with conversion.native: keep no layer costs anything"
    elif recipe.adapter.four_bit:
        words = "a model in 4 bits cannot be transferred"
    if words is not None:
        raise RecipeError(
            f"conversion.layers is {conversion.layers!r}, but {words}. Give indices or every:N, or leave it out."
        )
    return _with_layers(recipe, list(range(count)))


def known(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe with the layers that its run, which has begun in a folder, has measured; or unchanged."""
    found = files.record_of(folder).get(files.LAYERS) if files.has_begun(folder) else None
    if found is None or found["asked"] != recipe.conversion.layers:
        return recipe
    return _with_layers(recipe, found["layers"])


def measured(case: Case, console: Console | None = None) -> tuple[Recipe, Mapping[str, Any]]:
    """Return the recipe with its cheapest layers, and what run.json keeps of their measurement.

    The text is what is trained on, so that nothing is chosen on the held-out text.
    """
    recipe, conversion = case.recipe, case.recipe.conversion
    assert conversion.scheme is not None
    assert conversion.measured_layers is not None
    model, _ = load(recipe.model, dtype=torch.float32)
    spared = case.config.get_text_config().num_hidden_layers - conversion.measured_layers
    with case.precise():
        costs = layer_costs(
            model.to(processes().device),
            conversion.scheme,
            _windows(case),
            native="remove" if conversion.native == "handover" else conversion.native,
            options={name: value for name, value in conversion.options.items() if name != "anneal"},
            special=case.tokenizer.all_special_ids,
            spared=[spared],
            seed=recipe.training.seed,
            tell=lambda seconds: say(console, f"measuring which layers cost least: {durations.words(seconds)}"),
        )
    # Rounding may differ between processes.
    [costs] = broadcast_object_list([costs])
    [layers] = costs.cheapest(spared).values()
    for words in (*sentences(costs, spared), f"cheapest layers: {', '.join(map(str, layers))}"):
        say(console, words)
    kept = {"asked": conversion.layers, "layers": layers, "costs": asdict(costs)}
    return _with_layers(recipe, layers), {files.LAYERS: kept}


def seconds(case: Case, model: Any) -> float:
    """Estimate how long the layers of a recipe take to measure, on a stock model of its shapes; 0 if none are."""
    return 0.0 if case.recipe.conversion.measured_layers is None else seconds_for(model, _windows(case))


def sentences(costs: LayerCosts, spared: int) -> Iterator[str]:
    """Yield what layers carry, and what the cheapest ones cost together, in words."""
    for name, share in costs.abilities.items():
        carrying = ", ".join(f"{each.layer} ({each.abilities[name]:.0%})" for each in costs.carrying(name))
        rest = (
            f"without one of these, less than half of it is left: layers {carrying}" if carrying else "no layer alone"
        )
        yield f"{name}: the original {share:.0%}; {rest}"
    if not costs.abilities:
        yield "The original does not copy or recall random tokens, so perplexity alone decides."
    found, dear = costs.hybrids[spared], counted(spared, "most expensive layer")
    said = f"Without the {dear}, before training: perplexity {math.expm1(found.cost):+.0%}"
    yield ", ".join((said, *(f"{name} {found.abilities[name]:.0%}" for name in costs.abilities)))


def _windows(case: Case) -> Tensor:
    wanted = WINDOWS + STEPS * BATCH
    rows = itertools.islice(iter(case.text(case.recipe.training).train), wanted)
    tokens = torch.cat([row["input_ids"] for row in rows]).long()
    return windows_for(tokens, trained=min(case.length, case.own_length), start=start_token(case.tokenizer))


def _with_layers(recipe: Recipe, layers: list[int]) -> Recipe:
    return replace(recipe, conversion=replace(recipe.conversion, layers=layers))
