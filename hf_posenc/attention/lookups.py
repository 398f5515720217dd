"""Biases of the distance where slots do not tell it, as in training with skipped positions.

Each block looks the distances of its pairs of tokens up in a table, and sums gradients up by the same index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_posenc.attention.biases import BlockBias, Gradient, Hidden, Piece, RowBlock, finite, over_batch, spread_of
from hf_posenc.attention.mask import Mask
from hf_posenc.attention.task import Task
from hf_posenc.structures import DistanceTable, PiecewiseLinear

# Up to so many ends of pieces it is faster to compare with each than to search among them.
_ENDS_TO_COMPARE = 48


class _Lookup(BlockBias):
    """A bias that looks distances up in a table.

    Args:
        task: The operands.
        mask: What is hidden.
        causal: Whether keys ahead of a query are hidden, so that the table has none of them.
    """

    rows = 64
    backwards = False

    def __init__(self, task: Task, mask: Mask, *, causal: bool) -> None:
        self.positions = task.positions
        self.hidden = Hidden(mask, task.positions, backwards=False)
        self.first = 0 if causal else -task.reach
        self.distances = torch.arange(self.first, task.reach + 1, device=task.q.device)
        self.dtype = torch.promote_types(task.q.dtype, torch.float32)

    @staticmethod
    def pays(task: Task) -> bool:
        """Whether there are fewer distances than pairs of tokens, in one row of the batch."""
        return task.reach < task.q.shape[2] * task.k.shape[2]

    def index(self, block: RowBlock) -> Tensor:
        """Return where the distances of a block are in the table, int64 `[B|1, q, K]`."""
        place = self.positions.rows(block.start, block.stop, block.keys)
        distance = place.query[:, :, None] - place.key[:, None, :]
        return distance.sub_(self.first).clamp_min_(0)


# -- tables of distances ---------------------------------------------------------------------------------------------


class TableLookup(_Lookup):
    """A table of distances, see `DistanceTable`."""

    name = "distance table by index"

    def __init__(self, added: DistanceTable, task: Task, mask: Mask, *, causal: bool) -> None:
        super().__init__(task, mask, causal=causal)
        self.inputs = (finite(added.at(self.distances, self.dtype)),)

    def spread(self, prepared: object) -> float:
        assert isinstance(prepared, (tuple, list))
        return spread_of(prepared[0])

    def block(self, prepared: object, block: RowBlock) -> list[Piece]:
        assert isinstance(prepared, (tuple, list))
        return self.hidden.split(_looked_up(prepared[0], self.index(block)), block, by_kernel=True)

    def gradient(self, inputs: Sequence[Tensor], prepared: object, wanted: Sequence[bool]) -> Gradient:
        return _TableLookupGradient(self, inputs[0])


class _TableLookupGradient(Gradient):
    def __init__(self, bias: TableLookup, table: Tensor) -> None:
        self.bias, self.table = bias, table
        self.total = torch.zeros_like(table)

    def block(self, block: RowBlock) -> list[Piece]:
        self.index = self.bias.index(block)
        return self.bias.hidden.split(_looked_up(self.table, self.index), block, by_kernel=False)

    def add(self, block: RowBlock, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        for row, mine in _by_row(len(self.index), batch, d_logits.flatten(2)):
            self.total[heads].scatter_add_(1, self.index[row].flatten().expand_as(mine), mine)

    def result(self) -> list[Tensor | None]:
        return [self.total]


def _by_row(rows: int, batch: slice, d_logits: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Return the gradients `[h, ...]` for each of the rows of an index, which may have one for all of the batch."""
    return enumerate(d_logits, batch.start) if rows > 1 else enumerate([over_batch(d_logits)])


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    """Return what a table `[H, N]` has at an index `[B|1, q, K]`, `[B|1, H, q, K]`."""
    return table.index_select(1, index.flatten()).view(len(table), *index.shape).transpose(0, 1)


# -- straight pieces ---------------------------------------------------------------------------------------------------


class PiecewiseLookup(_Lookup):
    """A piecewise linear function of the distance times a weight of the query, see `PiecewiseLinear`; in causal calls."""

    name = "straight pieces by index"

    def __init__(self, added: PiecewiseLinear, task: Task, mask: Mask) -> None:
        super().__init__(task, mask, causal=True)
        feature, weight = added.feature(self.distances, self.dtype), added.weight(task.positions.query, self.dtype)
        ends, slope, offset = added.pieces(self.dtype)
        self.ends = ends.detach()
        self.inputs = (feature, weight, slope, offset)

    def block(self, prepared: object, block: RowBlock) -> list[Piece]:
        assert isinstance(prepared, (tuple, list))
        return self.hidden.split(_Pairs(self, prepared, block).bias, block, by_kernel=True)

    def gradient(self, inputs: Sequence[Tensor], prepared: object, wanted: Sequence[bool]) -> Gradient:
        return _PiecewiseLookupGradient(self, inputs)


class _Pairs:
    """The pairs of tokens in a block.

    Attributes:
        index: Of their distances, int64 `[B|1, q, K]`.
        feature: Of these, `[B|1, q, K]`.
        weight: Of the queries, `[B|1, q, 1]`.
        x: Both together, what the function is of, `[B|1, q, K]`.
        piece: Which piece that is in, an integer of any size, `[B|1, q, K]`.
        slope: Of the piece, `[B|1, H, q, K]`.
        bias: `[B|1, H, q, K]`.
    """

    def __init__(self, of: PiecewiseLookup, inputs: Sequence[Tensor], block: RowBlock) -> None:
        feature, weight, slope, offset = inputs
        self.index = of.index(block)
        self.feature = feature.index_select(0, self.index.flatten()).view(self.index.shape)
        self.weight = weight[:, block.start : block.stop, None]
        self.x = self.feature * self.weight
        self.piece = _piece(of.ends, self.x)
        piece = self.piece.int()
        self.slope = _looked_up(slope.T.contiguous(), piece)
        self.bias = torch.addcmul(_looked_up(offset.T.contiguous(), piece), self.slope, self.x[:, None])


def _piece(ends: Tensor, x: Tensor) -> Tensor:
    """Return how many ends are below each number, as `searchsorted` does."""
    first, last = torch.searchsorted(ends, torch.stack(x.aminmax())).tolist()
    if last - first > _ENDS_TO_COMPARE:
        return torch.searchsorted(ends, x)
    piece = torch.full_like(x, first, dtype=torch.int16 if last < 2**15 else torch.int64)
    for end in ends[first:last]:
        piece += x > end
    return piece


class _PiecewiseLookupGradient(Gradient):
    def __init__(self, bias: PiecewiseLookup, inputs: Sequence[Tensor]) -> None:
        self.bias, self.inputs = bias, inputs
        self.totals = [torch.zeros_like(x) for x in inputs]

    def block(self, block: RowBlock) -> list[Piece]:
        self.pairs = _Pairs(self.bias, self.inputs, block)
        self.d_x = torch.zeros_like(self.pairs.x)
        return self.bias.hidden.split(self.pairs.bias, block, by_kernel=False)

    def add(self, block: RowBlock, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        for row, mine in _by_row(len(self.pairs.x), batch, d_logits):
            self._add_row(block, row, heads, mine)

    def _add_row(self, block: RowBlock, row: int, heads: slice, mine: Tensor) -> None:
        pairs, (_, _, d_slope, d_offset) = self.pairs, self.totals
        x, count = pairs.x[row], len(d_slope)
        # Row by row first: one sum of that many small numbers would round.
        rows = torch.arange(0, block.rows * count, count, device=x.device)
        place = (pairs.piece[row] + rows[:, None]).flatten().expand(len(mine), -1)
        for total, change in ((d_slope, mine * x), (d_offset, mine)):
            sums = change.new_zeros(len(mine), block.rows * count).scatter_add_(1, place, change.flatten(1))
            total[:, heads] += sums.view(len(mine), block.rows, count).sum(1).T
        self.d_x[row] += (pairs.slope[row, heads] * mine).sum(0)

    def end(self, block: RowBlock) -> None:
        pairs, (d_feature, d_weight, _, _) = self.pairs, self.totals
        # Queries may have the same positions in all rows of the batch, and keys not.
        of_weight = (self.d_x * pairs.feature).sum(-1).sum_to_size(len(d_weight), block.rows)
        d_weight[:, block.start : block.stop] += of_weight
        d_feature.scatter_add_(0, pairs.index.flatten(), (self.d_x * pairs.weight).flatten())

    def result(self) -> list[Tensor | None]:
        return [*self.totals]
