"""One table of frequencies for many rotations: differences between layers and heads go into the projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.structures import Rotation

# The angle of the slowest rotation that float32 can tell from none, per position: 1e-7 at a million positions.
_STILL = 1e-13
# Frequencies closer than this, as a share, are one: their angles differ by no more than float32 rounds them.
_SAME = 2.0**-22


@dataclass(frozen=True, eq=False)
class Folded:
    """Rotations that share one table, in the layout of transformers: pairs (i, i + P).

    Attributes:
        frequencies: The table, float64 `[P]`, falling; none is negative.
        rotations: The rotations that it holds.
        slots: Index of each of their planes in the table, int64 `[G, D / 2]`.
    """

    frequencies: Tensor
    rotations: list[Rotation]
    slots: list[Tensor]

    @property
    def width(self) -> int:
        """Channels of a head that the table turns."""
        return 2 * len(self.frequencies)

    def spread(self, layer: int) -> Tensor:
        """Return the map from a layer's queries and keys to those that the table turns, float64 `[G, width, D]`."""
        basis, slots = self.rotations[layer].basis, self.slots[layer]
        rows = torch.cat((slots, slots + len(self.frequencies)), dim=1)[..., None].expand_as(basis)
        return basis.new_zeros(len(slots), self.width, basis.shape[-1]).scatter(1, rows, basis)


def fold(rotations: Sequence[Rotation]) -> Folded:
    """Bring rotations, one per layer, into one table: the smallest that holds the frequencies of all heads."""
    forward = [_forward(rotation) for rotation in rotations]
    heads = torch.cat([rotation.frequencies for rotation in forward])  # [layers * G, D / 2]
    levels = _levels(heads)
    # Find the level of each plane of each head.
    between = (levels[1:] + levels[:-1]) / 2
    index = len(between) - torch.bucketize(heads, between.flip(0))
    copies = torch.stack([row.bincount(minlength=len(levels)) for row in index]).amax(dim=0)
    begins = copies.cumsum(0) - copies
    slots = torch.stack([_slots(row, begins) for row in index])
    return Folded(
        levels.repeat_interleave(copies), forward, list(torch.split(slots, [len(r.frequencies) for r in forward]))
    )


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
