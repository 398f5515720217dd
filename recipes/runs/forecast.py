"""Forecast of a run before it starts: what it will do, and how long its stages will take."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import default_data_collator

from hf_posenc.patches import plan as planning
from hf_posenc.patches.patch import evaluating, patch
from hf_posenc.recipes import durations, loading
from hf_posenc.recipes.data.windows import Prepared, load_data
from hf_posenc.recipes.memory import available, micro_batches, need
from hf_posenc.recipes.processes import enough_threads, processes
from hf_posenc.recipes.runs.facts import Facts
from hf_posenc.recipes.runs.measurements import Suite
from hf_posenc.recipes.schema import checks
from hf_posenc.recipes.schema.recipe import Recipe
from hf_posenc.recipes.training.adapter import attach, check_targets
from hf_posenc.recipes.training.distillation import Teacher
from hf_posenc.recipes.training.stages import Stage, stages
from hf_posenc.recipes.training.trainer import (
    AdaptationTrainer,
    adaptation_trainer,
    check_teacher,
    divide_batch,
    teacher_of,
)
from hf_posenc.recipes.training.transfer import AttentionTransfer

# Numbers of weights of which an optimizer step is timed, and seconds to spend on a step.
_WEIGHTS, _SPENT = 2**22, 1.0


def seconds_of(
    model: Any,
    plans: Sequence[Stage],
    texts: Mapping[int, Prepared],
    suite: Suite,
    *,
    length: int,
    teacher: Teacher | None,
    done: Mapping[str, int] | None = None,
    measured: int = 0,
) -> dict[str, float]:
    """Estimate the seconds of each stage and of the measurements; empty where nothing is known before it begins.

    A forward and backward of each stage are timed, and a few rows of each measure. The model is what it was
    afterwards, without gradients.

    Args:
        model: Converted model with its adapter, not sharded.
        plans: Stages.
        texts: Text by length of windows.
        suite: Measurement before, during and after the training.
        length: Tokens of windows whose length is null.
        teacher: Teacher, which stages without distillation leave out.
        done: Steps of each stage that a stopped run has done.
        measured: Number of measurements that it has taken.
    """
    if processes().num_processes > 1:
        return {}  # Nobody knows what they cost each other, and a whole step need not fit into one device.
    found: dict[str, float] = {}
    try:
        for stage in plans:
            left = stage.recipe.training.steps - (done or {}).get(stage.name, 0)
            own = teacher if stage.recipe.distillation.distils else None
            data = texts[stage.recipe.training.length or length]
            if left > 0:
                found[stage.name] = left * _seconds_per_step(stage, model, data, own)
        count = 1 + sum(1 + _between(stage) for stage in plans) + 1 - measured
        found["measuring"] = max(0, count) * suite.seconds(model)
    except torch.OutOfMemoryError:
        return {}  # The run may still fit, for instance with other lengths.
    finally:
        gc.collect()  # A trainer holds its model in a reference cycle.
    return found


def facts_of(recipe: Recipe) -> tuple[Facts, dict[int, Prepared]]:
    """Return the facts of a recipe's run, and its text by length of windows.

    Of the model only the config is read, of the text some windows, so that what is wrong with it is said first.

    Raises:
        RecipeError: The recipe, or its text, does not suit the model.
        PosencError: The conversion fails, as in `patch`.
    """
    config = loading.load_config(recipe.model)
    checks.check_unconverted(recipe, config)
    check_teacher(recipe, config)
    length, own = checks.lengths(recipe, config)
    tokenizer = loading.load_tokenizer(loading.place(recipe.model))
    sizes = {stage.length or length for stage in recipe.stages().values()}
    texts = {size: load_data(recipe.data, tokenizer, length=size, config=config, checks=True) for size in sizes}
    model, conversion, planned = planning.skeleton(config), recipe.conversion, None
    check_targets(model, recipe.adapter)
    if conversion.scheme is not None:
        planned = planning.plan(model, conversion.scheme, **conversion.keywords)
        patch(model, conversion.scheme, **conversion.keywords)
    checks.check_tables(recipe, model, length)
    model = attach(model, recipe.adapter)
    if "transfer" in recipe.stages():
        AttentionTransfer(model, projections=recipe.moves_projections)  # It refuses what it cannot transfer.
    _, estimate = micro_batches(recipe, model, length)
    facts = Facts.of(
        model,
        recipe,
        planned,
        trained_length=own,
        data_tokens=texts[length].tokens,
        stages=stages(recipe, model),
        memory=estimate,
    )
    return facts, texts


def seconds_for(recipe: Recipe, texts: Mapping[int, Prepared]) -> dict[str, float]:
    """Estimate the seconds of a recipe's run like `seconds_of`, on a model of its shapes with random weights."""
    config, conversion, device = loading.load_config(recipe.model), recipe.conversion, processes().device
    length, own = checks.lengths(recipe, config)
    shapes = planning.skeleton(config)
    wanted = need(shapes, recipe, length)
    if recipe.adapter.four_bit or wanted.of(1) > available(device):
        return {}
    with loading.seeded(0), device:
        model = type(shapes)(config).to(torch.float32 if recipe.adapter.kind == "none" else shapes.dtype).eval()
    tokenizer = loading.load_tokenizer(loading.place(recipe.model))
    if conversion.scheme is not None:
        patch(model, conversion.scheme, **conversion.keywords)
    model = attach(model, recipe.adapter)
    micro, _ = micro_batches(recipe, model, length)
    training = replace(recipe.training, micro_batch_size=micro["training"])
    recipe = replace(
        recipe,
        training=training,
        lengthen=replace(recipe.lengthen, micro_batch_size=micro.get("lengthen")),
    )
    teacher = teacher_of(model, replace(recipe, distillation=replace(recipe.distillation, teacher=None)))
    suite = Suite.of(recipe.evaluation, config, tokenizer, texts[length], length, own)
    size = divide_batch(training, 1)[0] * length
    with enough_threads(model, size):
        return seconds_of(model, stages(recipe, model), texts, suite, length=length, teacher=teacher)


def _between(stage: Stage) -> int:
    """Return how often a stage is measured before it ends."""
    every, steps = stage.recipe.evaluation.every, stage.recipe.training.steps
    return (steps - 1) // every if every and stage.name != "transfer" else 0


def _seconds_per_step(stage: Stage, model: Any, data: Prepared, teacher: Teacher | None) -> float:
    training = stage.recipe.training
    with contextlib.ExitStack() as stack:
        module: Any = model
        if stage.name == "transfer":
            original = teacher.model if teacher is not None and stage.recipe.distillation.teacher is None else None
            module = AttentionTransfer(model, projections=stage.recipe.moves_projections, original=original)
            stack.enter_context(module.training_only())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer = adaptation_trainer(
            module, stage.recipe, data.train, folder=folder, collate=data.collate, teacher=teacher
        )
        micro, forwards = divide_batch(training, trainer.args.world_size)
        windows = [window for window, _ in zip(trainer.train_dataset, range(micro), strict=False)]
        # A short text stands for more.
        collate = trainer.data_collator or default_data_collator
        batch = collate((windows * micro)[:micro])
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        stack.enter_context(evaluating(model))
        stack.enter_context(_checkpointed(model, training.gradient_checkpointing))
        module.train()
        forward = durations.timed(lambda: _backward(trainer, module, batch), until=_SPENT)
        for weight in weights:
            weight.grad = None
        return forwards * forward + _optimizing(trainer, weights)


def _backward(trainer: AdaptationTrainer, module: nn.Module, batch: dict[str, Tensor]) -> None:
    device = trainer.args.device
    inputs = {name: value.to(device) for name, value in batch.items()}
    with trainer.accelerator.autocast():
        loss = trainer.compute_loss(module, inputs)
    loss.backward()


@contextlib.contextmanager
def _checkpointed(model: Any, wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    # transformers 5.23 renamed it.
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")(**{f"{name}_checkpointing_kwargs": {"use_reentrant": False}})
    try:
        yield
    finally:
        getattr(model, f"{name}_checkpointing_disable")()


def _optimizing(trainer: AdaptationTrainer, weights: Sequence[Tensor]) -> float:
    """Return the seconds of a step of the optimizer with its clipping, from some weights of its own."""
    every = sum(weight.numel() for weight in weights)
    some = nn.Parameter(torch.zeros(min(every, _WEIGHTS), device=weights[0].device, dtype=weights[0].dtype))
    kind, arguments = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    optimizer = kind([some], **arguments)
    some.grad = torch.zeros_like(some)

    def step() -> None:
        nn.utils.clip_grad_norm_([some], 1.0)
        optimizer.step()

    return durations.timed(step) * every / some.numel()
