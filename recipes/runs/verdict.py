"""The verdict on a run, by these rules and no others.

1. The trained model is compared with the native one, or with the control (the same training without a scheme) if there
   is one, at the measured length nearest the trained length, paired by window.
2. It is better or worse if the 95 % interval of the ratio of perplexities excludes 1, and as good otherwise. If the
   interval goes beyond `HOLDS`, or there are fewer than `LEAST` windows, that is said to be all that they can tell.
3. It is bad if its perplexity is above `HOLDS` times the other's, or no number.
4. Whatever its perplexity, it is worse if it copies or recalls less where the other is above guessing: if the 95 %
   interval of the difference, paired by sequence, lies below 0. It is bad if it keeps less than `KEEPS` of that.
5. A run that was measured at shorter texts only than it is for begins with that.
6. If it is worse at a shorter length and not at this one, it says so: a config may state more than a model was trained
   on, and there the native model is no measure.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.recipes import intervals
from hf_posenc.recipes.evaluation.grid import RATIO, Grid
from hf_posenc.recipes.evaluation.recall import RECALLS
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.intervals import Interval
from hf_posenc.recipes.layout import MEASUREMENTS, MODEL, RECIPE
from hf_posenc.recipes.runs.facts import Facts
from hf_posenc.recipes.runs.files import TEXT, record_of
from hf_posenc.recipes.runs.measurements import Measurements
from hf_posenc.recipes.schema.recipe import Recipe, StageName

HOLDS = 1.10
KEEPS = 2 / 3
LEAST = 32
Grade = Literal["better", "as good", "worse"]
# Settings of a training that a control does without, or that change no result.
# Tokens that a stage was measured to be worth (docs/adaptation.md): of a model that begins with a transfer, and of a
# training alone. More may help, but nobody knows.
_WORTH: dict[str, dict[StageName, int]] = {
    "with a transfer": {"transfer": 920_000, "training": 700_000},
    "alone": {"training": 2_000_000},
}
_NAMES: dict[StageName, str] = {"transfer": "attention transfer", "training": "training"}
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

    # Notebooks show it as `print` does.
    __repr__ = __str__


def judge(measurements: Measurements, facts: Facts, control: Measurements | None = None) -> Verdict | None:
    """Apply the rules to a run and its control; return `None` if nothing was measured that can be compared."""
    native, after = measurements.curve("native"), measurements.curve("after")
    rival, other, recalls = native, "the native model", measurements.recalls("native")
    if control is not None and is_comparable(measurements, control):
        rival, other, recalls = control.curve("after"), "the control", control.recalls("after")
    if rival is None or after is None or not any(map(rival.reads, rival.points)):
        return None
    length = nearest(filter(rival.reads, rival.points), facts.trained_length)
    ratio = after.relative_to(rival).at(length)
    kept = measurements.recalls("after")
    lost = [_Loss(name, kept[name], recalls[name]) for name in kept if name in recalls]
    is_bad = not ratio.mean <= HOLDS or any(each.is_bad for each in lost)
    is_worse, is_sure = any(each.is_sure for each in lost), ratio.high < 1 or ratio.low > 1
    grade: Grade = "worse" if is_bad or ratio.low > 1 or is_worse else "better" if is_sure else "as good"
    words = "as good as" if grade == "as good" else f"{'significantly ' * (is_sure or is_worse)}{grade} than"
    first = f"{_reach(after, facts)}{facts.encoding or 'the trained model'} is {words} {other}"
    windows = after.samples.shape[-1]
    if (grade == "as good" and ratio.high > HOLDS) or windows < LEAST:
        first += f", as far as {windows} windows can tell"
    if math.isfinite(ratio.mean):
        first += f": at {length:,} tokens its perplexity is {RATIO.say(ratio)} of that one's"
    sentences = (
        f"{first[0].upper()}{first[1:]}.",
        *_near(after, rival, length),
        *_recalled(lost, other),
        *_far(after, rival, other, length),
    )
    # Of the scheme's weights alone, nothing is left to train in a control.
    has_control = facts.encoding is not None and facts.trained_parameters != facts.new_parameters
    alone = rival is native and has_control and not is_bad
    return Verdict(grade, is_bad, sentences, _advice(facts, ratio, is_bad=is_bad, alone=alone), alone)


def is_comparable(measurements: Measurements, control: Measurements) -> bool:
    """Whether a run and its control were measured on the same windows, and can be paired."""
    here, there = (each.curve("after") for each in (measurements, control))
    if here is None or there is None:
        return False
    return (here.axes, here.samples.shape) == (there.axes, there.samples.shape)


@dataclass(frozen=True, eq=False)
class _Loss:
    """What a model has lost of an ability: to copy, or to recall."""

    name: str
    after: Grid
    before: Grid

    @property
    def _samples(self) -> tuple[Tensor, Tensor]:
        return self.after.samples.flatten(), self.before.samples.flatten()

    @property
    def is_known(self) -> bool:
        """Whether the other model has the ability, and both were measured on the same sequences."""
        after, before = self._samples
        is_alike = self.after.axes == self.before.axes and after.shape == before.shape
        return is_alike and self.before.quantity.shows(before)

    @property
    def is_sure(self) -> bool:
        """Whether the loss is significant."""
        after, before = self._samples
        return self.is_known and intervals.of_mean(after - before).high < 0

    @property
    def is_bad(self) -> bool:
        """Whether too little is left."""
        after, before = self._samples
        return self.is_sure and float(after.mean()) < KEEPS * float(before.mean())

    @property
    def sentence(self) -> str:
        """The shares of both models."""
        own, other = (each.quantity.say(each.at(*each.points)) for each in (self.after, self.before))
        what = f"{RECALLS[self.name].verb} {own} of random tokens, and that one {other}."
        return f"{'But it' if self.is_sure else 'It'} {what}"


def nearest(contexts: Iterable[int], length: int) -> int:
    """Return the context length nearest a trained length, on a logarithmic scale."""
    return min(contexts, key=lambda context: abs(math.log(context / length)))


def _near(after: Grid, rival: Grid, length: int) -> Iterator[str]:
    """Yield the sentence on the shortest text, if only there the model is worse."""
    shortest = min(filter(rival.reads, rival.points))
    here, there = (after.relative_to(rival).at(context) for context in (length, shortest))
    if here.low <= 1 < there.low:
        yield f"But at {shortest:,} tokens its perplexity is {RATIO.say(there)} of that one's."


def _recalled(lost: Sequence[_Loss], other: str) -> Iterator[str]:
    """Yield the sentences on what is copied and recalled."""
    yield from (each.sentence for each in lost if each.is_known)
    if lost and not any(each.is_known for each in lost):
        yield f"{other[0].upper()}{other[1:]} does not copy or recall random tokens, so nothing can be said of that."


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


def _reach(after: Grid, facts: Facts) -> str:
    """Return the beginning of a verdict on a run that was not measured at the length that it is for."""
    wanted, farthest = max(facts.trained_length, facts.reach), max(after.points)
    if farthest >= wanted:
        return ""
    return (
        f"measured up to {farthest:,} of the {wanted:,} tokens that the run is for (evaluation.contexts=[{wanted}] "
        "measures the rest), "
    )


def _advice(facts: Facts, ratio: Interval, *, is_bad: bool, alone: bool) -> str:
    if not math.isfinite(ratio.mean):
        return "The training diverged. Train again with lower rates: training.learning_rate, scheme_learning_rate."
    if is_bad:
        keep = "conversion.native=keep keeps the native encoding, too. " * (facts.fate != "kept")
        if facts.trained_parameters == facts.new_parameters:
            return f"It is not ready for use. Train more weights (adapter=lora). {keep}".strip()
        return f"It is not ready for use. {_longer(facts)} {keep}".strip()
    if alone:
        return (
            "The native model had no such training. To tell what the encoding did, train a control, too: the same run "
            "without a swap, in a folder next to this one."
        )
    return "To compare it by other measures, use hf-posenc eval."


def _longer(facts: Facts) -> str:
    """Return what is worth a longer training: the first stage with fewer tokens than were measured to help."""
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
        "cost most."
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
