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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hf_posenc.recipes.comparison.contestants import NATIVE
from hf_posenc.recipes.comparison.examiner import Cost, Findings
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
    if len(found) == 1:
        return Verdict(
            NATIVE, None, NATIVE, "No scheme is left to recommend or not: none was trained to its end.", (), ()
        )
    near_leaders = leaders(found, trained)
    near = recommended(found, near_leaders)
    reasons = [_leading(found, near_leaders, near, trained)]
    far = overall = None
    if farthest > trained:
        unable = [name for name, each in found.items() if not each.perplexity.reads(farthest)]
        if unable:
            reasons.append(f"{_list(unable)} cannot read {farthest:,} tokens.")
        far_leaders = leaders(found, farthest)
        if far_leaders:
            far = recommended(found, far_leaders)
            reasons += [_leading(found, far_leaders, far, farthest), *_far_reasons(found, far, trained, farthest)]
            # A scheme that is better at the trained length deserves its own recommendation.
            fits = near == NATIVE and found[far].ratio(trained, found[NATIVE]).mean <= ACCEPTABLE
            overall = far if near == far or fits else None
    headline = _headline(found, near, far, overall, trained, farthest)
    if is_short:
        headline = f"Provisional, after a short training: {headline[0].lower()}{headline[1:]}"
        reasons.insert(0, f"The budget is less than {SHORT:g} tokens per parameter; a longer one may change the order.")
    return Verdict(near, far, overall, headline, tuple(reasons), _cautions(found))


def leaders(found: Mapping[str, Findings], context: int) -> tuple[str, ...]:
    """Return the model with the lowest perplexity at a length and all that do not differ from it, best first."""
    readable = [each for each in found.values() if each.perplexity.reads(context)]
    order = sorted(readable, key=lambda each: each.perplexity.at(context).mean)
    return tuple(each.name for each in order if each is order[0] or not differ(each, order[0], context))


def differ(one: Findings, other: Findings, context: int) -> bool:
    """Whether the losses of two models differ significantly at a length; false for a single window."""
    found = one.perplexity.minus(other.perplexity).at(context)
    return found.low > 0 or found.high < 0


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
    text = f"Up to the trained length of {trained:,} tokens, {_choice(near)}."
    return text if far is None else f"{text} For texts of up to {farthest:,} tokens, {_choice(far)}."


def _choice(name: str) -> str:
    return "keep the native encoding" if name == NATIVE else f"take {name}"


def _leading(found: Mapping[str, Findings], names: Sequence[str], taken: str, context: int) -> str:
    """Return the sentences on the leaders at a length, the best first, and on the one that is taken."""
    native, best, others = found[NATIVE], names[0], names[1:]
    text = f"At {context:,} tokens {_called(best)} has the lowest {native.perplexity.quantity.noun}"
    if best != NATIVE and native.perplexity.reads(context):
        text += f": {RATIO.say(found[best].ratio(context, native))} of the equally trained native model's"
    rest = [name for name, each in found.items() if name not in names and each.perplexity.reads(context)]
    worse = " All others are significantly worse." * bool(rest)
    verb = "are" if len(others) > 1 else "is"
    text += f". {_list(others)} {verb} equal within noise." if others else f".{worse}"
    if taken == best:
        return text
    if taken == NATIVE:
        return f"{text} No scheme is significantly better than the native model, so nothing is gained by a swap."
    return f"{text} Of these, {taken} has the cheapest training step."


def _far_reasons(found: Mapping[str, Findings], far: str, trained: int, farthest: int) -> Iterator[str]:
    """Return the sentences on what the model for longer texts loses there and at the trained length."""
    native = found[NATIVE]
    growth, noun = found[far].growth(farthest, trained), native.perplexity.quantity.noun
    if growth.high <= HOLDS:
        holds = "it reads longer texts"
    elif growth.low > 1 and growth.mean > HOLDS:
        holds = "even this model loses on longer texts"
    else:
        windows = native.perplexity.samples.shape[-1]
        holds = f"{windows} windows are too few to tell whether it loses on longer texts"
    yield (
        f"The {noun} of {_called(far)} at {farthest:,} tokens is {RATIO.say(growth)} of its own at {trained:,}: "
        f"{holds}."
    )
    if far != NATIVE:
        noise = "" if differ(found[far], native, trained) else ", within noise"
        share = RATIO.say(found[far].ratio(trained, native))
        yield f"At {trained:,} tokens the {noun} of {far} is {share} of the native model's{noise}."


def _cautions(found: Mapping[str, Findings]) -> tuple[str, ...]:
    windows = found[NATIVE].perplexity.samples.shape[-1]
    pairs = len(found) - 1
    return (
        f"Intervals cover the choice of {windows} windows of text. Each scheme was trained once; another seed would "
        "change its figures, too.",
        f"With {pairs} comparison{'s' * (pairs > 1)} to one model, about one in twenty differs by chance alone.",
        "The best scheme after this budget need not be the best after a longer one.",
    )


def _called(name: str) -> str:
    return "the native model" if name == NATIVE else name


def _list(names: Sequence[str]) -> str:
    called = [_called(name) for name in names]
    text = " and ".join([", ".join(called[:-1]), called[-1]]) if len(called) > 1 else called[0]
    return text[0].upper() + text[1:] if text.startswith("the native") else text
