"""Numbers per query and distance, brought to queries and keys, and back.

Distances are int64 `[B|1, q, K]`. Numbers are those of N distances, from `last` down; others have those of the end.
"""

from __future__ import annotations

from torch import Tensor


def by_distance(values: Tensor, distance: Tensor, last: int) -> Tensor:
    """Return for each query and key the value `[B, H, q, N]` that the query has for their distance, `[B, H, q, K]`."""
    index = (last - distance).clamp(0, values.shape[-1] - 1)[:, None]
    return values.gather(-1, index.expand(*values.shape[:3], -1))


def sums_by_distance(weights: Tensor, distance: Tensor, last: int, count: int) -> Tensor:
    """Return for each query and distance the sum of the keys' weights `[B, H, q, K]`, `[B, H, q, count]`."""
    index = (last - distance).clamp(0, count - 1)[:, None].expand(weights.shape)
    return weights.new_zeros(*weights.shape[:3], count).scatter_add(-1, index, weights)
