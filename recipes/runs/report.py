"""The verdict on a run and its report: a table, a picture, a page and the model card, here and on the hub."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, EvalResult, HfApi, ModelCard, ModelCardData
from matplotlib.figure import Figure
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from hf_posenc.errors import PosencError, RecipeError
from hf_posenc.patches.atomic_files import write_text
from hf_posenc.patches.model_card import TASKS, base_and_licence, encoding_section, name_of, on_the_hub
from hf_posenc.recipes.data.sources import BUILTIN
from hf_posenc.recipes.evaluation import verdict
from hf_posenc.recipes.evaluation.grid import MASKED_PERPLEXITY, Grid, table
from hf_posenc.recipes.evaluation.perplexity import TARGETS
from hf_posenc.recipes.evaluation.recall import RECALLS
from hf_posenc.recipes.evaluation.report import Section, panel
from hf_posenc.recipes.evaluation.verdict import CONTROL, ORIGINAL, Verdict, nearest
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.intervals import Interval
from hf_posenc.recipes.reports import Table, render
from hf_posenc.recipes.reports.curves import Panel, lines_figure, save_figure, trained_mark
from hf_posenc.recipes.runs.facts import Facts, rows
from hf_posenc.recipes.runs.files import TEXT, record_of
from hf_posenc.recipes.runs.measurements import Measurements
from hf_posenc.recipes.runs.progress import Pace
from hf_posenc.recipes.schema.recipe import Recipe
from hf_posenc.recipes.storage import MEASUREMENTS, MODEL, RECIPE

TABLE, PICTURE, PAGE = "table.md", "perplexity.png", "report.html"
# Settings of a training that a control does without, or that change no result.
_OF_A_SWAP = dict.fromkeys(("micro_batch_size", "gradient_checkpointing", "skip_to", "scheme_learning_rate"))


# -- the verdict -------------------------------------------------------------------------------------------------------


def judge(measurements: Measurements, facts: Facts, control: Measurements | None = None) -> Verdict | None:
    """Compare a trained model with its control, or else with the original; `None` if nothing was measured."""
    own, other = measurements.results("after"), ORIGINAL if control is None else CONTROL
    rival = measurements.results(ORIGINAL) if control is None else control.results("after")
    name = facts.encoding or "the trained model"
    found = verdict.judge(own, rival, facts.trained_length, name=name, other=f"the {other}")
    if found is None:
        return None
    after, wanted = own["perplexity"], max(facts.trained_length, facts.reach)
    farthest = max(after.points)
    unmeasured = (
        f"Measured up to {farthest:,} of the {wanted:,} tokens that the run is for (evaluation.contexts=[{wanted}] "
        "measures the rest).",
    ) * (farthest < wanted)
    # Of the scheme's weights alone, nothing is left to train in a control.
    is_scheme_alone = facts.trained_parameters == facts.new_parameters
    wants_control = control is None and facts.encoding is not None and not is_scheme_alone and not found.is_bad
    if not after.at(nearest(after.points, facts.trained_length)).is_known:
        advice = "The training diverged. Train again with lower rates: training.learning_rate, scheme_learning_rate."
    elif found.is_bad:
        more = "Train more weights (adapter=lora)" if is_scheme_alone else "Train it longer (steps)"
        advice = f"It is not ready for use. {more}, or convert fewer layers: `hf-posenc layers` says which cost most."
        advice += " conversion.native=keep keeps the native encoding, too." * (facts.fate != "kept")
    elif wants_control:
        advice = (
            "The original had no such training. To tell what the encoding did, train a control, too: the same run "
            "without a swap, in a folder next to this one."
        )
    else:
        advice = "To compare it by other measures, use hf-posenc eval."
    return replace(found, sentences=(*unmeasured, *found.sentences), advice=advice, wants_control=wants_control)


def control_of(folder: Path, recipe: Recipe, measurements: Measurements) -> Measurements | None:
    """Return the measurements of a finished run next to this one, which trained the same and changed no encoding.

    It was measured on the same windows.
    """

    def training(each: Recipe) -> list[Any]:
        stages = ({**asdict(part), **_OF_A_SWAP} for part in (each.training, each.lengthen))
        return [each.model, each.data, each.adapter, *stages]

    def shape(each: Measurements) -> Any:
        return (grid := each.curve("after")) and (grid.axes, grid.samples.shape)

    changes = recipe.conversion.scheme is not None or recipe.conversion.rope
    folder, text = folder.resolve(), record_of(folder).get(TEXT)
    for path in sorted(folder.parent.glob(f"*/{RECIPE}")) if changes else ():
        if path.parent != folder and (path.parent / MODEL).is_dir():
            with contextlib.suppress(PosencError):
                other = read_recipe(path)
                alike = training(other) == training(recipe) and record_of(path.parent).get(TEXT, text) == text
                if other.conversion.scheme is None and not other.conversion.rope and alike:
                    found = Measurements.load(path.parent / MEASUREMENTS, writes=False)
                    return found if shape(found) == shape(measurements) else None
    return None


# -- table, picture and page -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """All that is known of a run at its end; `log` is that of the trainer (`trainer.state.log_history`).

    The control is there if the run can be compared with it, and what the models write if it was asked for.
    """

    measurements: Measurements
    facts: Facts
    log: Sequence[Mapping[str, Any]] = ()
    pace: Pace | None = None
    verdict: Verdict | None = None
    control: Measurements | None = None
    writing: Section | None = None

    def measured(self) -> dict[str, dict[str, Grid]]:
        """Return the results of the measured models, by their name in table and picture, then by measure."""
        name, steps = self.facts.encoding, max((step for step, _ in self.measurements.course()), default=0)
        sources = {
            ORIGINAL: (self.measurements, ORIGINAL),
            f"{CONTROL} (original, trained the same)": (self.control, "after"),
            f"{name}, before training": (self.measurements, "before"),
            f"{name}, after {steps:,} steps" if name else f"after {steps:,} steps": (self.measurements, "after"),
        }
        if name is None:
            del sources[f"{name}, before training"]  # It is the original again.
        found = {label: {} if source is None else source.results(which) for label, (source, which) in sources.items()}
        return {label: results for label, results in found.items() if results}

    def models(self) -> dict[str, Grid]:
        return {name: results["perplexity"] for name, results in self.measured().items()}

    def tables(self) -> list[Table]:
        """Return the tables of perplexity, and of what the models copy and recall; none if nothing was measured."""
        models = {name: (grid,) for name, grid in self.models().items()}
        found = list(Section("perplexity", "", "", models).tables()) if models else []
        for name, kind in RECALLS.items():
            grids = {label: results[name] for label, results in self.measured().items() if name in results}
            if grids:
                count = next(iter(grids.values())).samples.shape[-1]
                found.append(table(grids, f"{kind.title}: right tokens (%) in {count} sequences:"))
        return found

    def losses(self) -> list[tuple[int, float]]:
        """Return steps and losses on the text; a mixed loss would rise while its teacher fades."""
        return [(entry["step"], entry.get("text_loss", entry["loss"])) for entry in self.log if "loss" in entry]

    def values(self) -> dict[str, Any]:
        facts, models = self.facts, self.models()
        how = f"with {facts.encoding}" if facts.encoding else "trained as it is"
        first = next(iter(models.values()), None)
        return {
            "title": f"{name_of(facts.recipe.model)} {how}",
            "facts": facts,
            "tables": self.tables(),
            "masked": first is not None and first.quantity == MASKED_PERPLEXITY,
            "targets": TARGETS,
            "windows": 0 if first is None else first.samples.shape[-1],
            "unread": len({grid.measured() for grid in models.values()}) > 1,
            "losses": [loss for _, loss in self.losses()],
            "pace": self.pace,
            "verdict": self.verdict,
            "writing": self.writing,
        }


def write(folder: Path, results: Results) -> None:
    """Write table.md, perplexity.png, and both in report.html, each atomically."""
    facts = results.facts
    if results.models():
        save_figure(_figure(results), folder / PICTURE)
    course = {f"{step:,}": grid for step, grid in results.measurements.course()}
    by_step = table(course, "Perplexity by optimizer step:", "steps \\ tokens read") if len(course) > 2 else None
    values = {**results.values(), "course": by_step, "picture": PICTURE}
    write_text(folder / TABLE, render("run", **values))
    made = [f"{name}: {value}" for name, value in (("command", facts.command), *rows(facts))]
    made.append(f"versions: {', '.join(f'{package} {version}' for package, version in facts.versions.items())}")
    write_text(folder / PAGE, render("run", "html", **values, folder=folder, made=made))


def _figure(results: Results) -> Figure:
    facts, measurements, models = results.facts, results.measurements, results.models()
    conversion, steps = facts.recipe.conversion, facts.recipe.training.steps
    first, trained, original = next(iter(models.values())), list(models)[-1], measurements.curve(ORIGINAL)
    name, length = first.quantity.name, nearest(first.points, facts.trained_length)
    mark = trained_mark(facts.trained_length if facts.states_length else None)
    fades = conversion.native == "handover" and conversion.scheme is not None
    gone = (conversion.handover * steps, "the native encoding is gone") if fades else None
    losses = [(step, Interval(loss, math.nan, math.nan)) for step, loss in results.losses()]
    course = [(step, grid.at(length)) for step, grid in measurements.course()]
    control = None if results.control is None else results.control.curve("after")
    rival, whose = (original, ORIGINAL) if control is None else (control, CONTROL)
    level = None if rival is None else (rival.at(length).mean, f"the {whose}")
    by_step = (
        Panel(lines={trained: losses}, x="optimizer steps", y="training loss on text (nats)", mark=gone),
        Panel(lines={trained: course}, x="optimizer steps", y=f"{name} at {length:,} tokens", level=level, mark=gone),
    )
    return lines_figure(
        f"{results.values()['title']}: {name} on held-out text",
        [
            replace(panel(models, mark), x="context length (tokens read)", y=f"{name} (per token; lower is better)"),
            *(each for each in by_step if each.lines[trained]),
        ],
    )


# -- the model card ----------------------------------------------------------------------------------------------------


def model_card(results: Results, existing: str = "") -> str:
    """Return the model's README.md: loading, measurements and origin.

    Of the existing card, which `save_pretrained` wrote, metadata and the section on the positional encoding are kept;
    PEFT's empty form is not.
    """
    card = ModelCard(existing) if existing.strip() else ModelCard(f"---\n{ModelCardData().to_yaml()}\n---\n")
    licence = base_and_licence(results.facts.recipe.model)[1]
    facts = _public(results.facts)
    recipe = facts.recipe
    values = replace(results, facts=facts).values()
    has_decoder = facts.architecture in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    kind = "MaskedLM" if values["masked"] else "Seq2SeqLM" if has_decoder else "CausalLM"
    _describe(card.data, recipe, kind, licence, results.measurements.curve("after"))
    text = render(
        "card",
        **values,
        recipe=recipe,
        text=_text(recipe),
        name=name_of(recipe.model),
        # An adapter, or a model without a scheme, has no section yet.
        section=encoding_section(card.text),
        auto=f"AutoModelFor{kind}",
        base=recipe.model if on_the_hub(recipe.model) else f"path/of/{name_of(recipe.model)}",
    )
    card.text = f"\n{text}"
    return str(card.content)


def _describe(data: Any, recipe: Recipe, kind: str, licence: str | None, measured: Grid | None) -> None:
    adapter, scheme, source = recipe.adapter.kind, recipe.conversion.scheme, recipe.data.read_from
    data.library_name = "transformers" if adapter == "none" else "peft"
    # The hub accepts only names on the hub.
    data.base_model = recipe.model if on_the_hub(recipe.model) else None
    data.datasets = [source] if source != BUILTIN and on_the_hub(source) else None
    data.license = data.license or licence
    data.pipeline_tag = TASKS[f"AutoModelFor{kind}"]
    tags = [tag for tag in data.tags or [] if not tag.startswith("base_model:")]
    tags += [*(["lora"] if adapter == "lora" else []), "hf_posenc", *([scheme] if scheme else [])]
    data.tags = list(dict.fromkeys(tags))
    points = () if measured is None else filter(measured.reads, measured.points)
    data.eval_results = [
        EvalResult(
            task_type=TASKS[f"AutoModelFor{kind}"],
            dataset_type=source if data.datasets else "text",
            dataset_name=f"{name_of(source)}, held out",
            metric_type="perplexity",
            metric_name=f"{measured.quantity.noun} at {point:,} tokens",
            metric_value=round(measured.at(point).mean, 4),
        )
        for point in points
        if measured is not None
    ] or None
    data.metrics, data.model_name = (["perplexity"], name_of(recipe.model)) if data.eval_results else (None, None)


def _public(facts: Facts) -> Facts:
    """Return the facts of a run with names for local paths, which are private."""
    recipe = facts.recipe

    def name(text: str) -> str:
        key, equals, value = text.rpartition("=")
        return text if on_the_hub(value) or "/" not in value else f"{key}{equals}{Path(value).name}"

    data, distillation, teacher = recipe.data, recipe.distillation, recipe.distillation.teacher
    recipe = replace(
        recipe,
        model=name(recipe.model),
        data=replace(data, source=name(data.read_from), held_out=data.held_out and name(data.held_out)),
        distillation=replace(distillation, teacher=teacher and name(teacher)),
    )
    return replace(facts, recipe=recipe, command=shlex.join(map(name, shlex.split(facts.command))))


def _text(recipe: Recipe) -> str:
    if recipe.data.read_from == BUILTIN:
        return "the documentation that comes with Python"
    return f"`{name_of(recipe.data.read_from)}`" + (f" ({recipe.data.config})" if recipe.data.config else "")


# -- the hub -----------------------------------------------------------------------------------------------------------


def push(folder: Path, repository: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload the model of a finished run, with its card, table and picture, in one commit.

    Repository and branch (`None` is the main one) are created if necessary. Return the URL of the commit; raise
    `RecipeError` if the run is not finished, or the hub refuses.
    """
    if not (folder / RECIPE).is_file():
        raise RecipeError(f"{folder} holds no run of a recipe. Give the folder that `hf-posenc train` wrote.")
    model = folder / MODEL
    if not model.is_dir():
        raise RecipeError(
            f"The run in {folder} is not finished. Go on with it first: hf-posenc resume {shlex.quote(str(folder))}"
        )
    # The card has the recipe, without local paths.
    files = {name: folder / name for name in (TABLE, PICTURE) if (folder / name).is_file()}
    files |= {path.relative_to(model).as_posix(): path for path in sorted(model.rglob("*")) if path.is_file()}
    api = HfApi()
    try:
        name = api.create_repo(repository, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(name).private:
            raise RecipeError("it is public already. Make it private on the hub, or choose another name.")
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        operations = [CommitOperationAdd(path, str(file)) for path, file in files.items()]
        done = api.create_commit(name, operations, commit_message="Adapt with hf_posenc", revision=revision)
    except Exception as error:  # The HTTP library and its exceptions differ between versions of the client.
        words = " ".join(str(error).split()) or type(error).__name__
        raise RecipeError(f"Pushing to {repository} failed: {words}") from error
    return str(done.commit_url)
