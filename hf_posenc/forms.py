"""Forms of a scheme that attention computes faster than its seams.

A scheme returns them from the methods of `FastForms`. All of them equal its seams, and none is needed.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from hf_posenc.operands import Block, Positions

# The factors of the products of a `KeyBias`.
Products: TypeAlias = Callable[[Block], Sequence[tuple[Tensor | None, Tensor | None]]]


@dataclass(frozen=True, eq=False)
class Bias:
    """A bias on the scaled logits that depends on positions and on per-token state, not on queries and keys.

    Attributes:
        of: Returns the bias of a block, `[B|1, H, q, K]`, in dtype and on the device of the second argument.
    """

    of: Callable[..., Tensor]

    def scaled(self, factor: float) -> "Bias":
        """Return the same at part of its strength; here all functions return parts of the bias."""
        functions = {name: value for name, value in vars(self).items() if callable(value)}
        return replace(self, **{name: _scaled(function, factor) for name, function in functions.items()})


@dataclass(frozen=True, eq=False)
class Vectors:
    """Vectors per head and distance, for the distances from N - 1 down to 0. Those beyond have the first.

    Attributes:
        of_queries: Vectors that are multiplied with queries, `[H | G | 1, N, D]`.
        of_keys: Vectors that are multiplied with keys, likewise.
        bias: Bias that is added to the queries first, `[H, D]`.
        always: Vectors that are multiplied with keys at every distance, `[H, D]`.
        queries: Name of a state of the queries, `[B, Q, H, D]` of any D, that `of_queries` meet in their place.
    """

    of_queries: Tensor | None = None
    of_keys: Tensor | None = None
    bias: Tensor | None = None
    always: Tensor | None = None
    queries: str | None = None


@dataclass(frozen=True, eq=False)
class ContentBias(Bias):
    """A bias that depends on queries and keys, too: `of` gets them as its last arguments, as `Scheme.score` does.

    Attributes:
        vectors: Returns vectors of the distance, of queries or of keys at least, given the tables; in causal layers the
            bias is the scaled products with them. `None` if there are none for this call.
    """

    vectors: Callable[[Mapping[str, Tensor]], Vectors | None] = lambda tables: None

    def scaled(self, factor: float) -> "Bias":
        def scaled(tables: Mapping[str, Tensor]) -> Vectors | None:
            found = self.vectors(tables)
            if found is None:
                return None
            parts = {name: getattr(found, name) for name in ("of_queries", "of_keys", "always")}
            return replace(found, **{name: x * factor for name, x in parts.items() if x is not None})

        return replace(self, of=_scaled(self.of, factor), vectors=scaled)


@dataclass(frozen=True, eq=False)
class KeyBias(Bias):
    """A sum of products, each of a number of the query and a number of the key, in causal layers.

    Attributes:
        products: Returns the factors of each product, of queries `[B|1, H|1, Q]` and of keys `[B|1, H|1, K]`, given one
            block for the whole call. One of the two is float32 or float64; the other is int64 positions, or bool for 0
            and 1, or `None` for 1.
    """

    products: Products

    def scaled(self, factor: float) -> "Bias":
        return replace(self, of=_scaled(self.of, factor), products=_scaled_products(self.products, factor))


@dataclass(frozen=True, eq=False)
class DistanceTable(Bias):
    """A number per head and distance; also what a stock model with such a table can hold.

    Attributes:
        at: Returns the number for int64 distances `[N]` (query minus key; never negative in causal layers), `[H, N]`
            in the dtype of the second argument.
        reach: Distance from which the number no longer changes, on either side; `None` if it goes on changing.
        slope: Returns the number at distance 1, `[H]` on a device and in a dtype, if it is proportional to the distance
            in causal layers; else `None`.
        products: Returns the products of two floats that it is the sum of, otherwise as in `KeyBias`, for servers; a
            constant per query may be left out. `None` if they are too many.
    """

    at: Callable[[Tensor, torch.dtype], Tensor]
    reach: int | None = None
    slope: Callable[[torch.device, torch.dtype], Tensor] | None = None
    products: Products | None = None

    def scaled(self, factor: float) -> "Bias":
        # Servers take whole schemes only.
        return Bias.scaled(replace(self, products=None), factor)


@dataclass(frozen=True, eq=False)
class PiecewiseLinear(Bias):
    """A continuous function per head, of straight pieces, of `u(distance) * w(query position)`; `u` grows from 0 on.

    For causal layers.

    Attributes:
        feature: Returns u of int64 distances `[N]`, float `[N]`, in the dtype of the second argument.
        weight: Returns w of int64 query positions `[B|1, Q]`, float of the same shape, likewise.
        constant_below: Returns the position below which w is the same for all queries. At it, w may depend on
            parameters in two ways.
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

    def scaled(self, factor: float) -> "Bias":
        def pieces(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
            ends, slope, offset = self.pieces(dtype)
            return ends, slope * factor, offset * factor

        return replace(self, of=_scaled(self.of, factor), pieces=pieces)


@dataclass(frozen=True, eq=False)
class Spared(Bias):
    """The sum of a bias of positions and of products, which take it away from some keys, in causal layers.

    Attributes:
        rest: Bias of positions.
        products: See `KeyBias`.
    """

    rest: DistanceTable | PiecewiseLinear
    products: Products

    def scaled(self, factor: float) -> "Bias":
        products, rest = _scaled_products(self.products, factor), self.rest.scaled(factor)
        assert isinstance(rest, DistanceTable | PiecewiseLinear)
        return replace(self, of=_scaled(self.of, factor), rest=rest, products=products)


def first_of(positions: Tensor) -> Tensor:
    """Return which keys are the first of their text, given their positions."""
    return positions == 0


def without_first(bias: Bias) -> Bias:
    """Return a bias that is 0 on the first key of each text."""

    def of(block: Block, like: Tensor, *content: Tensor) -> Tensor:
        first = first_of(block.positions.key).to(like.device)
        return bias.of(block, like, *content).masked_fill(first[:, None, None], 0)

    def taken(block: Block) -> list[tuple[Tensor | None, Tensor | None]]:
        places = block.positions
        # The first key may be hidden, or no longer there, and then further than any that is.
        at_first = Block(Positions(places.query, places.query.new_zeros(1, 1)), reach=int(places.query.max()))
        found = bias.of(at_first, torch.empty(0, dtype=torch.float64, device=places.query.device))
        return [(-found[..., 0], first_of(places.key)[:, None])]

    if isinstance(bias, KeyBias):
        return KeyBias(of, _without_first(bias.products))
    if isinstance(bias, DistanceTable | PiecewiseLinear):
        return Spared(of, bias, taken)
    return ContentBias(of) if isinstance(bias, ContentBias) else Bias(of)


def total(biases: Sequence[Bias]) -> Bias:
    """Return the sum of biases: in the fast form that all of them have, or in none."""
    if len(biases) == 1:
        return biases[0]

    def of(block: Block, like: Tensor, *content: Tensor) -> Tensor:
        parts = (bias.of(block, like, *(content if isinstance(bias, ContentBias) else ())) for bias in biases)
        return functools.reduce(torch.add, parts)

    of_keys = [bias.products for bias in biases if isinstance(bias, KeyBias | Spared)]
    products = lambda block: [product for each in of_keys for product in each(block)]  # noqa: E731
    if len(of_keys) == len(biases):
        spared = [bias for bias in biases if isinstance(bias, Spared)]
        if not spared:
            return KeyBias(of, products)
        if len(spared) == 1:
            return Spared(of, spared[0].rest, products)
    tables = [bias for bias in biases if isinstance(bias, DistanceTable)]
    if len(tables) < len(biases):
        return ContentBias(of) if any(isinstance(bias, ContentBias) for bias in biases) else Bias(of)

    def at(distance: Tensor, dtype: torch.dtype) -> Tensor:
        return functools.reduce(torch.add, (table.at(distance, dtype) for table in tables))

    reaches = [table.reach for table in tables if table.reach is not None]
    return DistanceTable(of, at, max(reaches) if len(reaches) == len(tables) else None)


@dataclass(frozen=True, eq=False)
class Folded:
    """Queries, keys and values that are computed for each call, so that plain attention over them gives the output.

    Attributes:
        of: Returns them, `[B, H, Q, d]`, `[B, G, K, d]` and `[B, G, K, d]`, given the arguments of `score` and `mix`
            and one block for the whole call. The output has as many channels as that of `mix`. Only the products that
            the causal rule leaves visible need be right; others must be finite.
        span: Largest difference between the positions of queries.
        alone: Returns the same, but each query and each key depends on its own token only, at a position up to `span`;
            `None` if that cannot be.
    """

    of: Callable[[Tensor, Tensor, Tensor, Block], tuple[Tensor, Tensor, Tensor]]
    span: float = math.inf
    alone: Callable[[Tensor, Tensor, Tensor, Block], tuple[Tensor, Tensor, Tensor]] | None = None


@dataclass(frozen=True, eq=False)
class Locality:
    """The nearest keys, beyond which position makes no difference; keys count in the order of their slots.

    Attributes:
        enough: Returns whether all keys before those of a block are alike, given the arguments of `score`.
        beyond: Returns the effect of position on the keys before: a bias for each query, `[B, H, q, 1]`, in the dtype
            of the second argument, given the queries as `score` gets them; and the addend of their values, `[D]`, or
            `None`. Without this function they get no weight at all.
        first_try: Number of keys before those of the queries to try first; each further try takes twice as many.
    """

    enough: Callable[[Tensor, Tensor, Tensor, Block], bool]
    beyond: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]] | None = None
    first_try: int = 64


@dataclass(frozen=True, eq=False)
class GateCount:
    """A bias at the sum of the gates from a key up to the query.

    Between whole numbers it is linear, and from the last it is constant. A gate is the sigmoid of a scaled product;
    hidden keys have none.

    Attributes:
        at: Returns the bias at whole numbers from 0 on, `[B, H, Q, N]`, given the queries as `score` gets them, in
            dtype of the second argument.
        keys: Returns the keys by which gates open, `[B, G, K, D]`, given those that `score` gets and one block for
            the whole call; `None` where the logits open them.
        scale: Factor on the products of queries and these keys.
    """

    at: Callable[[Tensor, Tensor], Tensor]
    keys: Callable[[Tensor, Block], Tensor | None]
    scale: float


@dataclass(frozen=True, eq=False)
class Stick:
    """Every key takes the sigmoid of its logit, as a share of the rest that nearer keys left; there is no softmax.

    Attributes:
        current: Whether the query's own key takes a share, too.
        bias: Bias on the logits, `[H]`.
        rest_to_own: Whether the rest goes to the query's own value.
        rest: Value that the rest goes to, `[H, D]`; `None` if it is dropped.
    """

    current: bool
    bias: Tensor | None = None
    rest_to_own: bool = False
    rest: Tensor | None = None


# A scan of the keys from the last to the first, in a form that a kernel takes; see `Scheme.key_scan`.
KeyScan: TypeAlias = GateCount | Stick


def _without_first(products: Products) -> Products:
    """Return products that are 0 on the first key of each text, since one of their factors is."""

    def others(block: Block) -> list[tuple[Tensor | None, Tensor | None]]:
        seen = ~first_of(block.positions.key)[:, None]  # [B|1, 1, K]
        return [(x, seen if y is None else y * seen.to(y.device)) for x, y in products(block)]

    return others


def _scaled_products(products: Products, factor: float) -> Products:
    def scaled(x: Tensor | None) -> Tensor | None:
        return x * factor if x is not None and x.is_floating_point() else x

    return lambda block: [(scaled(x), scaled(y)) for x, y in products(block)]


def _scaled(function: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    return lambda *args: factor * function(*args)


class FastForms:
    """The forms in which attention may compute a scheme; a scheme has none unless it overrides a method."""

    def added(self) -> Bias | None:
        """Return the bias that `score` adds, in a form that fused attention takes.

        `None` if `score` does anything else, or the scheme overrides `weigh` or `mix`.
        """
        return None

    def folded(self) -> Folded | None:
        """Return queries, keys and values with which plain attention equals `score` and `mix` of the given ones.

        `None` if there are none, or the scheme overrides `weigh`.
        """
        return None

    def locality(self) -> Locality | None:
        """Return a rule for the keys beyond which position makes no difference, in causal layers; `None` if it always
        may.

        A scheme with `Locality.beyond` leaves `weigh` as it is, and its `mix` is linear in the weights.
        """
        return None

    def sink(self) -> Tensor | None:
        """Return a logit per head, `[H]`, that takes part in the softmax for no key; `None` if `weigh` does more."""
        return None

    def key_scan(self) -> KeyScan | None:
        """Return the form of `score`, `weigh` and `mix` as one pass over the keys that GPU kernels know, in causal
        layers."""
        return None
