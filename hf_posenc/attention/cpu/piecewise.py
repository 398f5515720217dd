"""Biases of straight pieces that the query scales, by blocks of rows (FIRE beyond its threshold).

Speed at 2,048 tokens, forward / both directions: 2.6 / 2.2 x of the scheme's own bias for each block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from hf_posenc.attention.call import Call, Rows
from hf_posenc.attention.cpu.biases import BlockBias, Piece, over_batch
from hf_posenc.forms import PiecewiseLinear


@dataclass(frozen=True, eq=False)
class _Tables:
    """Tables of a block by place: row r and key j have the place r + j, and the distance falls as places go up.

    Attributes:
        feature: Feature of the distance, `[N]`.
        piece: Index of the piece that the distance is in, for the row of the smallest weight, `[N]`.
        slope: Slope of that piece times the feature, `[H, N]`.
        offset: Offset of that piece, or -inf for hidden keys ahead of the query, `[H, N]`.
        bends: Ends of pieces, and the places where some row is beyond an end that the tables do not know of.
    """

    feature: Tensor
    piece: Tensor
    slope: Tensor
    offset: Tensor
    bends: list[tuple[int, slice]]


class PiecewiseBias(BlockBias):
    """A piecewise linear function of the distance times a weight of the query, see `PiecewiseLinear`.

    Over the rows of a block the weights differ little, so that most distances lie in the same piece for all of them.
    There the bias is `slope * u * w + offset` with a slope and an offset of the distance, two tables like that of
    `TableBias`. Distances at which an end of a piece lies for some row have the piece of the smallest weight in the
    tables, and the bend of the function at that end is added to them. It is for causal calls, where the distance of two
    tokens is the difference of their slots.
    """

    name = "straight pieces"
    backwards = True
    # From so many rows on the kernel takes 64 at a time, before 32.
    rows = 192

    def __init__(self, added: PiecewiseLinear, call: Call) -> None:
        super().__init__(call)
        feature = added.feature(torch.arange(call.keys, device=call.device), call.precise)
        weight = added.weight(call.positions.query, call.precise)
        ends, slope, offset = added.pieces(call.precise)
        self.ends = ends.detach()
        self.inputs = (feature, weight, slope, offset)

    def prepare(self, wanted: Sequence[bool]) -> None:
        super().prepare(wanted)
        self.feature, self.weight, self.slope, self.offset = self.inputs
        # Changes of the slope at the end of each piece, [M, H].
        self.bend = self.slope.diff(dim=0)

    def pieces(self, block: Rows) -> list[Piece]:
        self.tables = self._tables(block)
        if self.learning:
            shape = (len(self.tables.slope), block.length, block.keys + block.length)
            self.strip = self.buffer("strip", self.slope, shape, self.keys + block.length)
            # As many zeros as there are rows, since lines of one place that leave a row go on in the next.
            self.strip[..., block.keys :] = 0
        return [self.piece(self._bias(self.tables, block), block, slice(0, block.keys), ruled=not self.slots)]

    def _weights(self, block: Rows) -> Tensor:
        return self.weight[:, block.start : block.stop].flip(1)[..., None]

    def _tables(self, block: Rows) -> _Tables:
        feature, weights = self.feature[: block.stop + self.ahead], self._weights(block)
        lowest, highest = (torch.searchsorted(self.ends, feature * w) for w in (weights.amin(), weights.amax()))
        ends = torch.arange(len(self.ends), device=feature.device)
        first, last = (torch.searchsorted(piece, ends, right=True).tolist() for piece in (highest, lowest))
        bends = [
            (end, slice(len(feature) - upto, len(feature) - start))
            for end, (start, upto) in enumerate(zip(first, last, strict=True))
            if start < upto
        ]
        # Keys ahead of the query have the bias of distance 0, or are hidden.
        ahead = block.length + block.keys - 1 - len(feature)
        feature, piece = (torch.cat((x.flip(0), x[:1].expand(ahead))) for x in (feature, lowest))
        slope, offset = self.slope[piece].T * feature, self.offset[piece].T.contiguous()
        if self.slots and ahead:
            offset[:, -ahead:] = -math.inf
        return _Tables(feature, piece, slope, offset, bends)

    def _bias(self, tables: _Tables, block: Rows) -> Tensor:
        """Return the bias `[B|1, H, q, K]`; overwritten by the next call."""
        weights = self._weights(block)
        batch, heads, width = len(weights), len(tables.slope), tables.slope.shape[1]
        shape = (batch, heads, block.length, block.keys)
        offset, slope = (
            table.as_strided(shape, (0, width, 1, 1)) for table in (tables.offset, tables.slope.contiguous())
        )
        memory = self.buffer("bias", self.slope, shape, self.keys)
        bias = torch.addcmul(offset, slope, weights[:, None], out=memory)
        strides = (bias.stride(0), bias.stride(1), block.keys - 1, 1)
        for end, places in tables.bends:
            size = places.stop - places.start
            beyond = (tables.feature[places] * weights - self.ends[end]).clamp_min_(0)  # [B|1, q, places]
            # Rows without such a key, since it would be before the first.
            beyond = beyond.triu_(-places.start)
            lines = bias.as_strided((batch, heads, block.length, size), strides, places.start)
            lines.addcmul_(beyond[:, None], self.bend[end][:, None, None])
        return bias

    def add(self, block: Rows, batch: slice, d_logits: Tensor) -> None:
        mine = self.strip[..., : block.keys]
        if len(self.weight) > 1:
            for row, part in enumerate(d_logits, batch.start):
                mine.copy_(part)
                self._gather(block, row)
        elif batch.start == 0:
            mine.copy_(over_batch(d_logits))
        else:
            mine += over_batch(d_logits)
        if len(self.weight) == 1 and batch.stop == self.batch:
            self._gather(block, 0)

    def _gather(self, block: Rows, row: int) -> None:
        """Take the gradient of the logits of all heads in one row of the batch, or in all if weights are the same."""
        tables, weights = self.tables, self._weights(block)[row]  # [q, 1]
        d_feature, d_weight, d_slope, d_offset = (cast(Tensor, total) for total in self.totals)
        heads, rows, width = self.strip.shape
        lines = self.strip.as_strided((heads, rows, width - 1), (rows * width, width - 1, 1))
        both = torch.stack((torch.ones_like(weights), weights)).mT.expand(heads, 2, 1, rows).flatten(1, 2)
        by_offset, by_slope = (both @ lines).unbind(1)  # [H, N]
        of_weights = (lines @ tables.slope[..., None]).sum(0)  # [q, 1]
        of_feature = (by_slope * self.slope[tables.piece].T).sum(0)  # [N]
        of_slope, of_offset = (
            d_slope.new_zeros(heads, len(d_slope)).scatter_add_(1, tables.piece.expand(heads, -1), x)
            for x in (by_slope * tables.feature, by_offset)
        )
        for end, places in tables.bends:
            feature, bend = tables.feature[places], self.bend[end]
            x = feature * weights  # [q, places]
            beyond = (x > self.ends[end]).to(x).triu_(-places.start)
            mine = lines[..., places].flatten(1)  # [H, q * places]
            bent = mine @ torch.stack((beyond * x, beyond)).flatten(1).T  # [H, 2]
            for total, change in zip((of_slope, of_offset), bent.T, strict=True):
                total[:, end + 1] += change
                total[:, end] -= change
            d_x = (bend @ mine).view_as(x) * beyond
            of_feature[places] += (d_x * weights).sum(0)
            of_weights += (d_x * feature).sum(1, keepdim=True)
        d_slope += of_slope.T
        d_offset += of_offset.T
        behind = block.stop + self.ahead
        d_feature[:behind] += of_feature[:behind].flip(0)
        d_weight[row, block.start : block.stop] += of_weights[:, 0].flip(0)
