"""What is added to the logits, block by block of rows, and how its gradient is gathered.

In a block rows run backwards, unless a form says otherwise: the last query comes first. A bias of the distance then grows in
the same direction along rows and along keys, so that a block of it is a view of one table, in which both strides are 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_posenc.attention import far
from hf_posenc.attention.mask import Mask
from hf_posenc.attention.reading import reading
from hf_posenc.attention.task import Index, Task, outlines
from hf_posenc.operands import Block, Positions
from hf_posenc.scheme import Scheme
from hf_posenc.structures import Added, ContentBias


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
        bias: With what is hidden in it, `[B|1, H, q|1, keys]`, float32 or float64. Where a block has several pieces, no row of
            one is -inf throughout, since the kernel has 0 for the logarithm of its sum.
        causal: Whether row i sees the first i + 1 of these keys only, and the bias does not say so.
    """

    keys: slice
    bias: Tensor
    causal: bool = False

    def part(self, heads: slice, first: int) -> Piece | None:
        """Return the piece of some heads from a key on; `None` if nothing is left. A causal piece is not cut."""
        cut = max(0, first - self.keys.start)
        if self.keys.start + cut >= self.keys.stop:
            return None
        bias = self.bias if self.bias.shape[1] == 1 else self.bias[:, heads]
        return Piece(slice(self.keys.start + cut, self.keys.stop), bias[..., cut:], self.causal)


class Gradient:
    """Gathers the gradient of a bias over the blocks of a backward pass."""

    def block(self, block: RowBlock) -> list[Piece]:
        """Return the bias of a block, as `BlockBias.block` does, and be ready for its gradient."""
        raise NotImplementedError

    def add(self, block: RowBlock, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        """Take the gradient of the logits of some heads in some rows of the batch, from key `first` on, `[b, h, q, K - first]`.

        All heads of a row come before the next rows. Only forms that know of `first_keys` get another than 0.
        """
        raise NotImplementedError

    def end(self, block: RowBlock) -> None:
        """Know that all of a block was added."""

    def result(self) -> list[Tensor | None]:
        """Return the gradient of each input."""
        raise NotImplementedError


def over_batch(x: Tensor) -> Tensor:
    """Return the sum over the first dimension, without a copy where there is nothing to add."""
    return x[0] if len(x) == 1 else x.sum(0)


def spread_of(table: Tensor) -> float:
    """Return the largest difference along the last dimension, of what is not hidden."""
    lowest = table.masked_fill(table == -math.inf, math.inf).amin(dim=-1)
    return float((table.amax(dim=-1) - lowest).max())


def finite(bias: Tensor) -> Tensor:
    """Return a bias with the smallest number in place of -inf, which may be all that a row has in one of several `Piece`s."""
    return bias.clamp_min(torch.finfo(bias.dtype).min)


def first_true(those: Tensor) -> Tensor:
    """Return where a bool tensor `[..., K]` is true the first time, int64 `[...]`; 0 if nowhere."""
    return those.to(torch.uint8).argmax(-1)


class BlockBias:
    """A bias by blocks of rows.

    Attributes:
        inputs: The tensors it is made of, into which gradients may flow.
        backwards: Whether the last query comes first.
    """

    inputs: tuple[Tensor, ...]
    backwards = True
    # Rows of a block that are best made at once; and in the backward pass of a bias that learns.
    rows, learning_rows = 256, 64
    name: str

    def give_inputs(self) -> tuple[Tensor, ...]:
        """Return the inputs, and keep their shapes only, see `Task.outline`."""
        inputs, self.inputs = self.inputs, outlines(self.inputs)
        return inputs

    def moved(self, q: Tensor) -> Tensor:
        """Return queries `[B, H, Q, D]` whose products with the keys hold a part of the bias."""
        return q

    def leaves_out(self, inputs: Sequence[Tensor]) -> bool:
        """Whether keys may be too far away to count, so that `prepare` asks how far."""
        return False

    def prepare(self, inputs: Sequence[Tensor], slack: Tensor | None) -> object:
        """Bring the inputs into the form that `block` takes, once per pass.

        Args:
            inputs: The inputs.
            slack: See `far.slack`, `[H]`; `None` if all keys count.
        """
        return inputs

    def spread(self, prepared: object) -> float:
        """Return by how much the bias of a head may differ among the keys it needs, as far as that is known at once, or 0."""
        return 0.0

    def block(self, prepared: object, block: RowBlock) -> list[Piece]:
        """Return the bias, in pieces that cover all keys in order."""
        raise NotImplementedError

    def first_keys(self, prepared: object, block: RowBlock) -> Tensor | None:
        """Return the first key that any row of a block needs, by head, int64 `[H]`; `None` if all may."""
        return None

    def gradient(self, inputs: Sequence[Tensor], prepared: object, wanted: Sequence[bool]) -> Gradient:
        """Return what gathers the gradients of the inputs."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Hidden:
    """Puts a mask into blocks of a bias.

    Attributes:
        mask: The mask.
        positions: Of queries and keys.
        in_bias: Whether the bias hides itself what the causal rule of slots hides.
        backwards: Whether the last query comes first.
    """

    mask: Mask
    positions: Positions
    in_bias: bool = False
    backwards: bool = True

    def put(self, bias: Tensor, block: RowBlock) -> list[Piece]:
        """Return the bias of a block with the mask in it."""
        return [self.piece(bias, block, slice(0, block.keys), ruled=not self.in_bias)]

    def split(self, bias: Tensor, block: RowBlock, *, by_kernel: bool) -> list[Piece]:
        """Return the bias `[B|1, H, q|1, K]` of a block, whose rows run forwards, with the mask in it.

        Only next to the diagonal does the causal rule of slots hide anything: there it is in the bias, or left to the kernel.
        """
        slots = self.mask.rule == "slots"
        first = block.start + self.mask.ahead if slots else 0
        before, beside = slice(0, first), slice(first, block.keys)
        piece = self.piece(bias[..., beside], block, beside, ruled=not (slots and by_kernel))
        pieces = [replace(piece, causal=slots and by_kernel)]
        if first:
            pieces.insert(0, self.piece(bias[..., before], block, before, ruled=False))
        return pieces

    def piece(self, bias: Tensor, block: RowBlock, keys: slice, *, ruled: bool) -> Piece:
        """Return the bias of some keys of a block with the mask in it; with what its rule hides, if that is asked for."""
        if ruled:
            keep, added = self.mask.rows(block.start, block.stop, block.keys, self.positions)
        else:
            keep, added = self.mask.given_rows(block.start, block.stop, block.keys)
        if added is not None:
            bias = bias + self._in_order(added[..., keys]).to(bias)
        if keep is not None:
            # The smallest number rather than -inf: a row that sees no key must not become NaN.
            smallest = bias.new_full((), torch.finfo(bias.dtype).min)
            bias = torch.where(self._in_order(keep[..., keys]), bias, smallest)
        return Piece(keys, bias)

    def _in_order(self, rows: Tensor) -> Tensor:
        return rows.flip(2) if self.backwards else rows


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
    # The kernel's own causal rule is cheaper than a mask, and counts rows forwards.
    backwards = False

    def __init__(self, keys: Tensor, queries: Tensor, task: Task, mask: Mask) -> None:
        self.hidden = Hidden(mask, task.positions, backwards=False)
        self.inputs = (keys.contiguous(), queries)
        self.ahead = task.k.shape[2] - task.q.shape[2]

    def leaves_out(self, inputs: Sequence[Tensor]) -> bool:
        return self.hidden.mask.only_ahead and spread_of(inputs[0]) > far.NATS

    def prepare(self, inputs: Sequence[Tensor], slack: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return inputs[0], slack

    def block(self, prepared: object, block: RowBlock) -> list[Piece]:
        assert isinstance(prepared, tuple)
        return self.hidden.split(self.plain(prepared[0], block), block, by_kernel=True)

    def spread(self, prepared: object) -> float:
        assert isinstance(prepared, tuple)
        return spread_of(prepared[0])

    def first_keys(self, prepared: object, block: RowBlock) -> Tensor | None:
        assert isinstance(prepared, tuple)
        keys, slack = prepared
        if slack is None:
            return None
        own = keys[..., block.start + self.ahead : block.stop + self.ahead]
        few = keys[..., : block.keys] <= own.amin(-1, keepdim=True) - slack[:, None]
        return first_true(~few).amin(0)

    def plain(self, keys: Tensor, block: RowBlock) -> Tensor:
        """Return the bias of a block without the mask, `[B|1, H, 1, K]`."""
        # Small numbers for the keys next to the query: sums of gates over a long text would round their logits. By steps that
        # smaller blocks of the backward pass share.
        near = max(0, block.start - block.start % self.rows + self.ahead)
        return (keys[..., : block.keys] - keys[..., near : near + 1])[:, :, None]

    def gradient(self, inputs: Sequence[Tensor], prepared: object, wanted: Sequence[bool]) -> Gradient:
        return _KeysGradient(self, inputs)


class _KeysGradient(Gradient):
    def __init__(self, bias: KeysBias, inputs: Sequence[Tensor]) -> None:
        self.bias, self.inputs = bias, inputs
        self.totals = [torch.zeros_like(x) for x in inputs]

    def block(self, block: RowBlock) -> list[Piece]:
        return self.bias.hidden.split(self.bias.plain(self.inputs[0], block), block, by_kernel=False)

    def add(self, block: RowBlock, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        keys, queries = self.totals
        if len(keys) == 1:
            batch, d_logits = slice(1), over_batch(d_logits)[None]
        keys[batch, heads, first : block.keys] += d_logits.sum(2)
        # Zero but for rounding; that which the keys' gradients have of it cancels where gates are summed up.
        queries[batch, heads, block.start : block.stop] -= d_logits.sum(3)

    def result(self) -> list[Tensor | None]:
        return [*self.totals]


# -- any bias ----------------------------------------------------------------------------------------------------------


class AnyBias(BlockBias):
    """A bias that is made anew for every block.

    Args:
        added: The bias.
        task: The operands, of which state and tables are read; queries and keys too, where the bias depends on them.
        mask: What is hidden.
        scheme: Of whose parameters the bias reads some.
    """

    name = "bias by blocks"
    # Tables that a block reads get a gradient of their whole size from each, so few blocks are better.
    rows, learning_rows = 128, 128
    backwards = False

    def __init__(self, added: Added, task: Task, mask: Mask, scheme: Scheme) -> None:
        self.added, self.task, self.scheme = added, task.outline(), scheme
        self.parameters = tuple(scheme.parameters())
        self.hidden = Hidden(mask, task.positions, backwards=False)
        content: tuple[Tensor, ...] = ()
        if isinstance(added, ContentBias):
            q, k = task.content_q, task.content_k
            content = (task.q if q is None else q, task.k if k is None else k)
        self.content = len(content)
        self.names = [tuple(tensors) for tensors in (task.state, task.own, task.tables)]
        self.inputs = (*content, *task.state.values(), *task.own.values(), *task.tables.values(), *self.parameters)
        self.like = torch.empty(0, dtype=torch.promote_types(task.q.dtype, torch.float32), device=task.q.device)

    def places(self, block: RowBlock) -> tuple[Index, ...]:
        """Return where a block is in each of the operands."""
        rows, keys, everywhere = slice(block.start, block.stop), slice(block.keys), slice(None)
        state, own, tables = map(len, self.names)
        content = ((everywhere, everywhere, rows), (everywhere, everywhere, keys)) if self.content else ()
        return (*content, *[(everywhere, keys)] * state, *[(everywhere, rows)] * own, *[(everywhere,)] * tables)

    def block(self, prepared: object, block: RowBlock) -> list[Piece]:
        assert isinstance(prepared, (tuple, list))
        parts = [x[place] for x, place in zip(prepared, self.places(block), strict=False)]
        return self.hidden.split(finite(self.plain(parts, block)), block, by_kernel=True)

    def plain(self, parts: Sequence[Tensor], block: RowBlock) -> Tensor:
        """Return the bias without the mask `[B|1, H, q, K]`, given the block's part of each operand."""
        given = iter(parts)
        content = [next(given) for _ in range(self.content)]
        state, own, tables = ({name: next(given) for name in names} for names in self.names)
        place = Block(
            positions=self.task.positions.rows(block.start, block.stop, block.keys),
            reach=self.task.reach,
            native=self.task.content_q is not None,
            state=state,
            own=own,
            tables=tables,
        )
        return self.added.of(place, self.like, *content)

    def gradient(self, inputs: Sequence[Tensor], prepared: object, wanted: Sequence[bool]) -> Gradient:
        return _AnyGradient(self, inputs, wanted)


class _AnyGradient(Gradient):
    """Differentiates the making of each block."""

    def __init__(self, bias: AnyBias, inputs: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self.bias, self.inputs, self.wanted = bias, inputs, wanted
        self.totals: list[Tensor | None] = [None] * len(inputs)
        self.targets: dict[int, Tensor] = {}
        self.made: Tensor | None = None
        self.grad: Tensor | None = None

    def block(self, block: RowBlock) -> list[Piece]:
        # Parts of their own, so that no gradient is padded to the size of the whole.
        parts = [
            x[place].detach().requires_grad_(wanted)
            for x, place, wanted in zip(self.inputs, self.bias.places(block), self.wanted, strict=False)
        ]
        leaves = (*parts, *self.inputs[len(parts) :])
        self.targets = {index: x for index, x in enumerate(leaves) if self.wanted[index]}
        with torch.enable_grad():
            self.made = reading(self.bias.scheme, self.bias.parameters, lambda: self.bias.plain(parts, block))
        self.grad = torch.empty_like(self.made, memory_format=torch.contiguous_format)
        return self.bias.hidden.split(self.made.detach(), block, by_kernel=False)

    def add(self, block: RowBlock, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        assert self.grad is not None
        assert not first
        if len(self.grad) > 1:
            self.grad[batch, heads] = d_logits
        elif batch.start == 0:
            self.grad[0, heads] = over_batch(d_logits)
        else:
            self.grad[0, heads] += over_batch(d_logits)

    def end(self, block: RowBlock) -> None:
        assert self.made is not None
        parts = torch.autograd.grad(self.made, list(self.targets.values()), self.grad, allow_unused=True)
        places = self.bias.places(block)
        for index, part in zip(self.targets, parts, strict=True):
            if part is None:
                continue
            total = self.totals[index]
            if total is None:
                dtype = torch.promote_types(part.dtype, torch.float32)
                total = self.totals[index] = torch.zeros_like(self.inputs[index], dtype=dtype)
            total[places[index] if index < len(places) else ...] += part
        self.made = self.grad = None

    def result(self) -> list[Tensor | None]:
        return [None if total is None else total.to(x.dtype) for total, x in zip(self.totals, self.inputs, strict=True)]
