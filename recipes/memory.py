"""Memory of a training step, estimated before it is made, and micro batches that fit into what there is."""

from __future__ import annotations

import copy
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from hf_posenc.patches import surgery
from hf_posenc.patches.patch import unpatch
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.schema.recipe import Recipe, Training
from hf_posenc.recipes.training.pieces import AT_ONCE, Readout

# Share of the free memory that a step may take; the estimate is rough.
_USED = 0.8
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_GIB = 2**30
# Memory that was freed and that glibc does not give back, which is at most this (twice its largest threshold of mmap).
_SLACK = 2**26
# Tokens of the forward in which activations are counted: a prime, which is no size of a weight.
_TOKENS = 61


@dataclass(frozen=True)
class Need:
    """Bytes of one training step.

    Fixed are weights, Adam's moments, a teacher, casts of weights, and what the allocator keeps. A matrix that is
    embedding and head has two gradients. Of a window there are activations, and logits with what is made of them, of
    which no more than `at_once`.
    """

    fixed: int
    gradients: int
    window: int
    logits: int
    at_once: float = math.inf

    def of(self, windows: int, *, accumulates: bool = False) -> int:
        """Return the peak of a step with so many windows per forward; `accumulates` if it has several forwards.

        The backward pass frees activations before all gradients are there, unless those of an earlier forward are.
        """
        text = windows * self.window + int(min(windows * self.logits, self.at_once))
        return self.fixed + (self.gradients + text if accumulates else max(self.gradients, text))


def need(model: nn.Module, recipe: Recipe, length: int) -> Need:
    """Estimate the memory of a training step from the shapes of a model, which may lie on the meta device.

    Numbers of logits, in float32, are there three times at the peak: log-probabilities, their gradient and the
    gradient of the logits. A teacher adds its own logits and the slopes; without a loss on the text, one of the three
    is missing. Checkpointing keeps the activations of one layer and the inputs of all.
    """
    inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    weights = list(model.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    trains_all, distillation = recipe.adapter.kind == "none", recipe.distillation
    # Under an adapter, the original is there without a copy.
    is_within = not trains_all and recipe.conversion.scheme is not None and distillation.teacher is None
    own = sum(weight.numel() for weight in weights)
    config = inner.config.get_text_config()
    vocabulary, hidden, layers = config.vocab_size, config.hidden_size, config.num_hidden_layers
    halves = recipe.training.precision != "float32"
    kept, is_piecewise = _activations(inner, halves=halves)
    if recipe.training.gradient_checkpointing:
        kept = kept // layers + 4 * layers * hidden
    logits = 3 + (distillation.distils and 2 - (distillation.share == 1))
    table = inner.get_input_embeddings().weight
    is_tied = trains_all and inner.get_output_embeddings() is not None and config.tie_word_embeddings
    loaded = own * (4 if trains_all else weights[0].element_size())
    if recipe.adapter.four_bit:  # all but the embedding and the head
        wide = table.numel() * (1 if config.tie_word_embeddings else 2)
        loaded = wide * table.element_size() + (own - wide) // 2
    fixed = loaded + own * 4 * (distillation.distils and not is_within) + trained * 8 + _SLACK
    return Need(
        fixed + own * 2 * (halves and trains_all),
        trained * 4 + 2 * 4 * table.numel() * is_tied,
        length * kept,
        length * vocabulary * 4 * logits,
        AT_ONCE * 4 * logits if is_piecewise else math.inf,
    )


def _activations(model: PreTrainedModel, *, halves: bool) -> tuple[int, bool]:
    """Return the bytes per token that a model without its head keeps for the backward pass, and if it has a `Readout`.

    They are counted in a forward of the stock model on tensors without memory: schemes keep little more. It has a mask,
    so heads of grouped keys and values count as repeated, which they are not where nothing is padded.
    """
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        # Other tensors are weights, and their casts.
        if _TOKENS in tensor.shape:
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
        return tensor

    is_piecewise = False
    try:
        whole = _stock(model).train()
        with FakeTensorMode(), torch.device("cpu"):
            for module in whole.modules():
                for name, own in module.named_parameters(recurse=False):
                    module._parameters[name] = nn.Parameter(torch.empty(own.shape))
                for name, own in module.named_buffers(recurse=False):
                    module._buffers[name] = torch.empty(own.shape, dtype=own.dtype)
            ids = torch.zeros(1, _TOKENS, dtype=torch.long)
            given = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
            saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            with saved, torch.autocast("cpu", torch.bfloat16, enabled=halves):
                whole.base_model(input_ids=ids, use_cache=False, **given)
            is_piecewise = Readout.of(whole) is not None
    # Forwards that depend on values, or read packed weights, cannot be run so: linear layers keep what they read, and
    # what they write is kept by others.
    except Exception:
        table = model.get_input_embeddings().weight.shape
        matrices = [own.shape for own in model.parameters() if own.ndim == 2 and own.shape != table]
        return (2 if halves else 4) * sum(map(sum, matrices)), is_piecewise
    return sum(storage.nbytes() for storage in found.values()) // _TOKENS, is_piecewise


def _stock(model: PreTrainedModel) -> Any:
    weights: dict[int, Any] = {id(own): nn.Parameter(own.detach().to("meta"), False) for own in model.parameters()}
    twin = copy.deepcopy(model, weights)
    return unpatch(twin) if surgery.is_patched(twin) else twin


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
        # No more than these fit, even without logits.
        most = min(share, max(1, (room - wanted.fixed) // wanted.window))
        divisors = (size for size in range(most, 0, -1) if share % size == 0)
        micro = next((size for size in divisors if wanted.of(size, accumulates=size < share) <= room), 1)
    peak = wanted.of(micro, accumulates=micro < share)
    size = peak / _GIB
    words = f"{'less than 0.1' if size < 0.1 else f'about {size:.1f}'} GiB for a step, of {free / _GIB:.1f} free, "
    words += f"with {micro} of {share} windows at a time"
    if peak > room:
        words += "; it may not fit: give a shorter length, gradient_checkpointing=true or adapter=lora"
    return None if micro == share else micro, words


def micro_batches(recipe: Recipe, model: nn.Module, length: int) -> tuple[dict[str, int | None], str]:
    """Return micro batches that fit, by the section of the stage, and the estimate for the training in words."""
    together = processes()
    free = available(together.device, together.num_processes)
    of_token, found = need(model, recipe, 1), {}
    for name, stage in recipe.stages().items():
        if name != "transfer":  # It follows the training, and needs less.
            tokens = stage.length or length
            wanted = replace(of_token, window=of_token.window * tokens, logits=of_token.logits * tokens)
            found[name] = micro_batch(stage, wanted, free, together.num_processes)
    return {name: micro for name, (micro, _) in found.items()}, found["training"][1]
