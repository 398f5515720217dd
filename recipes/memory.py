"""Memory of a training step, estimated before it is made, and micro batches that fit into what there is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.schema.recipe import Recipe, Training

# Share of the free memory that a step may take; the estimate is rough.
_USED = 0.8
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_GIB = 2**30


@dataclass(frozen=True)
class Need:
    """Bytes of one training step: fixed ones, and those of the activations and logits of a window.

    Fixed are weights, gradients and Adam's moments, and the copy of the model that a teacher is.
    """

    fixed: int
    window: int

    def of(self, windows: int) -> int:
        """Return the bytes of a forward and backward of so many windows."""
        return self.fixed + windows * self.window


def need(model: nn.Module, recipe: Recipe, length: int) -> Need:
    """Estimate the memory of a step from the shapes of a model, which may lie on the meta device.

    A matrix stands for one linear layer, whose input and output are kept for the backward pass; with checkpointing
    those of one layer and the inputs of all. Logits are there three times in float32, with a teacher five times.
    """
    inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    weights = list(model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    trains_all, teaches = recipe.adapter.kind == "none", recipe.distillation.distils
    # Under an adapter, the original is there without a copy.
    is_within = not trains_all and recipe.conversion.scheme is not None and recipe.distillation.teacher is None
    own = sum(weight.numel() for weight in weights)
    config = inner.config.get_text_config()
    vocabulary, hidden, layers = config.vocab_size, config.hidden_size, config.num_hidden_layers
    channels = sum(sum(weight.shape) for weight in weights if weight.ndim == 2 and vocabulary not in weight.shape)
    if recipe.training.gradient_checkpointing:
        channels = channels // layers + layers * hidden
    element = 4 if recipe.training.precision == "float32" else 2
    of_token = channels * element + vocabulary * 4 * (5 if teaches else 3)
    loaded = own * (4 if trains_all else weights[0].element_size())
    return Need(loaded + own * 4 * (teaches and not is_within) + trained * 12, length * of_token)


def available(device: torch.device, count: int = 1) -> int:
    """Return the free bytes of a GPU; on a CPU, the share of one process in what the machine or container has free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    limit = _CGROUP.read_text(encoding="utf-8").strip() if _CGROUP.is_file() else "max"
    if limit != "max":
        free = min(free, int(limit) - int(psutil.Process(os.getpid()).memory_info().rss))
    return free // count


def micro_batch(training: Training, wanted: Need, free: int, count: int = 1) -> tuple[int | None, str]:
    """Return how many windows a process can read per forward, and an estimate of the memory in words.

    A number in the settings is kept. `None` is the whole share of the process.
    """
    share, room = training.batch_size // count, int(_USED * free)
    micro = training.micro_batch_size
    if micro is None:
        most = max(1, min(share, (room - wanted.fixed) // wanted.window))
        micro = next(size for size in range(most, 0, -1) if share % size == 0)
    size = wanted.of(micro) / _GIB
    words = f"{'less than 0.1' if size < 0.1 else f'about {size:.1f}'} GiB for a step, of {free / _GIB:.1f} free, "
    words += f"with {micro} of {share} windows at a time"
    if wanted.of(micro) > room:
        words += "; it may not fit: give a shorter length, gradient_checkpointing=true or adapter=lora"
    return None if micro == share else micro, words


def micro_batches(recipe: Recipe, model: nn.Module, length: int) -> tuple[dict[str, int | None], str]:
    """Return micro batches that fit, by the section of the stage, and the estimate for the training in words."""
    together = processes()
    free = available(together.device, together.num_processes)
    found = {
        name: micro_batch(stage, need(model, recipe, stage.length or length), free, together.num_processes)
        for name, stage in recipe.stages().items()
        if name != "transfer"  # It follows the training.
    }
    return {name: micro for name, (micro, _) in found.items()}, found["training"][1]
