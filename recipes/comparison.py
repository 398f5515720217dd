"""Comparison of schemes for a model: adapt it to each under one budget, measure all side by side, write one report.

found = compare("tiny-llama", "comparison", schemes=("fire", "alibi"), budget=300)
print(*found.recommendation.sentences, sep="\n")
"""

from __future__ import annotations

import contextlib
import gc
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console
from transformers import AutoModelForCausalLM

from hf_posenc import registry
from hf_posenc.errors import OptionError, RecipeError, StorageError, shown
from hf_posenc.patches.atomic_files import OutputError, write_text
from hf_posenc.patches.plan import plan
from hf_posenc.recipes import durations, library, storage
from hf_posenc.recipes.data.windows import Prepared, load_data
from hf_posenc.recipes.evaluation import evaluate
from hf_posenc.recipes.evaluation.generation import Generation
from hf_posenc.recipes.evaluation.grid import Grid
from hf_posenc.recipes.evaluation.perplexity import TARGETS, contexts_for
from hf_posenc.recipes.evaluation.report import Report
from hf_posenc.recipes.evaluation.verdict import CONTROL, ORIGINAL, Results, Verdict, judge
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.loading import auto_class, load, trained_length
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.reports import Table, counted, render, say, versions
from hf_posenc.recipes.reports.curves import save_figure
from hf_posenc.recipes.runs import hybrids, run
from hf_posenc.recipes.runs.files import check_writable, record_of, take
from hf_posenc.recipes.runs.forecast import seconds_for
from hf_posenc.recipes.runs.measurements import Measurements
from hf_posenc.recipes.runs.request import Request, Subject, check_measures
from hf_posenc.recipes.schema import checks, fields
from hf_posenc.recipes.schema.recipe import Conversion, Distillation, Evaluation, Recipe, Transfer
from hf_posenc.recipes.storage import MEASUREMENTS, MODEL, RECIPE
from hf_posenc.recipes.training.adapter import trained_dtype

REQUEST, RUNS, RESULTS = "comparison.json", "runs", "results.json"
# What a scheme for longer texts may cost at the trained length, as a share of the control's perplexity; and the tokens
# per parameter of the model after which a recommendation is no longer provisional.
ACCEPTABLE, SHORT = 1.02, 0.5
# Keys that overrides must not change, with the reasons.
_SETTLED = {
    "model": "it is the model that is compared",
    "conversion": "it is what is compared; give a recipe of your own (a .yaml file) among the schemes",
    "training.steps": "the budget says it",
    "evaluation": "all are measured alike",
}
HTML, MARKDOWN, PICTURES = "report.html", "report.md", "pictures"


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of a comparison: grids by model and measure, of `"original"` and `"control"` too; errors by scheme."""

    folder: Path
    found: Mapping[str, Results]
    failed: Mapping[str, str]
    recommendation: Recommendation


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
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def sentences(self) -> tuple[str, ...]:
        return (self.headline, *self.reasons, *self.cautions)


def compare(
    model: str,
    folder: str | Path,
    *,
    schemes: Sequence[str] | None = None,
    budget: int = 300,
    overrides: Sequence[str] = (),
    measures: Sequence[str] | None = None,
    samples: int = 32,
    console: Console | None = None,
    command: str = "",
) -> Comparison:
    """Adapt a model to several schemes under one budget, measure all side by side, and write a report.

    After an interruption, the same call continues. More schemes can be added to a folder by a call that names them.

    Args:
        model: A local directory, a name on the hub, or "tiny-llama", which comes with the package.
        folder: Output folder. Finished runs there are reused.
        schemes: Names of schemes or recipes, or YAML files of recipes; `None` means the usual ones.
        budget: Optimizer steps per model.
        overrides: `section.key=value` for all recipes, such as `"data.source=text.txt"`.
        measures: Measures in addition to perplexity, by their names in `hf-posenc eval`; `None` means induction and
            mqar for causal models, and no other for those with an encoder.
        samples: Windows or examples of each kind.
        console: Console for the progress; `None` is silent.
        command: The command line, for the report.

    Raises:
        OptionError: An argument is unknown or conflicts with another, or the folder holds another comparison.
        RecipeError: A scheme has no recipe, or the control cannot be trained.
        UnknownSchemeError: A scheme is unknown.
        OutputError: The folder holds something else.
        CheckpointError: The record of the comparison in the folder is damaged.
    """
    folder = Path(folder)
    if processes().num_processes > 1:
        raise OptionError("compare runs in one process. Start it without accelerate launch.")
    asked = {
        "model": model,
        "budget": budget,
        # Each key is given once, so the order does not matter.
        "overrides": sorted(overrides),
        "measures": None if measures is None else [*measures],
        "samples": samples,
    }
    _check_folder(folder, asked)
    loaded, tokenizer = load(model)
    config, parameters = loaded.config, loaded.num_parameters()
    del loaded
    recipes = contestants(model, config, schemes=schemes, budget=budget, overrides=overrides, samples=samples)
    control = recipes[CONTROL]
    length = control.training.length
    assert length is not None
    data = load_data(control.data, tokenizer, length=length, seed=control.training.seed, config=config)
    if console is not None and not (folder / REQUEST).is_file():
        _tell_time(recipes, data, length, console)
    examiner = Examiner(control, config, tokenizer, data, asked)
    if not (folder / REQUEST).is_file():
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
        storage.save(asked, folder / REQUEST)
    lock = FileLock(folder / RUNS / ".lock", blocking=False)
    # Of two at once, each would report as failed what the other trains.
    take(lock, folder)
    try:
        original = examiner.examine(ORIGINAL, folder / "untrained", console)
        reports, failed = _complete(recipes, examiner, folder, console)
    finally:
        lock.release()
    found = {name: report.results(name) for name, report in reports.items()}
    tokens = control.training.batch_size * length
    is_short = budget * tokens < SHORT * parameters
    recommendation = recommend(found, examiner.trained, examiner.farthest, is_short=is_short)
    made = {
        "model": model,
        "budget": budget,
        "tokens per step": tokens,
        "text": control.data.read_from,
        "changes to all recipes": ", ".join(overrides) or "none",
        "windows": samples,
        "command": command or "hf_posenc.recipes.compare",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    _write(
        folder,
        {ORIGINAL: original, **reports},
        title=f"Positional encodings for {model}",
        training=f"{counted(budget, 'step')} of {tokens:,} tokens",
        recommendation=recommendation if len(found) > 1 else None,
        failed=[f"{name}: {reason}" for name, reason in failed.items()],
        starts=_starts({name: recipes[name] for name in found}, config, folder / RUNS),
        made=[f"{name}: {value}" for name, value in made.items()],
    )
    return Comparison(folder, {ORIGINAL: original.results(ORIGINAL), **found}, failed, recommendation)


def _tell_time(recipes: Mapping[str, Recipe], data: Prepared, length: int, console: Console) -> None:
    """Print how long the training of all will take, from a step of each."""
    found: dict[str, float] = {}
    for name, recipe in recipes.items():
        # A recipe of one's own may have long windows.
        texts = {stage.length or length: data for stage in recipe.stages().values()}
        with contextlib.suppress(Exception):  # Whatever it is, it fails in its turn, which names the scheme.
            found[name] = sum(seconds_for(recipe, texts).values())
    say(console, f"time: {durations.listed(found)}, and measuring")


def _check_folder(folder: Path, asked: Mapping[str, Any]) -> None:
    """Raise unless a folder is new, empty, or holds the same comparison."""
    path = folder / REQUEST
    if path.is_file():
        remedy = f"It says what is compared in {folder}: restore it, or choose another folder."
        there = storage.load(dict[str, Any], path, remedy)
        changed = (key for key, value in asked.items() if there.get(key) != value)
        differing = [f"{key} is {shown(there.get(key))} there and {shown(asked[key])} here" for key in changed]
        if differing:
            raise OptionError(f"{folder} holds another comparison: {'; '.join(differing)}. Choose another folder.")
        return
    if not folder.absolute().parent.is_dir():
        raise OutputError(f"There is no directory {folder.parent} to make {folder.name} in. Make it first.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} exists, and holds no comparison. Choose another folder, or empty this one.")
    check_writable(folder)


def _complete(
    recipes: Mapping[str, Recipe], examiner: Examiner, folder: Path, console: Console | None
) -> tuple[dict[str, Report], dict[str, str]]:
    """Train and examine all models. A scheme may fail; the control must not."""
    found: dict[str, Report] = {}
    failed: dict[str, str] = {}
    began, done = time.monotonic(), 0
    for number, (name, recipe) in enumerate(recipes.items()):
        place = folder / RUNS / name
        if console is not None:
            left = (time.monotonic() - began) / max(done, 1) * (len(recipes) - number)
            estimate = f", about {timedelta(seconds=round(left))} left for all" if done else ""
            console.rule(f"[bold]{name}[/bold] ({number + 1} of {len(recipes)}{estimate})", align="left")
        is_new = not (place / MODEL).is_dir()
        try:
            again = shlex.join(["hf-posenc", "train", str(place / RECIPE), "--out", "FOLDER"])
            run.train(recipe, place, console=console, command=again)
            found[name] = examiner.examine(name, place, console)
        # The failure of one scheme must not stop the others.
        except Exception as error:
            if name == CONTROL or isinstance(error, StorageError):
                raise
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())}".removeprefix("RuntimeError: ")
            say(console, f"{name} failed: {failed[name]}", "red")
        done += is_new
        # A trainer holds its model in a reference cycle. Free it before the next one is loaded.
        gc.collect()
        torch.cuda.empty_cache()
    return found, failed


class Examiner:
    """Measurement of models by the same measures on the same text: that of the control, also for its contexts.

    Raise `OptionError` if a measure is unknown, or the text is too short.
    """

    def __init__(self, control: Recipe, config: Any, tokenizer: Any, data: Prepared, asked: Mapping[str, Any]) -> None:
        if (measures := asked["measures"]) is None:
            measures = ("induction", "mqar") if auto_class(config) is AutoModelForCausalLM else ()
        check_measures(measures)
        own, samples = trained_length(config) or control.training.length, asked["samples"]
        assert own is not None
        try:
            contexts, _ = contexts_for(own, len(data.held_out), windows=samples)
        except RecipeError:  # It names keys that all contestants share.
            contexts = ()
        if own not in contexts:
            raise OptionError(
                f"The trained length is {own} tokens, and the held-out text has {len(data.held_out):,}; expected at "
                f"least {TARGETS}, and a text for {samples} windows. Give more text, or fewer samples."
            )
        every = tuple(dict.fromkeys(("perplexity", *measures)))
        request = Request((CONTROL,), every, contexts=contexts, trained_length=own, samples=samples)
        self.trained, self.farthest = own, max(contexts)
        self._measures = request.made_for(tokenizer, data.held_out, data.corrupt)
        self._comparing = [measure for measure in self._measures if isinstance(measure, Generation)]
        self._control = control

    def examine(self, name: str, folder: Path, console: Console | None) -> Report:
        """Return the results of a finished run, or of the `ORIGINAL` model, which are kept in a folder."""
        path, device = folder / RESULTS, processes().device
        if not path.is_file():
            folder.mkdir(exist_ok=True)
            original = Subject(ORIGINAL, self._control.model)
            subject = original if name == ORIGINAL else Subject(name, str(folder / MODEL))
            dtype = trained_dtype(self._control.adapter).get("dtype")  # as all contestants
            # A process that goes on with a comparison has not measured what others are compared with.
            for measure in self._comparing if name != ORIGINAL else ():
                measure(original.load(device, dtype=dtype))
            self._comparing = []
            model = subject.load(device, dtype=dtype if name == ORIGINAL else None)
            storage.save(evaluate({name: model}, self._measures, console=console), path)
        found: Report = storage.load(Report, path, "Remove it to measure again.")
        return found


# -- who takes part ----------------------------------------------------------------------------------------------------


def contestants(
    model: str,
    config: Any,
    *,
    schemes: Sequence[str] | None,
    budget: int,
    overrides: Sequence[str],
    samples: int = 32,
) -> dict[str, Recipe]:
    """Return the recipes of the control and of each scheme, with the conversion of its built-in recipe, by name.

    Training, teacher and adapter are the same for all, except for recipes that are named themselves.
    """
    for pair in overrides:
        key = ".".join(next(iter(fields.override(Recipe, {}, [pair]))))
        for settled, reason in _SETTLED.items():
            if key == settled or key.startswith(f"{settled}."):
                raise OptionError(f"{shown(pair)}: {key} is the same for all schemes or each one's own: {reason}.")
    wanted = tuple(_usual(config) if schemes is None else schemes)
    names = [Path(source).stem for source in wanted]
    if not wanted or len(set(names)) < len(names) or {CONTROL, ORIGINAL} & set(names):
        raise OptionError(
            f"Got the schemes {', '.join(wanted) or 'none'}; expected different ones, none called {CONTROL!r} or "
            f"{ORIGINAL!r}."
        )
    named = [f"model={model}", f"training.steps={budget}", *overrides]
    # Not the first one named: all must stay the same when a comparison is extended.
    common = read_recipe("swap", [f"scheme={_usual(config)[0]}", *named], config=config)
    if common.adapter.kind == "scheme":
        raise OptionError(
            "adapter.kind is 'scheme', but the control is trained alike and has no weights of a scheme. Give "
            "adapter=lora, or leave it out."
        )
    length, _ = checks.lengths(common, config)
    found = {
        CONTROL: replace(
            common,
            summary="The original with the same training.",
            conversion=Conversion(scheme=None),
            distillation=Distillation(),
            transfer=Transfer(),
        )
    }
    for name, source in zip(names, wanted, strict=True):
        if library.is_file(source):
            own = read_recipe(source, overrides)
        elif source in library.names():
            own = read_recipe(source, named, config=config)
        else:
            # Unknown scheme names raise their own error.
            own = read_recipe("swap", [f"scheme={registry.get(source).name}", *named], config=config)
            # What is kept in force has nothing to transfer.
            own = replace(common, conversion=own.conversion, transfer=own.transfer)
        checks.check_unconverted(own, config)
        _check_same(name, own, common)
        found[name] = own
    # The examiner measures more after training, by the same measures for all.
    evaluation = Evaluation(contexts=[max(length, TARGETS)], windows=min(Evaluation.windows, samples))
    return {
        name: replace(
            own, model=model, training=replace(own.training, steps=budget, length=length), evaluation=evaluation
        )
        for name, own in found.items()
    }


def _check_same(name: str, own: Recipe, common: Recipe) -> None:
    own, common = (replace(each, data=replace(each.data, source=each.data.read_from)) for each in (own, common))
    for section, keys in (("data", vars(common.data)), ("training", ("batch_size", "seed", "precision"))):
        for key in keys:
            here, there = (getattr(getattr(recipe, section), key) for recipe in (own, common))
            if here != there:
                raise RecipeError(
                    f"{name} has {section}.{key}={shown(here)}, and {CONTROL} {shown(there)}: schemes that are "
                    f"compared are trained on the same text in the same batches. Say it for all, for instance "
                    f"{section}.{key}={here}."
                )


def _usual(config: Any) -> list[str]:
    """Return the schemes that declare themselves usual and are defined for the model."""
    direction = "causal" if auto_class(config) is AutoModelForCausalLM or config.is_encoder_decoder else "bidirectional"
    return [name for name, info in registry.schemes().items() if info.usual and direction in info.directions]


# -- the rules, as docs/compare.md has them ----------------------------------------------------------------------------


def recommend(found: Mapping[str, Results], trained: int, farthest: int, *, is_short: bool = False) -> Recommendation:
    """Apply the rules to the results of models by name, the trained length and the longest measured text.

    After a training that `is_short`, the headline is provisional.
    """
    curves = {name: results["perplexity"] for name, results in found.items()}
    control = curves[CONTROL]
    if len(found) == 1 or not control.reads(trained):
        why = "No scheme was trained to its end, so none is recommended."
        if len(found) > 1:
            why = "The control diverged, so schemes have nothing to be compared with. Take lower rates: "
            why += "training.learning_rate, training.scheme_learning_rate."
        return Recommendation(CONTROL, None, CONTROL, why)
    judged = {
        name: judge(results, found[CONTROL], trained, name=name, other="the control")
        for name, results in found.items()
        if name != CONTROL
    }
    verdicts = {name: verdict for name, verdict in judged.items() if verdict is not None}
    near = _best(curves, (name for name, each in verdicts.items() if each.grade == "better"), trained) or CONTROL
    overall, far = None, _best(curves, curves, farthest) if farthest > trained else None
    if far is not None:
        far = far if _differ(curves[far], control, farthest) else CONTROL
        cost = curves[far].relative_to(control).at(trained).mean
        suits = far != CONTROL and not verdicts[far].loses and cost <= ACCEPTABLE
        overall = far if near == far or (near == CONTROL and suits) else None
    headline = _headline(verdicts, near, far, overall, trained, farthest)
    reasons = list(_reasons(curves, verdicts, {trained: near} | ({} if far is None else {farthest: far})))
    reasons += [f"{name} cannot read {farthest:,} tokens." for name in curves if not curves[name].reads(farthest)]
    if is_short:
        headline = f"Provisional, after a short training: {headline[0].lower()}{headline[1:]}"
        reasons.insert(0, f"The budget is less than {SHORT:g} tokens per parameter; a longer one may change the order.")
    cautions = (
        f"Intervals cover the choice of {control.samples.shape[-1]} windows of text. Each scheme was trained once; "
        "another seed would change its figures, too.",
        "About one in twenty comparisons with the control differs by chance alone.",
        "The best scheme after this budget need not be the best after a longer one.",
    )
    return Recommendation(near, far, overall, headline, tuple(reasons), cautions, verdicts)


def _differ(one: Grid, other: Grid, context: int) -> bool:
    """Whether two perplexities differ significantly at a length, or only the first model reads it."""
    if not other.reads(context):
        return True
    ratio = one.relative_to(other).at(context)
    return ratio.low > 1 or ratio.high < 1


def _best(curves: Mapping[str, Grid], names: Iterable[str], context: int) -> str | None:
    """Return the model of the lowest perplexity at a length; `None` if none reads it."""
    able = [name for name in names if curves[name].reads(context)]
    return min(able, key=lambda name: curves[name].at(context).mean, default=None)


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


def _reasons(curves: Mapping[str, Grid], verdicts: Mapping[str, Verdict], chosen: Mapping[int, str]) -> Iterable[str]:
    """Yield what is said of the models that are chosen at each length, and of those that do not differ from them."""
    yield from (str(verdicts[name]) for name in dict.fromkeys(chosen.values()) if name != CONTROL)
    for context, name in chosen.items():
        if name == CONTROL:
            yield f"At {context:,} tokens no scheme is better than the control."
        alike = [
            other
            for other, curve in curves.items()
            if other != name and curve.reads(context) and not _differ(curve, curves[name], context)
        ]
        if alike:
            called = "the control" if name == CONTROL else name
            yield f"At {context:,} tokens these do not differ from {called} significantly: {', '.join(alike)}."


# -- the report --------------------------------------------------------------------------------------------------------


def _starts(recipes: Mapping[str, Recipe], config: Any, runs: Path) -> Table:
    header = ["", "new parameters", "more cache (bytes per token)", "at the start (times)", "start"]
    rows = []
    for name, recipe in recipes.items():
        conversion, added = hybrids.stand_in(recipe, config).conversion, ["-", "-"]
        if conversion.scheme is not None:
            # At the end of training, a handover is over.
            ended = replace(conversion, native="remove") if conversion.native == "handover" else conversion
            planned = plan(config, conversion.scheme, **ended.keywords)
            added = [f"{planned.parameters:,}", f"{planned.cache_bytes_per_token:,}"]
        found = Measurements.load(runs / name / MEASUREMENTS, writes=False)
        before, original = found.curve("before"), found.curve(ORIGINAL)
        multiple = "-"
        if before is not None and original is not None:
            multiple = f"{before.relative_to(original).at(before.points[0]).mean:.3g}"
        rows.append([name, *added, multiple, record_of(runs / name).get("start", "")])
    return Table(header, rows)


def _write(folder: Path, found: Mapping[str, Report], **known: Any) -> None:
    """Write report.html, report.md and pictures/, each file whole or not at all.

    The control comes first: the others are compared with it. `known` are further variables of the template.
    """
    (folder / PICTURES).mkdir(exist_ok=True)
    names = (CONTROL, *(name for name in found if name not in (CONTROL, ORIGINAL)), ORIGINAL)
    sections = [
        replace(section, models={name: found[name][section.name].models[name] for name in names})
        for section in found[CONTROL].sections
    ]
    for section in sections:
        save_figure(section.figure(), folder / PICTURES / section.picture)
    values: dict[str, Any] = {
        "schemes": counted(len(found) - len({CONTROL, ORIGINAL}), "scheme"),
        "sections": sections,
        "pictures": PICTURES,
        "folder": folder,
        **known,
    }
    write_text(folder / MARKDOWN, render("comparison", **values))
    write_text(folder / HTML, render("comparison", "html", **values))
