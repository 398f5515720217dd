"""The verdict on a model next to another one, by these rules and no others. Runs, evaluations and comparisons use it.

1. Perplexities are compared at the measured length nearest the trained length, paired by window.
2. The model is better or worse if the 95 % interval of the ratio of perplexities excludes 1, and as good otherwise. If
   the interval goes beyond `HOLDS`, or there are fewer than `LEAST` windows, that is said to be all that they can tell.
3. It is bad if its perplexity is above `HOLDS` times the other's, or no number.
4. Whatever its perplexity, it is worse if it copies or recalls less, at the length nearest the trained length at which
   the other is above guessing: if the 95 % interval of the difference, paired by sequence, lies below 0. It is bad if
   it keeps less than `KEEPS` of that. If none of this was measured, that is said.
5. If it is worse at the shortest length and not at the trained one, it says so: a config may state more than a model
   was trained on, and there the other is no measure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from hf_posenc.recipes import intervals
from hf_posenc.recipes.evaluation.grid import RATIO, Grid

# The unconverted model: as it was loaded, and after the same training.
ORIGINAL, CONTROL = "original", "control"
HOLDS = 1.10
KEEPS = 2 / 3
LEAST = 32
# Measures of an ability, in runs and in evaluations, by name.
VERBS = {"copy": "copies", "induction": "copies", "recall": "recalls", "mqar": "recalls"}

Grade = Literal["better", "as good", "worse"]
# The results of one model: the first grid of each measure, by the name of the measure.
Results = Mapping[str, Grid]


@dataclass(frozen=True)
class Verdict:
    """A verdict with its reasons.

    Attributes:
        grade: The model compared with the other one.
        is_bad: Whether the model should not be used as it is.
        loses: Whether it copies or recalls less.
        advice: The next step after a run.
        wants_control: Whether a control would tell more.
    """

    grade: Grade
    is_bad: bool
    sentences: tuple[str, ...]
    advice: str = ""
    wants_control: bool = False
    loses: bool = False

    def __str__(self) -> str:
        return " ".join((*self.sentences, self.advice)).strip()

    # Notebooks show it as `print` does.
    __repr__ = __str__


def judge(own: Results, rival: Results, trained_length: int, *, name: str, other: str) -> Verdict | None:
    """Apply the rules to the results of a model and of another one, with their names in the sentences.

    Return `None` if no perplexity of both was measured.
    """
    after, before = own.get("perplexity"), rival.get("perplexity")
    if after is None or before is None or not any(map(before.reads, before.points)):
        return None
    length = nearest(filter(before.reads, before.points), trained_length)
    ratio, windows = after.relative_to(before).at(length), after.samples.shape[-1]
    both = [key for key in VERBS if key in own and key in rival]
    abilities = [_Ability(VERBS[key], own[key], rival[key], trained_length) for key in both]
    loses = any(each.is_lost for each in abilities)
    is_bad = not ratio.mean <= HOLDS or any(each.is_bad for each in abilities)
    is_sure = ratio.high < 1 or ratio.low > 1
    grade: Grade = "worse" if is_bad or loses or ratio.low > 1 else "better" if is_sure else "as good"
    first = f"{name} is {'significantly ' * (grade != 'as good' and (is_sure or loses))}{grade} "
    first += f"{'as' if grade == 'as good' else 'than'} {other}"
    if (grade == "as good" and ratio.high > HOLDS) or windows < LEAST:
        first += f", as far as {windows} windows can tell"
    if math.isfinite(ratio.mean):
        first += f": at {length:,} tokens its {after.quantity.noun} is {RATIO.say(ratio)} of that one's"
    sentences = (
        f"{first[0].upper()}{first[1:]}.",
        *_shorter(after, before, length),
        *_kept(abilities, other, grade),
        *_longer(after, before, other, length),
    )
    return Verdict(grade, is_bad, sentences, loses=loses)


def nearest(contexts: Iterable[int], length: int) -> int:
    """Return the context length nearest a trained length, on a logarithmic scale."""
    return min(contexts, key=lambda context: abs(math.log(context / length)))


@dataclass(frozen=True, eq=False)
class _Ability:
    """Random tokens that two models copy or recall, at the telling length nearest the trained length."""

    verb: str
    own: Grid
    rival: Grid
    trained_length: int

    @property
    def _samples(self) -> tuple[Tensor, Tensor]:
        """Samples of both. A model that guesses is measured at no longer text: what is missing is guessed, too."""
        quantity, values = self.rival.quantity, self.rival.values
        telling = [length for length in self.rival.points if quantity.shows(values(length))]
        length, guess = nearest(telling or self.rival.points, self.trained_length), quantity.guess or 0.0
        return self.own.values(length).nan_to_num(guess), self.rival.values(length)

    @property
    def is_known(self) -> bool:
        """Whether the other model is above guessing, and both were measured on the same sequences."""
        alike = self.own.axes == self.rival.axes and self.own.samples.shape == self.rival.samples.shape
        return alike and self.rival.quantity.shows(self._samples[1])

    @property
    def is_lost(self) -> bool:
        """Whether the model does significantly less."""
        return self.is_known and intervals.of_mean(self._samples[0] - self._samples[1]).high < 0

    @property
    def is_bad(self) -> bool:
        """Whether too little is left."""
        return self.is_lost and float(self._samples[0].mean()) < KEEPS * float(self._samples[1].mean())

    @property
    def sentence(self) -> str:
        """The shares of both models."""
        own, other = (self.rival.quantity.say(self.rival.quantity.interval(each)) for each in self._samples)
        return f"{'But it' if self.is_lost else 'It'} {self.verb} {own} of random tokens, and that one {other}."


def _shorter(after: Grid, before: Grid, length: int) -> Iterator[str]:
    """Yield the sentence on the shortest text, if only there the model is worse."""
    shortest = min(filter(before.reads, before.points))
    here, there = (after.relative_to(before).at(context) for context in (length, shortest))
    if here.low <= 1 < there.low:
        yield f"But at {shortest:,} tokens its {after.quantity.noun} is {RATIO.say(there)} of that one's."


def _kept(abilities: list[_Ability], other: str, grade: Grade) -> Iterator[str]:
    """Yield the sentences on copying and recalling."""
    if not abilities and grade != "worse":
        yield "That says nothing of copying and recalling, which were not measured."
    yield from (each.sentence for each in abilities if each.is_known)
    if abilities and not any(each.is_known for each in abilities):
        yield f"{other[0].upper()}{other[1:]} does not copy or recall random tokens, so nothing can be said of that."


def _longer(after: Grid, before: Grid, other: str, length: int) -> Iterator[str]:
    """Yield the sentence on the longest text."""
    farthest = max(after.points)
    if farthest <= length:
        return
    own, noun = f"{RATIO.say(after.growth(farthest, length))} of its own at {length:,}", after.quantity.noun
    if not after.reads(farthest):
        yield f"It cannot read {farthest:,} tokens."
    elif before.reads(farthest):
        share = RATIO.say(after.relative_to(before).at(farthest))
        yield f"At {farthest:,} tokens its {noun} is {share} of that one's, and {own}."
    else:
        yield f"At {farthest:,} tokens, which {other} cannot read, its {noun} is {own}."
