"""Processes that run a recipe together (one, or those of `accelerate launch`), and their threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import nn
from torch.distributed.fsdp import FSDPModule

# Multiplications with weights per forward that pay for one more thread. Measured on two cores with the built-in model
# (468,000 weights): in windows of 1,024 tokens and batches of 8, slightly below this for each of two threads, one
# thread is as fast as two; with an eighth of the tokens, more than twice as fast.
_WORTH_A_THREAD = 2**31
# Width from which bfloat16 is clearly faster on a CPU that has instructions for it. Time of a training step in float32
# over that in bfloat16, on one core with AMX: 1.0 to 1.1 at width 64, 1.1 to 1.3 at 128, 1.5 and more at 256.
_WIDE = 256
_CPUS = Path("/proc/cpuinfo")


def processes() -> PartialState:
    """Return the state of this process among all processes, which synchronise at the first call.

    Without `cpu=True`, accelerate would take each process for the only one on a machine without an accelerator.
    """
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu)
    if state.distributed_type == DistributedType.MULTI_CPU and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        # torch can shard on a CPU, but accelerate would silently use DDP there.
        state.distributed_type = DistributedType.MULTI_GPU
    return state


def bfloat16_pays(width: int) -> bool:
    """Whether a model of some width trains faster in bfloat16: on a GPU, or on a CPU with instructions for it."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    flags = _CPUS.read_text(encoding="utf-8").split() if _CPUS.is_file() else ()  # other systems than Linux have none
    return width >= _WIDE and not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)


def sharding(model: nn.Module, *, in_part: bool) -> dict[str, str]:
    """Return accelerate's settings of FSDP for the next stage of a run, which trains a model, or only a part of it.

    A part that was sharded alone could not be sharded again with the model, so it is not sharded. What an earlier stage
    has sharded stays as it is.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.reshard()  # A measurement gathers the weights outside of the layers, and leaves them so.
    settings = {"ACCELERATE_USE_FSDP": "false"} if in_part else {}
    return settings | ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"} if sharded else {})


@contextlib.contextmanager
def enough_threads(model: nn.Module, tokens: int) -> Iterator[None]:
    """Limit torch's threads, within the context, to those that a forward of so many tokens has work for.

    The number is unchanged if OMP_NUM_THREADS or MKL_NUM_THREADS gives one, or an accelerator computes.
    """
    before = torch.get_num_threads()
    is_chosen = any(os.environ.get(variable) for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if not is_chosen and processes().device.type == "cpu":
        work = tokens * sum(parameter.numel() for parameter in model.parameters())
        torch.set_num_threads(max(1, min(before, work // _WORTH_A_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
