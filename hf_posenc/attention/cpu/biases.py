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
from hf_posenc.forms import Bias, ContentBias

# The first key of a block is rounded down to a multiple of this.
_STEP = 64


@dataclass(frozen=True, eq=False)
class Piece:
    """The bias of a block for some of its keys.

    Attributes:
        keys: Slice of the keys.
        bias: Bias with hidden keys in it, `[B|1, H, q|1, keys]`, float32 or float64; `None` is 0. Where a block has
            several pieces, no row of one is -inf throughout, since the kernel has 0 for the logarithm of its sum.
        causal: Whether row i sees the first i + 1 of these keys only, and the bias does not say so.
    """

    keys: slice
    bias: Tensor | None
    causal: bool = False


SomeBias = TypeVar("SomeBias", bound="BlockBias")


class BlockBias:
    """A bias by blocks of rows, and the gradients of its inputs: the tensors that it is made of.

    Between the passes autograd keeps the inputs. A pass begins with a copy, `begin`, and takes the `pieces` of one
    block after the other. A backward pass that sums up weights itself calls `add` for each block and all rows of the
    batch in order, and at last `gradients`.

    Attributes:
        name: Name of the form.
        backwards: Whether the last query of a block comes first.
        in_channels: Whether queries and keys hold it themselves, or part of it.
        cuts: Whether it leaves out the keys of a block that lie before a window.
        rows: Rows of a block that are best made at once.
        learning_rows: The same in the backward pass.
        inputs: The tensors that it is made of.
        learning: Whether gradients of the inputs are gathered in this pass.
        by_hand: Whether products are taken without the kernel in this pass, so that the bias must say what is hidden.
        totals: These gradients.
    """

    name: ClassVar[str]
    backwards: ClassVar[bool] = False
    in_channels: bool = False
    cuts: ClassVar[bool] = False
    rows: int = 256
    learning_rows: ClassVar[int] = 64
    inputs: Sequence[Tensor]
    learning: bool
    by_hand: bool
    totals: Sequence[Tensor | None]

    def __init__(self, call: Call) -> None:
        self.mask, self.positions = call.mask, call.positions
        self.batch, self.queries, self.keys = len(call.q), call.queries, call.keys
        self.heads, self.groups = call.q.shape[1], call.k.shape[1]
        self.ahead = self.keys - self.queries
        self.slots = call.mask.rule == "slots"
        self.windowed = self.cuts and call.mask.window is not None and call.slots_tell_distances

    def begin(self: SomeBias, inputs: Sequence[Tensor], wanted: Sequence[bool] = ()) -> SomeBias:
        """Return a copy for one pass, which has its inputs, and gathers the gradients of those that want one."""
        found = copy.copy(self)
        found.inputs, found.memory, found.learning, found.by_hand = inputs, {}, any(wanted), False
        found.prepare(wanted)
        return found

    def prepare(self, wanted: Sequence[bool]) -> None:
        """Bring the inputs into the form that `pieces` takes, and make room for gradients."""
        self.totals = [torch.zeros_like(x) for x in self.inputs] if self.learning else []

    def moved(self, q: Tensor) -> Tensor:
        """Return queries `[B, H, Q, D]` whose products with the keys hold a part of the bias."""
        return q

    def spread(self) -> float:
        """Return the largest difference within the bias of a head; 0 if unknown."""
        return 0.0

    def blocks(self, rows: int) -> Iterator[Rows]:
        """Return the blocks, of so many rows each, with the keys that any of them sees."""
        for start in range(0, self.queries, rows):
            stop = min(start + rows, self.queries)
            first = self.mask.first_needed(start) // _STEP * _STEP if self.windowed else 0
            yield Rows(start, stop, self.mask.keys_needed(stop, self.keys), first)

    def in_order(self, rows: Tensor) -> Tensor:
        """Return rows `[B, H, q, ...]` in the order of the bias, or bring them back from it."""
        return rows.flip(2) if self.backwards else rows

    def pieces(self, block: Rows) -> list[Piece]:
        """Return the bias of a block, in pieces that cover its keys in order."""
        raise NotImplementedError

    def add(self, block: Rows, batch: slice, d_logits: Tensor) -> None:
        """Take the gradient `[b, H, q, K]` of the logits of a block in some rows of the batch."""
        raise NotImplementedError

    def gradients(self) -> Sequence[Tensor | None]:
        return self.totals

    # -- parts of a block --------------------------------------------------------------------------------------------

    def split(self, bias: Tensor, block: Rows) -> list[Piece]:
        """Return the bias `[B|1, H, q|1, K]` of a block, whose rows run forwards, with the mask in it.

        Only next to the diagonal does the causal rule of slots hide anything: there it is left to the kernel, or in
        the bias where that is not used.
        """
        by_kernel = self.slots and not self.by_hand
        first = max(block.first, block.start + self.mask.ahead) if self.slots else block.first
        before, diagonal = slice(block.first, first), slice(first, block.keys)
        size = first - block.first
        pieces = [replace(self.piece(bias[..., size:], block, diagonal, ruled=not by_kernel), causal=by_kernel)]
        if size:
            pieces.insert(0, self.piece(bias[..., :size], block, before, ruled=False))
        return pieces

    def piece(self, bias: Tensor, block: Rows, keys: slice, *, ruled: bool) -> Piece:
        """Return the bias of some keys of a block with the mask in it; with the mask's rule, if that is asked for."""
        if self.mask.only_ahead and not ruled:
            return Piece(keys, bias)
        here = block._replace(first=keys.start, keys=keys.stop)
        keep, added = self.mask.part(*here).seen(self.positions.rows(*here), ruled=ruled)
        if added is not None:
            bias = bias + self.in_order(added).to(bias)
        if keep is not None:
            # The smallest number rather than -inf: a row that sees no key must not become NaN.
            bias = torch.where(self.in_order(keep), bias, bias.new_full((), torch.finfo(bias.dtype).min))
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


def _spread(bias: Tensor) -> float:
    """Return the largest difference along the last dimension, of keys that are not hidden."""
    lowest = bias.masked_fill(bias == -math.inf, math.inf).amin(dim=-1)
    return float((bias.amax(dim=-1) - lowest).max())


class Unbiased(BlockBias):
    """Nothing but the mask, for queries and keys that hold a bias, which may be `steep`, as channels."""

    # Rows run forwards: the kernel's own causal rule is cheaper than a mask.
    name = "channels"
    in_channels = cuts = True
    inputs = ()

    def __init__(self, call: Call, *, steep: bool) -> None:
        super().__init__(call)
        self.steep = steep
        self.nothing = torch.zeros((), dtype=call.precise, device=call.device)
        if self.mask.only_ahead or self.mask.pads:
            self.rows = self.queries  # at once, since the kernel has blocks of its own

    def spread(self) -> float:
        return math.inf if self.steep else 0.0

    def pieces(self, block: Rows) -> list[Piece]:
        return self.split(self.nothing.expand(1, 1, 1, block.keys - block.first), block)

    def piece(self, bias: Tensor, block: Rows, keys: slice, *, ruled: bool) -> Piece:
        nothing = self.mask.only_ahead and not ruled
        return Piece(keys, None) if nothing else super().piece(bias, block, keys, ruled=ruled)


class TableBias(BlockBias):
    """A table of distances, where the distance of two tokens is the difference of their slots.

    In a pass, `falling` is the table from the largest distance down, with the bias ahead of a query behind that,
    `[H, M]`.
    """

    name = "distance table"
    backwards = cuts = True
    falling: Tensor
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

    def prepare(self, wanted: Sequence[bool]) -> None:
        # `pieces` looks at it as if its rows lay one after the other.
        falling = self.inputs[0].flip(1).contiguous()
        if self.causal or self.slots:
            falling = falling[:, : self.keys]
            ahead = falling.new_full((), -math.inf) if self.slots else falling[:, -1:]
            falling = torch.cat((falling, ahead.expand(len(falling), self.keys - 1)), dim=1)
        self.falling = falling

    def spread(self) -> float:
        return _spread(self.falling)

    def pieces(self, block: Rows) -> list[Piece]:
        shape = (1, len(self.falling), block.length, block.keys - block.first)
        place = self.queries - block.stop + block.first
        view = self.falling.as_strided(shape, (0, self.falling.stride(0), 1, 1), place)
        return [self.piece(view, block, slice(block.first, block.keys), ruled=not self.slots)]

    def add(self, block: Rows, batch: slice, d_logits: Tensor) -> None:
        if self.strip is None:
            # Behind the last column as many zeros as there are rows, since lines that leave a row go on in the next.
            width = max(self.inputs[0].shape[1], self.queries + self.keys) + block.length
            self.strip = d_logits.new_zeros(len(self.falling), block.length, width)
        start = self.queries - block.stop
        self.strip[:, : block.length, start + block.first : start + block.keys] += over_batch(d_logits)

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

    def prepare(self, wanted: Sequence[bool]) -> None:
        if self.learning:
            self.sums = PartSums(self.inputs, wanted)

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

    def add(self, block: Rows, batch: slice, d_logits: Tensor) -> None:
        if len(self.grad) > 1:
            self.grad[batch] = d_logits
        elif batch.start == 0:
            self.grad[0] = over_batch(d_logits)
        else:
            self.grad[0] += over_batch(d_logits)
        if batch.stop == self.batch:
            self.sums.add(torch.autograd.grad(self.made, self.sums.targets, self.grad, allow_unused=True))
            del self.made, self.grad

    def gradients(self) -> Sequence[Tensor | None]:
        return self.sums.result()
