"""Run of a recipe: load, convert, train, measure and save a model in one directory, resumable at any point."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from filelock import BaseFileLock, FileLock
from pydantic_core import to_jsonable_python
from rich.console import Console
from transformers import set_seed

from hf_posenc.errors import RecipeError, StorageError, shown
from hf_posenc.patches.adapter_files import apart, fingerprint
from hf_posenc.patches.atomic_files import UNFINISHED, publish, storing, write_text
from hf_posenc.recipes import durations, loading, storage
from hf_posenc.recipes.data import sources
from hf_posenc.recipes.data.windows import content_of
from hf_posenc.recipes.evaluation.generation import Generation
from hf_posenc.recipes.evaluation.measure import Workers
from hf_posenc.recipes.evaluation.report import Section
from hf_posenc.recipes.evaluation.verdict import ORIGINAL, Verdict
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.loading import is_masked, load
from hf_posenc.recipes.processes import enough_threads, processes
from hf_posenc.recipes.reports import say
from hf_posenc.recipes.runs import files, hybrids, report, stages
from hf_posenc.recipes.runs.case import Case, Context, Work
from hf_posenc.recipes.runs.facts import Facts, header, line
from hf_posenc.recipes.runs.files import has_begun, record_of
from hf_posenc.recipes.runs.forecast import forecast, seconds_of, sized
from hf_posenc.recipes.runs.measurements import Measurements
from hf_posenc.recipes.runs.stages import Trained
from hf_posenc.recipes.schema import fields
from hf_posenc.recipes.schema.recipe import Recipe
from hf_posenc.recipes.storage import CHECKPOINTS, MODEL, RECIPE, RUN
from hf_posenc.recipes.training.adapter import keep_unpacked, quantization, trained_dtype
from hf_posenc.recipes.training.rates import magnitude
from hf_posenc.recipes.training.trainer import divide_batch, teacher_of

# Keys of a config that say where it comes from, or in which dtype it was saved.
_OF_NO_MATTER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@dataclass(frozen=True, eq=False)
class Outcome:
    """Outcome of a run: the folder of the model is ready for `from_pretrained`.

    `loss` is the last one logged, in nats per token; it and the `results` are `None` if the run was finished `already`
    and nothing was done.
    """

    folder: Path
    model: Path
    measurements: Measurements
    loss: float | None
    already: bool = False
    results: report.Results | None = None

    @property
    def verdict(self) -> Verdict | None:
        return None if self.results is None else self.results.verdict


def train(recipe: Recipe, folder: str | Path, *, console: Console | None = None, command: str = "") -> Outcome:
    """Run a recipe, or continue a stopped run of the same recipe from its last complete checkpoint.

    Works in one process or under `accelerate launch`, where the main process writes and prints.

    Args:
        recipe: Recipe to run.
        folder: Output folder: new, empty, or of a run of the same recipe.
        console: Console for the progress; `None` is silent.
        command: Command line, for the model card.

    Raises:
        RecipeError: The recipe cannot be run, or the folder holds something else.
        StorageError: The disk is full. Complete checkpoints are kept, and `resume` continues from the last one.
        PosencError: The conversion failed, as in `patch`.
    """
    recipe, folder, together = _located(recipe.checked()), Path(folder), processes()
    recipe = hybrids.known(recipe, folder)
    is_main = together.is_main_process
    if not is_main:
        console = None
    _check_folder(folder, recipe)
    lock = FileLock(folder / files.LOCK, blocking=False)
    try:
        if is_main:
            files.take(lock, folder)
        measurements = Measurements.load(folder / storage.MEASUREMENTS, writes=is_main)
        if (folder / MODEL).is_dir():
            if is_main:
                files.remove_transfer(folder)  # if the run was killed before it did
            say(console, f"{folder} holds a finished run of this recipe; nothing is left to do. See {folder / MODEL}.")
            return Outcome(folder, folder / MODEL, measurements, None, already=True)
        if is_main:
            files.check_writable(folder)
        with storing(folder):
            return _run(recipe, folder, measurements, lock, console, command)
    except StorageError as error:
        for place in (folder, folder / CHECKPOINTS) if is_main else ():
            files.clear(place)
        if not (folder / RECIPE).is_file():
            raise
        raise StorageError(
            f"{error} Every complete checkpoint is kept: hf-posenc resume {shlex.quote(str(folder))} goes on."
        ) from error
    finally:
        files.STOP.over()
        lock.release()


def resume(folder: str | Path, *, console: Console | None = None) -> Outcome:
    """Continue a stopped run.

    Raises:
        RecipeError: The folder holds no run, or its recipe was changed since the run began.
        CheckpointError: A file of the run is damaged.
        PosencError: The run failed, as in `train`.
    """
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        raise RecipeError(f"There is no {RECIPE} in {folder}. Give the folder of a run that was started by train.")
    return train(read_recipe(folder / RECIPE), folder, console=console)


def _run(
    recipe: Recipe,
    folder: Path,
    measurements: Measurements,
    lock: BaseFileLock,
    console: Console | None,
    command: str,
) -> Outcome:
    """Do what is left of a run: check all of its stages, run them one after the other, and write what came out."""
    record, case, together = record_of(folder), Case.of(recipe), processes()
    here, sizes = str(together.num_processes), record.get(files.MICRO, {})
    chosen: Mapping[str, Any] = {}
    if recipe.conversion.measured_layers is not None:
        forecast(case)  # What cannot run is refused before anything is measured.
        recipe, chosen = hybrids.measured(case, console)
        case = replace(case, recipe=recipe, given=case.texts)
    facts, micro = forecast(case, command or record.get("command", ""))
    context = Context(case, folder, measurements, console)
    if context.checkpoint is not None:
        facts = facts.with_verdict(record.get(files.FIT)).with_verdict(record.get(files.TRANSFER))
    places = {place: files.last(place) for place in (stage.folder(context) for stage in stages.training(recipe))}
    for place, whole in places.items():
        for found in files.checkpoints(place):
            if whole is None or files.step_of(found) > files.step_of(whole):
                context.say(f"{found} is damaged; the run goes on from {whole or 'before it'}.")
    # Micro batches round differently, so a resumed run takes those that it began with, whatever memory is free now.
    if any(places.values()) or (context.checkpoints / "transfer" / files.TRANSFERRED).is_file():
        micro = sizes.get(here, micro)
    micro_batch, _ = divide_batch(recipe.training, together.num_processes)
    set_seed(recipe.training.seed)
    work = Work(_load(recipe), facts)
    # Where weights are sharded as they are loaded, only the first process has all of them.
    [work.weights] = broadcast_object_list([magnitude(work.model)])
    with enough_threads(work.model, micro_batch * case.length):
        if recipe.distillation.distils and recipe.distillation.teacher is not None:
            work.teacher = teacher_of(work.model, recipe)
        given = _given(context, work)
        _check_given(context, record, given)
        _claim(context, lock, facts, {**given, **chosen, files.MICRO: {**sizes, here: micro}})
        for words in (*header(facts), *case.measures[1]):
            context.say(words)
        recipe = sized(recipe, micro)
        for stage in stages.stages(recipe):
            if console is not None and isinstance(stage, Trained) and not stage.begins:
                left = seconds_of(case, stages.training(recipe), work, context)
                context.say(line("time", durations.listed(left)))
            if not stage.finished(context):
                stage.run(context, work)
        return _finish(context, work)


def _finish(context: Context, work: Work) -> Outcome:
    """Judge the trained model, and write its report and the model itself."""
    recipe, facts, folder = context.case.recipe, work.facts, context.folder
    assert facts is not None
    control = report.control_of(folder, recipe, context.measurements)
    verdict = report.judge(context.measurements, facts, control)
    writing = _compare(context, work, facts.encoding or "trained")
    results = report.Results(context.measurements, facts, work.log, work.pace, verdict, control, writing)
    if processes().is_main_process:
        report.write(folder, results)
    _tell_length(work.model, context.case.tokenizer, facts.reach)
    _save(context, work, results)
    loss = next((entry["loss"] for entry in reversed(work.log) if "loss" in entry), None)
    return Outcome(folder, folder / MODEL, context.measurements, loss, results=results)


def _compare(context: Context, work: Work, name: str) -> Section | None:
    """Compare what the trained model and the original write, if it is asked for."""
    case, model = context.case, work.model
    if not case.recipe.evaluation.prompts or is_masked(model):
        return None
    text = case.text(case.recipe.training)
    generation = Generation(text.held_out, case.tokenizer, samples=case.recipe.evaluation.prompts, corrupt=text.corrupt)
    original, _ = load(case.recipe.model, **trained_dtype(case.recipe.adapter))
    with case.precise():
        # Every process writes all, since the forward of a sharded model needs all of them.
        workers = Workers(alone=True)
        found = {ORIGINAL: generation(original.to(model.device), workers), name: generation(model, workers)}
    return Section(generation.name, generation.title, generation.note, found)


def _save(context: Context, work: Work, results: report.Results) -> None:
    """Write the final model, its tokenizer and its card atomically."""
    unfinished, trainer = context.folder / f"{UNFINISHED}-{MODEL}", work.trainer
    assert trainer is not None
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        # Checkpoints stay sharded; the final model must load anywhere.
        plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(unfinished))
    processes().wait_for_everyone()
    if processes().is_main_process:
        (unfinished / "training_args.bin").unlink(missing_ok=True)
        context.case.tokenizer.save_pretrained(unfinished)
        card = unfinished / "README.md"
        existing = card.read_text(encoding="utf-8") if card.exists() else ""
        card.write_text(report.model_card(results, existing), encoding="utf-8")
        files.clear(context.checkpoints)
        publish(unfinished, context.folder / MODEL)
        files.remove_transfer(context.folder)
    processes().wait_for_everyone()


# -- the folder --------------------------------------------------------------------------------------------------------


def _check_folder(folder: Path, recipe: Recipe) -> None:
    """Raise unless a folder may hold the run of a recipe: it is new or empty, or holds a run of the same recipe."""
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"{folder} exists and is a file. Choose another name for the run.")
    if not folder.parent.is_dir():
        raise RecipeError(f"There is no directory {folder.parent} to make {folder.name} in. Make it first.")
    if has_begun(folder):
        kept, now = record_of(folder).get(files.KEPT), recipe.flat()
        # Without run.json, recipe.yaml says what there was.
        there = read_recipe(folder / RECIPE) if kept is None else fields.build(Recipe, kept, where=str(folder / RUN))
        before = _located(there).flat()
        changes = [f"{key} was {shown(before[key])} and is {shown(now[key])}" for key in now if now[key] != before[key]]
        if changes:
            raise RecipeError(
                f"{folder} holds a run that began with another recipe: {'; '.join(changes)}. Put back what was there "
                f"(also in {RECIPE}), or train the changed recipe in another folder."
            )
        return
    others = [] if not folder.is_dir() or (folder / RECIPE).is_file() else list(folder.iterdir())
    if any(not path.name.startswith(UNFINISHED) and path.name != CHECKPOINTS for path in others):
        raise RecipeError(f"{folder} exists, and holds no run of a recipe. Choose another folder, or empty this one.")


def _claim(context: Context, lock: BaseFileLock, facts: Facts, entries: Mapping[str, Any]) -> None:
    """Create and lock the folder and write recipe and record, now that the recipe is known to work."""
    if processes().is_main_process:
        context.checkpoints.mkdir(parents=True, exist_ok=True)
        files.take(lock, context.folder)
        files.clear(context.folder)
        files.clear(context.checkpoints)
        write_text(context.folder / RECIPE, context.case.recipe.text())
        start = {
            "step": 0 if context.checkpoint is None else files.step_of(context.checkpoint),
            "processes": processes().num_processes,
            "device": str(processes().device),
            "machine": platform.platform(),
            "cpus": os.cpu_count(),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        starts = [*record_of(context.folder).get("starts", []), start]
        context.record(facts, **entries, starts=starts)
    processes().wait_for_everyone()


def _located(recipe: Recipe) -> Recipe:
    """Return a recipe with absolute paths: its run may be resumed and measured in another directory."""
    teacher = recipe.distillation.teacher
    return replace(
        recipe,
        model=loading.located(recipe.model),
        data=sources.located(recipe.data),
        distillation=replace(recipe.distillation, teacher=teacher and loading.located(teacher)),
    )


# -- the model ---------------------------------------------------------------------------------------------------------


def _load(recipe: Recipe) -> Any:
    packed = quantization(recipe.adapter, precision=recipe.training.precision)
    options = {} if packed is None else {"quantization_config": packed}
    model, _ = load(recipe.model, **trained_dtype(recipe.adapter), **options)
    if packed is not None:
        # `attach` does this too, but `fit` runs before it.
        keep_unpacked(model)
    else:
        # The trainer does this too, but fits and measurements come before it.
        model.to(processes().device)
    return model


def _given(context: Context, work: Work) -> dict[str, Any]:
    """Return what tells the text, the model and the teacher of a run from others."""
    case = context.case
    text = case.text(case.recipe.training)
    base = {"model": fingerprint_of(work.model, case.tokenizer)}
    if work.teacher is not None:
        base["teacher"] = fingerprint_of(work.teacher.model)
    return {files.TEXT: f"{text.digest()}, {text.tokens} tokens", files.BASE: base}


def _check_given(context: Context, record: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise `RecipeError` unless text, model and teacher are those with which the run began."""
    folder, recipe = context.folder, context.case.recipe
    if not has_begun(folder):
        return
    before, now = record.get(files.BASE, {}), given[files.BASE]
    for name, what in (("model", recipe.model), ("teacher", recipe.distillation.teacher)):
        if changes := differences(before.get(name, {}), now.get(name, {})):
            raise RecipeError(
                f"The {name} {what} is not the one with which the run in {folder} began: {'; '.join(changes)}. Put it "
                "back, or train in another folder."
            )
    if record.get(files.TEXT, given[files.TEXT]) != given[files.TEXT]:
        raise RecipeError(
            f"The text of {recipe.data.read_from} has other tokens than when the run in {folder} began, so "
            "measurements before and after could not be compared. Put it back, or train in another folder."
        )


def fingerprint_of(model: Any, tokenizer: Any = None) -> dict[str, Any]:
    """Return what tells a model, before it is converted, and its tokenizer from others, as JSON values."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _OF_NO_MATTER}
    return {
        "config": to_jsonable_python(config, inf_nan_mode="null", fallback=str),
        "weights": fingerprint(model, ()),
        "tokenizer": None if tokenizer is None else hashlib.sha256(content_of(tokenizer).encode()).hexdigest(),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words how fingerprints differ, as far as both are known."""
    one, other = (each.get("config") or {} for each in (before, now))
    # Another transformers may have other keys.
    found = [
        f"{key} of its config was {shown(one[key])} and is {shown(other[key])}"
        for key in sorted(one.keys() & other.keys())
        if one[key] != other[key]
    ]
    weights = [each.get("weights") or {} for each in (before, now)]
    comparable = weights[0].get("version") == weights[1].get("version")
    found += ["its weights have changed"] * bool(comparable and apart(*weights))
    changed = None not in (keys := (before.get("tokenizer"), now.get("tokenizer"))) and keys[0] != keys[1]
    return found + ["its tokenizer has changed"] * changed


def _tell_length(model: Any, tokenizer: Any, length: int) -> None:
    """Write the longest length that was trained for where evaluations and servers look for it."""
    config = model.config
    if tokenizer.model_max_length < length:
        tokenizer.model_max_length = length
    # Elsewhere the key is the size of a table. Some types of rotation compute their frequencies from it.
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    rotations = [parameters, *(of_layers for of_layers in parameters.values() if isinstance(of_layers, dict))]
    computes = any(
        each.get("rope_type") == "dynamic" or (each.get("rope_type") == "longrope" and "factor" not in each)
        for each in rotations
    )
    if parameters and not computes and config.max_position_embeddings < length:
        config.max_position_embeddings = length
