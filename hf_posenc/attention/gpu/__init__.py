"""What runs on a GPU only, by kernels of our own. They need Triton, which is imported when the first of them is run."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from hf_posenc.attention.blocks import blocks
from hf_posenc.attention.dense import block_of
from hf_posenc.attention.mask import Mask
from hf_posenc.attention.task import Task
from hf_posenc.scheme import Scheme
from hf_posenc.structures import Added, GateCount, KeyBias, Stick, Walk

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The oldest GPUs whose matrix units multiply bfloat16.
_CAPABILITY = (8, 0)
# Tiles of wider heads do not fit.
_WIDEST = 128

_NAMES: dict[type[Added] | type[Walk], str] = {GateCount: "gate count", Stick: "stick", KeyBias: "key bias"}


def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for a device."""
    return device.type == "cuda" and _compiles(device.index)


@functools.cache
def _compiles(index: int | None) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= _CAPABILITY


def structure(scheme: Scheme) -> Walk | KeyBias | None:
    """Return what a scheme does, where there is a kernel for it."""
    found = scheme.walk() or scheme.added()
    return found if isinstance(found, (GateCount, Stick, KeyBias)) else None


def applies(scheme: Scheme, task: Task, mask: Mask) -> bool:
    """Whether there is a kernel for this call."""
    found = structure(scheme)
    # The walks add up gradients in no fixed order.
    refused = isinstance(found, Walk) and torch.are_deterministic_algorithms_enabled()
    return not refused and available(task.q.device) and _takes(found, task, mask)


def _takes(found: Walk | KeyBias | None, task: Task, mask: Mask) -> bool:
    q, k, v = task.q, task.k, task.v
    return (
        found is not None
        and task.native_score is None
        and not task.dropout
        and not task.upcast
        and mask.bias is None
        and q.dtype in _DTYPES
        and q.dtype == k.dtype == v.dtype
        and k.shape[1] == v.shape[1]
        and q.shape[-1] == v.shape[-1] <= _WIDEST
        and not (isinstance(found, Stick) and found.rest_to_own and not _own_keys_are_last(task, mask))
    )


def _own_keys_are_last(task: Task, mask: Mask) -> bool:
    """Whether the last keys are the queries' own."""
    missing = task.k.shape[2] - task.q.shape[2]
    if mask.rule == "slots":
        return mask.ahead == missing
    # In a cache there may be slots behind the queries.
    return missing >= 0 and bool((task.positions.key[:, missing:] == task.positions.query).all())


def form(scheme: Scheme) -> str:
    """Return which kernel that is."""
    found = structure(scheme)
    assert found is not None
    return _NAMES[type(found)]


def kernels(scheme: Scheme, task: Task, mask: Mask) -> Tensor:
    """Return the output `[B, H, Q, D]`, without any tensor of size Q x K but a mask that is given as one.

    Queries that see no key get zeros. Gradients of keys and values may be added up in no fixed order. What no kernel takes goes by
    blocks.
    """
    found = structure(scheme)
    if not _takes(found, task, mask):
        return blocks(scheme, task, mask)
    # Triton launches on the current GPU.
    with torch.autocast(task.q.device.type, enabled=False), torch.cuda.device_of(task.q):
        if isinstance(found, Stick):
            return _stick(found, task, mask)
        if isinstance(found, GateCount):
            return _gate_count(found, task, mask)
        assert isinstance(found, KeyBias)
        return _key_bias(found, task, mask)


def _stick(walk: Stick, task: Task, mask: Mask) -> Tensor:
    from hf_posenc.attention.gpu import stick, tiles

    v = task.v
    bias = None if walk.bias is None else walk.bias.float()
    output, rest = stick.break_stick(tiles.shape_of(task, mask), task.q, task.k, v, bias, current=walk.current)
    if walk.rest is not None:
        return output + (rest[..., None] * walk.rest.float()[:, None]).to(output)
    if walk.rest_to_own:
        length, before = task.q.shape[2], v.shape[2] - task.q.shape[2]
        if mask.keep is not None:
            rest = rest * mask.keep.expand(*mask.keep.shape[:2], length, -1).diagonal(before, -2, -1)
        values = v[:, :, before:].repeat_interleave(task.q.shape[1] // v.shape[1], dim=1)
        return output + (rest[..., None] * values).to(output)
    return output


def _gate_count(walk: GateCount, task: Task, mask: Mask) -> Tensor:
    from hf_posenc.attention.gpu import count, tiles

    q = task.q if task.content_q is None else task.content_q
    k = task.k if task.content_k is None else task.content_k
    gates = walk.keys(k, block_of(task, mask.keep))
    bias = walk.at(q, torch.empty(0, dtype=torch.float32, device=q.device))
    opening = None if gates is None else (q, gates)
    return count.count_gates(tiles.shape_of(task, mask), task.q, task.k, task.v, opening, bias, walk.scale)


def _key_bias(added: KeyBias, task: Task, mask: Mask) -> Tensor:
    from hf_posenc.attention.gpu import keys, tiles

    batch = len(task.q)
    own, others = (added.at(state).float().expand(batch, -1, -1) for state in (task.own, task.state))
    return keys.attend(tiles.shape_of(task, mask), task.q, task.k, task.v, own, others)
