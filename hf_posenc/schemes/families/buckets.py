"""The logarithmic distance buckets of T5."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_posenc.registry import require

# Bound on the table of all distances: a number in a file must not be able to claim any amount of memory.
LONGEST = 2**20


class Buckets:
    """A map from distances to T5's buckets.

    Args:
        num_buckets: Number of buckets.
        max_distance: Distance from which all keys share the last bucket.
        causal: Count keys ahead of the query as distance 0; otherwise they have the upper half of the buckets.

    Raises:
        OptionError: `max_distance` is beyond a million.
    """

    def __init__(self, *, num_buckets: int, max_distance: int, causal: bool) -> None:
        require(max_distance <= LONGEST, "t5", "max_distance", max_distance, f"at most {LONGEST:,}")
        self.causal = causal
        self.max_distance = max_distance
        self.per_side = num_buckets if causal else num_buckets // 2
        # A table from the CPU: a GPU's logarithm may round a boundary to the other side. float32 as in T5.
        exact = self.per_side // 2
        distance = torch.arange(max_distance + 1, device="cpu")
        log = torch.log(distance.clamp_min(1).float() / exact)
        large = exact + (log / math.log(max_distance / exact) * (self.per_side - exact)).long()
        self.lookup = torch.where(distance < exact, distance, large.clamp_max(self.per_side - 1))

    def __call__(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance (query minus key), int64 of the same shape."""
        lookup = self.lookup.to(distance.device)
        if self.causal:
            return lookup[distance.clamp(0, self.max_distance)]
        return lookup[distance.abs().clamp_max(self.max_distance)] + (distance < 0) * self.per_side
