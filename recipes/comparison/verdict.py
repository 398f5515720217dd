"""The conclusions of a comparison, by these rules and no others.

1. Two models differ at a length if the 95 % interval of the difference of their losses, paired by window, excludes 0.
2. The leaders at a length are the model with the lowest perplexity and all models that do not differ from it.
3. If the native model is a leader, it is recommended, because it costs nothing. Otherwise the leader with the shortest
   training step is; among those not significantly slower, the one with the smallest memory.
4. A scheme reads longer texts if the 95 % interval of its perplexity at the longest, by its own at the trained length,
   ends at or below `HOLDS`. It loses on them if the ratio is above `HOLDS` and significantly above 1. Otherwise the
   windows are too few to tell.
5. One scheme is recommended for both uses if the native model is recommended at the trained length and the ratio of the
   scheme recommended beyond to it is at most `ACCEPTABLE` at that length.
6. After fewer than `SHORT` tokens per parameter of the model, the headline says that it is provisional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_posenc.recipes.comparison.findings import NATIVE, Cost, Findings
from hf_posenc.recipes.evaluation.grid import RATIO
from hf_posenc.recipes.runs.verdict import HOLDS

ACCEPTABLE = 1.02
SHORT = 0.5


@dataclass(frozen=True)
class Verdict:
    """A recommendation with its reasons, in sentences.

    Attributes:
        near: Model for texts up to the trained length.
        far: Model for longer texts; `None` if no longer text was measured.
        overall: Model for both, if one suits both.
        cautions: Limits of the figures.
    """

    near: str
    far: str | None
    overall: str | None
    headline: str
    reasons: tuple[str, ...]
    cautions: tuple[str, ...]

    @property
    def recommended(self) -> tuple[str, ...]:
        """Names of one or two models."""
        return (self.near, self.far or self.near) if self.overall is None else (self.overall,)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Headline, reasons and cautions."""
        return (self.headline, *self.reasons, *self.cautions)


def judge(found: Mapping[str, Findings], trained: int, farthest: int, *, is_short: bool = False) -> Verdict:
    """Apply the rules to findings by name, the trained length and the longest measured text.

    After a training that `is_short`, the headline is provisional.
    """
    native, noun = found[NATIVE], found[NATIVE].perplexity.quantity.noun
    if len(found) == 1 or not native.perplexity.reads(trained):
        why = "No scheme is left to recommend or not: none was trained to its end."
        if len(found) > 1:
            why = (
                "The native model diverged in the same training, so schemes have nothing to be compared with. Take "
                "lower rates: training.learning_rate, training.scheme_learning_rate."
            )
        return Verdict(NATIVE, None, NATIVE, why, (), ())
    near_leaders = leaders(found, trained)
    near = recommended(found, near_leaders)
    reasons = [_leading(found, near_leaders, near, trained)]
    far = overall = None
    if farthest > trained:
        unable = [name for name, each in found.items() if not each.perplexity.reads(farthest)]
        if unable:
            reasons.append(f"{_listed(unable)} cannot read {farthest:,} tokens.")
        far_leaders = leaders(found, farthest)
        if far_leaders:
            far = recommended(found, far_leaders)
            reasons += [_leading(found, far_leaders, far, farthest), _growth(found[far], trained, farthest)]
            loss = found[far].ratio(trained, native)
            if far != NATIVE:
                noise = "" if differ(found[far], native, trained) else ", within noise"
                reasons.append(
                    f"At {trained:,} tokens the {noun} of {far} is {RATIO.say(loss)} of the native model's{noise}."
                )
            # A scheme that is better at the trained length deserves its own recommendation.
            overall = far if near == far or (near == NATIVE and loss.mean <= ACCEPTABLE) else None
    headline = _headline(found, near, far, overall, trained, farthest)
    if is_short:
        headline = f"Provisional, after a short training: {headline[0].lower()}{headline[1:]}"
        reasons.insert(0, f"The budget is less than {SHORT:g} tokens per parameter; a longer one may change the order.")
    pairs = len(found) - 1
    cautions = (
        f"Intervals cover the choice of {native.windows} windows of text. Each scheme was trained once; another seed "
        "would change its figures, too.",
        f"With {pairs} comparison{'s' * (pairs > 1)} to one model, about one in twenty differs by chance alone.",
        "The best scheme after this budget need not be the best after a longer one.",
    )
    return Verdict(near, far, overall, headline, tuple(reasons), cautions)


def leaders(found: Mapping[str, Findings], context: int) -> tuple[str, ...]:
    """Return the model with the lowest perplexity at a length and all that do not differ from it, best first."""
    readable = [each for each in found.values() if each.perplexity.reads(context)]
    order = sorted(readable, key=lambda each: each.perplexity.at(context).mean)
    return tuple(each.name for each in order if each is order[0] or not differ(each, order[0], context))


def differ(one: Findings, other: Findings, context: int) -> bool:
    """Whether the losses of two models differ significantly at a length; false for a single window."""
    ratio = one.ratio(context, other)
    return ratio.low > 1 or ratio.high < 1


def recommended(found: Mapping[str, Findings], names: Sequence[str]) -> str:
    """Return the native model if it is among the names, or else the cheapest of them."""
    return NATIVE if NATIVE in names else cheapest({name: found[name].cost for name in names})


def cheapest(costs: Mapping[str, Cost]) -> str:
    """Return, among the models with the fastest step within noise, the one with the smallest memory."""
    first = min(costs.values(), key=lambda each: each.time.mean)
    alike = (name for name, each in costs.items() if not each.is_slower_than(first))
    return min(alike, key=lambda name: (costs[name].memory_ratio, costs[name].parameters, name))


# -- sentences ---------------------------------------------------------------------------------------------------------


def _headline(
    found: Mapping[str, Findings], near: str, far: str | None, overall: str | None, trained: int, farthest: int
) -> str:
    if overall == NATIVE:
        return f"Keep the native encoding: nothing beats it up to {farthest:,} tokens."
    if overall is not None:
        beyond = f"the best choice at {farthest:,} tokens"
        if overall == near:
            return f"Take {overall}: the best choice at {trained:,} tokens, and {beyond}."
        differs = differ(found[overall], found[NATIVE], trained)
        loss = f"a loss of at most {ACCEPTABLE - 1:.0%}" if differs else "no significant loss"
        return f"Take {overall}: {loss} at the trained length of {trained:,} tokens, and {beyond}."
    choices = {name: "keep the native encoding" if name == NATIVE else f"take {name}" for name in found}
    text = f"Up to the trained length of {trained:,} tokens, {choices[near]}."
    return text if far is None else f"{text} For texts of up to {farthest:,} tokens, {choices[far]}."


def _leading(found: Mapping[str, Findings], names: Sequence[str], taken: str, context: int) -> str:
    """Return the sentences on the leaders at a length, the best first, and on the one that is taken."""
    native, best, others = found[NATIVE], names[0], names[1:]
    text = f"At {context:,} tokens {_called(best)} has the lowest {native.perplexity.quantity.noun}"
    if best != NATIVE and native.perplexity.reads(context):
        text += f": {RATIO.say(found[best].ratio(context, native))} of the equally trained native model's"
    if others:
        text += f". {_listed(others)} {'are' if len(others) > 1 else 'is'} equal within noise"
    text += "."
    if not others and any(each.perplexity.reads(context) for name, each in found.items() if name != best):
        text += " All others are significantly worse."
    if taken == best:
        return text
    if taken == NATIVE:
        return f"{text} No scheme is significantly better than the native model, so nothing is gained by a swap."
    return f"{text} Of these, {taken} has the cheapest training step."


def _growth(each: Findings, trained: int, farthest: int) -> str:
    """Return the sentence on what the model for longer texts loses there."""
    growth = each.growth(farthest, trained)
    if growth.high <= HOLDS:
        holds = "it reads longer texts"
    elif growth.low > 1 and growth.mean > HOLDS:
        holds = "even this model loses on longer texts"
    else:
        holds = f"{each.windows} windows are too few to tell whether it loses on longer texts"
    return (
        f"The {each.perplexity.quantity.noun} of {_called(each.name)} at {farthest:,} tokens is {RATIO.say(growth)} of "
        f"its own at {trained:,}: {holds}."
    )


def _called(name: str) -> str:
    return "the native model" if name == NATIVE else name


def _listed(names: Sequence[str]) -> str:
    """Return names for the beginning of a sentence."""
    called = [_called(name) for name in names]
    text = " and ".join([", ".join(called[:-1]), called[-1]] if len(called) > 1 else called)
    return f"T{text[1:]}" if names[0] == NATIVE else text
