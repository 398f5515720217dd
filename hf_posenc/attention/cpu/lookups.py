"""Biases of the distance where slots do not tell it, as in training with skipped positions.

Each block looks the distances of its pairs of tokens up in a table, and sums gradients up by the same index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.blocks import Rows
from hf_posenc.attention.call import Call
from hf_posenc.attention.cpu.biases import BlockBias, Gradient, Piece, finite, over_batch, spread_of
from hf_posenc.structures import DistanceTable, PiecewiseLinear

# Number of ends of pieces up to which it is faster to compare with each than to search among them.
_ENDS_TO_COMPARE = 48


class _Lookup(BlockBias):
    """A bias that looks distances up in a table."""

    rows = 64

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.first = 0 if call.causal else -call.reach
        self.distances = torch.arange(self.first, call.reach + 1, device=call.device)

    @staticmethod
    def pays(call: Call) -> bool:
        """Whether there are fewer distances than pairs of tokens, in one row of the batch."""
        return call.reach < call.queries * call.keys

    def index(self, block: Rows) -> Tensor:
        """Return the places of a block's distances in the table, int64 `[B|1, q, K]`."""
        place = self.positions.rows(block.start, block.stop, block.keys)
        distance = place.query[:, :, None] - place.key[:, None, :]
        return distance.sub_(self.first).clamp_min_(0)


# -- tables of distances ---------------------------------------------------------------------------------------------


class TableLookup(_Lookup):
    """A table of distances, see `DistanceTable`."""

    name = "distance table by index"

    def __init__(self, added: DistanceTable, call: Call) -> None:
        super().__init__(call)
        self.inputs = (finite(added.at(self.distances, call.precise)),)

    def spread(self) -> float:
        return spread_of(self.inputs[0])

    def pieces(self, block: Rows, *, by_kernel: bool = True) -> list[Piece]:
        return self.split(_looked_up(self.inputs[0], self.index(block)), block, by_kernel=by_kernel)

    def gradient(self, wanted: Sequence[bool]) -> Gradient[Any]:
        return _TableLookupGradient(self, wanted)


class _TableLookupGradient(Gradient[TableLookup]):
    def pieces(self, block: Rows) -> list[Piece]:
        self.index = self.bias.index(block)
        return self.bias.split(_looked_up(self.bias.inputs[0], self.index), block, by_kernel=False)

    def add(self, block: Rows, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        for row, mine in _by_row(len(self.index), batch, d_logits.flatten(2)):
            self.totals[0][heads].scatter_add_(1, self.index[row].flatten().expand_as(mine), mine)


def _by_row(rows: int, batch: slice, d_logits: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Return the gradients `[h, ...]` for each row of an index, which may have one row for all of the batch."""
    return enumerate(d_logits, batch.start) if rows > 1 else enumerate([over_batch(d_logits)])


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    """Return the entries of a table `[H, N]` at an index `[B|1, q, K]`, `[B|1, H, q, K]`."""
    return table.index_select(1, index.flatten()).view(len(table), *index.shape).transpose(0, 1)


# -- straight pieces ---------------------------------------------------------------------------------------------------


class PiecewiseLookup(_Lookup):
    """A piecewise linear function of distance times query weight, in causal calls; see `PiecewiseLinear`."""

    name = "straight pieces by index"

    def __init__(self, added: PiecewiseLinear, call: Call) -> None:
        super().__init__(call)
        dtype = call.precise
        feature, weight = added.feature(self.distances, dtype), added.weight(call.positions.query, dtype)
        ends, slope, offset = added.pieces(dtype)
        self.ends = ends.detach()
        self.inputs = (feature, weight, slope, offset)

    def pieces(self, block: Rows, *, by_kernel: bool = True) -> list[Piece]:
        return self.split(_Pairs(self, block).bias, block, by_kernel=by_kernel)

    def gradient(self, wanted: Sequence[bool]) -> Gradient[Any]:
        return _PiecewiseLookupGradient(self, wanted)


class _Pairs:
    """The pairs of tokens in a block.

    Attributes:
        index: Places of their distances, int64 `[B|1, q, K]`.
        feature: Features of the distances, `[B|1, q, K]`.
        weight: Weights of the queries, `[B|1, q, 1]`.
        x: Feature times weight, the argument of the function, `[B|1, q, K]`.
        piece: Index of the piece that `x` is in, an integer of any size, `[B|1, q, K]`.
        slope: Slope of the piece, `[B|1, H, q, K]`.
        bias: Bias `[B|1, H, q, K]`.
    """

    def __init__(self, of: PiecewiseLookup, block: Rows) -> None:
        feature, weight, slope, offset = of.inputs
        self.index = of.index(block)
        self.feature = feature.index_select(0, self.index.flatten()).view(self.index.shape)
        self.weight = weight[:, block.start : block.stop, None]
        self.x = self.feature * self.weight
        self.piece = _piece(of.ends, self.x)
        piece = self.piece.int()
        self.slope = _looked_up(slope.T.contiguous(), piece)
        self.bias = torch.addcmul(_looked_up(offset.T.contiguous(), piece), self.slope, self.x[:, None])


def _piece(ends: Tensor, x: Tensor) -> Tensor:
    """Return the number of ends below each number, as `searchsorted` does."""
    first, last = torch.searchsorted(ends, torch.stack(x.aminmax())).tolist()
    if last - first > _ENDS_TO_COMPARE:
        return torch.searchsorted(ends, x)
    piece = torch.full_like(x, first, dtype=torch.int16 if last < 2**15 else torch.int64)
    for end in ends[first:last]:
        piece += x > end
    return piece


class _PiecewiseLookupGradient(Gradient[PiecewiseLookup]):
    def pieces(self, block: Rows) -> list[Piece]:
        self.pairs = _Pairs(self.bias, block)
        self.d_x = torch.zeros_like(self.pairs.x)
        return self.bias.split(self.pairs.bias, block, by_kernel=False)

    def add(self, block: Rows, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        for row, mine in _by_row(len(self.pairs.x), batch, d_logits):
            self._add_row(block, row, heads, mine)

    def _add_row(self, block: Rows, row: int, heads: slice, mine: Tensor) -> None:
        pairs, (_, _, d_slope, d_offset) = self.pairs, self.totals
        x, count = pairs.x[row], len(d_slope)
        # Row by row first: one sum of that many small numbers would round.
        rows = torch.arange(0, block.length * count, count, device=x.device)
        place = (pairs.piece[row] + rows[:, None]).flatten().expand(len(mine), -1)
        for total, change in ((d_slope, mine * x), (d_offset, mine)):
            sums = change.new_zeros(len(mine), block.length * count).scatter_add_(1, place, change.flatten(1))
            total[:, heads] += sums.view(len(mine), block.length, count).sum(1).T
        self.d_x[row] += (pairs.slope[row, heads] * mine).sum(0)

    def end(self, block: Rows) -> None:
        pairs, (d_feature, d_weight, _, _) = self.pairs, self.totals
        # Queries may have the same positions in all rows of the batch, and keys not.
        of_weight = (self.d_x * pairs.feature).sum(-1).sum_to_size(len(d_weight), block.length)
        d_weight[:, block.start : block.stop] += of_weight
        d_feature.scatter_add_(0, pairs.index.flatten(), (self.d_x * pairs.weight).flatten())
