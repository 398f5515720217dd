"""Tables of distances, where the distance of two tokens is the difference of their slots: blocks that are views of one table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.attention import far
from hf_posenc.attention.biases import BlockBias, Gradient, Hidden, Piece, RowBlock, first_true, over_batch, spread_of
from hf_posenc.attention.mask import Mask
from hf_posenc.attention.task import Task


@dataclass(frozen=True, eq=False)
class _Falling:
    """A table of distances as `TableBias.block` looks at it.

    Attributes:
        table: From the largest distance down, with what is ahead of a query behind that, `[H, M]`.
        first: Where the first key is that gets a weight, int64 `[H]`; `None` if all do.
    """

    table: Tensor
    first: Tensor | None


class TableBias(BlockBias):
    """A table of distances, where the distance of two tokens is the difference of their slots.

    Args:
        table: For all of `distances`, `[H, N]`.
        task: The operands.
        mask: What is hidden.
        causal: Whether the table holds keys behind the query only.
    """

    name = "distance table"

    def __init__(self, table: Tensor, task: Task, mask: Mask, *, causal: bool) -> None:
        self.queries, self.keys = task.q.shape[2], task.k.shape[2]
        self.causal = causal
        self.hides = mask.rule == "slots"
        self.hidden = Hidden(mask, task.positions, in_bias=self.hides)
        self.inputs = (table,)

    @classmethod
    def distances(cls, task: Task, *, causal: bool) -> Tensor:
        """Return the distances that a table is needed for, in ascending order."""
        keys = task.k.shape[2]
        return torch.arange(0 if causal else 1 - keys, keys, device=task.q.device)

    def leaves_out(self, inputs: Sequence[Tensor]) -> bool:
        return self.causal and self.hidden.mask.only_ahead and spread_of(inputs[0]) > far.NATS

    def prepare(self, inputs: Sequence[Tensor], slack: Tensor | None) -> _Falling:
        """Return the table from the largest distance down; distances at which keys get no weight are hidden."""
        (table,) = inputs
        if slack is not None:
            table = table.masked_fill(table <= table[:, :1] - slack[:, None], -math.inf)
        # `block` looks at it as if its rows lay one after the other.
        falling = table.flip(1).contiguous()
        first = None if slack is None else first_true(falling != -math.inf)
        if self.causal or self.hides:
            falling = falling[:, : self.keys]
            ahead = falling.new_full((), -math.inf) if self.hides else falling[:, -1:]
            falling = torch.cat((falling, ahead.expand(len(falling), self.keys - 1)), dim=1)
        return _Falling(falling, first)

    def spread(self, prepared: object) -> float:
        assert isinstance(prepared, _Falling)
        return spread_of(prepared.table)

    def block(self, prepared: object, block: RowBlock) -> list[Piece]:
        assert isinstance(prepared, _Falling)
        table, first = prepared.table, self.queries - block.stop
        shape = (1, len(table), block.rows, block.keys)
        return self.hidden.put(table.as_strided(shape, (0, table.stride(0), 1, 1), first), block)

    def first_keys(self, prepared: object, block: RowBlock) -> Tensor | None:
        assert isinstance(prepared, _Falling)
        # The first row of the block is the nearest to the first key.
        return None if prepared.first is None else (prepared.first + block.start - self.queries + 1).clamp_min_(0)

    def gradient(self, inputs: Sequence[Tensor], prepared: object, wanted: Sequence[bool]) -> Gradient:
        return _TableGradient(self, inputs[0], prepared)


class _TableGradient(Gradient):
    """Sums blocks into one strip in which a distance lies on a line of its own, and at the end along these lines."""

    def __init__(self, bias: TableBias, table: Tensor, prepared: object) -> None:
        assert isinstance(prepared, _Falling)
        self.bias, self.prepared, self.size = bias, prepared, table.shape[1]
        self.strip: Tensor | None = None
        self.dtype = table.dtype

    def block(self, block: RowBlock) -> list[Piece]:
        return self.bias.block(self.prepared, block)

    def add(self, block: RowBlock, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        if self.strip is None:
            # Behind the last column as many zeros as there are rows, since lines that leave a row go on in the next.
            width = max(self.size, self.bias.queries + self.bias.keys) + block.rows
            self.strip = d_logits.new_zeros(len(self.prepared.table), block.rows, width)
        start = self.bias.queries - block.stop
        self.strip[heads, : block.rows, start + first : start + block.keys] += over_batch(d_logits)

    def result(self) -> list[Tensor | None]:
        assert self.strip is not None
        heads, rows, width = self.strip.shape
        # Behind distance 0 those of keys ahead of the query, where a mask shows some.
        count = max(self.size, self.bias.queries + self.bias.keys - 1)
        sums = self.strip.as_strided((heads, rows, count), (rows * width, width - 1, 1)).sum(1)
        falling = sums[:, : self.size]
        if self.bias.causal:
            falling[:, -1] += sums[:, self.size :].sum(1)
        return [falling.flip(1).to(self.dtype)]
