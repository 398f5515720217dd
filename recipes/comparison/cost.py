"""What a training step costs: its time beside the native model's, and what it keeps in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_ROUNDS = 9
# The first steps load and allocate.
_UNTIMED = 2


def step_ratios(model: nn.Module, native: nn.Module, batch: Mapping[str, Tensor], rounds: int = _ROUNDS) -> list[float]:
    """Return the time of a training step as a share of the native model's.

    A step is forward, backward and optimizer, without any teacher. The two take turns, so that what else the machine does
    meets both. The weights stay as they are.

    Args:
        model: The converted model, in training mode.
        native: The model that it was made of, likewise.
        batch: Arguments of a forward that returns a loss.
        rounds: How many pairs of steps.

    Returns:
        One ratio for each pair.
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
    """Return how many bytes a forward keeps for its backward pass, beside the weights; the same on every machine.

    Args:
        model: In training mode.
        batch: Arguments of a forward that returns a loss.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        # An operation that keeps its own result would hold itself for ever.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # As long as the loss lives, no memory is used twice.
        loss = model(**batch, use_cache=False).loss
    del loss
    return sum(kept.values())
