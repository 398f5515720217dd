"""What is added to the logits, block by block of rows, and how its gradient is gathered.

In a block rows run backwards: the last query comes first. A bias of the distance then grows in the same direction along rows
and along keys, so that a block of it is a view of one table, in which both strides are 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.attention.mask import Mask
from hf_posenc.attention.task import Task
from hf_posenc.scheme import Block, Positions
from hf_posenc.structures import Added, PiecewiseLinear


@dataclass(frozen=True)
class RowBlock:
    """Some rows of the attention matrix, `start:stop`, and the first `keys` columns."""

    start: int
    stop: int
    keys: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Piece:
    """The bias of a block for some of its keys.

    Attributes:
        keys: Which.
        bias: With what is hidden in it, `[B|1, H, q|1, keys]`, rows backwards, float32 or float64.
    """

    keys: slice
    bias: Tensor


class Gradient:
    """Gathers the gradient of a bias over the blocks of a backward pass."""

    def block(self, block: RowBlock) -> list[Piece]:
        """Return the bias of a block, as `BlockBias.block` does, and be ready for its gradient."""
        raise NotImplementedError

    def add(self, block: RowBlock, row: int, heads: slice, d_logits: Tensor) -> None:
        """Take the gradient of the logits of some heads in one row of the batch, `[1, h, q, K]`."""
        raise NotImplementedError

    def end(self, block: RowBlock) -> None:
        """Know that all of a block was added."""

    def result(self) -> list[Tensor | None]:
        """Return the gradient of each input."""
        raise NotImplementedError


class BlockBias:
    """A bias by blocks of rows.

    Attributes:
        inputs: The tensors it is made of, into which gradients may flow.
    """

    inputs: tuple[Tensor, ...]
    # Rows of a block that are best made at once.
    rows = 256
    name: str

    def prepare(self, inputs: Sequence[Tensor]) -> object:
        """Bring the inputs into the form that `block` takes, once per pass."""
        return inputs

    def block(self, prepared: object, block: RowBlock) -> list[Piece]:
        """Return the bias, in pieces that cover all keys in order."""
        raise NotImplementedError

    def gradient(self, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> Gradient:
        """Return what gathers the gradients of the inputs."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Hidden:
    """Puts a mask into blocks of a bias.

    Attributes:
        mask: The mask.
        positions: Of queries and keys.
        in_bias: Whether the bias hides itself what the causal rule of slots hides.
    """

    mask: Mask
    positions: Positions
    in_bias: bool = False

    def put(self, bias: Tensor, block: RowBlock) -> list[Piece]:
        """Return the bias of a block with the mask in it."""
        return [self.piece(bias, block, slice(0, block.keys), ruled=not self.in_bias)]

    def piece(self, bias: Tensor, block: RowBlock, keys: slice, *, ruled: bool) -> Piece:
        """Return the bias of some keys of a block with the mask in it; with what its rule hides, if that is asked for."""
        if ruled:
            keep, added = self.mask.rows(block.start, block.stop, block.keys, self.positions)
        else:
            keep, added = self.mask.given_rows(block.start, block.stop, block.keys)
        if added is not None:
            bias = bias + added[..., keys].flip(2).to(bias)
        if keep is not None:
            # The smallest number rather than -inf: a row that sees no key must not become NaN.
            bias = torch.where(keep[..., keys].flip(2), bias, bias.new_full((), torch.finfo(bias.dtype).min))
        return Piece(keys, bias)


# -- tables of distances ---------------------------------------------------------------------------------------------


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

    def prepare(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the table from the largest distance down, with what is ahead of a query behind that, `[H, M]`."""
        (table,) = inputs
        falling = table.flip(1)
        if not self.causal and not self.hides:
            return falling
        falling = falling[:, : self.keys]
        ahead = falling.new_full((), -math.inf) if self.hides else falling[:, -1:]
        return torch.cat((falling, ahead.expand(len(falling), self.keys - 1)), dim=1)

    def block(self, prepared: object, block: RowBlock) -> list[Piece]:
        assert isinstance(prepared, Tensor)
        stride, first = prepared.stride(0), self.queries - block.stop
        shape = (1, len(prepared), block.rows, block.keys)
        return self.hidden.put(prepared.as_strided(shape, (0, stride, 1, 1), first), block)

    def gradient(self, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> Gradient:
        return _TableGradient(self, inputs[0])


class _TableGradient(Gradient):
    """Sums blocks into one strip in which a distance lies on a line of its own, and at the end along these lines."""

    def __init__(self, bias: TableBias, table: Tensor) -> None:
        self.bias, self.prepared, self.size = bias, bias.prepare((table,)), table.shape[1]
        self.strip: Tensor | None = None
        self.dtype = table.dtype

    def block(self, block: RowBlock) -> list[Piece]:
        return self.bias.block(self.prepared, block)

    def add(self, block: RowBlock, row: int, heads: slice, d_logits: Tensor) -> None:
        if self.strip is None:
            # Behind the last column as many zeros as there are rows, since lines that leave a row go on in the next.
            width = max(self.size, self.bias.queries + self.bias.keys) + block.rows
            self.strip = d_logits.new_zeros(len(self.prepared), block.rows, width)
        first = self.bias.queries - block.stop
        self.strip[heads, : block.rows, first : first + block.keys] += d_logits[0]

    def result(self) -> list[Tensor | None]:
        assert self.strip is not None
        heads, rows, width = self.strip.shape
        lines = self.strip.as_strided((heads, rows, self.size), (rows * width, width - 1, 1))
        return [lines.sum(1).flip(1).to(self.dtype)]


# -- biases of keys -------------------------------------------------------------------------------------------------


class KeysBias(BlockBias):
    """A bias of each key, less that of the query, which softmax does not see: it is left out, but for its gradient.

    Args:
        keys: Of every key, `[B|1, H, K]`.
        queries: Of every query, `[B|1, H, Q]`.
        task: The operands.
        mask: What is hidden.
    """

    name = "key bias"
    rows = 256

    def __init__(self, keys: Tensor, queries: Tensor, task: Task, mask: Mask) -> None:
        self.hidden = Hidden(mask, task.positions)
        self.inputs = (keys.contiguous(), queries)
        self.ahead = task.k.shape[2] - task.q.shape[2]

    def block(self, prepared: object, block: RowBlock) -> list[Piece]:
        assert isinstance(prepared, (tuple, list))
        keys: Tensor = prepared[0][:, :, None]
        # Small numbers for the keys next to the query: sums of gates over a long text would round their logits. By steps that
        # smaller blocks of the backward pass share.
        near = max(0, block.start - block.start % self.rows + self.ahead)
        bias = keys[..., : block.keys] - keys[..., near : near + 1]
        first = block.start + self.ahead
        if self.hidden.mask.rule != "slots" or not first:
            return self.hidden.put(bias, block)
        # Only next to the diagonal do rows differ.
        before, beside = slice(0, first), slice(first, block.keys)
        return [
            self.hidden.piece(bias[..., before], block, before, ruled=False),
            self.hidden.piece(bias[..., beside], block, beside, ruled=True),
        ]

    def gradient(self, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> Gradient:
        return _KeysGradient(self, inputs)


class _KeysGradient(Gradient):
    def __init__(self, bias: KeysBias, inputs: Sequence[Tensor]) -> None:
        self.bias, self.inputs = bias, inputs
        self.totals = [torch.zeros_like(x) for x in inputs]

    def block(self, block: RowBlock) -> list[Piece]:
        return self.bias.block(self.inputs, block)

    def add(self, block: RowBlock, row: int, heads: slice, d_logits: Tensor) -> None:
        keys, queries = self.totals
        here = row if len(keys) > 1 else 0
        keys[here, heads, : block.keys] += d_logits[0].sum(1)
        # Zero but for rounding; that which the keys' gradients have of it cancels where gates are summed up.
        queries[here, heads, block.start : block.stop] -= d_logits[0].sum(2).flip(1)

    def result(self) -> list[Tensor | None]:
        return [*self.totals]


# -- straight pieces --------------------------------------------------------------------------------------------------


class PiecewiseBias(BlockBias):
    """A piecewise linear function of the distance times a weight of the query, see `PiecewiseLinear`.

    Along a row the distance falls, so each piece is one run of keys: all runs of a block are filled from a table that has a
    row for each of them. Where the distance of two tokens is the difference of their slots, in causal calls.

    Args:
        added: The function.
        task: The operands.
        mask: What is hidden.
    """

    name = "straight pieces"
    rows = 64

    def __init__(self, added: PiecewiseLinear, task: Task, mask: Mask) -> None:
        self.queries, self.keys = task.q.shape[2], task.k.shape[2]
        dtype = torch.promote_types(task.q.dtype, torch.float32)
        self.hides = mask.rule == "slots"
        self.hidden = Hidden(mask, task.positions, in_bias=self.hides)
        feature = added.feature(torch.arange(self.keys, device=task.q.device), dtype)
        weight = added.weight(task.positions.query, dtype)
        ends, slope, offset = added.pieces(dtype)
        self.ends = ends.detach()
        self.inputs = (feature, weight, slope, offset)

    def prepare(self, inputs: Sequence[Tensor]) -> object:
        return _Pieces(self, inputs)

    def block(self, prepared: object, block: RowBlock) -> list[Piece]:
        assert isinstance(prepared, _Pieces)
        return self.hidden.put(prepared.bias_of(prepared.filled(block), block), block)

    def gradient(self, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> Gradient:
        return _PiecewiseGradient(self, inputs)


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of keys in the rows of a block, all of a row before those of the next.

    Attributes:
        lengths: Keys in each run, int64 `[B|1, q, R]`.
        keys: Keys in each row.
    """

    lengths: Tensor
    keys: int

    def sums(self, x: Tensor) -> Tensor:
        """Return the sums over the runs of `[H, q, K]`, given one row of the batch: `[H, q, R]`."""
        ends = self.lengths.cumsum(-1)  # [1, q, R]
        upto = torch.nn.functional.pad(x.cumsum(-1), (1, 0))
        return upto.gather(-1, ends.expand(len(x), -1, -1)).diff(dim=-1, prepend=upto[..., :1])


class _Pieces:
    """The inputs of a `PiecewiseBias` in the form that blocks take."""

    def __init__(self, bias: PiecewiseBias, inputs: Sequence[Tensor]) -> None:
        self.bias = bias
        self.feature, self.weight, self.slope, self.offset = inputs
        self.buffers: dict[str, Tensor] = {}
        self.first = int(torch.searchsorted(bias.ends, bias.ends.new_zeros(())))
        self.falling = torch.cat((self.feature.flip(0), self.feature.new_zeros(bias.keys - 1)))

    def weights(self, block: RowBlock) -> Tensor:
        """Return the weights of the rows, `[B|1, q, 1]`."""
        return self.weight[:, block.start : block.stop].flip(1)[..., None]

    def features(self, block: RowBlock) -> Tensor:
        """Return the feature of every distance, a view `[1, q, K]`."""
        return self.falling.as_strided((1, block.rows, block.keys), (0, 1, 1), self.bias.queries - block.stop)

    def runs(self, block: RowBlock) -> _Runs:
        """Return the runs of every row, the last piece first; behind the first piece comes what is ahead of the query."""
        limits = self.bias.ends / self.weights(block)  # [B|1, q, M]
        # A piece ends before the first distance beyond its limit.
        beyond = torch.searchsorted(self.feature, limits.flip(-1).contiguous(), right=True)
        own = (
            torch.arange(block.stop - 1, block.start - 1, -1, device=beyond.device) + self.bias.keys - self.bias.queries
        )
        starts = (own[:, None] + 1 - beyond).clamp(0, block.keys)
        ahead = (own + 1)[:, None].expand(*starts.shape[:2], 1)
        edges = torch.cat((torch.zeros_like(ahead), starts, ahead, torch.full_like(ahead, block.keys)), dim=-1)
        return _Runs(edges.diff(dim=-1), block.keys)

    def filled(self, block: RowBlock) -> Tensor:
        """Return slope and offset of every key, `[B|1, q, K, 2 H]`; overwritten by the next call."""
        rows = self.coefficients(block)
        size = len(rows) * block.rows * block.keys
        run = torch.repeat_interleave(self.runs(block).lengths.flatten(), output_size=size)
        found = torch.index_select(rows.flatten(0, 2), 0, run, out=self.buffer("filled", (size, rows.shape[-1]), block))
        return found.view(len(rows), block.rows, block.keys, -1)

    def bias_of(self, filled: Tensor, block: RowBlock) -> Tensor:
        """Return the bias `[B|1, H, q, K]`, in the place of the offsets; overwritten by the next call."""
        slope, offset = filled.chunk(2, dim=-1)
        batch, rows, keys, heads = slope.shape
        made = offset.addcmul_(slope, self.features(block)[..., None])
        bias = self.buffer("bias", (batch, heads, rows, keys), block)
        return bias.copy_(made.permute(0, 3, 1, 2))

    def buffer(self, name: str, shape: tuple[int, ...], block: RowBlock) -> Tensor:
        """Return memory that is used again for every block: to ask for new costs more than to fill it."""
        size = math.prod(shape)
        if name not in self.buffers:
            # The first block has as many rows as any, and most keys come later.
            self.buffers[name] = self.slope.new_empty(size // block.keys * self.bias.keys)
        return self.buffers[name][:size].view(shape)

    def coefficients(self, block: RowBlock) -> Tensor:
        """Return slope, times the row's weight, and offset of every run, `[B|1, q, R, 2 H]`."""
        # Keys ahead of the query are hidden, or have what distance 0 has (whatever hides them then is not for us to know).
        own = torch.full_like(self.offset[:1], -math.inf) if self.bias.hides else self.offset[self.first][None]
        slope = torch.cat((self.slope.flip(0), torch.zeros_like(self.slope[:1])))  # [R, H]
        offset = torch.cat((self.offset.flip(0), own))
        slope = slope * self.weights(block)[..., None]
        return torch.cat((slope, offset.expand_as(slope)), dim=-1)


class _PiecewiseGradient(Gradient):
    def __init__(self, bias: PiecewiseBias, inputs: Sequence[Tensor]) -> None:
        self.bias, self.pieces = bias, _Pieces(bias, inputs)
        self.totals = [torch.zeros_like(x) for x in inputs]
        self.strip: Tensor | None = None

    def block(self, block: RowBlock) -> list[Piece]:
        self.runs = self.pieces.runs(block)
        filled = self.pieces.filled(block)
        self.slope = filled.chunk(2, dim=-1)[0].permute(0, 3, 1, 2)  # [B|1, H, q, K]
        return self.bias.hidden.put(self.pieces.bias_of(filled, block), block)

    def add(self, block: RowBlock, row: int, heads: slice, d_logits: Tensor) -> None:
        here = row if len(self.runs.lengths) > 1 else 0
        runs = _Runs(self.runs.lengths[here : here + 1], block.keys)
        _, weight, slope, offset = self.totals
        features, weights = self.pieces.features(block), self.pieces.weights(block)[here]  # [q, 1]
        by_offset = runs.sums(d_logits[0])[..., :-1].flip(-1)  # [h, q, M + 1], the first piece first
        by_slope = runs.sums(d_logits[0] * features)[..., :-1].flip(-1)
        offset[:, heads] += by_offset.sum(1).T
        slope[:, heads] += (by_slope * weights).sum(1).T
        rows = weight[here, block.start : block.stop]
        rows += torch.einsum("hqr,rh->q", by_slope, self.pieces.slope[:, heads]).flip(0)
        if self.strip is None:
            self.strip = d_logits.new_zeros(block.rows, self.bias.queries + self.bias.keys + block.rows)
        first = self.bias.queries - block.stop
        self.strip[: block.rows, first : first + block.keys] += (d_logits[0] * self.slope[here, heads]).sum(0)

    def result(self) -> list[Tensor | None]:
        assert self.strip is not None
        rows, width = self.strip.shape
        lines = self.strip.as_strided((rows, self.bias.keys), (width - 1, 1))
        self.totals[0] += lines.sum(0).flip(0)
        return [*self.totals]


# -- any bias ----------------------------------------------------------------------------------------------------------


class AnyBias(BlockBias):
    """A bias that is made anew for every block.

    Args:
        added: The bias.
        task: The operands, of which state and tables are read.
        mask: What is hidden.
        parameters: That the bias reads.
    """

    name = "bias by blocks"

    def __init__(self, added: Added, task: Task, mask: Mask, parameters: Sequence[Tensor]) -> None:
        self.added = added
        self.hidden = Hidden(mask, task.positions)
        self.shape = task.q.shape
        self.positions, self.reach = task.positions, task.reach
        self.names = [tuple(tensors) for tensors in (task.state, task.own, task.tables)]
        tensors = (*task.state.values(), *task.own.values(), *task.tables.values())
        self.inputs = (*tensors, *parameters)
        self.like = torch.empty(0, dtype=torch.promote_types(task.q.dtype, torch.float32), device=task.q.device)

    def block(self, prepared: object, block: RowBlock) -> list[Piece]:
        assert isinstance(prepared, (tuple, list))
        return self.hidden.put(self.plain(prepared, block), block)

    def plain(self, inputs: Sequence[Tensor], block: RowBlock) -> Tensor:
        """Return the bias without the mask."""
        given = iter(inputs)
        state, own, tables = ({name: next(given) for name in names} for names in self.names)
        place = Block(
            positions=self.positions.rows(block.start, block.stop, block.keys).backwards(),
            reach=self.reach,
            state={name: tensor[:, : block.keys] for name, tensor in state.items()},
            own={name: tensor[:, block.start : block.stop].flip(1) for name, tensor in own.items()},
            tables=tables,
        )
        return self.added.of(place, self.like)

    def gradient(self, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> Gradient:
        return _AnyGradient(self, inputs, wanted)


class _AnyGradient(Gradient):
    """Differentiates the making of each block."""

    def __init__(self, bias: AnyBias, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self.bias, self.wanted = bias, wanted
        count = sum(map(len, bias.names))
        fresh = [x.detach().requires_grad_(want) for x, want in zip(inputs[:count], wanted, strict=False)]
        self.inputs = [*fresh, *inputs[count:]]
        self.targets = [x for x, want in zip(self.inputs, wanted, strict=True) if want]
        self.totals: list[Tensor | None] = [None] * len(self.targets)
        self.made: Tensor | None = None
        self.grad: Tensor | None = None

    def block(self, block: RowBlock) -> list[Piece]:
        with torch.enable_grad():
            self.made = self.bias.plain(self.inputs, block)
        self.grad = torch.zeros_like(self.made)
        return self.bias.hidden.put(self.made.detach(), block)

    def add(self, block: RowBlock, row: int, heads: slice, d_logits: Tensor) -> None:
        assert self.grad is not None
        self.grad[row if self.grad.shape[0] > 1 else 0, heads] += d_logits[0]

    def end(self, block: RowBlock) -> None:
        assert self.made is not None
        parts = torch.autograd.grad(self.made, self.targets, self.grad, allow_unused=True)
        for index, part in enumerate(parts):
            if part is not None:
                total = self.totals[index]
                self.totals[index] = part.clone() if total is None else total.add_(part)
        self.made = self.grad = None

    def result(self) -> list[Tensor | None]:
        found = iter(self.totals)
        return [next(found) if want else None for want in self.wanted]
