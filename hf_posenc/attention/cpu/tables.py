"""Tables of distances: blocks are views of one table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_posenc.attention.call import Call, Rows
from hf_posenc.attention.cpu.biases import NATS, BlockBias, Piece, first_true, over_batch, spread_of


class TableBias(BlockBias):
    """A table of distances, where the distance of two tokens is the difference of their slots.

    Once prepared, `falling` is the table from the largest distance down, with the bias ahead of a query behind that,
    `[H, M]`; `first` is the place of the first key in it that gets a weight, int64 `[H]`, or `None` if all do.
    """

    name = "distance table"
    backwards = cuts = True
    falling: Tensor
    first: Tensor | None
    # Sum of all blocks, in which a distance lies on a line of its own.
    strip: Tensor | None = None

    def __init__(self, table: Tensor, call: Call) -> None:
        super().__init__(call)
        self.causal = call.causal
        self.inputs = (table,)

    @classmethod
    def distances(cls, call: Call) -> Tensor:
        """Return the distances that a table is needed for, in ascending order."""
        return torch.arange(0 if call.causal else 1 - call.keys, call.keys, device=call.device)

    def may_cut(self) -> bool:
        return self.causal and self.mask.only_ahead and spread_of(self.inputs[0]) > NATS

    def prepare(self, slack: Tensor | None) -> None:
        (table,) = self.inputs
        if slack is not None:
            # Distances at which keys get no weight are hidden.
            table = table.masked_fill(table <= table[:, :1] - slack[:, None], -math.inf)
        # `pieces` looks at it as if its rows lay one after the other.
        falling = table.flip(1).contiguous()
        self.first = None if slack is None else first_true(falling != -math.inf)
        if self.causal or self.slots:
            falling = falling[:, : self.keys]
            ahead = falling.new_full((), -math.inf) if self.slots else falling[:, -1:]
            falling = torch.cat((falling, ahead.expand(len(falling), self.keys - 1)), dim=1)
        self.falling = falling

    def spread(self) -> float:
        return spread_of(self.falling)

    def pieces(self, block: Rows) -> list[Piece]:
        shape = (1, len(self.falling), block.length, block.keys)
        view = self.falling.as_strided(shape, (0, self.falling.stride(0), 1, 1), self.queries - block.stop)
        return [self.piece(view, block, slice(0, block.keys), ruled=not self.slots)]

    def first_keys(self, block: Rows) -> Tensor:
        # The first row of the block is the nearest to the first key.
        if self.first is None:
            return super().first_keys(block)
        return (self.first + block.start - self.queries + 1).clamp_min_(0)

    def add(self, block: Rows, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        if self.strip is None:
            # Behind the last column as many zeros as there are rows, since lines that leave a row go on in the next.
            width = max(self.inputs[0].shape[1], self.queries + self.keys) + block.length
            self.strip = d_logits.new_zeros(len(self.falling), block.length, width)
        start = self.queries - block.stop
        self.strip[heads, : block.length, start + first : start + block.keys] += over_batch(d_logits)

    def gradients(self) -> Sequence[Tensor | None]:
        assert self.strip is not None
        heads, rows, width = self.strip.shape
        size = self.inputs[0].shape[1]
        # Behind distance 0 lie those of keys ahead of the query, where a mask shows some.
        count = max(size, self.queries + self.keys - 1)
        sums = self.strip.as_strided((heads, rows, count), (rows * width, width - 1, 1)).sum(1)
        falling = sums[:, :size]
        if self.causal:
            falling[:, -1] += sums[:, size:].sum(1)
        return [falling.flip(1).to(self.inputs[0].dtype)]
