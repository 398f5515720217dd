"""Cost of a training step: time relative to the native model, and memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_ROUNDS = 9
# The first steps load kernels and allocate memory.
_UNTIMED = 2


def step_ratios(model: nn.Module, native: nn.Module, batch: Mapping[str, Tensor], rounds: int = _ROUNDS) -> list[float]:
    """Return ratios of training-step times to the native model's.

    A step is forward, backward and optimizer, without a teacher. Steps of the two models alternate, so that other load
    on the machine affects both. The weights do not change.

    Args:
        model: The converted model, in training mode.
        native: The native model, in training mode.
        batch: Arguments of a forward that returns a loss.
        rounds: Number of pairs of steps.

    Returns:
        One ratio per pair.
    """
    runs = [(each, torch.optim.AdamW(each.parameters(), lr=0.0, weight_decay=0.0)) for each in (model, native)]
    ratios = []
    for number in range(_UNTIMED + rounds):
        own, other = (_seconds(each, optimizer, batch) for each, optimizer in runs)
        if number >= _UNTIMED:
            ratios.append(own / other)
    return ratios


def _seconds(model: Any, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]) -> float:
    _wait()
    before = time.perf_counter()
    model(**batch, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    _wait()
    return time.perf_counter() - before


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kept_bytes(model: Any, batch: Mapping[str, Tensor]) -> int:
    """Return the bytes that a forward saves for its backward pass, without weights; the same on every machine.

    Args:
        model: A model in training mode.
        batch: Arguments of a forward that returns a loss.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        # An operation that saves its own output would otherwise form a reference cycle.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # While the loss is alive, no storage is reused, so addresses identify storages.
        loss = model(**batch, use_cache=False).loss
    del loss
    return sum(kept.values())
