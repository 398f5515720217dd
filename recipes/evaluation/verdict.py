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
    """A verdict on a model next to another one, with its reasons.

    A bad model should not be used as it is; one that loses copies or recalls less. After a run there is advice on the
    next step, and whether a control would tell more.
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
    kept = [found for key in both if (found := _kept(VERBS[key], own[key], rival[key], trained_length))]
    loses = any(is_lost for _, is_lost, _ in kept)
    is_bad = not ratio.mean <= HOLDS or any(is_bad for *_, is_bad in kept)
    is_sure = ratio.high < 1 or ratio.low > 1
    grade: Grade = "worse" if is_bad or loses or ratio.low > 1 else "better" if is_sure else "as good"
    first = f"{name} is {'significantly ' * (grade != 'as good' and (is_sure or loses))}{grade} "
    first += f"{'as' if grade == 'as good' else 'than'} {other}"
    if (grade == "as good" and ratio.high > HOLDS) or windows < LEAST:
        first += f", as far as {windows} windows can tell"
    if math.isfinite(ratio.mean):
        first += f": at {length:,} tokens its {after.quantity.noun} is {RATIO.say(ratio)} of that one's"
    of_kept = [sentence for sentence, *_ in kept]
    if not both and grade != "worse":
        of_kept = ["That says nothing of copying and recalling, which were not measured."]
    elif both and not kept:
        of_kept = [
            f"{other[0].upper()}{other[1:]} does not copy or recall random tokens, so nothing can be said of that."
        ]
    sentences = (
        f"{first[0].upper()}{first[1:]}.",
        *_shorter(after, before, length),
        *of_kept,
        *_longer(after, before, other, length),
    )
    return Verdict(grade, is_bad, sentences, loses=loses)


def nearest(contexts: Iterable[int], length: int) -> int:
    """Return the context length nearest a trained length, on a logarithmic scale."""
    return min(contexts, key=lambda context: abs(math.log(context / length)))


def _kept(verb: str, own: Grid, rival: Grid, trained_length: int) -> tuple[str, bool, bool] | None:
    """Return the sentence on random tokens that two models copy or recall, and whether the first loses, and too much.

    They are compared at the telling length nearest the trained length. `None` if the other model is not above guessing
    there, or they were not measured on the same sequences.
    """
    quantity = rival.quantity
    telling = [length for length in rival.points if quantity.shows(rival.values(length))]
    length = nearest(telling or rival.points, trained_length)
    alike = own.axes == rival.axes and own.samples.shape == rival.samples.shape
    if not (alike and quantity.shows(rival.values(length))):
        return None
    # A model that guesses is measured at no longer text: what is missing is guessed, too.
    after, before = own.values(length).nan_to_num(quantity.guess or 0.0), rival.values(length)
    loses = intervals.of_mean(after - before).high < 0
    shares = [quantity.say(quantity.interval(each)) for each in (after, before)]
    sentence = f"{'But it' if loses else 'It'} {verb} {shares[0]} of random tokens, and that one {shares[1]}."
    return sentence, loses, loses and float(after.mean()) < KEEPS * float(before.mean())


def _shorter(after: Grid, before: Grid, length: int) -> Iterator[str]:
    shortest = min(filter(before.reads, before.points))
    here, there = (after.relative_to(before).at(context) for context in (length, shortest))
    if here.low <= 1 < there.low:
        yield f"But at {shortest:,} tokens its {after.quantity.noun} is {RATIO.say(there)} of that one's."


def _longer(after: Grid, before: Grid, other: str, length: int) -> Iterator[str]:
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
