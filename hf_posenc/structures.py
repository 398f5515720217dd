"""Structures that a scheme may declare of itself, so that other rooms need not know the scheme.

Biases, folds, locality and scans of keys let attention take a fast path (`Scheme.added` and its neighbours).
Equivalents say in the terms of stock models what a scheme computes (`Scheme.stock_equivalent`). Pictures show numbers
that only the scheme can compute (`Scheme.pictures`). An adaptation tells recipes how a trained model is brought to a
scheme (`Scheme.adaptation`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hf_posenc.operands import Block


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
        of_queries: Vectors that are multiplied with queries, `[H | G, N, D]`.
        of_keys: Vectors that are multiplied with keys, likewise.
        bias: Bias that is added to the queries first, `[H, D]`.
        always: Vectors that are multiplied with keys at every distance, `[H, D]`.
    """

    of_queries: Tensor | None = None
    of_keys: Tensor | None = None
    bias: Tensor | None = None
    always: Tensor | None = None


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
    """A number per head and token: that of the key less that of the query.

    Attributes:
        at: Returns the number of tokens, float32 or wider `[B|1, H, S]`, given their state.
    """

    at: Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, eq=False)
class DistanceTable(Bias):
    """A number per head and distance; also what a stock model with such a table can hold.

    Attributes:
        at: Returns the number for int64 distances `[N]` (query minus key; never negative in causal layers), `[H, N]`
            in the dtype of the second argument.
        reach: Distance from which the number no longer changes, on either side; `None` if it goes on changing.
    """

    at: Callable[[Tensor, torch.dtype], Tensor]
    reach: int | None = None


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
class Folded:
    """Queries, keys and values that are computed for each call, so that plain attention over them gives the output.

    Attributes:
        of: Returns them, `[B, H, Q, d]`, `[B, G, K, d]` and `[B, G, K, d]`, given the arguments of `score` and `mix`
            and one block for the whole call. The output has as many channels as that of `mix`. Only the products that
            the causal rule leaves visible need be right; others must be finite.
        span: Largest difference between the positions of queries.
    """

    of: Callable[[Tensor, Tensor, Tensor, Block], tuple[Tensor, Tensor, Tensor]]
    span: float = math.inf


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


def _scaled(function: Callable[..., Tensor], factor: float) -> Callable[..., Tensor]:
    return lambda *args: factor * function(*args)


# -- equivalents in stock models ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Nothing:
    """The model computes what it would without the scheme."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """Queries and keys turn in planes, by angles proportional to the position of their token.

    With `x = basis @ q`, plane i is the pair (u, w) = (x[i], x[i + P]), which at position p becomes
    `(u cos - w sin, w cos + u sin)` with the angle `p * frequencies[i]`. Keys likewise, so only the product `basis.T
    @ basis` is seen where the angle is 0: it is the identity, or holds a factor on what is turned.

    Attributes:
        frequencies: Angle per position of each plane, float64 `[G, P]` with P = D / 2; may be zero or negative.
        basis: Its axes as rows, float64 `[G, D, D]`, first all u, then all w.
    """

    frequencies: Tensor
    basis: Tensor

    @classmethod
    def of_pairs(
        cls, frequencies: Tensor, size: int, layout: Literal["half", "interleaved"], factor: float = 1.0
    ) -> "Rotation":
        """Return the rotation of channel pairs among the first channels of each head; the others pass.

        Args:
            frequencies: Frequency of each pair, float64 `[G, M]`.
            size: Channels of a head.
            layout: Pairs (i, i + M), or (2i, 2i + 1).
            factor: On the channels that are turned.
        """
        groups, turned = len(frequencies), 2 * frequencies.shape[-1]
        channels, passing = torch.arange(turned), torch.arange(turned, size)
        first, second = channels.chunk(2) if layout == "half" else (channels[0::2], channels[1::2])
        order = torch.cat((first, passing[0::2], second, passing[1::2]))
        length = torch.ones(size, dtype=torch.float64)
        length[:turned] = factor
        idle = frequencies.new_zeros(groups, (size - turned) // 2)
        return cls(torch.cat((frequencies, idle), dim=-1), length.diag()[order].expand(groups, -1, -1))

    def is_identity(self) -> bool:
        """Whether neither turning nor a factor is there."""
        product = self.basis.mT @ self.basis
        unit = torch.eye(product.shape[-1], dtype=product.dtype).expand_as(product)
        return not bool(self.frequencies.any()) and torch.allclose(product, unit, rtol=0, atol=1e-12)


@dataclass(frozen=True, eq=False)
class PositionTable:
    """A vector per position is added to the embeddings of the tokens.

    Attributes:
        rows: Returns the first n of them, `[n, E]`.
        limit: Number of rows; `None` if there is one for every position.
    """

    rows: Callable[[int], Tensor]
    limit: int | None


Equivalent: TypeAlias = Nothing | Rotation | PositionTable | DistanceTable


# -- pictures -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Numbers:
    """Numbers that a scheme computes, to be drawn as colours.

    Attributes:
        of: Returns the numbers, given the scheme and the arguments of `score` on a text.
        title: Title of these numbers, where a picture has several.
        high: Number of the last colour; the first is 0. `None` is the largest number.
        log: Whether colours are on a logarithmic scale, from a thousandth of the last.
    """

    of: Callable[..., Tensor]
    label: str
    title: str = ""
    high: float | None = 1.0
    log: bool = False

    @classmethod
    def of_state(cls, name: str, label: str, high: float | None) -> "Numbers":
        """Return the numbers of tokens that a cache holds, `[B, K, H]`, or one for the query heads of a kv head."""

        def of(scheme: object, logits: Tensor, q: Tensor, k: Tensor, block: Any) -> Tensor:
            found: Tensor = block.state[name].transpose(1, 2)
            return found.repeat_interleave(q.shape[1] // found.shape[1], dim=1)

        return cls(of, label, high=high)


@dataclass(frozen=True, eq=False)
class Picture:
    """A kind of picture of what a scheme has learned.

    Attributes:
        name: Name of the kind, in commands and file names.
        over: Axes. `"tokens"` shows numbers per head and token, `[B, H, K]`, or those per head, query and key at one
            query; `"pairs"` shows numbers per head, query and key, `[B, H, Q, K]`.
        numbers: Values from left to right.
    """

    name: str
    summary: str
    title: str
    over: Literal["tokens", "pairs"]
    numbers: tuple[Numbers, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Adaptation:
    """The way to bring a trained model to a scheme that does not start with what the model computes.

    Attributes:
        native: Fate of a native encoding of distances (a rotation): `"remove"`, `"keep"` or `"handover"`.
        fit: Target of a fit before training, if that is removed: `"native"`, `"attention"` or none.
        options: Options of such a start.
        elsewhere: Fate of any other native encoding, such as a table of positions.
        windows: Options that are lengths, in training windows; they are rounded to whole tokens.
        reach: Trained lengths over which positions are to be spread in training, by skipping some; 0 is a scheme that
            knows the trained positions only.
        symmetric: Whether an encoder cannot tell its two directions apart.
        encoder: Options for encoders.
        rate: Factor of the learning rate of the scheme's weights in an attention transfer, and in a training that
            follows no fit. Numbers that are added to logits have far to go; weights that read hidden states have not.
        rate_width: Hidden size beyond which the rate falls in proportion, in every training; `None` is no fall. For
            matrices whose inputs hardly differ from token to token: each step of Adam moves all products alike.
    """

    native: Literal["remove", "keep", "handover"] = "remove"
    fit: Literal["native", "attention"] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: Literal["remove", "keep", "handover"] = "remove"
    windows: Mapping[str, float] = field(default_factory=dict)
    reach: int = 1
    symmetric: bool = False
    encoder: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 1.0
    rate_width: int | None = None
