"""Forecast of a run before it starts: its checks and facts, and how long its stages will take."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import default_data_collator

from hf_posenc.patches import plan as planning
from hf_posenc.patches.patch import evaluating
from hf_posenc.recipes import durations, loading
from hf_posenc.recipes.data.windows import Prepared
from hf_posenc.recipes.memory import available, micro_batches, need
from hf_posenc.recipes.processes import enough_threads, processes
from hf_posenc.recipes.runs import hybrids, stages
from hf_posenc.recipes.runs.case import Case, Context, Work
from hf_posenc.recipes.runs.facts import Facts
from hf_posenc.recipes.runs.stages import Adapt, Convert, Trained
from hf_posenc.recipes.schema.recipe import Recipe
from hf_posenc.recipes.training.trainer import CHECKPOINTING, AdaptationTrainer, divide_batch

# Numbers of weights of which an optimizer step is timed, and seconds to spend on a step.
_WEIGHTS, _SPENT = 2**22, 1.0


def forecast(case: Case, command: str = "") -> tuple[Facts, dict[str, int | None]]:
    """Check all stages of a run on a model without weights; return its facts, and its micro batches by section.

    Raise `RecipeError` if the recipe or its text does not suit the model, and what `patch` raises.
    """
    recipe, planned = hybrids.stand_in(case.recipe, case.config), None
    with torch.device("meta"):
        model = loading.language_class(recipe.model, case.config).from_config(case.config)
    if recipe.conversion.scheme is not None:
        planned = planning.plan(model, recipe.conversion.scheme, **recipe.conversion.keywords)
    work = Work(model)
    for stage in stages.stages(recipe):
        stage.check(case, work)
    micro, memory = micro_batches(recipe, work.model, case.length)
    trained = stages.training(recipe)
    others = (stage for stage in trained if stage.section != "training")
    facts = Facts.of(
        work.model,
        case.recipe,
        planned,
        trained_length=case.own_length,
        data_tokens=case.text(recipe.training).tokens,
        command=command,
        stages=tuple(stage.describe(has_new=bool(planned and planned.parameters)) for stage in trained),
        other_tokens=sum(stage.settings.steps * stage.tokens(case.own_length) for stage in others),
        memory=memory,
    )
    return facts, micro


def sized(recipe: Recipe, micro: Mapping[str, int | None]) -> Recipe:
    return replace(
        recipe,
        training=replace(recipe.training, micro_batch_size=micro.get("training")),
        lengthen=replace(recipe.lengthen, micro_batch_size=micro.get("lengthen")),
    )


def seconds_of(case: Case, trained: Sequence[Trained], work: Work, context: Context | None = None) -> dict[str, float]:
    """Estimate the seconds of each stage and of the measurements; empty where nothing is known before it begins.

    A forward and backward of each stage are timed, and a few rows of each measure. The model, which has its adapter and
    is not sharded, is what it was afterwards, without gradients. With its context, a run has done a part of them.
    """
    if processes().num_processes > 1:
        return {}  # Nobody knows what they cost each other, and a whole step need not fit into one device.
    found: dict[str, float] = {}
    try:
        for stage in trained:
            left = stage.settings.steps - (0 if context is None else stage.done(context))
            if left > 0:
                found[stage.section] = left * _seconds_per_step(stage, case, work)
        every = case.recipe.evaluation.every
        # The original, what each stage begins or ends with, and what is between; the transfer is not measured within.
        inner = [(stage.settings.steps - 1) // every for stage in trained if every and stage.section != "transfer"]
        count = 2 + len(trained) + sum(inner) - (0 if context is None else context.measurements.count)
        with case.precise():
            found["measuring"] = max(0, count) * sum(each.seconds(work.model) for each in case.measures[0].values())
    except torch.OutOfMemoryError:
        return {}  # The run may still fit, for instance with other lengths.
    finally:
        gc.collect()  # A trainer holds its model in a reference cycle.
    return found


def seconds_for(recipe: Recipe, texts: Mapping[int, Prepared]) -> dict[str, float]:
    """Estimate the seconds of a recipe's run like `seconds_of`, on a model of its shapes with random weights.

    `texts` has the text by the length of windows.
    """
    case, device = Case.of(recipe, texts=texts), processes().device
    kind = loading.language_class(recipe.model, case.config)
    with torch.device("meta"):
        shapes = kind.from_config(case.config)
    if recipe.adapter.four_bit or need(shapes, recipe, case.length).of(1) > available(device):
        return {}
    with loading.seeded(0), device:
        model = kind.from_config(case.config).eval()
    work = Work(model.to(torch.float32) if recipe.adapter.kind == "none" else model)
    choosing = {"layers": seconds} if (seconds := hybrids.seconds(case, model)) else {}
    recipe = hybrids.stand_in(recipe, case.config)
    # A teacher that the recipe names takes about as long.
    recipe = replace(recipe, distillation=replace(recipe.distillation, teacher=None))
    Convert(recipe).run(None, work)
    Adapt(recipe).run(None, work)
    recipe = sized(recipe, forecast(case)[1])
    with enough_threads(work.model, divide_batch(recipe.training, 1)[0] * case.length):
        return choosing | seconds_of(case, stages.training(recipe), work)


def _seconds_per_step(stage: Trained, case: Case, work: Work) -> float:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        module = stack.enter_context(stage.module(work))
        trainer = stage.trainer(case, work, module, folder=folder)
        micro, forwards = divide_batch(stage.settings, trainer.args.world_size)
        windows = [window for window, _ in zip(trainer.train_dataset, range(micro), strict=False)]
        # A short text stands for more.
        batch = (trainer.data_collator or default_data_collator)((windows * micro)[:micro])
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        stack.enter_context(evaluating(work.model))
        if stage.settings.gradient_checkpointing:
            kwargs = {f"{CHECKPOINTING}_checkpointing_kwargs": {"use_reentrant": False}}
            getattr(work.model, f"{CHECKPOINTING}_checkpointing_enable")(**kwargs)
            stack.callback(getattr(work.model, f"{CHECKPOINTING}_checkpointing_disable"))
        module.train()
        inputs = {name: value.to(trainer.args.device) for name, value in batch.items()}

        def backward() -> None:
            with trainer.accelerator.autocast():
                loss = trainer.compute_loss(module, inputs)
            loss.backward()

        forward = durations.timed(backward, until=_SPENT)
        for weight in weights:
            weight.grad = None
        return forwards * forward + _optimizing(trainer, weights)


def _optimizing(trainer: AdaptationTrainer, weights: Sequence[nn.Parameter]) -> float:
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
