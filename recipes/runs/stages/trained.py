"""Stages that train: what all have, the training itself, and long windows after it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from accelerate.utils import patch_environment
from torch import nn
from transformers import TrainerCallback, TrainerState, default_data_collator
from transformers.trainer import TRAINER_STATE_NAME

from hf_posenc.recipes import layout
from hf_posenc.recipes.data.collation import Collator, MixedLengths, PositionSkipping
from hf_posenc.recipes.processes import processes, sharding
from hf_posenc.recipes.reports import counted
from hf_posenc.recipes.runs import files
from hf_posenc.recipes.runs.measurements import Measuring
from hf_posenc.recipes.runs.progress import Progress
from hf_posenc.recipes.runs.stages.base import Case, Context, Stage, Work
from hf_posenc.recipes.schema.recipe import Distillation, Recipe, StageName, Training
from hf_posenc.recipes.training.rates import Name, with_rates
from hf_posenc.recipes.training.trainer import (
    AdaptationTrainer,
    adaptation_trainer,
    check_loggers,
    divide_batch,
    whole_batches,
)

_LOGS_VARIABLE = "TENSORBOARD_LOGGING_DIR"


@dataclass(frozen=True)
class Trained(Stage):
    """A stage that trains; `begins` is the number of optimizer steps of the stages before it.

    Attributes:
        section: Name of its section in the recipe.
        words: Name in reports.
        skipping: Share of the windows that skip positions, where any do.
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

    def settled(self, model: Any) -> Recipe:
        """Return the recipe of this stage alone, with its rates, which follow from the model's size."""
        kind, fitted = self.rates
        return replace(self.plain(model), training=with_rates(self.settings, model, kind, fitted=fitted))

    def check(self, case: Case, work: Work) -> None:
        check_loggers(self.recipe.saving.loggers)
        divide_batch(self.settings, processes().num_processes, section=self.section)
        whole_batches(self.windows(case), self.settings.batch_size)
        case.suite  # noqa: B018  # It refuses contexts and short texts.

    def run(self, context: Context, work: Work) -> None:
        self.train(context, work, work.model, [self.measuring(context, work)], saves_end=self.saves_end)
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

    def trainer(
        self,
        case: Case,
        work: Work,
        module: nn.Module,
        *,
        folder: Path,
        callbacks: Sequence[TrainerCallback] = (),
        saves_end: bool = False,
    ) -> AdaptationTrainer:
        """Return the trainer of a module, which writes into a folder."""
        recipe = self.settled(work.model)
        return adaptation_trainer(
            module,
            recipe,
            self.windows(case),
            folder=folder,
            collate=self.collate(case),
            teacher=work.teacher if recipe.distillation.distils else None,
            callbacks=callbacks,
            saves_end=saves_end,
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

    def train(
        self,
        context: Context,
        work: Work,
        module: nn.Module,
        callbacks: Sequence[TrainerCallback],
        *,
        saves_end: bool = False,
    ) -> None:
        """Train a module, from the last checkpoint if there is one."""
        case, folder = context.case, self.folder(context)
        distillation = self.settled(work.model).distillation
        checkpoints = files.WholeCheckpoints(folder, keep=self.recipe.saving.keep)
        is_part = module is not work.model
        text = "" if is_part else "text_loss" if distillation.distils and work.teacher is not None else "loss"
        # By default TensorBoard writes next to the unfinished checkpoints, which are removed. Stages begin at step 0.
        logs = Path(os.environ.get(_LOGS_VARIABLE, context.folder / layout.LOGS)) / self.section
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
                saves_end=saves_end,
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

    def describe(self, model: Any, *, has_new: bool) -> str:
        """Return the settings in words; without new weights, their rate is left out."""
        training = self.settled(model).training
        size = f"{counted(training.steps, 'step')} x {counted(training.batch_size, 'window')}"
        rates = f"rate {training.learning_rate:.2g}"
        if self.rates[0] == "fit" or self.recipe.adapter.kind == "scheme":  # nothing of the model is trained
            rates = f"rate {training.scheme_learning_rate:.2g} (scheme)"
        elif has_new:
            rates = f"rates {training.learning_rate:.2g} and {training.scheme_learning_rate:.2g} (scheme)"
        return f"{self.words}: {size}, {rates}"


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
        return MixedLengths(case.length, share=share, seed=seed) if found is None else found


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
