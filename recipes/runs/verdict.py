"""The verdict on a run, by these rules and no others.

1. The trained model is compared with the native one, or with the control (the same training without a scheme) if there
   is one, at the measured length nearest the trained length, paired by window.
2. It is better or worse if the 95 % interval of the ratio of perplexities excludes 1, and as good otherwise. If the
   interval goes beyond `HOLDS`, that is said to be all that so few windows can tell.
3. It is bad if its perplexity is above `HOLDS` times the other's, or no number.
4. A run that was measured at shorter texts only than it is for says so.
5. If it is worse at a shorter length and not at this one, it says so: a config may state more than a model was trained
   on, and there the native model is no measure.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hf_posenc.errors import PosencError
from hf_posenc.recipes.evaluation.grid import RATIO, Grid
from hf_posenc.recipes.intervals import Interval
from hf_posenc.recipes.runs.facts import Facts
from hf_posenc.recipes.runs.files import MEASUREMENTS, MODEL, RECIPE, TEXT, record_of
from hf_posenc.recipes.runs.measurements import Measurements
from hf_posenc.recipes.schema.recipe import Recipe

HOLDS = 1.10
Grade = Literal["better", "as good", "worse"]
# Settings of a training that a control does without, or that change no result.
_OF_A_SWAP = dict.fromkeys(("micro_batch_size", "gradient_checkpointing", "skip_to", "scheme_learning_rate"))


@dataclass(frozen=True)
class Verdict:
    """A verdict with its reasons.

    Attributes:
        grade: The trained model compared with the native one or the control.
        is_bad: Whether the model should not be used as it is.
        advice: The next step.
        wants_control: Whether a control would tell more.
    """

    grade: Grade
    is_bad: bool
    sentences: tuple[str, ...]
    advice: str
    wants_control: bool = False

    def __str__(self) -> str:
        return " ".join((*self.sentences, self.advice))


def judge(measurements: Measurements, facts: Facts, control: Measurements | None = None) -> Verdict | None:
    """Apply the rules to a run and its control; return `None` if nothing was measured that can be compared."""
    native, after = measurements.curve("native"), measurements.curve("after")
    rival, other = native, "the native model"
    trained = None if control is None else control.curve("after")
    # One that was measured on other windows cannot be paired.
    here, there = (None if grid is None else (grid.axes, grid.samples.shape) for grid in (after, trained))
    if trained is not None and here == there:
        rival, other = trained, "the control"
    if rival is None or after is None or not any(map(rival.reads, rival.points)):
        return None
    length = nearest(filter(rival.reads, rival.points), facts.trained_length)
    ratio = after.relative_to(rival).at(length)
    is_bad = not ratio.mean <= HOLDS
    is_sure = ratio.high < 1 or ratio.low > 1
    grade: Grade = "worse" if is_bad or ratio.low > 1 else "better" if is_sure else "as good"
    words = "as good as" if grade == "as good" else f"{'significantly ' * is_sure}{grade} than"
    first = f"{facts.encoding or 'the trained model'} is {words} {other}"
    if grade == "as good" and ratio.high > HOLDS:
        first += f", as far as {after.samples.shape[-1]} windows can tell"
    if math.isfinite(ratio.mean):
        first += f": at {length:,} tokens its perplexity is {RATIO.say(ratio)} of that one's"
    sentences = (
        f"{first[0].upper()}{first[1:]}.",
        *_near(after, rival, length),
        *_far(after, rival, other, length),
        *_unmeasured(after, facts),
    )
    # Of the scheme's weights alone, nothing is left to train in a control.
    has_control = facts.encoding is not None and facts.trained_parameters != facts.new_parameters
    alone = rival is native and has_control and not is_bad
    return Verdict(grade, is_bad, sentences, _advice(facts, ratio, is_bad=is_bad, alone=alone), alone)


def nearest(contexts: Iterable[int], length: int) -> int:
    """Return the context length nearest a trained length, on a logarithmic scale."""
    return min(contexts, key=lambda context: abs(math.log(context / length)))


def _near(after: Grid, rival: Grid, length: int) -> Iterator[str]:
    """Yield the sentence on the shortest text, if only there the model is worse."""
    shortest = min(filter(rival.reads, rival.points))
    here, there = (after.relative_to(rival).at(context) for context in (length, shortest))
    if here.low <= 1 < there.low:
        yield f"But at {shortest:,} tokens its perplexity is {RATIO.say(there)} of that one's."


def _far(after: Grid, rival: Grid, other: str, length: int) -> Iterator[str]:
    """Yield the sentence on the longest text."""
    farthest = max(after.points)
    if farthest <= length:
        return
    own = f"{RATIO.say(RATIO.interval(after.values(farthest) - after.values(length)))} of its own at {length:,}"
    if not after.reads(farthest):
        yield f"It cannot read {farthest:,} tokens."
    elif rival.reads(farthest):
        share = RATIO.say(after.relative_to(rival).at(farthest))
        yield f"At {farthest:,} tokens its perplexity is {share} of that one's, and {own}."
    else:
        yield f"At {farthest:,} tokens, which {other} cannot read, its perplexity is {own}."


def _unmeasured(after: Grid, facts: Facts) -> Iterator[str]:
    """Yield the sentence on the length that a run is for, if it was too short to be measured there."""
    wanted, farthest = max(facts.trained_length, facts.reach), max(after.points)
    if farthest < wanted:
        yield (
            f"The run is for texts of up to {wanted:,} tokens, and nothing was measured beyond {farthest:,} "
            f"(evaluation.contexts=[{wanted}] does)."
        )


def _advice(facts: Facts, ratio: Interval, *, is_bad: bool, alone: bool) -> str:
    if not math.isfinite(ratio.mean):
        return "The training diverged. Train again with lower rates: training.learning_rate, scheme_learning_rate."
    if is_bad:
        keep = ", or with the native encoding kept (conversion.native=keep)" * (facts.fate != "kept")
        longer = f"it longer (steps={4 * facts.recipe.training.steps})"
        trains_scheme_alone = facts.trained_parameters == facts.new_parameters
        more = "more weights (adapter=lora)" if trains_scheme_alone else longer
        return f"It is not ready for use. Train {more}{keep}."
    if alone:
        return (
            "The native model had no such training. To tell what the encoding did, train a control, too: the same run "
            "without a swap, in a folder next to this one."
        )
    return "To compare it by other measures, use hf-posenc eval."


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
                other = Recipe.read(path)
                alike = training(other) == training(recipe) and record_of(path.parent).get(TEXT, text) == text
                if other.conversion.scheme is None and not other.conversion.rope and alike:
                    return Measurements.load(path.parent / MEASUREMENTS, writes=False)
    return None
