"""Run of a recipe: load, convert, train, measure and save a model in one directory, resumable at any point."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from filelock import BaseFileLock, FileLock
from pydantic_core import to_jsonable_python
from rich.console import Console
from torch.utils.data import Subset
from transformers import TrainerCallback, TrainerState, default_data_collator, set_seed
from transformers.trainer import TRAINER_STATE_NAME

from hf_posenc.errors import RecipeError, StorageError, shown
from hf_posenc.patches.adapter_files import apart, fingerprint
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.atomic_files import UNFINISHED, publish, published, reading, storing, write_text
from hf_posenc.patches.patch import disabled, native_scheme, patch, set_strength
from hf_posenc.patches.plan import Plan, plan
from hf_posenc.patches.rotary import native_rope, set_rope
from hf_posenc.recipes import durations, layout, loading, storage
from hf_posenc.recipes.data import sources
from hf_posenc.recipes.data.collation import Collator, MixedLengths
from hf_posenc.recipes.data.windows import Prepared, content_of, load_data
from hf_posenc.recipes.evaluation.generation import Generation, compared
from hf_posenc.recipes.evaluation.grid import Grid
from hf_posenc.recipes.evaluation.measure import Workers
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.layout import CHECKPOINTS, MODEL, RECIPE, RUN
from hf_posenc.recipes.loading import is_masked, load
from hf_posenc.recipes.memory import micro_batches
from hf_posenc.recipes.processes import enough_threads, processes, sharding
from hf_posenc.recipes.runs import files, report
from hf_posenc.recipes.runs.facts import Facts, print_header
from hf_posenc.recipes.runs.files import has_begun, record_of
from hf_posenc.recipes.runs.forecast import seconds_of
from hf_posenc.recipes.runs.measurements import Measurements, Measuring, Suite
from hf_posenc.recipes.runs.progress import Pace, Progress
from hf_posenc.recipes.runs.verdict import Verdict, control_of, is_comparable, judge
from hf_posenc.recipes.schema import checks, fields
from hf_posenc.recipes.schema.recipe import Recipe, Training
from hf_posenc.recipes.training.adapter import attach, check_targets, keep_unpacked, quantization, trained_dtype
from hf_posenc.recipes.training.distillation import Teacher
from hf_posenc.recipes.training.fit_bias import fit
from hf_posenc.recipes.training.stages import Stage, stages
from hf_posenc.recipes.training.starts import held_out
from hf_posenc.recipes.training.trainer import (
    DAMAGED,
    AdaptationTrainer,
    adaptation_trainer,
    check_loggers,
    check_teacher,
    divide_batch,
    teacher_of,
)
from hf_posenc.recipes.training.transfer import BEST, AttentionTransfer, BestLayers

# Context in which a model computes as it was loaded.
Original = Callable[[Any], contextlib.AbstractContextManager[None]]

# Keys of a config that say where it comes from, or in which dtype it was saved.
_OF_NO_MATTER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
_LOGS_VARIABLE = "TENSORBOARD_LOGGING_DIR"
# Windows for `fit`; tokens that judge the transfer.
_FITTED = 16
_JUDGED = 2048


@dataclass(frozen=True, eq=False)
class Outcome:
    """Outcome of a run: the folder of the model is ready for `from_pretrained`.

    `loss` is the last one logged, in nats per token; `None` if the run was finished `already` and nothing was done.
    """

    folder: Path
    model: Path
    measurements: Measurements
    loss: float | None
    already: bool = False
    verdict: Verdict | None = None


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
    is_main = together.is_main_process
    if not is_main:
        console = None
    _check_folder(folder, recipe)
    lock = FileLock(folder / files.LOCK, blocking=False)
    try:
        if is_main:
            files.take(lock, folder)
        measurements = Measurements.load(folder / layout.MEASUREMENTS, writes=is_main)
        if (folder / MODEL).is_dir():
            if is_main:
                files.remove_transfer(folder)  # if the run was killed before it did
            _say(console, f"{folder} holds a finished run of this recipe; nothing is left to do. See {folder / MODEL}.")
            return Outcome(folder, folder / MODEL, measurements, None, already=True)
        # The trainer would fail on these only after the data is prepared.
        check_loggers(recipe.saving.loggers)
        for section, settings in recipe.stages().items():
            divide_batch(settings, together.num_processes, section=section)
        if is_main:
            files.check_writable(folder)
        with storing(folder):
            return _Run(recipe, folder, console, command, measurements, lock).complete()
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


def _say(console: Console | None, text: str) -> None:
    if console is not None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)


@dataclass(eq=False)
class _Run:
    """Steps of one run."""

    recipe: Recipe
    folder: Path
    console: Console | None
    command: str
    measurements: Measurements
    lock: BaseFileLock

    def __post_init__(self) -> None:
        record, self.checkpoints = record_of(self.folder), self.folder / CHECKPOINTS
        self.command = self.command or record.get("command", "")
        self.fitted: dict[str, Any] | None = record.get(files.FIT)
        self.transferred: dict[str, Any] | None = record.get(files.TRANSFER)
        self.processes, self.text = processes(), ""
        self.base: dict[str, dict[str, Any]] = {}
        # Of the training of all weights, or of what follows it: after that, nothing needs the start.
        self.checkpoint = files.last(self.checkpoints / "lengthen") or files.last(self.checkpoints)
        for folder in (self.checkpoints, *(self.checkpoints / name for name in ("transfer", "lengthen"))):
            whole = files.last(folder)
            for found in files.checkpoints(folder):
                if whole is None or files.step_of(found) > files.step_of(whole):
                    _say(self.console, f"{found} is damaged; the run goes on from {whole or 'before it'}.")
        self.teacher: Teacher | None = None
        # Micro batches round differently, so a resumed run takes those that it began with, whatever memory is free now.
        transfer = self.checkpoints / "transfer"
        has_begun = self.checkpoint or files.last(transfer) or (transfer / files.TRANSFERRED).is_file()
        kept = record.get(files.MICRO, {}) if has_begun else {}
        self.micro: dict[str, int | None] = kept.get(str(self.processes.num_processes), {})

    def complete(self) -> Outcome:
        """Do what is left of the run."""
        recipe, evaluation = self.recipe, self.recipe.evaluation
        set_seed(recipe.training.seed)
        model, tokenizer = self._load()
        self._check_base(model, tokenizer)
        checks.check_unconverted(recipe, model.config)
        check_targets(model, recipe.adapter)
        check_teacher(recipe, model.config)
        length, own_length = checks.lengths(recipe, model.config)
        micro_batch, _ = divide_batch(recipe.training, self.processes.num_processes)
        with enough_threads(model, micro_batch * length):
            read = partial(load_data, recipe.data, tokenizer, seed=recipe.training.seed, config=model.config)
            # Of all stages, so that a later one fails before the first one begins.
            sizes = {stage.length or length for stage in recipe.stages().values()}
            texts = {size: read(length=size) for size in sizes}
            data = texts[length]
            self._check_text(data)
            suite = Suite.of(evaluation, model.config, tokenizer, data, length, own_length)
            planned, as_loaded = self._convert(model)
            checks.check_tables(recipe, model, length)
            if self.checkpoint is None:  # Its weights would replace the fitted ones.
                self.fitted = self._fit(model, data)
            model = attach(model, recipe.adapter)
            micro, memory = micro_batches(recipe, model, length)
            self.micro = self.micro or micro
            with as_loaded(model) if planned is None else contextlib.nullcontext():
                self.teacher = teacher_of(model, recipe)
            if self.teacher is not None and recipe.distillation.teacher is not None:
                self.base["teacher"] = fingerprint_of(self.teacher.model)
                self._check_same("teacher", f"The teacher {recipe.distillation.teacher}")
            plans = stages(self._sized(), model)
            facts = Facts.of(
                model,
                recipe,
                planned,
                trained_length=own_length,
                data_tokens=data.tokens,
                command=self.command,
                stages=plans,
                memory=memory,
                refused="" if self.fitted is None or self.fitted["accepted"] else self.fitted["sentence"],
            )
            self._claim(facts)
            if self.console:
                print_header(self.console, facts)
                for note in suite.notes:
                    _say(self.console, note)
                _say(self.console, f"time       {self._time(model, plans, texts, suite, length)}")

            def measure(model: Any) -> tuple[Grid, dict[str, Grid]]:
                with self._precise():
                    return suite.curve(model), suite.recalls(model)

            log: list[dict[str, Any]] = []
            trainer: AdaptationTrainer | None = None
            for stage in plans:
                measuring = Measuring(
                    self.measurements,
                    measure,
                    every=evaluation.every,
                    begins=stage.begins,
                    native=as_loaded if stage is plans[0] else None,
                    console=self.console,
                )
                if stage.name == "transfer":
                    self._transfer(stage, model, data, facts, measuring)
                    continue
                text = texts[stage.recipe.training.length or length]
                trainer = None  # Its optimizer is twice as large as the model.
                trainer, pace = self._train(stage, model, text, facts, measuring, ends=stage is plans[-1])
                log += [{**entry, "step": entry["step"] + stage.begins} for entry in trainer.state.log_history]
            assert trainer is not None
            if self.transferred is not None and not self.transferred["accepted"]:
                facts = replace(facts, cautions=(*facts.cautions, self.transferred["sentence"]))
            control = control_of(self.folder, recipe, self.text)
            control = control if control is not None and is_comparable(self.measurements, control) else None
            verdict = judge(self.measurements, facts, control)
            if evaluation.prompts:
                facts = replace(facts, writes=self._compare(model, tokenizer, data))
            results = report.Results(self.measurements, facts, log, pace, verdict, control)
            if self.processes.is_main_process:
                report.write(self.folder, results)
            _tell_length(model, tokenizer, facts.reach)
            self._save(trainer, tokenizer, results)
        loss = next((entry["loss"] for entry in reversed(log) if "loss" in entry), None)
        return Outcome(self.folder, self.folder / MODEL, self.measurements, loss, verdict=verdict)

    def _load(self) -> tuple[Any, Any]:
        adapter = self.recipe.adapter
        packed = quantization(adapter, precision=self.recipe.training.precision)
        options = {} if packed is None else {"quantization_config": packed}
        model, tokenizer = load(self.recipe.model, **trained_dtype(adapter), **options)
        if packed is not None:
            # `attach` does this too, but `fit` runs before it.
            keep_unpacked(model)
        else:
            # The trainer does this too, but fits and measurements come before it.
            model.to(self.processes.device)
        return model, tokenizer

    def _check_base(self, model: Any, tokenizer: Any) -> None:
        """Raise `RecipeError` if model or tokenizer are not those with which the run began."""
        self.base["model"] = fingerprint_of(model, tokenizer)
        self._check_same("model", f"The model {self.recipe.model}")

    def _check_same(self, name: str, what: str) -> None:
        """Raise `RecipeError` if a model has another fingerprint than when the run began."""
        there = record_of(self.folder).get(files.BASE, {}) if has_begun(self.folder) else {}
        if changes := differences(there.get(name, {}), self.base[name]):
            raise RecipeError(
                f"{what} is not the one with which the run in {self.folder} began: {'; '.join(changes)}. Put it back, "
                "or train in another folder."
            )

    def _check_text(self, data: Prepared) -> None:
        """Raise `RecipeError` if the text is not that with which the run began."""
        self.text = f"{data.digest()}, {data.tokens} tokens"
        if has_begun(self.folder) and record_of(self.folder).get(files.TEXT, self.text) != self.text:
            raise RecipeError(
                f"The text of {self.recipe.data.read_from} has other tokens than when the run in {self.folder} began, "
                "so measurements before and after could not be compared. Put it back, or train in another folder."
            )

    def _convert(self, model: Any) -> tuple[Plan | None, Original]:
        """Convert the model; return the plan of that, and the context in which the model computes as it was loaded."""
        conversion = self.recipe.conversion
        if conversion.scheme is not None:
            planned = plan(model, conversion.scheme, **conversion.keywords)
            local = native_scheme(model) if conversion.window is not None else None
            patch(model, conversion.scheme, **conversion.keywords)
            if conversion.window is not None:
                _narrow(model, local, planned.layers, conversion.window)
            return planned, disabled
        if not conversion.rope:
            return None, lambda model: contextlib.nullcontext()
        stock = set_rope(model, conversion.rope)
        return None, lambda model: native_rope(model, stock)

    def _fit(self, model: Any, data: Prepared) -> dict[str, Any] | None:
        """Fit the start if the recipe says so, and return the verdict for run.json."""
        conversion = self.recipe.conversion
        if conversion.fit != "native":
            return None
        # A handover ends without the native encoding, so the fit is judged without it.
        handover = conversion.native == "handover"
        if handover:
            set_strength(model, native=0)
        ids = torch.stack([window["input_ids"] for window in itertools.islice(iter(data.train), _FITTED)])
        result = fit(model, ids=ids.to(model.device), corrupt=data.corrupt)
        if handover:
            set_strength(model)
        _say(self.console, result.sentence)
        return {"accepted": result.accepted, "sentence": result.sentence}

    def _sized(self) -> Recipe:
        """Return the recipe with its micro batches."""
        training, lengthen = self.recipe.training, self.recipe.lengthen
        return replace(
            self.recipe,
            training=replace(training, micro_batch_size=self.micro["training"]),
            lengthen=replace(lengthen, micro_batch_size=self.micro.get("lengthen")),
        )

    def _time(
        self, model: Any, plans: Sequence[Stage], texts: Mapping[int, Prepared], suite: Suite, length: int
    ) -> str:
        """Estimate how long the rest of the run takes, in words."""
        done: dict[str, int] = {}
        for stage in reversed(plans):
            folder, steps = self._folder(stage), stage.recipe.training.steps
            last = files.last(folder)
            # What follows begins when a stage is over.
            if not done and not (folder / files.TRANSFERRED).is_file():
                steps = 0 if last is None else files.step_of(last)
            done |= {stage.name: steps} if steps else {}
        with self._precise():
            found = seconds_of(
                model,
                plans,
                texts,
                suite,
                length=length,
                teacher=self.teacher,
                done=done,
                measured=self.measurements.count,
            )
        return durations.listed(found)

    def _folder(self, stage: Stage) -> Path:
        """Return the folder of the checkpoints of a stage."""
        return self.checkpoints if stage.name == "training" else self.checkpoints / stage.name

    def _claim(self, facts: Facts) -> None:
        """Create and lock the folder and write recipe and record, now that the recipe is known to work."""
        if self.processes.is_main_process:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            files.take(self.lock, self.folder)
            files.clear(self.folder)
            files.clear(self.checkpoints)
            write_text(self.folder / RECIPE, self.recipe.text())
            self._write_record(self._record(facts))
        self.processes.wait_for_everyone()

    def _record(self, facts: Facts) -> dict[str, Any]:
        start = {
            "step": 0 if self.checkpoint is None else files.step_of(self.checkpoint),
            "processes": self.processes.num_processes,
            "device": str(self.processes.device),
            "machine": platform.platform(),
            "cpus": os.cpu_count(),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        there = record_of(self.folder)
        return {
            **asdict(facts),
            files.FIT: self.fitted,
            files.TRANSFER: self.transferred,
            files.MICRO: {**there.get(files.MICRO, {}), str(self.processes.num_processes): self.micro},
            files.TEXT: self.text,
            files.BASE: self.base,
            "starts": [*there.get("starts", []), start],
        }

    def _write_record(self, record: dict[str, Any]) -> None:
        storage.save(record, self.folder / RUN)

    def _train(
        self, stage: Stage, model: Any, data: Prepared, facts: Facts, callback: TrainerCallback, *, ends: bool
    ) -> tuple[AdaptationTrainer, Pace | None]:
        """Run a stage that trains a model or its attentions; return its trainer and its pace."""
        is_transfer = stage.name == "transfer"
        folder = self._folder(stage)
        teacher = self.teacher if stage.recipe.distillation.distils else None
        collate: Collator | None = data.collate
        if stage.name == "lengthen" and collate is None:
            # Encoders as they were cannot tell the parts apart.
            seed, share = self.recipe.training.seed, self.recipe.lengthen.short
            collate = MixedLengths(facts.length, share=share, seed=seed)
        checkpoints = files.WholeCheckpoints(folder, keep=self.recipe.saving.keep)
        text = "" if is_transfer else "loss" if teacher is None else "text_loss"
        # By default TensorBoard writes next to the unfinished checkpoints, which are removed. Stages begin at step 0.
        logs = Path(os.environ.get(_LOGS_VARIABLE, self.folder / layout.LOGS)) / stage.name
        variables = {_LOGS_VARIABLE: str(logs), **sharding(model, in_part=is_transfer)}
        showing = Progress(self.console, stage.tokens(facts.length), text=text)
        with showing as progress, patch_environment(**variables):
            trainer = adaptation_trainer(
                model,
                stage.recipe,
                data.train,
                folder=checkpoints.unfinished,
                collate=collate,
                teacher=teacher,
                callbacks=[callback, progress, checkpoints, files.STOP],
                saves_end=not (ends or is_transfer),
            )
            trainer.args.run_name = self.folder.resolve().name
            if not is_transfer and (teacher is None or self.recipe.distillation.until):
                # No later stage has a teacher. The trainer has the only reference now, and frees one that has faded.
                self.teacher = teacher = None
            _go_on(trainer, files.last(folder))
        return trainer, progress.pace

    def _transfer(self, stage: Stage, model: Any, data: Prepared, facts: Facts, measuring: Measuring) -> None:
        """Run the attention transfer, or read its result, and measure before it; its verdict goes into run.json."""
        if self.checkpoint is not None:
            return
        folder, teacher, device = self.checkpoints / "transfer", self.teacher, self.processes.device
        result = folder / files.TRANSFERRED
        original = teacher.model if teacher is not None and self.recipe.distillation.teacher is None else None
        transfer = AttentionTransfer(model, projections=stage.recipe.moves_projections, original=original)
        measuring.begin(model)
        judged, windows = _set_aside(data.train, stage.recipe.training)
        collate = data.collate or default_data_collator
        batches = [{name: value.to(device) for name, value in collate(part).items()} for part in judged]
        with transfer.training_only():
            with self._precise():
                best = BestLayers(transfer, batches)
            if result.is_file():
                best.load(result)
            else:
                last = files.last(folder)
                if last is not None:
                    best.load(last / BEST)
                self._train(stage, transfer, replace(data, train=windows), facts, best, ends=False)
            found = best.restore()
        self.transferred = asdict(found)
        if self.processes.is_main_process:
            self._write_record({**record_of(self.folder), files.TRANSFER: self.transferred})
            if not result.is_file():
                folder.mkdir(exist_ok=True)
                with published(result) as unfinished:
                    best.save(unfinished)
        self.processes.wait_for_everyone()
        _say(self.console, found.sentence)

    def _precise(self) -> Any:
        """Return the context of a forward in the precision of the recipe."""
        precision = self.recipe.training.precision
        device = self.processes.device.type
        return torch.autocast(device, getattr(torch, precision), enabled=precision != "float32")

    def _compare(self, model: Any, tokenizer: Any, data: Prepared) -> str:
        """Compare what the trained model and the original write, in words."""
        if is_masked(model):
            return "Nothing: a masked language model continues no text."
        samples = self.recipe.evaluation.prompts
        generation = Generation(data.held_out, tokenizer, samples=samples, corrupt=data.corrupt)
        original, _ = load(self.recipe.model, **trained_dtype(self.recipe.adapter))
        with self._precise():
            # Every process writes all, since the forward of a sharded model needs all of them.
            workers = Workers(alone=True)
            sentence = compared(generation(original.to(model.device), workers), generation(model, workers))
        _say(self.console, sentence)
        return sentence

    def _save(self, trainer: AdaptationTrainer, tokenizer: Any, results: report.Results) -> None:
        """Write the final model, its tokenizer and its card atomically."""
        unfinished = self.folder / f"{UNFINISHED}-{MODEL}"
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            # Checkpoints stay sharded; the final model must load anywhere.
            plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(str(unfinished))
        self.processes.wait_for_everyone()
        if self.processes.is_main_process:
            (unfinished / "training_args.bin").unlink(missing_ok=True)
            tokenizer.save_pretrained(unfinished)
            card = unfinished / "README.md"
            existing = card.read_text(encoding="utf-8") if card.exists() else ""
            card.write_text(report.model_card(results, existing), encoding="utf-8")
            files.clear(self.checkpoints)
            publish(unfinished, self.folder / MODEL)
            files.remove_transfer(self.folder)
        self.processes.wait_for_everyone()


def _go_on(trainer: AdaptationTrainer, checkpoint: Path | None) -> None:
    """Train from a checkpoint to the end; from one of the last step, do only what follows it."""
    if checkpoint is None:
        trainer.train()
        return
    with reading(str(checkpoint), DAMAGED):
        # Trainer takes integers for floats: one beyond their range is damage that it would only meet later.
        json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes(), parse_int=lambda digits: float(int(digits)))
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if state.global_step != files.step_of(checkpoint):
            raise ValueError(f"it is of step {shown(state.global_step)}")
    if state.global_step < trainer.args.max_steps:
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    trainer.callback_handler.on_train_begin(trainer.args, state, trainer.control)
    trainer.callback_handler.on_train_end(trainer.args, state, trainer.control)


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


def _narrow(model: Any, scheme: str | None, converted: Mapping[str, Sequence[int]], window: int) -> None:
    """Hide tokens far behind from the layers that keep the model's own encoding, which the scheme computes."""
    if scheme is None:
        raise RecipeError("conversion.window needs a model whose own encoding a scheme computes. Leave it out.")
    architecture = of_model(model)
    for stack, body in architecture.stacks(model).items():
        if stack in converted:
            others = sorted(set(range(len(architecture.attentions(body)))) - set(converted[stack]))
            patch(model, scheme, layers=others, stacks=stack, window=window)


def _set_aside(windows: Any, training: Training) -> tuple[list[list[Any]], Any]:
    """Return windows that judge the transfer, in micro batches, and the others to train on."""
    first = next(iter(windows))
    most, has_end = max(2, math.ceil(_JUDGED / len(first["input_ids"]))), hasattr(windows, "__len__")
    count = held_out(len(windows), most=most) if has_end else most
    # One window serves both.
    judged = list(itertools.islice(iter(windows), max(1, count)))
    size = training.micro_batch_size or training.batch_size
    parts = [judged[start : start + size] for start in range(0, len(judged), size)]
    others = Subset(windows, range(count, len(windows))) if has_end else windows.skip(count)
    return parts, others


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
