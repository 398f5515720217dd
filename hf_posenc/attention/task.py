"""The operands of one attention call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from hf_posenc.operands import Block, Positions

# Picks a part of a tensor.
Index: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class Task:
    """Projected operands, ready for an executor.

    Attributes:
        q: `[B, H, Q, D]`.
        k: `[B, G, K, D]`, or `[B, H, K, D]` from a scheme whose keys differ by query head.
        v: `[B, G, K, D]`.
        positions: Of the queries and of the keys.
        reach: A bound on every distance, see `Block`.
        scale: Factor on `q @ k.T`.
        state: Per-token state of the keys.
        own: The same of the queries' tokens.
        tables: What the scheme made once for this call.
        content_q: Queries without the native rotation, if there is one.
        content_k: Keys without the native rotation, if the scheme reads them.
        native_score: Adds the model's own additive encoding to the logits of a block, where that is kept.
        parameters: Trained tensors that `native_score` reads.
        dropout: Probability with which weights are dropped; 0 outside training.
        upcast: Multiply queries and keys in float32 whatever their dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Positions
    reach: int
    scale: float
    state: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    content_q: Tensor | None = None
    content_k: Tensor | None = None
    native_score: Callable[[Tensor, Block], Tensor] | None = None
    parameters: tuple[Tensor, ...] = ()
    dropout: float = 0.0
    upcast: bool = False

    def operands(self) -> tuple[Tensor, ...]:
        """Return all tensors that gradients may flow into."""
        loose = (tensor for tensor in (self.content_q, self.content_k) if tensor is not None)
        return (self.q, self.k, self.v, *loose, *self.state.values(), *self.own.values(), *self.tables.values())

    def places(self, start: int, stop: int, keys: int, first: int = 0) -> tuple[Index, ...]:
        """Return where the queries `start:stop` and the keys `first:keys` are in each of `operands`."""
        rows, columns = slice(start, stop), slice(first, keys)
        everywhere = slice(None)
        loose = [
            (everywhere, everywhere, part)
            for tensor, part in ((self.content_q, rows), (self.content_k, columns))
            if tensor is not None
        ]
        return (
            (everywhere, everywhere, rows),
            *[(everywhere, everywhere, columns)] * 2,
            *loose,
            *[(everywhere, columns)] * len(self.state),
            *[(everywhere, rows)] * len(self.own),
            *[(everywhere,)] * len(self.tables),
        )

    def part(self, start: int, stop: int, keys: int, first: int = 0) -> Task:
        """Return the task of the queries `start:stop` against the keys `first:keys`."""
        operands = [x[place] for x, place in zip(self.operands(), self.places(start, stop, keys, first), strict=True)]
        return replace(self.with_operands(operands), positions=self.positions.rows(start, stop, keys, first))

    def outline(self) -> Task:
        """Return the same task with shapes in place of operands, for what outlives the forward pass.

        What a backward pass needs of them is for autograd to keep, or to drop, as gradient checkpointing has it do.
        """
        return self.with_operands(outlines(self.operands()))

    def with_operands(self, operands: Sequence[Tensor]) -> Task:
        """Return the same task on other tensors, in the order of `operands`."""
        given = iter(operands)

        def loose(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else next(given)

        return replace(
            self,
            q=next(given),
            k=next(given),
            v=next(given),
            content_q=loose(self.content_q),
            content_k=loose(self.content_k),
            state={name: next(given) for name in self.state},
            own={name: next(given) for name in self.own},
            tables={name: next(given) for name in self.tables},
        )


def outlines(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors of the same shapes and dtypes that take no memory."""
    return tuple(torch.empty_like(x, device="meta") for x in tensors)
