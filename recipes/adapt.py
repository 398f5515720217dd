"""A short adaptation of a converted causal language model, on `transformers.Trainer`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hf_posenc.errors import ShapeError
from hf_posenc.recipes.distillation import Distilling, Teacher
from hf_posenc.recipes.groups import parameter_groups

Progress = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to adapt.

    Attributes:
        steps: Optimizer steps.
        length: Tokens per window.
        batch_size: Windows per step (and per device, if there are several).
        learning_rate: Peak, for the model's own weights.
        scheme_learning_rate: Peak, for the weights of the scheme, which start from nothing.
        weight_decay: On the model's own matrices; the scheme's weights are few, and their scale means something.
        distillation: Share of the loss that is the divergence from the teacher, if there is one.
        seed: Of the order of the windows and of everything that the trainer draws.
        use_cpu: Whether to leave accelerators alone.
    """

    steps: int = 200
    length: int = 128
    batch_size: int = 16
    learning_rate: float = 3e-3
    scheme_learning_rate: float = 2e-2
    weight_decay: float = 0.1
    distillation: float = 0.5
    seed: int = 0
    use_cpu: bool = False

    @property
    def tokens(self) -> int:
        """How many tokens the model is trained on."""
        return self.steps * self.batch_size * self.length

    def arguments(self, folder: str) -> TrainingArguments:
        """Return the trainer's arguments; it writes nothing of value to `folder`."""
        return TrainingArguments(
            output_dir=folder,
            max_steps=self.steps,
            per_device_train_batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            adam_beta2=0.98,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, self.steps // 20),
            seed=self.seed,
            use_cpu=self.use_cpu,
            save_strategy="no",
            logging_steps=max(1, self.steps // 50),
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )


class Windows(Dataset[dict[str, Tensor]]):
    """Windows at random places of a text, the same for the same seed.

    Args:
        ids: Token ids, int64 `[tokens]`.
        length: Tokens per window.
        count: How many windows.
        seed: Of the places.

    Raises:
        ShapeError: The text is shorter than a window.
    """

    def __init__(self, ids: Tensor, length: int, count: int, seed: int) -> None:
        if ids.ndim != 1 or len(ids) < length:
            raise ShapeError(f"Got token ids of shape {list(ids.shape)}; expected at least one window, [{length}].")
        generator = torch.Generator().manual_seed(seed)
        self._ids, self._length = ids, length
        self._starts = torch.randint(len(ids) - length + 1, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._ids[self._starts[index] :][: self._length]
        return {"input_ids": window, "labels": window}


def adapt(
    model: Any,
    ids: Tensor,
    settings: Settings,
    *,
    teacher: nn.Module | None = None,
    progress: Progress | None = None,
) -> list[float]:
    """Train a converted model, in place, on windows of a text.

    Works on a model that is not converted as well, which makes the control of an experiment: the same windows in the
    same order.

    Args:
        model: A causal language model.
        ids: Token ids of the training text, int64 `[tokens]`.
        settings: How long and how fast.
        teacher: The model as it was before the conversion, to stay close to. It must have weights of its own:
            `hf_posenc.disabled(model)` has those that are being trained.
        progress: Called after each step with the step and the latest loss.

    Returns:
        The losses that the trainer logged, in order.
    """
    windows = Windows(ids, settings.length, settings.steps * settings.batch_size, settings.seed)
    callbacks = [] if progress is None else [_Report(progress)]
    # A trainer turns the cache off for good, which a model that is saved after it would remember.
    uses_cache = model.config.use_cache
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = AdaptationTrainer(
                model=model,
                args=settings.arguments(folder),
                train_dataset=windows,
                callbacks=callbacks,
                teacher=teacher,
                settings=settings,
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
    finally:
        model.config.use_cache = uses_cache
    model.eval()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class AdaptationTrainer(Distilling, Trainer):
    """A trainer that knows the scheme's weights from the model's, and may listen to a teacher."""

    def __init__(self, *, teacher: nn.Module | None, settings: Settings, **kwargs: Any) -> None:
        super().__init__(teacher=None if teacher is None else Teacher(teacher), share=settings.distillation, **kwargs)
        self.optimizer: torch.optim.Optimizer | None
        self._settings = settings

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer with the groups of `parameter_groups`."""
        if self.optimizer is None:
            kind, arguments = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups = parameter_groups(
                model or self.model,
                scheme_learning_rate=self._settings.scheme_learning_rate,
                weight_decay=self._settings.weight_decay,
            )
            self.optimizer = kind(groups, **arguments)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer


class _Report(TrainerCallback):
    """Tells a function how far the training is."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._loss = math.nan

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._loss = (logs or {}).get("loss", self._loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress(state.global_step, self._loss)
