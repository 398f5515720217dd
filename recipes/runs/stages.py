"""The stages of a run, in their order: what each refuses, what it does, and what is done of it."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import broadcast_object_list, patch_environment
from torch import nn
from torch.utils.data import Subset
from transformers import TrainerCallback, TrainerState, default_data_collator
from transformers.trainer import TRAINER_STATE_NAME

from hf_posenc.errors import RecipeError
from hf_posenc.patches.atomic_files import published
from hf_posenc.patches.patch import disabled, native_scheme, patch, set_strength
from hf_posenc.patches.rotary import native_rope, set_rope
from hf_posenc.patches.surgery import Sites, is_patched
from hf_posenc.recipes import storage
from hf_posenc.recipes.data.collation import Collator, MixedLengths, PositionSkipping, Repetition
from hf_posenc.recipes.data.windows import start_token
from hf_posenc.recipes.processes import processes, sharding
from hf_posenc.recipes.reports import counted
from hf_posenc.recipes.runs import files
from hf_posenc.recipes.runs.case import Case, Context, Work
from hf_posenc.recipes.runs.measurements import Measuring
from hf_posenc.recipes.runs.progress import Progress
from hf_posenc.recipes.schema import checks
from hf_posenc.recipes.schema.recipe import Distillation, Recipe, StageName, Training
from hf_posenc.recipes.training.adapter import attach, check_targets, quantization
from hf_posenc.recipes.training.fit_bias import check_fit, fit
from hf_posenc.recipes.training.rates import Name, with_rates
from hf_posenc.recipes.training.starts import held_out
from hf_posenc.recipes.training.trainer import (
    AdaptationTrainer,
    adaptation_trainer,
    check_loggers,
    check_teacher,
    divide_batch,
    teacher_of,
    whole_batches,
)
from hf_posenc.recipes.training.transfer import BEST, AttentionTransfer, BestLayers

# Windows of text that a fit reads, and tokens that judge the transfer.
_WINDOWS, _JUDGED = 16, 2048
_LOGS_VARIABLE = "TENSORBOARD_LOGGING_DIR"


@dataclass(frozen=True)
class Stage:
    """A stage of a run.

    `check` does to a model without weights what `run` will do to the model, and raises if `run` would: a dry run is the
    check of each stage. `run` continues where a stopped run was, unless the stage is `finished`.
    """

    recipe: Recipe

    def check(self, case: Case, work: Work) -> None:
        """Raise `PosencError` for what cannot run; `work` has a model on the meta device."""
        raise NotImplementedError

    def finished(self, context: Context) -> bool:
        """Whether a checkpoint of a later stage has all that it does."""
        return False

    def run(self, context: Context, work: Work) -> None:
        raise NotImplementedError


# -- stages that make the model ----------------------------------------------------------------------------------------


class Convert(Stage):
    """Conversion of the model, which is the same with and without weights."""

    def check(self, case: Case, work: Work) -> None:
        checks.check_unconverted(self.recipe, case.config)
        self.run(None, work)
        checks.check_tables(self.recipe, work.model, case.length)

    def run(self, context: Context | None, work: Work) -> None:
        conversion, model = self.recipe.conversion, work.model
        if conversion.scheme is not None:
            own = native_scheme(model) if conversion.window is not None else None
            patch(model, conversion.scheme, **conversion.keywords)
            if conversion.window is not None:
                _narrow(model, own, conversion.window)
            work.original = disabled
        elif conversion.rope:
            stock = set_rope(model, conversion.rope)
            work.original = lambda model: native_rope(model, stock)


def _narrow(model: Any, scheme: str | None, window: int) -> None:
    """Hide tokens far behind from the layers that keep the model's own encoding, which the scheme computes."""
    if scheme is None:
        raise RecipeError("conversion.window needs a model whose own encoding a scheme computes. Leave it out.")
    for name, stack in Sites.of(model).stacks.items():
        others = [layer for layer, attention in enumerate(stack.attentions) if not is_patched(attention)]
        if len(others) < len(stack.attentions):
            patch(model, scheme, layers=others, stacks=name, window=window)


class Fit(Stage):
    """Fit of an additive scheme before anything is trained."""

    def check(self, case: Case, work: Work) -> None:
        check_fit(work.model)

    def finished(self, context: Context) -> bool:
        return context.checkpoint is not None

    def run(self, context: Context, work: Work) -> None:
        model, text = work.model, context.case.text(self.recipe.training)
        # A handover ends without the native encoding, so the fit is judged without it.
        fades = self.recipe.conversion.native == "handover"
        if fades:
            set_strength(model, native=0)
        ids = torch.stack([window["input_ids"] for window in itertools.islice(iter(text.train), _WINDOWS)])
        result = fit(model, ids=ids.to(model.device), corrupt=text.corrupt)
        if fades:
            set_strength(model)
        context.judged(work, files.FIT, {"accepted": result.accepted, "sentence": result.sentence})


class Adapt(Stage):
    """Adapter of the recipe, and the teacher that the model is before it is trained."""

    def check(self, case: Case, work: Work) -> None:
        check_teacher(self.recipe, case.config)
        check_targets(work.model, self.recipe.adapter)
        quantization(self.recipe.adapter)
        work.model = attach(work.model, self.recipe.adapter)

    def run(self, context: Context | None, work: Work) -> None:
        """Attach the adapter, and make the teacher unless the recipe names one."""
        work.model = attach(work.model, self.recipe.adapter)
        if self.recipe.distillation.teacher is None:
            # A copy of a converted model is unpatched; other rope parameters are taken back for a moment.
            is_rope = self.recipe.conversion.scheme is None
            with work.original(work.model) if is_rope else contextlib.nullcontext():
                work.teacher = teacher_of(work.model, self.recipe)


# -- stages that train it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained(Stage):
    """A stage that trains; `begins` is the number of optimizer steps of the stages before it.

    It has a `section` of the recipe, a name in `words` for reports, and the share of windows that skip positions.
    """

    section: ClassVar[StageName]
    words: ClassVar[str]
    skipping: ClassVar[float] = 1.0

    begins: int = 0

    @property
    def settings(self) -> Training:
        return self.recipe.stages()[self.section]

    @property
    def rates(self) -> tuple[Name, bool]:
        """Which default rates it has, and whether its scheme was fitted."""
        return self.section, True

    def plain(self, model: Any) -> Recipe:
        """Return the recipe with what this stage has of it; the training alone brings in the scheme."""
        return replace(self.recipe, conversion=replace(self.recipe.conversion, scheme=None))

    def settled(self, work: Work) -> Recipe:
        """Return the recipe of this stage alone, with its rates, which follow from the model as it was loaded."""
        kind, fitted = self.rates
        known = {"weights": work.weights, "distance": work.distance}
        training = with_rates(self.settings, work.model, kind, fitted=fitted, **known)
        return replace(self.plain(work.model), training=training)

    def check(self, case: Case, work: Work) -> None:
        check_loggers(self.recipe.saving.loggers)
        divide_batch(self.settings, processes().num_processes, section=self.section)
        whole_batches(self.windows(case), self.settings.batch_size)
        case.measures  # noqa: B018  # It refuses contexts and short texts.

    def run(self, context: Context, work: Work) -> None:
        self.train(context, work, work.model, [self.measuring(context, work)])
        assert work.trainer is not None
        work.log += [{**entry, "step": entry["step"] + self.begins} for entry in work.trainer.state.log_history]

    @property
    def saves_end(self) -> bool:
        """Whether its last step saves a checkpoint, for a stage that follows."""
        return False

    def done(self, context: Context) -> int:
        last = files.last(self.folder(context))
        return 0 if last is None else files.step_of(last)

    def folder(self, context: Context) -> Path:
        return context.checkpoints / self.section

    def windows(self, case: Case) -> Any:
        return case.text(self.settings).train

    def collate(self, case: Case) -> Collator | None:
        """Return the collator; `None` is the trainer's."""
        found, settings = case.text(self.settings).collate, self.settings
        if settings.skip_to is None:
            return found
        whole = found or default_data_collator
        return PositionSkipping(settings.skip_to, share=self.skipping, seed=settings.seed, collate=whole)

    def module(self, work: Work) -> AbstractContextManager[nn.Module]:
        return contextlib.nullcontext(work.model)

    def trainer(self, case: Case, work: Work, module: nn.Module, **more: Any) -> AdaptationTrainer:
        """Return the trainer of a module; `more` are further arguments of `adaptation_trainer`."""
        recipe = self.settled(work)
        teacher = work.teacher if recipe.distillation.distils else None
        return adaptation_trainer(
            module, recipe, self.windows(case), collate=self.collate(case), teacher=teacher, **more
        )

    def measuring(self, context: Context, work: Work) -> Measuring:
        """Return the callback that measures this stage, and first of all the model as it was loaded."""
        return Measuring(
            context.measurements,
            context.measure,
            every=self.recipe.evaluation.every,
            begins=self.begins,
            original=None if self.begins else work.original,
            console=context.console,
        )

    def train(self, context: Context, work: Work, module: nn.Module, callbacks: Sequence[TrainerCallback]) -> None:
        """Train a module, from the last checkpoint if there is one."""
        case, folder = context.case, self.folder(context)
        settled = self.settled(work)
        distillation = settled.distillation
        has_new = bool(work.facts and work.facts.new_parameters)
        context.say(f"{self.words} at {self.in_words(settled.training, has_new=has_new)}")
        checkpoints = files.WholeCheckpoints(folder, keep=self.recipe.saving.keep)
        is_part = module is not work.model
        text = "" if is_part else "text_loss" if distillation.distils and work.teacher is not None else "loss"
        # By default TensorBoard writes next to the unfinished checkpoints, which are removed. Stages begin at step 0.
        logs = Path(os.environ.get(_LOGS_VARIABLE, context.folder / storage.LOGS)) / self.section
        variables = {_LOGS_VARIABLE: str(logs), **sharding(work.model, in_part=is_part)}
        work.trainer = None  # Its optimizer is twice as large as the model.
        showing = Progress(context.console, self.tokens(case.length), text=text)
        with showing as progress, patch_environment(**variables):
            work.trainer = self.trainer(
                case,
                work,
                module,
                folder=checkpoints.unfinished,
                callbacks=[*callbacks, progress, checkpoints, files.STOP],
                saves_end=self.saves_end,
            )
            work.trainer.args.run_name = context.folder.resolve().name
            if not is_part and (not distillation.distils or distillation.until):
                # No later stage has a teacher. The trainer has the only reference now, and frees one that has faded.
                work.teacher = None
            go_on(work.trainer, files.last(folder))
        work.pace = progress.pace

    def tokens(self, length: int) -> int:
        """Return the tokens of a step; `length` is the length of windows where the recipe gives none."""
        return self.settings.batch_size * (self.settings.length or length)

    def describe(self, *, has_new: bool) -> str:
        """Return the settings in words. Rates that are null are said when the stage begins."""
        training = self.settings
        size = f"{self.words}: {counted(training.steps, 'step')} x {counted(training.batch_size, 'window')}"
        if training.learning_rate is None or training.scheme_learning_rate is None:
            return size
        return f"{size}, {self.in_words(training, has_new=has_new)}"

    def in_words(self, training: Training, *, has_new: bool) -> str:
        """Return the rates of this stage; without new weights, their rate is left out."""
        scheme = f"{training.scheme_learning_rate:.2g} (scheme)"
        if self.rates[0] == "fit" or self.recipe.adapter.kind == "scheme":  # nothing of the model is trained
            return f"rate {scheme}"
        own = f"{training.learning_rate:.2g}"
        return f"rates {own} and {scheme}" if has_new else f"rate {own}"


class Transfer(Trained):
    """Transfer of all attentions, or of their schemes alone, before the training."""

    section = "transfer"
    words = "attention transfer"
    skipping = 0.5

    @property
    def rates(self) -> tuple[Name, bool]:
        return "transfer" if self.recipe.moves_projections else "fit", True

    def plain(self, model: Any) -> Recipe:
        return replace(super().plain(model), distillation=Distillation())

    def windows(self, case: Case) -> Any:
        return set_aside(super().windows(case), self.settings)[1]

    def collate(self, case: Case) -> Collator | None:
        found, share = super().collate(case), self.recipe.transfer.repeat
        if not share:
            return found
        # Positions are skipped in what is repeated, too.
        settings: dict[str, Any] = {"seed": self.settings.seed, "start": start_token(case.tokenizer)}
        return Repetition(share, collate=found or default_data_collator, **settings)

    def check(self, case: Case, work: Work) -> None:
        AttentionTransfer(work.model, projections=self.recipe.moves_projections)
        super().check(case, work)

    def finished(self, context: Context) -> bool:
        return context.checkpoint is not None

    def done(self, context: Context) -> int:
        is_over = self.finished(context) or (self.folder(context) / files.TRANSFERRED).is_file()
        return self.settings.steps if is_over else super().done(context)

    @contextlib.contextmanager
    def module(self, work: Work) -> Iterator[AttentionTransfer]:
        original = None if work.teacher is None or self.recipe.distillation.teacher else work.teacher.model
        transfer = AttentionTransfer(work.model, projections=self.recipe.moves_projections, original=original)
        with transfer.training_only():
            yield transfer

    def run(self, context: Context, work: Work) -> None:
        """Train, unless the result is there, and measure before it."""
        folder, text = self.folder(context), context.case.text(self.settings)
        result, collate = folder / files.TRANSFERRED, self.collate(context.case) or default_data_collator
        with self.module(work) as transfer:
            self.measuring(context, work).begin(work.model)
            parts = (collate(part) for part in set_aside(text.train, self.settings)[0])
            device = processes().device
            batches = [{name: value.to(device) for name, value in part.items()} for part in parts]
            with context.case.precise():
                best = BestLayers(transfer, batches)
            last = files.last(folder)
            if result.is_file():
                best.load(result)
            elif last is not None:
                best.load(last / BEST)
            [work.distance] = broadcast_object_list([float(best.before.mean())])
            if not result.is_file():
                self.train(context, work, transfer, [best])
            found = best.restore()
        if processes().is_main_process and not result.is_file():
            folder.mkdir(exist_ok=True)
            with published(result) as unfinished:
                best.save(unfinished)
        processes().wait_for_everyone()
        context.judged(work, files.TRANSFER, asdict(found))


def set_aside(windows: Any, training: Training) -> tuple[list[list[Any]], Any]:
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


class Train(Trained):
    """Training, in which the scheme is brought in, and the teacher restores what the model could do."""

    section = "training"
    words = "training"

    @property
    def rates(self) -> tuple[Name, bool]:
        conversion, transfers = self.recipe.conversion, "transfer" in self.recipe.stages()
        learned = conversion.scheme is None or conversion.fit is not None or transfers
        is_refining = transfers and self.recipe.moves_projections
        return "refining" if is_refining else self.section, learned or conversion.native == "keep"

    def plain(self, model: Any) -> Recipe:
        return self.recipe

    def folder(self, context: Context) -> Path:
        return context.checkpoints

    @property
    def saves_end(self) -> bool:
        return "lengthen" in self.recipe.stages()


class Lengthen(Trained):
    """Training on long windows, mixed with short ones so that these are not unlearned.

    It keeps the teacher, or would undo a part of what that taught; but not one that has faded, nor an encoder-decoder,
    which would read the windows whole, beyond its trained length.
    """

    section = "lengthen"
    words = "long windows"

    def plain(self, model: Any) -> Recipe:
        has_teacher = not self.recipe.distillation.until and not model.config.is_encoder_decoder
        plain = super().plain(model)
        return plain if has_teacher else replace(plain, distillation=Distillation())

    def collate(self, case: Case) -> Collator | None:
        # Encoders as they were cannot tell the parts apart.
        found = super().collate(case)
        seed, share = self.recipe.training.seed, self.recipe.lengthen.short
        if found is not None:
            return found
        return MixedLengths(case.length, share=share, seed=seed, start=start_token(case.tokenizer))


def go_on(trainer: AdaptationTrainer, checkpoint: Path | None) -> None:
    """Train from a checkpoint to the end; from one of the last step, do only what follows it."""
    if checkpoint is None:
        trainer.train()
        return
    # Its files are those that were written: `files.last` compares their checksums.
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    if state.global_step < trainer.args.max_steps:
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.state = state
    trainer.callback_handler.on_train_begin(trainer.args, state, trainer.control)
    trainer.callback_handler.on_train_end(trainer.args, state, trainer.control)


def training(recipe: Recipe) -> list[Trained]:
    kinds: dict[str, type[Trained]] = {kind.section: kind for kind in (Transfer, Train, Lengthen)}
    found: list[Trained] = []
    for section in recipe.stages():
        found.append(kinds[section](recipe, begins=sum(stage.settings.steps for stage in found)))
    return found


def stages(recipe: Recipe) -> list[Stage]:
    """Return all stages: those that make the model, and those that train it."""
    fits = [Fit(recipe)] * (recipe.conversion.fit == "native")
    return [Convert(recipe), *fits, Adapt(recipe), *training(recipe)]
