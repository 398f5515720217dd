"""One table of frequencies for many rotations: differences between layers and heads go into the projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_posenc.structures import Rotation

# The angle of the slowest rotation that float32 can tell from none, per position: 1e-7 at a million positions.
_STILL = 1e-13
# Frequencies closer than this, as a share, are one: their angles differ by no more than float32 rounds them.
_SAME = 2.0**-22


def fold(rotations: Sequence[Rotation]) -> tuple[Tensor, list[Tensor]]:
    """Bring rotations, one per layer, into one table: the smallest that holds the frequencies of all heads.

    Returns:
        The table, float64 `[P]`, falling and not negative, in the layout of transformers: pairs (i, i + P). And for
        each layer the map from its queries and keys to those that the table turns, float64 `[G, 2 P, D]`.
    """
    forward = [_forward(rotation) for rotation in rotations]
    heads = torch.cat([rotation.frequencies for rotation in forward])  # [layers * G, D / 2]
    levels = _levels(heads)
    # Find the level of each plane of each head.
    between = (levels[1:] + levels[:-1]) / 2
    index = len(between) - torch.bucketize(heads, between.flip(0))
    copies = torch.stack([row.bincount(minlength=len(levels)) for row in index]).amax(dim=0)
    begins = copies.cumsum(0) - copies
    table = levels.repeat_interleave(copies)
    slots = torch.stack([_slots(row, begins) for row in index])
    bases = torch.cat([rotation.basis for rotation in forward])
    rows = torch.cat((slots, slots + len(table)), dim=1)[..., None].expand_as(bases)
    maps = bases.new_zeros(len(bases), 2 * len(table), bases.shape[-1]).scatter(1, rows, bases)
    return table, list(torch.split(maps, [len(rotation.frequencies) for rotation in forward]))


def _forward(rotation: Rotation) -> Rotation:
    """Return the same rotation with no frequency below zero: a plane seen from its other side turns forward."""
    speed = rotation.frequencies.abs()
    u, w = rotation.basis.chunk(2, dim=1)
    w = torch.where(rotation.frequencies[..., None] < 0, -w, w)
    return Rotation(speed.where(speed > _STILL, speed.new_zeros(())), torch.cat((u, w), dim=1))


def _levels(frequencies: Tensor) -> Tensor:
    """Return the distinct frequencies, falling."""
    kept: list[float] = []
    for frequency in sorted(set(frequencies.flatten().tolist()), reverse=True):
        if not kept or kept[-1] - frequency > _SAME * kept[-1]:
            kept.append(frequency)
    return frequencies.new_tensor(kept)


def _slots(levels: Tensor, begins: Tensor) -> Tensor:
    """Return the place of each plane of a head in the table, given its level and where the levels begin there."""
    earlier = torch.stack([(levels[:place] == level).sum() for place, level in enumerate(levels)])
    return begins[levels] + earlier
