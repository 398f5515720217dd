"""Base class of the additive schemes with a form for images."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.operands import Block, Geometry
from hf_posenc.schemes.families.additive import DistanceBias


class GridBias(DistanceBias):
    """A bias of the distance in texts, and of the offset between patches in images (`Geometry(axes=2)`).

    In an image the token at position 0 is the class token; it has no place and no bias, neither as a query nor as a
    key.
    """

    def __init__(self, geometry: Geometry, *, gate: bool = False, shared: bool = False) -> None:
        super().__init__(geometry, gate=gate, shared=shared)
        self.axes = 2 if geometry.axes == 2 else 0

    def grid_values(self, offset: Tensor) -> Tensor:
        """Return the bias `[H, N]` at offsets `[N, 2]`: row and column of the query minus those of the key."""
        raise NotImplementedError

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor:
        if not self.axes:
            return super().bias(block, dtype)
        places = block.positions
        offset = places.of_queries(2, dtype)[:, :, None] - places.of_keys(2, dtype)[:, None]  # [B|1, q, K, 2]
        values = self.grid_values(offset.flatten(0, 2)).view(-1, *offset.shape[:-1]).transpose(0, 1)
        patches = (places.query != 0)[:, :, None] & (places.key != 0)[:, None]  # [B|1, q, K]
        return values.where(patches[:, None].to(values.device), values.new_zeros(()))
