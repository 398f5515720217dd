"""The recommendation of a comparison, by the rules in docs/compare.md and no others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hf_posenc.recipes.evaluation.grid import Grid
from hf_posenc.recipes.evaluation.report import Report
from hf_posenc.recipes.evaluation.verdict import CONTROL, Verdict, judge

# What a scheme for longer texts may cost at the trained length, as a share of the control's perplexity; and the tokens
# per parameter of the model after which a recommendation is no longer provisional.
ACCEPTABLE, SHORT = 1.02, 0.5


@dataclass(frozen=True, eq=False)
class Findings:
    """The results of all measures on one model."""

    name: str
    report: Report

    @property
    def perplexity(self) -> Grid:
        return self.results["perplexity"]

    @property
    def results(self) -> Mapping[str, Grid]:
        return self.report.results(self.name)

    @property
    def windows(self) -> int:
        return self.perplexity.samples.shape[-1]


@dataclass(frozen=True)
class Recommendation:
    """A recommendation with its reasons, in sentences; the name `CONTROL` stands for the native encoding.

    Attributes:
        near: Model for texts up to the trained length.
        far: Model for longer texts; `None` if no longer text was measured.
        overall: Model for both, if one suits both.
        cautions: Limits of the figures.
        verdicts: The verdict on each scheme next to the control.
    """

    near: str
    far: str | None
    overall: str | None
    headline: str
    reasons: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    verdicts: Mapping[str, Verdict] | None = None

    @property
    def sentences(self) -> tuple[str, ...]:
        return (self.headline, *self.reasons, *self.cautions)


def recommend(found: Mapping[str, Findings], trained: int, farthest: int, *, is_short: bool = False) -> Recommendation:
    """Apply the rules to findings by name, the trained length and the longest measured text.

    After a training that `is_short`, the headline is provisional.
    """
    control = found[CONTROL]
    if len(found) == 1:
        return Recommendation(CONTROL, None, CONTROL, "No scheme was trained to its end, so none is recommended.")
    if not control.perplexity.reads(trained):
        return Recommendation(
            CONTROL,
            None,
            CONTROL,
            "The control diverged, so schemes have nothing to be compared with. Take lower rates: "
            "training.learning_rate, training.scheme_learning_rate.",
        )
    judged = {
        name: judge(each.results, control.results, trained, name=name, other="the control")
        for name, each in found.items()
        if name != CONTROL
    }
    verdicts = {name: verdict for name, verdict in judged.items() if verdict is not None}
    near = _best(found, (name for name, each in verdicts.items() if each.grade == "better"), trained) or CONTROL
    far = overall = None
    if farthest > trained:
        far = _best(found, found, farthest)
        if far is not None:
            far = far if differ(found[far], control, farthest) else CONTROL
            cost = found[far].perplexity.relative_to(control.perplexity).at(trained).mean
            suits = far != CONTROL and not verdicts[far].loses and cost <= ACCEPTABLE
            overall = far if near == far or (near == CONTROL and suits) else None
    headline = _headline(verdicts, near, far, overall, trained, farthest)
    reasons = list(_reasons(found, verdicts, {trained: near} | ({} if far is None else {farthest: far})))
    reasons += [
        f"{name} cannot read {farthest:,} tokens." for name in found if not found[name].perplexity.reads(farthest)
    ]
    if is_short:
        headline = f"Provisional, after a short training: {headline[0].lower()}{headline[1:]}"
        reasons.insert(0, f"The budget is less than {SHORT:g} tokens per parameter; a longer one may change the order.")
    cautions = (
        f"Intervals cover the choice of {control.windows} windows of text. Each scheme was trained once; another seed "
        "would change its figures, too.",
        "About one in twenty comparisons with the control differs by chance alone.",
        "The best scheme after this budget need not be the best after a longer one.",
    )
    return Recommendation(near, far, overall, headline, tuple(reasons), cautions, verdicts)


def differ(one: Findings, other: Findings, context: int) -> bool:
    """Whether the losses of two models differ significantly at a length, or only the first reads it."""
    if not other.perplexity.reads(context):
        return True
    ratio = one.perplexity.relative_to(other.perplexity).at(context)
    return ratio.low > 1 or ratio.high < 1


def _best(found: Mapping[str, Findings], names: Iterable[str], context: int) -> str | None:
    """Return the model of the lowest perplexity at a length; `None` if none reads it."""
    able = [name for name in names if found[name].perplexity.reads(context)]
    return min(able, key=lambda name: found[name].perplexity.at(context).mean, default=None)


def _headline(
    verdicts: Mapping[str, Verdict], near: str, far: str | None, overall: str | None, trained: int, farthest: int
) -> str:
    if overall == CONTROL:
        return f"Keep the native encoding: nothing beats it up to {farthest:,} tokens."
    if overall is not None:
        if overall == near:
            return f"Take {overall}: the best choice at {trained:,} tokens, and at {farthest:,}."
        loss = f"a loss of at most {ACCEPTABLE - 1:.0%}" if verdicts[overall].grade == "worse" else "as good"
        return f"Take {overall}: {loss} at the trained length of {trained:,} tokens, and the best at {farthest:,}."
    choices = {CONTROL: "keep the native encoding"} | {
        name: f"{name} is the best, and not ready for use" if verdict.is_bad else f"take {name}"
        for name, verdict in verdicts.items()
    }
    text = f"Up to the trained length of {trained:,} tokens, {choices[near]}."
    return text if far is None else f"{text} For texts of up to {farthest:,} tokens, {choices[far]}."


def _reasons(
    found: Mapping[str, Findings], verdicts: Mapping[str, Verdict], chosen: Mapping[int, str]
) -> Iterable[str]:
    """Yield what is said of the models that are chosen at each length, and of those that do not differ from them."""
    for name in dict.fromkeys(chosen.values()):
        if name != CONTROL:
            yield str(verdicts[name])
    for context, name in chosen.items():
        called = "the control" if name == CONTROL else name
        others = [
            other
            for other, each in found.items()
            if other != name and each.perplexity.reads(context) and not differ(each, found[name], context)
        ]
        if name == CONTROL:
            yield f"At {context:,} tokens no scheme is better than the control."
        if others:
            yield f"At {context:,} tokens these do not differ from {called} significantly: {', '.join(others)}."
