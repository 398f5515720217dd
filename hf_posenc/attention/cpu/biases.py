"""Biases on the logits, block by block of rows, and how their gradients are gathered.

In some forms the rows of a block run backwards: the last query comes first. A bias of the distance then grows in the
same direction along rows and along keys, so that a block of it is a view of one table, in which both strides are 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from hf_posenc.attention.blocks import Rows
from hf_posenc.attention.call import Call, Index, outlines
from hf_posenc.attention.cpu import cutoff
from hf_posenc.attention.parameters import with_parameters
from hf_posenc.structures import Bias, ContentBias


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

    def part(self, heads: slice, first: int) -> Piece | None:
        """Return the piece of some heads from a key on; `None` if nothing is left. A causal piece is not cut."""
        cut = max(0, first - self.keys.start)
        if self.keys.start + cut >= self.keys.stop:
            return None
        bias = self.bias if self.bias.shape[1] == 1 else self.bias[:, heads]
        return Piece(slice(self.keys.start + cut, self.keys.stop), bias[..., cut:], self.causal)


class BlockBias:
    """A bias by blocks of rows.

    It is made of tensors, its inputs, into which gradients may flow. Between the passes autograd keeps those, and the
    bias only their shapes: each pass works on a copy that has them, see `with_inputs`.

    Args:
        call: Call that the bias belongs to.

    Attributes:
        name: Name of the form.
        backwards: Whether the last query of a block comes first.
        hides_ahead: Whether the bias itself hides the keys that the causal rule of slots hides.
        rows: Rows of a block that are best made at once.
        learning_rows: The same in the backward pass of a bias that learns.
        inputs: Tensors that the bias is made of.
    """

    name: ClassVar[str]
    backwards: ClassVar[bool] = False
    hides_ahead: ClassVar[bool] = False
    rows: ClassVar[int] = 256
    learning_rows: ClassVar[int] = 64
    inputs: Sequence[Tensor]

    def __init__(self, call: Call) -> None:
        self.mask, self.positions = call.mask, call.positions
        self.queries, self.keys = call.queries, call.keys
        self.ahead = self.keys - self.queries
        self.slots = call.mask.rule == "slots"
        self.windowed = call.mask.window is not None and call.slots_tell_distances

    def give_inputs(self) -> Sequence[Tensor]:
        """Return the inputs, and keep their shapes only, see `Call.outline`."""
        inputs, self.inputs = self.inputs, outlines(self.inputs)
        return inputs

    def with_inputs(self, inputs: Sequence[Tensor]) -> BlockBias:
        """Return a copy that has its inputs."""
        found = copy.copy(self)
        found.inputs = inputs
        return found

    def moved(self, q: Tensor) -> Tensor:
        """Return queries `[B, H, Q, D]` whose products with the keys hold a part of the bias."""
        return q

    def may_cut(self) -> bool:
        """Whether some keys may be too far away to get any weight, so that a cutoff pays."""
        return False

    def prepare(self, slack: Tensor | None) -> None:
        """Bring the inputs into the form that `pieces` takes, once per pass.

        Args:
            slack: Slack of each head, see `cutoff.slack`; `None` if all keys count.
        """

    def spread(self) -> float:
        """Return the largest difference within the bias of a head, over the keys it needs; 0 if unknown."""
        return 0.0

    def pieces(self, block: Rows, *, by_kernel: bool = True) -> list[Piece]:
        """Return the bias of a block, in pieces that cover all its keys in order.

        Args:
            block: Place of the block.
            by_kernel: Leave the causal rule to the kernel where that is cheaper.
        """
        raise NotImplementedError

    def first_keys(self, block: Rows) -> Tensor | None:
        """Return the first key that any row of a block needs, by head, int64 `[H]`; `None` if all may be needed."""
        return None

    def first_in_window(self, block: Rows, heads: int) -> Tensor | None:
        """Return the first key that a window leaves any row of a block, by head; `None` if it may leave all."""
        first = self.mask.first_needed(block.start) if self.windowed else 0
        return torch.full((heads,), first) if first else None

    def gradient(self, wanted: Sequence[bool]) -> Gradient[Any]:
        """Return an object that gathers the gradients of the inputs."""
        raise NotImplementedError

    # -- the mask ----------------------------------------------------------------------------------------------------

    def masked(self, bias: Tensor, block: Rows) -> list[Piece]:
        """Return the bias of a block with the mask in it."""
        return [self.piece(bias, block, slice(0, block.keys), ruled=not (self.hides_ahead and self.slots))]

    def split(self, bias: Tensor, block: Rows, *, by_kernel: bool) -> list[Piece]:
        """Return the bias `[B|1, H, q|1, K]` of a block, whose rows run forwards, with the mask in it.

        Only next to the diagonal does the causal rule of slots hide anything: there it is in the bias, or left to the
        kernel.
        """
        by_kernel = by_kernel and self.slots
        first = block.start + self.mask.ahead if self.slots else 0
        before, diagonal = slice(0, first), slice(first, block.keys)
        piece = self.piece(bias[..., diagonal], block, diagonal, ruled=not by_kernel)
        pieces = [replace(piece, causal=by_kernel)]
        if first:
            pieces.insert(0, self.piece(bias[..., before], block, before, ruled=False))
        return pieces

    def piece(self, bias: Tensor, block: Rows, keys: slice, *, ruled: bool) -> Piece:
        """Return the bias of some keys of a block with the mask in it; with the mask's rule, if that is asked for."""
        if ruled:
            keep, added = self.mask.rows(block.start, block.stop, block.keys, self.positions)
        else:
            keep, added = self.mask.given_rows(block.start, block.stop, block.keys, self.positions)
        if added is not None:
            bias = bias + self._in_order(added[..., keys]).to(bias)
        if keep is not None:
            # The smallest number rather than -inf: a row that sees no key must not become NaN.
            smallest = bias.new_full((), torch.finfo(bias.dtype).min)
            bias = torch.where(self._in_order(keep[..., keys]), bias, smallest)
        return Piece(keys, bias)

    def _in_order(self, rows: Tensor) -> Tensor:
        return rows.flip(2) if self.backwards else rows


AnyBlockBias = TypeVar("AnyBlockBias", bound=BlockBias)


class Gradient(Generic[AnyBlockBias]):
    """Gathers the gradient of a bias over the blocks of a backward pass.

    Args:
        bias: Bias with its inputs.
        wanted: Whether each of the inputs needs a gradient.
    """

    def __init__(self, bias: AnyBlockBias, wanted: Sequence[bool]) -> None:
        self.bias, self.wanted = bias, wanted
        self.totals = [torch.zeros_like(x) for x in bias.inputs]

    def pieces(self, block: Rows) -> list[Piece]:
        """Return the bias of a block, and get ready for its gradient."""
        return self.bias.pieces(block, by_kernel=False)

    def add(self, block: Rows, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        """Take the gradient `[b, h, q, K - first]` of the logits of some heads and rows, from key `first` on.

        All heads of a row come before the next rows. Only forms with `first_keys` get another `first` than 0.
        """
        raise NotImplementedError

    def end(self, block: Rows) -> None:
        """Finish a block that was added as a whole."""

    def result(self) -> Sequence[Tensor | None]:
        """Return the gradient of each input."""
        return self.totals


def over_batch(x: Tensor) -> Tensor:
    """Return the sum over the first dimension, without a copy where there is nothing to add."""
    return x[0] if len(x) == 1 else x.sum(0)


def spread_of(table: Tensor) -> float:
    """Return the largest difference along the last dimension, of keys that are not hidden."""
    lowest = table.masked_fill(table == -math.inf, math.inf).amin(dim=-1)
    return float((table.amax(dim=-1) - lowest).max())


def finite(bias: Tensor) -> Tensor:
    """Return a bias with the smallest number for -inf, which may be all that a row has in one of several `Piece`s."""
    return bias.clamp_min(torch.finfo(bias.dtype).min)


def first_true(found: Tensor) -> Tensor:
    """Return the first place where a bool tensor `[..., K]` is true, int64 `[...]`; 0 if there is none."""
    return found.to(torch.uint8).argmax(-1)


# -- biases of keys -------------------------------------------------------------------------------------------------


class KeysBias(BlockBias):
    """A bias of each key, less that of the query, which softmax does not see: it is left out, except in its gradient.

    Args:
        keys: Bias of every key, `[B|1, H, K]`.
        queries: Bias of every query, `[B|1, H, Q]`.
        call: The call.
    """

    # Rows run forwards: the kernel's own causal rule is cheaper than a mask.
    name = "key bias"

    def __init__(self, keys: Tensor, queries: Tensor, call: Call) -> None:
        super().__init__(call)
        self.inputs = (keys.contiguous(), queries)
        self.slack: Tensor | None = None

    def may_cut(self) -> bool:
        return self.mask.only_ahead and spread_of(self.inputs[0]) > cutoff.NATS

    def prepare(self, slack: Tensor | None) -> None:
        self.slack = slack

    def spread(self) -> float:
        return spread_of(self.inputs[0])

    def pieces(self, block: Rows, *, by_kernel: bool = True) -> list[Piece]:
        keys = self.inputs[0]
        # Small numbers for the keys next to the query: sums of gates over a long text would round their logits. By
        # steps that smaller blocks of the backward pass share.
        near = max(0, block.start - block.start % self.rows + self.ahead)
        bias = (keys[..., : block.keys] - keys[..., near : near + 1])[:, :, None]
        return self.split(bias, block, by_kernel=by_kernel)

    def first_keys(self, block: Rows) -> Tensor | None:
        keys = self.inputs[0]
        if self.slack is None:
            return self.first_in_window(block, keys.shape[1])
        own = keys[..., block.start + self.ahead : block.stop + self.ahead]
        few = keys[..., : block.keys] <= own.amin(-1, keepdim=True) - self.slack[:, None]
        return first_true(~few).amin(0)  # with a window there is no slack

    def gradient(self, wanted: Sequence[bool]) -> Gradient[Any]:
        return _KeysGradient(self, wanted)


class _KeysGradient(Gradient[KeysBias]):
    def add(self, block: Rows, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        keys, queries = self.totals
        if len(keys) == 1:
            batch, d_logits = slice(1), over_batch(d_logits)[None]
        keys[batch, heads, first : block.keys] += d_logits.sum(2)
        # Zero but for rounding; the share of it in the keys' gradients cancels where gates are summed up.
        queries[batch, heads, block.start : block.stop] -= d_logits.sum(3)


# -- any bias ----------------------------------------------------------------------------------------------------------


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
        self.content = len(content)
        self.names = [tuple(tensors) for tensors in (call.state, call.own, call.tables)]
        self.inputs = (*content, *call.state.values(), *call.own.values(), *call.tables.values(), *self.parameters)
        self.like = torch.empty(0, dtype=call.precise, device=call.device)

    def places(self, block: Rows) -> tuple[Index, ...]:
        """Return the part of each operand that belongs to a block."""
        rows, keys, everywhere = slice(block.start, block.stop), slice(block.keys), slice(None)
        state, own, tables = map(len, self.names)
        content = ((everywhere, everywhere, rows), (everywhere, everywhere, keys)) if self.content else ()
        return (*content, *[(everywhere, keys)] * state, *[(everywhere, rows)] * own, *[(everywhere,)] * tables)

    def pieces(self, block: Rows, *, by_kernel: bool = True) -> list[Piece]:
        parts = [x[place] for x, place in zip(self.inputs, self.places(block), strict=False)]
        return self.split(finite(self.plain(parts, block)), block, by_kernel=by_kernel)

    def plain(self, parts: Sequence[Tensor], block: Rows) -> Tensor:
        """Return the bias without the mask `[B|1, H, q, K]`, given the block's part of each operand."""
        given = iter(parts)
        content = [next(given) for _ in range(self.content)]
        state, own, tables = ({name: next(given) for name in names} for names in self.names)
        positions = self.positions.rows(block.start, block.stop, block.keys)
        place = replace(self.call, positions=positions, state=state, own=own, tables=tables).block(None)
        return self.added.of(place, self.like, *content)

    def gradient(self, wanted: Sequence[bool]) -> Gradient[Any]:
        return _AnyGradient(self, wanted)


class _AnyGradient(Gradient[AnyBias]):
    """Differentiates the computation of each block."""

    def __init__(self, bias: AnyBias, wanted: Sequence[bool]) -> None:
        self.bias, self.inputs, self.wanted = bias, bias.inputs, wanted
        self.found: list[Tensor | None] = [None] * len(self.inputs)
        self.targets: dict[int, Tensor] = {}
        self.made: Tensor | None = None
        self.grad: Tensor | None = None

    def pieces(self, block: Rows) -> list[Piece]:
        # Parts of their own, so that no gradient is padded to the size of the whole.
        parts = [
            x[place].detach().requires_grad_(wanted)
            for x, place, wanted in zip(self.inputs, self.bias.places(block), self.wanted, strict=False)
        ]
        leaves = (*parts, *self.inputs[len(parts) :])
        self.targets = {index: x for index, x in enumerate(leaves) if self.wanted[index]}
        scheme = self.bias.call.scheme
        with torch.enable_grad():
            self.made = with_parameters(scheme, self.bias.parameters, lambda: self.bias.plain(parts, block))
        self.grad = torch.empty_like(self.made, memory_format=torch.contiguous_format)
        return self.bias.split(self.made.detach(), block, by_kernel=False)

    def add(self, block: Rows, batch: slice, heads: slice, first: int, d_logits: Tensor) -> None:
        assert self.grad is not None
        assert not first
        if len(self.grad) > 1:
            self.grad[batch, heads] = d_logits
        elif batch.start == 0:
            self.grad[0, heads] = over_batch(d_logits)
        else:
            self.grad[0, heads] += over_batch(d_logits)

    def end(self, block: Rows) -> None:
        assert self.made is not None
        parts = torch.autograd.grad(self.made, list(self.targets.values()), self.grad, allow_unused=True)
        places = self.bias.places(block)
        for index, part in zip(self.targets, parts, strict=True):
            if part is None:
                continue
            total = self.found[index]
            if total is None:
                dtype = torch.promote_types(part.dtype, torch.float32)
                total = self.found[index] = torch.zeros_like(self.inputs[index], dtype=dtype)
            total[places[index] if index < len(places) else ...] += part
        self.made = self.grad = None

    def result(self) -> Sequence[Tensor | None]:
        return [None if total is None else total.to(x.dtype) for total, x in zip(self.found, self.inputs, strict=True)]
