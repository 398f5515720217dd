"""The logarithmic distance buckets of T5, shared by the T5 schemes and by the T5 architecture."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


@functools.lru_cache(maxsize=64)
def _lookup(num_buckets: int, max_distance: int) -> Tensor:
    # Computed once, on the CPU: a GPU's logarithm may round a boundary to the other side. T5 computes in float32.
    exact = num_buckets // 2
    distance = torch.arange(max_distance + 1, dtype=torch.float32, device="cpu").clamp_min(1)
    scale = math.log(max_distance / exact)
    large = exact + (torch.log(distance / exact) / scale * (num_buckets - exact)).long()
    large = large.clamp(max=num_buckets - 1)
    plain = torch.arange(max_distance + 1, device="cpu")
    return torch.where(plain < exact, plain, large)


def bucket(distance: Tensor, *, num_buckets: int, max_distance: int, causal: bool) -> Tensor:
    """Return T5's bucket of each distance (query minus key), int64 of the same shape.

    Causal: keys ahead of the query count as distance 0. Otherwise the upper half of the buckets is for them.
    """
    if causal:
        lookup = _lookup(num_buckets, max_distance).to(distance.device)
        return lookup[distance.clamp(0, max_distance)]
    lookup = _lookup(num_buckets // 2, max_distance).to(distance.device)
    return lookup[distance.abs().clamp_max(max_distance)] + (distance < 0) * (num_buckets // 2)
