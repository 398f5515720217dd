"""Training of a model by a recipe, on `transformers.Trainer`."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Subset
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.integrations import get_available_reporting_integrations

from hf_posenc.errors import RecipeError
from hf_posenc.recipes.data.collation import Collator
from hf_posenc.recipes.loading import load, load_config
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.schema.recipe import Recipe, Training
from hf_posenc.recipes.training.callbacks import Annealing, Handover, parameter_groups
from hf_posenc.recipes.training.distillation import Distilling, Teacher
from hf_posenc.recipes.training.rates import with_rates

# Adam's default, 0.999, averages over a thousand steps, which is too slow for a few hundred.
_ADAM_BETA2 = 0.98
_LOG_EVERY, _LOGS = 10, 50
# transformers 5.23 renamed it, and warns about the old name.
CHECKPOINTING = "activation" if hasattr(PreTrainedModel, "activation_checkpointing_enable") else "gradient"


def adaptation_trainer(
    model: Any,
    recipe: Recipe,
    windows: Any,
    *,
    folder: Path,
    collate: Collator | None = None,
    teacher: Teacher | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    saves_end: bool = False,
) -> AdaptationTrainer:
    """Return the trainer of a recipe for a model that is converted and has its adapter.

    A stock model gets the same windows in the same order, and serves as the control of an experiment. Callbacks run
    after the recipe's. If `saves_end`, the last step saves a checkpoint, too, for a stage that follows.
    """
    recipe = replace(recipe, training=with_rates(recipe.training, model))
    training, conversion, distillation = recipe.training, recipe.conversion, recipe.distillation
    assert training.scheme_learning_rate is not None
    own: list[TrainerCallback] = [LogAndSave(saves_end=saves_end)]
    if conversion.scheme is not None and conversion.native == "handover":
        own.append(Handover(conversion.handover))
    if conversion.anneals:
        own.append(Annealing(conversion.anneal))
    trainer = AdaptationTrainer(
        model=model,
        args=training_arguments(recipe, folder),
        train_dataset=whole_batches(windows, training.batch_size),
        data_collator=collate or default_data_collator,
        callbacks=[*own, *callbacks],
        scheme_learning_rate=training.scheme_learning_rate,
        teacher=teacher,
        share=distillation.share,
        hidden=distillation.hidden,
        until=distillation.until,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def teacher_of(model: Any, recipe: Recipe) -> Teacher | None:
    """Return the teacher of a model that has its adapter but is not trained yet; `None` if the recipe has none."""
    distillation = recipe.distillation
    if not distillation.distils:
        return None
    if distillation.teacher is None:
        if recipe.conversion.scheme is None:
            return Teacher(copy.deepcopy(model).requires_grad_(False))
        return Teacher.copy_of(model) if recipe.adapter.kind == "none" else Teacher.within(model)
    other, _ = load(distillation.teacher, dtype=torch.float32)
    return Teacher(other.requires_grad_(False))


def check_teacher(recipe: Recipe, config: Any) -> None:
    """Raise `CheckpointError` if the teacher that a recipe names is missing, `RecipeError` if it does not suit.

    Only configs are read; `config` is that of the model.
    """
    distillation = recipe.distillation
    if distillation.teacher is None:
        return
    other = load_config(distillation.teacher)
    for name in ("vocab_size", *(("hidden_size", "num_hidden_layers") if distillation.hidden else ())):
        here, there = (getattr(each, name, None) for each in (config, other))
        if here != there:
            raise RecipeError(
                f"distillation.teacher is {distillation.teacher!r}, whose {name} is {there}, and that of the model "
                f"{here}. Give a model of the same vocabulary, and of the same shape where hidden states are learned "
                "from."
            )


def check_loggers(loggers: Sequence[str]) -> None:
    """Raise `RecipeError` if a logger is not installed; the trainer would raise only after the data is prepared."""
    for name in loggers:
        if name not in get_available_reporting_integrations():
            raise RecipeError(
                f"saving.loggers has {name!r}, which is not installed. Run pip install {name}, or leave it out."
            )


def training_arguments(recipe: Recipe, folder: Path) -> TrainingArguments:
    """Return the trainer's arguments, which depend on the number of processes."""
    training, saving = recipe.training, recipe.saving
    together = processes()
    micro_batch, accumulation = divide_batch(training, together.num_processes)
    arguments = TrainingArguments(
        output_dir=str(folder),
        run_name=folder.name,
        max_steps=training.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        adam_beta2=_ADAM_BETA2,
        lr_scheduler_type=training.schedule,
        warmup_steps=training.warmup_steps,
        max_grad_norm=training.max_grad_norm,
        bf16=training.precision == "bfloat16",
        fp16=training.precision == "float16",
        seed=training.seed,
        data_seed=training.seed,
        use_cpu=together.device.type == "cpu",
        save_strategy="steps",
        save_steps=saving.every,
        logging_steps=max(1, min(_LOG_EVERY, training.steps // _LOGS)),
        report_to=saving.loggers or "none",
        # A NaN loss must stop the run; by default the trainer hides it in the log.
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        dataloader_pin_memory=together.device.type == "cuda",
        # Collators need all columns.
        remove_unused_columns=False,
        # With False the trainer would change the model's config; `compute_loss` turns the cache off instead.
        use_cache=True,
        **(
            {f"{CHECKPOINTING}_checkpointing": True, f"{CHECKPOINTING}_checkpointing_kwargs": {"use_reentrant": False}}
            if training.gradient_checkpointing
            else {}
        ),
    )
    # One process drives one device; with more, the trainer would use `DataParallel`.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    # TrainingArguments resets accelerate's state when asked for its devices.
    processes()
    return arguments


def divide_batch(training: Training, count: int, *, section: str = "training") -> tuple[int, int]:
    """Return the windows per forward and the forwards per step of one process, or raise `RecipeError`."""
    share, rest = divmod(training.batch_size, count)
    if rest:
        raise RecipeError(
            f"{section}.batch_size is {training.batch_size}, which {count} processes cannot share. Give a multiple of "
            f"{count}, or start another number of processes."
        )
    micro = training.micro_batch_size or share
    if share % micro:
        raise RecipeError(
            f"{section}.micro_batch_size is {micro}, and a process has {share} of the {training.batch_size} windows of "
            f"a batch. Give a divisor of {share}."
        )
    return micro, share // micro


def whole_batches(windows: Any, batch_size: int) -> Any:
    """Return the windows without an incomplete batch at the end."""
    if not hasattr(windows, "__len__"):
        return windows
    count = len(windows) // batch_size * batch_size
    if count == 0:
        raise RecipeError(
            f"The text has {len(windows)} windows to train on, and batch_size is {batch_size}. Give more text, smaller "
            "batches or a smaller training.length."
        )
    return windows if count == len(windows) else Subset(windows, range(count))


class AdaptationTrainer(Distilling, Trainer):
    """Trainer with a learning rate for the scheme, and distillation."""

    def __init__(self, *, scheme_learning_rate: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.optimizer: torch.optim.Optimizer | None
        self._scheme_learning_rate = scheme_learning_rate

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # In the trainer's arguments, this would change the model's config.
        return super().compute_loss(model, inputs | {"use_cache": False}, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as `Distilling` does; raise `RecipeError`, before the step is saved, if the loss is not finite."""
        if not math.isfinite(logs.get("loss", 0.0)):
            raise RecipeError(
                f"The loss at step {self.state.global_step} is {logs['loss']}: the training diverged. Give smaller "
                "learning rates (training.learning_rate, training.scheme_learning_rate) or more training.warmup, and "
                "another folder."
            )
        super().log(logs, *args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            kind, arguments = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = kind(self._groups(model or self.model), **arguments)
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the scheduler of the optimizer, after giving that the parameters of a sharded model.

        With FSDP2, accelerate tells parameters apart by their addresses. If an earlier stage has sharded the model,
        those of which this process holds no part all have the address 0, and accelerate would take them for one.
        """
        if isinstance(self.model, FSDPModule) and self.optimizer is not None:
            for group, own in zip(self.optimizer.param_groups, self._groups(self.model), strict=True):
                group["params"] = own["params"]
        return super().create_scheduler(*args, **kwargs)

    def _groups(self, model: Any) -> list[dict[str, Any]]:
        return parameter_groups(
            model, scheme_learning_rate=self._scheme_learning_rate, weight_decay=self.args.weight_decay
        )


class LogAndSave(TrainerCallback):
    """Callback that logs at each checkpoint and at the end, and saves no checkpoint at the last step.

    A logged loss is the mean since the previous entry. A resumed run starts counting at its checkpoint, so a run
    without interruption must do so too, or the two would log different numbers. The last step saves the model itself,
    or a checkpoint if `saves_end`.
    """

    def __init__(self, *, saves_end: bool = False) -> None:
        self._saves_end = saves_end

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ends = state.global_step >= state.max_steps
        control.should_log = control.should_log or control.should_save or ends
        control.should_save = self._saves_end if ends else control.should_save
