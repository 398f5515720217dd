"""The skew: numbers per query and distance, or products of keys with vectors per distance, brought to queries and keys.

Where positions are consecutive, the distance changes by one from key to key and from query to query. The number of a
distance is then shifted by one more place in each row, which a view can do, without an index per query and key.

Distances are int64 `[B|1, q, K]`. Values `[B, H, q, N]` and vectors `[H, N, D]` are those of N distances, from `last`
down (or from `first` up); distances beyond have those of the end. `plain` says that positions are consecutive.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Keys that meet the vectors of their distances at once.
_TILE = 64


def by_distance(values: Tensor, distance: Tensor, last: int, *, plain: bool) -> Tensor:
    """Return for each query and key the value that the query has for their distance, `[B, H, q, K]`."""
    rows, keys = distance.shape[1:]
    if not plain:
        index = (last - distance).clamp(0, values.shape[-1] - 1)[:, None]
        return values.gather(-1, index.expand(*values.shape[:3], -1))
    highest = int(distance[0, -1, 0])
    return _shifted(_window(values, last - highest, rows + keys), keys)


def sums_by_distance(weights: Tensor, distance: Tensor, last: int, count: int, *, plain: bool) -> Tensor:
    """Return for each query and distance the sum of the weights `[B, H, q, K]` of the keys at it, `[B, H, q, count]`.

    It is the transpose of `by_distance`.
    """
    rows, keys = distance.shape[1:]
    if not plain:
        index = (last - distance).clamp(0, count - 1)[:, None].expand(weights.shape)
        return weights.new_zeros(*weights.shape[:3], count).scatter_add(-1, index, weights)
    return _unwindow(_shifted_back(weights, rows + keys), last - int(distance[0, -1, 0]), count)


def queries_by_distance(q: Tensor, vectors: Tensor, distance: Tensor, last: int, *, plain: bool) -> Tensor:
    """Return for each query `[B, H, q, D]` and key the product of the query with the vector of their distance."""
    if not plain:
        return by_distance(q @ vectors.mT, distance, last, plain=False)
    rows, keys = distance.shape[1:]
    met = _window(vectors.mT, last - int(distance[0, -1, 0]), rows + keys)
    return _shifted(q @ met, keys)


def keys_by_distance(k: Tensor, vectors: Tensor, distance: Tensor, first: int) -> Tensor:
    """Return for each query and key `[B, G, K, D]` the product of the key with the vector of their distance.

    Positions are consecutive; vectors are those of distances from `first` up.
    """
    rows, shared = distance.shape[1], len(vectors) // k.shape[1]
    found = []
    for tile, of_first in zip(torch.split(k, _TILE, dim=2), torch.split(distance[0, 0], _TILE), strict=True):
        # The distances from its last key and the first query to its first key and the last query.
        met = _window(vectors.mT, int(of_first[-1]) - first, rows + len(of_first))
        found.append(_shifted(tile.repeat_interleave(shared, dim=1) @ met, rows).mT)
    return torch.cat(found, dim=-1)


def _window(values: Tensor, start: int, count: int) -> Tensor:
    """Return the places from `start` on of the last dimension, the ends for those outside."""
    before = min(count, max(0, -start))
    inside = values[..., max(0, start) : max(0, start + count)]
    behind = count - before - inside.shape[-1]
    shape = values.shape[:-1]
    if not before and not behind:
        return inside
    return torch.cat((values[..., :1].expand(*shape, before), inside, values[..., -1:].expand(*shape, behind)), dim=-1)


def _unwindow(values: Tensor, start: int, count: int) -> Tensor:
    """Return the transpose of `_window`: `count` places from `-start` on, with all outside added to the ends."""
    places = values.shape[-1]
    begin, end = (min(max(0, place), places) for place in (-start, count - start))
    before = min(count, max(0, start))
    sums = torch.nn.functional.pad(values[..., begin:end], (before, count - before - (end - begin)))
    if begin:
        sums[..., 0] += values[..., :begin].sum(-1)
    if end < places:
        sums[..., -1] += values[..., end:].sum(-1)
    return sums


def _shifted(x: Tensor, count: int) -> Tensor:
    """Return `count` places of each row of `[..., q, q + count]`, each row one place later than the row behind it."""
    rows, width = x.shape[-2:]
    # Each row of one place less begins one place earlier.
    return torch.unflatten(x.flatten(-2)[..., rows - 1 : rows * width - 1], -1, (rows, width - 1))[..., :count]


def _shifted_back(x: Tensor, width: int) -> Tensor:
    """Return the transpose of `_shifted`: `[..., q, K]` in rows of `width` places, with zeros elsewhere."""
    rows, count = x.shape[-2:]
    lines = torch.nn.functional.pad(x, (0, width - 1 - count)).flatten(-2)
    return torch.unflatten(torch.nn.functional.pad(lines, (rows - 1, 1)), -1, (rows, width))
