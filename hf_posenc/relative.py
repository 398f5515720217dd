"""Numbers per query and distance, or products of keys with vectors per distance, brought to queries and keys.

Where both stand one after the other, the distance changes by one from key to key and from query to query. What belongs to
each distance then only has to be shifted by one more place in each row, which is a matter of strides, not of an index per
query and key.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Keys that meet the vectors of their distances at once.
_TILE = 64


def by_distance(values: Tensor, distance: Tensor, last: int, *, plain: bool) -> Tensor:
    """Return for each query and key what the query has for their distance.

    Args:
        values: `[B, H, q, N]`, for the distances from `last` down; distances before and behind have that of the end.
        distance: int64 `[B|1, q, K]`.
        last: See above.
        plain: Whether distances are those of consecutive positions.

    Returns:
        `[B, H, q, K]`.
    """
    rows, keys = distance.shape[1:]
    if not plain:
        index = (last - distance).clamp(0, values.shape[-1] - 1)[:, None]
        return values.gather(-1, index.expand(*values.shape[:3], -1))
    highest = int(distance[0, -1, 0])
    return _shifted(_window(values, last - highest, rows + keys - 1), keys)


def keys_by_distance(k: Tensor, vectors: Tensor, distance: Tensor, first: int) -> Tensor:
    """Return for each query and key the product of the key with the vector of their distance.

    Args:
        k: `[B, G, K, D]`.
        vectors: `[H, N, D]`, for the distances from `first` up; distances before and behind have that of the end.
        distance: int64 `[1, q, K]`, of consecutive positions.
        first: See above.

    Returns:
        `[B, H, q, K]`.
    """
    rows, keys = distance.shape[1:]
    groups, width = k.shape[1], k.shape[3]
    heads = vectors.shape[0]
    # Keys that are so far from all queries that they meet the last vector: whole tiles of them.
    far = max(0, int(distance[0, 0, 0]) - (first + vectors.shape[1] - 1) + 1) // _TILE * _TILE
    if far:
        last = vectors[:, -1].view(groups, -1, width)
        met = torch.einsum("bgkd,grd->bgrk", k[:, :, :far], last).flatten(1, 2)[:, :, None].expand(-1, -1, rows, -1)
        if far == keys:
            return met
        near = keys_by_distance(k[:, :, far:], vectors, distance[:, :, far:], first)
        return torch.cat((met, near), dim=-1)
    tiles, span = -(-keys // _TILE), rows + _TILE - 1
    k = torch.nn.functional.pad(k, (0, 0, 0, tiles * _TILE - keys)).reshape(
        len(k), groups, tiles, _TILE, width
    )  # [B, G, T, t, D]
    # A tile sees the distances from its last key and the first query to its first key and the last query.
    lowest = int(distance[0, 0, 0]) - tiles * _TILE + 1
    rising = _window(vectors.mT, lowest - first, (tiles - 1) * _TILE + span)  # [H, D, ...]
    windows = rising.unfold(-1, span, _TILE).permute(0, 2, 1, 3).flip(1)  # [H, T, D, span], the first tile first
    windows = windows.reshape(groups, heads // groups, tiles, width, span)
    products = torch.einsum("bgtkd,grtds->bgrtks", k, windows).flatten(1, 2)
    return _shifted(products, rows).flatten(2, 3)[:, :, :keys].mT


def _window(values: Tensor, start: int, count: int) -> Tensor:
    """Return the places from `start` on of the last dimension, the ends for those outside."""
    before = min(count, max(0, -start))
    inside = values[..., max(0, start) : max(0, start + count)]
    behind = count - before - inside.shape[-1]
    shape = values.shape[:-1]
    if not before and not behind:
        return inside
    return torch.cat((values[..., :1].expand(*shape, before), inside, values[..., -1:].expand(*shape, behind)), dim=-1)


def _shifted(x: Tensor, count: int) -> Tensor:
    """Return `count` places of each row of `[..., q, W]`, from the last row's first on, one place later in each row before."""
    rows, width = x.shape[-2:]
    if rows == 1:
        return x[..., :count]
    flat = x.flatten(-2)[..., rows - 1 : rows * width - 1]
    return flat.view(*x.shape[:-2], rows, width - 1)[..., :count]
