"""What a scheme adds to logits, in the forms that attention can use without a matrix of it; see `Scheme.added`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hf_posenc.scheme import Block


@dataclass(frozen=True, eq=False)
class Added:
    """A bias on the scaled logits, which depends on positions and on what tokens bring, not on queries and keys.

    Attributes:
        of: Returns it for a block, `[B|1, H, q, K]`, in dtype and on the device of the second argument.
    """

    of: Callable[..., Tensor]

    def scaled(self, factor: float) -> Added:
        """Return the same at part of its strength."""
        return replace(self, of=_scaled(self.of, factor))


@dataclass(frozen=True, eq=False)
class ContentBias(Added):
    """A bias that depends on queries and keys, too: `of` gets them behind its other arguments, as `Scheme.score` does."""


@dataclass(frozen=True, eq=False)
class Vectors:
    """Vectors per head and distance, for the distances from N - 1 - `ahead` down to 0. Those beyond have the first.

    Attributes:
        of_queries: Which queries are multiplied with, `[H | G, N, D]`.
        of_keys: Which keys are, likewise.
        bias: Added to the queries first, `[H, D]`.
        always: Which keys are multiplied with at every distance, `[H, D]`.
        ahead: So many are for negative distances, behind the others: they may be any, and spare a copy to make room for them.
    """

    of_queries: Tensor | None = None
    of_keys: Tensor | None = None
    bias: Tensor | None = None
    always: Tensor | None = None
    ahead: int = 0


@dataclass(frozen=True, eq=False)
class RelativeProducts(ContentBias):
    """The scaled products of queries, of keys, or of both, with vectors of the distance; in causal layers.

    Attributes:
        vectors: Returns the vectors, of queries or of keys at least, given the tables; `None` if there are none for this call.
    """

    vectors: Callable[[Mapping[str, Tensor]], Vectors | None]

    def scaled(self, factor: float) -> RelativeProducts:
        def scaled(tables: Mapping[str, Tensor]) -> Vectors | None:
            found = self.vectors(tables)
            if found is None:
                return None
            parts = (found.of_queries, found.of_keys, found.always)
            of_queries, of_keys, always = (None if x is None else x * factor for x in parts)
            return replace(found, of_queries=of_queries, of_keys=of_keys, always=always)

        return replace(self, of=_scaled(self.of, factor), vectors=scaled)


@dataclass(frozen=True, eq=False)
class KeyBias(Added):
    """A number per head and token: that of the key less that of the query.

    Attributes:
        at: Returns it for tokens, float32 or wider `[B|1, H, S]`, given their state.
    """

    at: Callable[[Mapping[str, Tensor]], Tensor]

    def scaled(self, factor: float) -> KeyBias:
        return replace(self, of=_scaled(self.of, factor), at=_scaled(self.at, factor))


@dataclass(frozen=True, eq=False)
class DistanceTable(Added):
    """A number per head and distance.

    Attributes:
        at: Returns it for int64 distances `[N]` (query minus key; never negative in causal layers), `[H, N]` in the dtype of the
            second argument.
    """

    at: Callable[[Tensor, torch.dtype], Tensor]

    def scaled(self, factor: float) -> DistanceTable:
        return replace(self, of=_scaled(self.of, factor), at=_scaled(self.at, factor))


@dataclass(frozen=True, eq=False)
class PiecewiseLinear(Added):
    """A continuous function per head, of straight pieces, of `u(distance) * w(query position)`; `u` grows from 0 on.

    For causal layers.

    Attributes:
        feature: Returns u of int64 distances `[N]`, float `[N]`, in the dtype of the second argument.
        weight: Returns w of int64 query positions `[B|1, Q]`, float of the same shape, likewise.
        constant_below: Returns the position below which w is the same for all queries. At it, w may depend on parameters in
            two ways.
        pieces: Returns the ends of the pieces, in ascending order `[M]`, and slope and offset of each piece, each
            `[M + 1, H]`, in the dtype that is given: between two ends the function is `slope * u * w + offset`.
    """

    feature: Callable[[Tensor, torch.dtype], Tensor]
    weight: Callable[[Tensor, torch.dtype], Tensor]
    constant_below: Callable[[], float]
    pieces: Callable[[torch.dtype], tuple[Tensor, Tensor, Tensor]]

    def table(self, distance: Tensor, position: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias of one query position `[1, 1]` at int64 distances `[N]`, `[H, N]`."""
        ends, slope, offset = self.pieces(dtype)
        x = self.feature(distance, dtype) * self.weight(position, dtype)[0]
        piece = torch.searchsorted(ends, x.detach())
        return (slope[piece] * x[:, None] + offset[piece]).T

    def scaled(self, factor: float) -> PiecewiseLinear:
        def pieces(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
            ends, slope, offset = self.pieces(dtype)
            return ends, slope * factor, offset * factor

        return replace(self, of=_scaled(self.of, factor), pieces=pieces)


@dataclass(frozen=True, eq=False)
class Folded:
    """Queries, keys and values that are made anew for each call, of which plain attention makes the output.

    Attributes:
        of: Returns them, `[B, H, Q, d]`, `[B, G, K, d]` and `[B, G, K, d]`, given those that `score` and `mix` get and a block of all;
            the output has as many channels as `mix` makes. Only the products that the causal rule leaves visible need be right; others must be
            finite.
        span: How far apart the positions of queries may be.
        ahead: Whether products with keys at later positions than the query's are right, too.
    """

    of: Callable[[Tensor, Tensor, Tensor, Block], tuple[Tensor, Tensor, Tensor]]
    span: float = math.inf
    ahead: bool = True


@dataclass(frozen=True, eq=False)
class Nearest:
    """What the nearest keys are, beyond which position makes no difference; keys count in the order of their slots.

    Attributes:
        enough: Whether the keys of a block, without those before them, hold all that differ. It is given what `score` gets.
        beyond: Returns what keys before them get of position: a bias for each query, `[B, H, q, 1]`, in dtype of the second
            argument, given the queries as `score` gets them; and what is added to their values, `[D]`, or `None`. Where there
            is no such function they get no weight at all.
        first_try: How many keys before those of the queries may do; twice as many are tried each time that they do not.
    """

    enough: Callable[[Tensor, Tensor, Tensor, Block], bool]
    beyond: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
    first_try: int = 64

    def scaled(self, factor: float) -> Nearest | None:
        """Return the same at part of its strength; `None` if keys without weight would get some."""
        beyond = self.beyond
        if beyond is None:
            return None

        def part(q: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
            bias, value = beyond(q, like)
            return factor * bias, None if value is None else factor * value

        return replace(self, beyond=part)


@dataclass(frozen=True, eq=False)
class Walk:
    """How a scheme goes through the keys from the last to the first, in a form that a kernel takes; see `Scheme.walk`."""


@dataclass(frozen=True, eq=False)
class GateCount(Walk):
    """A bias at what gates let through, from a key up to the query; in between it is straight, and it ends at the last number.

    A gate is the sigmoid of a scaled product; hidden keys have none.

    Attributes:
        at: Returns the bias at whole numbers from 0 on, `[B, H, Q, N]`, given the queries as `score` gets them, in dtype of the
            second argument.
        keys: Returns the keys by which gates open, `[B, G, K, D]`, given those that `score` gets and a block of all; `None` where the
            logits open them.
        scale: Factor on the products of queries and these keys.
    """

    at: Callable[[Tensor, Tensor], Tensor]
    keys: Callable[[Tensor, Block], Tensor | None]
    scale: float


@dataclass(frozen=True, eq=False)
class Stick(Walk):
    """In place of the softmax every key takes the sigmoid of its logit of what nearer ones left.

    Attributes:
        current: Whether the query's own key takes a part, too.
        bias: Of the logits, `[H]`.
        rest_to_own: Whether the query's own value gets what all keys leave.
        rest: What gets it, `[H, D]`; `None` if nothing does.
    """

    current: bool
    bias: Tensor | None = None
    rest_to_own: bool = False
    rest: Tensor | None = None


def _scaled(function: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    return lambda *args: factor * function(*args)
