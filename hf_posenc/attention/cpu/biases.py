"""Biases on the logits, block by block of rows, and how their gradients are gathered.

In some forms the rows of a block run backwards: the last query comes first. A bias of the distance then grows in the
same direction along rows and along keys, so that a block of it is a view of one table, in which both strides are 1.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from hf_posenc.attention.blocks import PartSums, with_parameters
from hf_posenc.attention.call import Call, Rows
from hf_posenc.attention.cpu import cutoffs
from hf_posenc.forms import Bias, ContentBias


@dataclass(frozen=True, eq=False)
class Piece:
    """The bias of a block for some of its keys.

    Attributes:
        keys: Slice of the block's keys.
        bias: Bias with hidden keys in it, `[B|1, H, q|1, keys]`, float32 or float64. Where a block has several
            pieces, no row of one is -inf throughout, since the kernel has 0 for the logarithm of its sum.
        causal: Whether row i sees the first i + 1 of these keys only, and the bias does not say so.
    """

    keys: slice
    bias: Tensor
    causal: bool = False


def parts_of(pieces: Sequence[Piece], heads: slice, first: int) -> Iterator[Piece]:
    """Return the parts of pieces for some heads, from a key on. A causal piece is not cut."""
    for piece in pieces:
        cut = max(0, first - piece.keys.start)
        if piece.keys.start + cut < piece.keys.stop:
            bias = piece.bias if piece.bias.shape[1] == 1 else piece.bias[:, heads]
            yield replace(piece, keys=slice(piece.keys.start + cut, piece.keys.stop), bias=bias[..., cut:])


SomeBias = TypeVar("SomeBias", bound="BlockBias")


class BlockBias:
    """A bias by blocks of rows, and the gradients of its inputs: the tensors that it is made of.

    Between the passes autograd keeps the inputs; each pass works on a copy of its own, see `for_pass`. A backward pass
    that sums up weights itself calls `learn` first; then, for each block, `pieces`, `add` for all of its heads and rows
    of the batch, and `end`; and at last `gradients`.

    Attributes:
        name: Name of the form.
        backwards: Whether the last query of a block comes first.
        cuts: Whether it may leave out the first keys of a block: those before a window, or see `cutoffs`.
        rows: Rows of a block that are best made at once.
        learning_rows: The same in the backward pass.
    """

    name: ClassVar[str]
    backwards: ClassVar[bool] = False
    cuts: ClassVar[bool] = False
    rows: ClassVar[int] = 256
    learning_rows: ClassVar[int] = 64
    inputs: Sequence[Tensor]
    learning = False

    def __init__(self, call: Call) -> None:
        self.mask, self.positions = call.mask, call.positions
        self.queries, self.keys = call.queries, call.keys
        self.heads, self.groups = call.q.shape[1], call.k.shape[1]
        self.ahead = self.keys - self.queries
        self.slots = call.mask.rule == "slots"
        self.windowed = self.cuts and call.mask.window is not None and call.slots_tell_distances

    def for_pass(self: SomeBias, inputs: Sequence[Tensor]) -> SomeBias:
        """Return a copy that has its inputs."""
        found = copy.copy(self)
        found.inputs, found.memory = inputs, {}
        return found

    def moved(self, q: Tensor) -> Tensor:
        """Return queries `[B, H, Q, D]` whose products with the keys hold a part of the bias."""
        return q

    def may_cut(self) -> bool:
        """Whether some keys may be too far away to get any weight, see `cutoffs`."""
        return False

    def prepare(self, slack: Tensor | None) -> None:
        """Bring the inputs into the form that `pieces` takes, once per pass.

        Args:
            slack: Slack of each head `[H]`, see `cutoffs`; `None` if all keys count.
        """

    def spread(self) -> float:
        """Return the largest difference within the bias of a head, over the keys it needs; 0 if unknown."""
        return 0.0

    def blocks(self, rows: int) -> Iterator[Rows]:
        """Return the blocks, of so many rows each."""
        for start in range(0, self.queries, rows):
            stop = min(start + rows, self.queries)
            yield Rows(start, stop, self.mask.keys_needed(stop, self.keys))

    def in_order(self, rows: Tensor) -> Tensor:
        """Return rows `[B, H, q, ...]` in the order of the bias, or bring them back from it."""
        return rows.flip(2) if self.backwards else rows

    def pieces(self, block: Rows) -> list[Piece]:
        """Return the bias of a block, in pieces that cover all its keys in order."""
        raise NotImplementedError

    def first_keys(self, block: Rows) -> Tensor:
        """Return the first key that any row of a block needs, by head, int64 `[H]`: that of a window, or of all."""
        first = self.mask.first_needed(block.start) if self.windowed else 0
        return torch.full((self.heads,), first, device="cpu")

    def runs(self, block: Rows) -> Iterator[tuple[slice, slice, int]]:
        """Return groups of neighbouring heads in a block, their kv heads, and the first key that they need."""
        return cutoffs.runs(self.first_keys(block), self.groups)

    def steps(self) -> Iterator[tuple[tuple[slice, slice, slice], slice, list[Piece]]]:
        """Return for each call of the kernel the place of its rows, their kv heads, and their bias."""
        for block in self.blocks(self.rows):
            pieces = self.pieces(block)
            for heads, groups, first in self.runs(block):
                here = (slice(None), heads, slice(block.start, block.stop))
                yield here, groups, list(parts_of(pieces, heads, first))

    # -- gradients ---------------------------------------------------------------------------------------------------

    def learn(self, wanted: Sequence[bool]) -> None:
        """Get ready to gather the gradients of the inputs that want one."""
        self.learning = True
        self.totals = [torch.zeros_like(x) for x in self.inputs]

    def add(self, block: Rows, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        """Take the gradient `[b, h, q, K - first]` of the logits of some heads and rows, from key `first` on.

        All heads of a row come before the next rows. Only forms that cut get some heads, or a `first` other than 0.
        """
        raise NotImplementedError

    def end(self, block: Rows) -> None:
        """Finish a block that was added as a whole."""

    def gradients(self) -> Sequence[Tensor | None]:
        """Return the gradient of each input."""
        return self.totals

    # -- parts of a block --------------------------------------------------------------------------------------------

    def split(self, bias: Tensor, block: Rows) -> list[Piece]:
        """Return the bias `[B|1, H, q|1, K]` of a block, whose rows run forwards, with the mask in it.

        Only next to the diagonal does the causal rule of slots hide anything: there it is left to the kernel, or in
        the bias where that learns.
        """
        by_kernel = self.slots and not self.learning
        first = block.start + self.mask.ahead if self.slots else 0
        before, diagonal = slice(0, first), slice(first, block.keys)
        piece = self.piece(bias[..., diagonal], block, diagonal, ruled=not by_kernel)
        pieces = [replace(piece, causal=by_kernel)]
        if first:
            pieces.insert(0, self.piece(bias[..., before], block, before, ruled=False))
        return pieces

    def piece(self, bias: Tensor, block: Rows, keys: slice, *, ruled: bool) -> Piece:
        """Return the bias of some keys of a block with the mask in it; with the mask's rule, if that is asked for."""
        if self.mask.only_ahead and not ruled:
            return Piece(keys, bias)
        keep, added = self.mask.part(*block).seen(self.positions.rows(*block), ruled=ruled)
        if added is not None:
            bias = bias + self.in_order(added[..., keys]).to(bias)
        if keep is not None:
            # The smallest number rather than -inf: a row that sees no key must not become NaN.
            smallest = bias.new_full((), torch.finfo(bias.dtype).min)
            bias = torch.where(self.in_order(keep[..., keys]), bias, smallest)
        return Piece(keys, bias)

    def buffer(self, use: str, like: Tensor, shape: tuple[int, ...], widest: int) -> Tensor:
        """Return memory that every block uses again: new memory costs more than to fill it.

        The first block has as many rows as any; `widest` is the most columns that another may have.
        """
        size = math.prod(shape)
        if use not in self.memory or len(self.memory[use]) < size:
            self.memory[use] = like.new_empty(max(size, size // shape[-1] * widest))
        return self.memory[use][:size].view(shape)

    memory: dict[str, Tensor]


def over_batch(x: Tensor) -> Tensor:
    """Return the sum over the first dimension, without a copy where there is nothing to add."""
    return x[0] if len(x) == 1 else x.sum(0)


class KeysBias(BlockBias):
    """A bias of each key `[B|1, H, K]`, less that of the query `[B|1, H, Q]`.

    Softmax does not see that of the query, which is left out, except in its gradient.
    """

    # Rows run forwards: the kernel's own causal rule is cheaper than a mask.
    name = "key bias"
    cuts = True

    def __init__(self, keys: Tensor, queries: Tensor, call: Call) -> None:
        super().__init__(call)
        self.inputs = (keys.contiguous(), queries)

    def may_cut(self) -> bool:
        return cutoffs.may_pay(self.inputs[0], self.mask)

    def prepare(self, slack: Tensor | None) -> None:
        self.slack = slack

    def spread(self) -> float:
        return cutoffs.spread(self.inputs[0])

    def pieces(self, block: Rows) -> list[Piece]:
        keys = self.inputs[0]
        # Small numbers for the keys next to the query: sums of gates over a long text would round their logits. By
        # steps that smaller blocks of the backward pass share.
        near = max(0, block.start - block.start % self.rows + self.ahead)
        return self.split((keys[..., : block.keys] - keys[..., near : near + 1])[:, :, None], block)

    def first_keys(self, block: Rows) -> Tensor:
        keys = self.inputs[0]
        if self.slack is None:
            return super().first_keys(block)
        own = keys[..., block.start + self.ahead : block.stop + self.ahead]
        few = keys[..., : block.keys] <= own.amin(-1, keepdim=True) - self.slack[:, None]
        return cutoffs.first_true(~few).amin(0)  # with a window there is no slack

    def add(self, block: Rows, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        keys, queries = self.totals
        if len(keys) == 1:
            batch, d_logits = slice(1), over_batch(d_logits)[None]
        keys[batch, heads, first : block.keys] += d_logits.sum(2)
        # Zero but for rounding; the share of it in the keys' gradients cancels where gates are summed up.
        queries[batch, heads, block.start : block.stop] -= d_logits.sum(3)


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
        return self.causal and cutoffs.may_pay(self.inputs[0], self.mask)

    def prepare(self, slack: Tensor | None) -> None:
        (table,) = self.inputs
        if slack is not None:
            # Distances at which keys get no weight are hidden.
            table = table.masked_fill(table <= table[:, :1] - slack[:, None], -math.inf)
        # `pieces` looks at it as if its rows lay one after the other.
        falling = table.flip(1).contiguous()
        self.first = None if slack is None else cutoffs.first_true(falling != -math.inf)
        if self.causal or self.slots:
            falling = falling[:, : self.keys]
            ahead = falling.new_full((), -math.inf) if self.slots else falling[:, -1:]
            falling = torch.cat((falling, ahead.expand(len(falling), self.keys - 1)), dim=1)
        self.falling = falling

    def spread(self) -> float:
        return cutoffs.spread(self.falling)

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


class AnyBias(BlockBias):
    """A bias that the scheme computes for every block, from state, tables, parameters and possibly content."""

    name = "bias by blocks"
    # Tables that a block reads get a gradient of their whole size from each, so few blocks are better.
    rows = learning_rows = 128

    def __init__(self, added: Bias, call: Call) -> None:
        super().__init__(call)
        self.added, self.call = added, call.outline()
        self.parameters = tuple(call.scheme.parameters())
        content = call.content() if isinstance(added, ContentBias) else ()
        read = {id(x) for x in (*content, *call.state.values(), *call.own.values(), *call.tables.values())}
        operands = (x if id(x) in read else x.detach() for x in call.operands())
        self.inputs = (*operands, *self.parameters)
        self.like = torch.empty(0, dtype=call.precise, device=call.device)

    def pieces(self, block: Rows) -> list[Piece]:
        call = self.call.with_operands(self.inputs[: len(self.inputs) - len(self.parameters)])
        part = self.sums.take(call, block) if self.learning else call.part(*block)
        content = part.content() if isinstance(self.added, ContentBias) else ()
        with torch.set_grad_enabled(self.learning):
            found = with_parameters(
                call.scheme, self.parameters, lambda: self.added.of(part.block(None), self.like, *content)
            )
        if self.learning:
            self.made, self.grad = found, torch.empty_like(found, memory_format=torch.contiguous_format)
            return self.split(found.detach(), block)
        # The smallest number for -inf, which may be all that a row has in one of several pieces.
        return self.split(found.clamp_min(torch.finfo(found.dtype).min), block)

    def learn(self, wanted: Sequence[bool]) -> None:
        self.learning = True
        self.sums = PartSums(self.inputs, wanted)

    def add(self, block: Rows, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        if len(self.grad) > 1:
            self.grad[batch] = d_logits
        elif batch.start == 0:
            self.grad[0] = over_batch(d_logits)
        else:
            self.grad[0] += over_batch(d_logits)

    def end(self, block: Rows) -> None:
        self.sums.add(torch.autograd.grad(self.made, self.sums.targets, self.grad, allow_unused=True))
        del self.made, self.grad

    def gradients(self) -> Sequence[Tensor | None]:
        return self.sums.result()
