"""Processes that run a recipe together: one, or those of `accelerate launch`."""

from __future__ import annotations

import os

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, str_to_bool


def processes(*, use_cpu: bool = False) -> PartialState:
    """Return the state of this process among all processes, which synchronise at the first call.

    Without `cpu=True`, accelerate would take each process for the only one on a machine without an accelerator.

    Args:
        use_cpu: Whether to use the CPU even if there is an accelerator; the variable ACCELERATE_USE_CPU does so too.
    """
    on_cpu = use_cpu or _is_set("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu)
    if state.distributed_type == DistributedType.MULTI_CPU and _is_set("ACCELERATE_USE_FSDP"):
        # torch can shard on a CPU, but accelerate would silently use DDP there.
        state.distributed_type = DistributedType.MULTI_GPU
    return state


def _is_set(variable: str) -> bool:
    return bool(str_to_bool(os.environ.get(variable, "false")))
