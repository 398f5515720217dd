"""The verdict on a run, with the next step: what is worth training longer, and whether a control would tell more."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.recipes.evaluation import verdict
from hf_posenc.recipes.evaluation.grid import Grid
from hf_posenc.recipes.evaluation.verdict import CONTROL, ORIGINAL, Verdict, nearest
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.layout import MEASUREMENTS, MODEL, RECIPE
from hf_posenc.recipes.runs.facts import Facts
from hf_posenc.recipes.runs.files import TEXT, record_of
from hf_posenc.recipes.runs.measurements import Measurements
from hf_posenc.recipes.schema.recipe import Recipe, StageName

# Tokens that a stage was measured to be worth (docs/which_scheme.md): of a model that begins with a transfer, and of a
# training alone. More may help, but nobody knows.
_WORTH: dict[str, dict[StageName, int]] = {
    "with a transfer": {"transfer": 920_000, "training": 700_000},
    "alone": {"training": 2_000_000},
}
_NAMES: dict[StageName, str] = {"transfer": "attention transfer", "training": "training"}
# Settings of a training that a control does without, or that change no result.
_OF_A_SWAP = dict.fromkeys(("micro_batch_size", "gradient_checkpointing", "skip_to", "scheme_learning_rate"))


def judge(measurements: Measurements, facts: Facts, control: Measurements | None = None) -> Verdict | None:
    """Compare a trained model with its control, or else with the original; `None` if nothing was measured."""
    own, rival, other = measurements.results("after"), measurements.results(ORIGINAL), ORIGINAL
    if control is not None and is_comparable(measurements, control):
        rival, other = control.results("after"), CONTROL
    name = facts.encoding or "the trained model"
    found = verdict.judge(own, rival, facts.trained_length, name=name, other=f"the {other}")
    if found is None:
        return None
    after = own["perplexity"]
    # Of the scheme's weights alone, nothing is left to train in a control.
    has_control = facts.encoding is not None and facts.trained_parameters != facts.new_parameters
    wants_control = other == ORIGINAL and has_control and not found.is_bad
    return replace(
        found,
        sentences=(*_unmeasured(after, facts), *found.sentences),
        advice=_advice(facts, found, after, wants_control=wants_control),
        wants_control=wants_control,
    )


def is_comparable(measurements: Measurements, control: Measurements) -> bool:
    """Whether a run and its control were measured on the same windows, and can be paired."""
    here, there = (each.curve("after") for each in (measurements, control))
    if here is None or there is None:
        return False
    return (here.axes, here.samples.shape) == (there.axes, there.samples.shape)


def _unmeasured(after: Grid, facts: Facts) -> list[str]:
    """Return the sentence on a run that was measured at shorter texts only than it is for."""
    wanted, farthest = max(facts.trained_length, facts.reach), max(after.points)
    said = f"Measured up to {farthest:,} of the {wanted:,} tokens that the run is for "
    return [f"{said}(evaluation.contexts=[{wanted}] measures the rest)."] * (farthest < wanted)


def _advice(facts: Facts, found: Verdict, after: Grid, *, wants_control: bool) -> str:
    if not after.at(nearest(after.points, facts.trained_length)).is_known:
        return "The training diverged. Train again with lower rates: training.learning_rate, scheme_learning_rate."
    if found.is_bad:
        keep = " conversion.native=keep keeps the native encoding, too." * (facts.fate != "kept")
        alone = facts.trained_parameters == facts.new_parameters
        return f"It is not ready for use. {'Train more weights (adapter=lora).' if alone else _more(facts)}{keep}"
    if wants_control:
        return (
            "The original had no such training. To tell what the encoding did, train a control, too: the same run "
            "without a swap, in a folder next to this one."
        )
    return "To compare it by other measures, use hf-posenc eval."


def _more(facts: Facts) -> str:
    """Return the first stage with fewer tokens than were measured to help, in words."""
    stages = facts.recipe.stages()
    for name, worth in _WORTH["with a transfer" if "transfer" in stages else "alone"].items():
        settings = stages[name]
        tokens = settings.batch_size * (settings.length or facts.length)
        steps = math.ceil(worth / tokens)
        # A little more would tell nothing.
        if 1.2 * settings.steps < steps:
            return (
                f"Train it longer: {worth:,} tokens of {_NAMES[name]} were measured to help, and this run had "
                f"{settings.steps * tokens:,} ({f'{name}.' * (name != 'training')}steps={steps})."
            )
    return (
        "It had as many tokens as were ever measured, so rather convert fewer layers: `hf-posenc layers` says which "
        "cost most, and conversion.layers=auto:K takes the K cheapest."
    )


def control_of(folder: Path, recipe: Recipe, text: str) -> Measurements | None:
    """Return the measurements of a finished run next to this one, which trained the same and changed no encoding."""

    def training(each: Recipe) -> list[Any]:
        stages = ({**asdict(part), **_OF_A_SWAP} for part in (each.training, each.lengthen))
        return [each.model, each.data, each.adapter, *stages]

    changes = recipe.conversion.scheme is not None or recipe.conversion.rope
    folder = folder.resolve()
    for path in sorted(folder.parent.glob(f"*/{RECIPE}")) if changes else ():
        if path.parent != folder and (path.parent / MODEL).is_dir():
            with contextlib.suppress(PosencError):
                other = read_recipe(path)
                alike = training(other) == training(recipe) and record_of(path.parent).get(TEXT, text) == text
                if other.conversion.scheme is None and not other.conversion.rope and alike:
                    return Measurements.load(path.parent / MEASUREMENTS, writes=False)
    return None
