"""The processes that run a recipe together: one, or those that `accelerate launch` started."""

from __future__ import annotations

import os

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, str_to_bool


def processes(*, use_cpu: bool = False) -> PartialState:
    """Return this process's place among them; they meet on the first call.

    accelerate takes an accelerator unless told otherwise, and without one each process for the only one.

    Args:
        use_cpu: Whether to leave accelerators alone, as the environment variable ACCELERATE_USE_CPU does.
    """
    on_cpu = use_cpu or _is_set("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu)
    if state.distributed_type == DistributedType.MULTI_CPU and _is_set("ACCELERATE_USE_FSDP"):
        # accelerate shards on accelerators alone, and would take DDP without a word; torch shards on a CPU as well.
        state.distributed_type = DistributedType.MULTI_GPU
    return state


def _is_set(variable: str) -> bool:
    return bool(str_to_bool(os.environ.get(variable, "false")))
