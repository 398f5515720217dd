"""The operands of a scheme: a layer's geometry, positions, fresh tokens, blocks of rows, and projections.

Letters in shape comments: B batch, H query heads, G kv heads, Q queries, K keys, D head_dim, E hidden size. `B|1` is a
size that may also be 1 and then broadcasts.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import OptionError, PositionError, ShapeError

Result = TypeVar("Result")

# The largest integer of a geometry or an option. Distances are counted in float32, which skips integers beyond.
LARGEST_COUNT = 2**24
# Bounds on the size of other numbers: products of three of them fit float32.
SMALLEST_NUMBER, LARGEST_NUMBER = 1e-12, 1e12


def is_count(value: object) -> bool:
    """Whether a value is an integer that float32 can count to."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_COUNT


def is_number(value: object) -> bool:
    """Whether float32 can compute with a value: 0, or a number that is neither tiny nor huge."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return value == 0 or SMALLEST_NUMBER <= abs(value) <= LARGEST_NUMBER


def _are_frequencies(value: object, most: int) -> bool:
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 1 and 1 <= len(value) <= most):
        return False
    # Frequencies of a model that is still loading have no values yet.
    return value.is_meta or bool(value.isfinite().all())


@dataclass(frozen=True, eq=False)
class NativeTable:
    """The table of a model's own encoding, from which a scheme of the same kind can start.

    Attributes:
        kind: `"learned"` (GPT-2, `[positions, E]`), `"t5"` (log buckets, `[buckets, H]`), or `"offsets"` (BEiT,
            `[(2N - 1)^2 + 3, H]`: offsets of the query from the key in N rows and N columns of patches, row by row;
            then patches for the class token, the class token for patches, and itself).
        weight: The table.
        max_distance: Distance from which all keys share the last bucket (`"t5"` only).
        shared: Whether all layers of the stack use this one table.
    """

    kind: str
    weight: Tensor
    max_distance: int | None = None
    shared: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class Geometry:
    """The shape of one attention layer: everything a scheme may know about the model around it.

    Attributes:
        heads: Query heads H.
        kv_heads: Key/value heads G; H must be a multiple of it.
        head_dim: Channels per head D.
        hidden_size: Channels of the residual stream E.
        scale: Factor on `q @ k.T`; `None` means `head_dim ** -0.5` (T5 uses 1).
        layer: Index of the layer in its stack.
        causal: True if queries see only earlier keys (decoders), False if they see all keys (encoders).
        axes: Coordinates of a token: 1 in a text; 2 in an image, where the class token has position 0.
        inv_freq: Frequencies of the model's own rotary encoding, float `[D / 2]`, if it has one; fewer than D / 2 turn
            only the first channels. In a layer that the model does not rotate they are zero.
        layout: Pairing of the channels that it rotates: `"half"` (i, i + d/2) or `"interleaved"` (2i, 2i + 1).
        uniform: True if it is the same in all layers of the stack.
        max_positions: The trained length of the model, if its config states one.
        rotary_scaling: Factor on rotated queries and keys that belongs to `inv_freq` (YaRN, longrope).
        rotary_limit: The length up to which the model uses `inv_freq`, if it changes frequencies beyond (dynamic,
            longrope).
        inv_freq_long: Frequencies beyond `rotary_limit`, if they are the same for all lengths (longrope).
        native: The model's own table of positions or distances, if it has one.
        embedding_rms: Root mean square of the token embeddings, the target size of absolute encodings.
        first: True if no earlier layer has the same scheme, so this one receives no `Tokens.carried`.
        last: True if no later layer has the same scheme, so nothing reads what this one carries on.

    Raises:
        OptionError: A field is out of range: a size is not a positive integer, or a number is not finite.
    """

    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    scale: float = None  # type: ignore[assignment]  # set in __post_init__
    layer: int = 0
    causal: bool = True
    axes: int = 1
    inv_freq: Tensor | None = None
    layout: Literal["half", "interleaved"] = "half"
    uniform: bool = True
    max_positions: int | None = None
    rotary_scaling: float = 1.0
    rotary_limit: int | None = None
    inv_freq_long: Tensor | None = None
    native: NativeTable | None = None
    embedding_rms: float | None = None
    first: bool = True
    last: bool = True

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "hidden_size", "axes"):
            value = getattr(self, name)
            self._require(is_count(value) and value >= 1, name, f"a positive integer of at most {LARGEST_COUNT:,}")
        self._require(is_count(self.layer) and self.layer >= 0, "layer", "an integer of at least 0")
        if self.heads % self.kv_heads:
            raise OptionError(
                f"Geometry(heads={self.heads}, kv_heads={self.kv_heads}): heads must be a multiple of kv_heads."
            )
        if self.scale is None:
            object.__setattr__(self, "scale", self.head_dim**-0.5)
        self._require(self.layout in ("half", "interleaved"), "layout", "'half' or 'interleaved'")
        for name in ("scale", "rotary_scaling"):
            value = getattr(self, name)
            self._require(is_number(value) and value > 0, name, "a positive number, neither tiny nor huge")
        for name in ("max_positions", "rotary_limit"):
            value = getattr(self, name)
            self._require(value is None or (type(value) is int and value >= 1), name, "None or a positive integer")
        self._require(self.native is None or isinstance(self.native, NativeTable), "native", "None or a NativeTable")
        most = self.head_dim // 2
        for name in ("inv_freq", "inv_freq_long"):
            value = getattr(self, name)
            expected = f"None or 1 to {most} finite frequencies, a float tensor of one dimension"
            self._require(value is None or _are_frequencies(value, most), name, expected)

    def _require(self, condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise OptionError(f"Geometry({name}={getattr(self, name)!r}): expected {expected}.")

    @property
    def context(self) -> int:
        """The trained length, or 2,048 tokens if the model's config states none."""
        return self.max_positions or 2048

    def native_table(self, kind: str) -> NativeTable | None:
        """Return the model's own table if it is of this kind."""
        return self.native if self.native is not None and self.native.kind == kind else None


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of queries and keys in the sequence, in tokens; never their slots in the cache.

    Attributes:
        query: Positions of the queries, int64 `[B|1, Q]`.
        key: Positions of the keys, int64 `[B|1, K]`.
        query_coords: Coordinates of the queries' tokens in n dimensions, float32 or float64 `[B|1, Q, n]`; `None` in a
            text, where every coordinate of a token is its position.
        key_coords: Coordinates of the keys' tokens, `[B|1, K, n]`.
        made: Values that `once` has made, by key.
    """

    query: Tensor
    key: Tensor
    query_coords: Tensor | None = None
    key_coords: Tensor | None = None
    made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def once(self, make: Callable[[], Result], *key: Hashable) -> Result:
        """Return the result of a function, which is called once for each key in all layers that share these positions.

        While a graph is traced, it is called each time; the compiler removes what is computed twice.
        """
        if torch.compiler.is_compiling():
            return make()
        if key not in self.made:
            self.made[key] = make()
        found: Result = self.made[key]
        return found

    def each(self, function: Callable[[Tensor, Tensor | None], Result]) -> tuple[Result, Result]:
        """Return a function of positions and coordinates for queries and for keys, made once if they are equal."""
        of_keys = function(self.key, self.key_coords)
        if self.query is self.key and self.query_coords is self.key_coords:
            return of_keys, of_keys
        return function(self.query, self.query_coords), of_keys

    def rows(self, start: int, stop: int, keys: int, first: int = 0) -> "Positions":
        """Return the positions of the queries `start:stop` and of the keys `first:keys`."""
        return Positions(
            self.query[:, start:stop],
            self.key[:, first:keys],
            None if self.query_coords is None else self.query_coords[:, start:stop],
            None if self.key_coords is None else self.key_coords[:, first:keys],
        )


def coordinates_of(positions: Tensor, coords: Tensor | None, axes: int, dtype: torch.dtype) -> Tensor:
    """Return the coordinates of tokens, `[B|1, S, axes]`: those given, or their position on every axis."""
    if coords is None:
        return positions.to(dtype)[..., None].expand(*positions.shape, axes)
    if coords.shape[-1] != axes:
        raise PositionError(f"Got coordinates with {coords.shape[-1]} axes; the scheme has {axes}.")
    return coords.to(dtype)


def check_tensor(name: str, value: object, *, optional: bool = False) -> None:
    """Raise `ShapeError`, which names the argument, if a value is no dense tensor."""
    if optional and value is None:
        return
    if not isinstance(value, Tensor):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise ShapeError(f"Got {name} of type {kind}; expected a torch.Tensor{' or None' * optional}.")
    if value.layout != torch.strided:
        raise ShapeError(f"Got {name} of layout {value.layout}; expected a dense tensor that has numbers.")


def check_coords(
    coords: Tensor, axes: set[int], batch: int, length: int, device: torch.device, name: str = "position_coords"
) -> Tensor:
    """Return coordinates that were given for tokens, float32 or float64 `[B|1, S, n]`.

    Raise `PositionError`, which names the argument, if they do not fit the inputs, or the numbers of axes that schemes
    read (0 stands for a scheme that reads none).
    """
    wanted = axes - {0}
    check_tensor(name, coords)
    if not wanted:
        raise PositionError(
            f"Got {name}, but no scheme here reads coordinates. Leave them out, or take a scheme that has the option "
            "axes."
        )
    shapes = f"[{batch} or 1, {length}, {' or '.join(map(str, sorted(wanted)))}]"
    fits = coords.ndim == 3 and coords.shape[1] == length and coords.shape[0] in (1, batch)
    if not fits or {coords.shape[2]} != wanted:
        raise PositionError(
            f"Got {name} of shape {list(coords.shape)}; expected {shapes}: the coordinates of each input token."
        )
    if not coords.is_floating_point():
        coords = coords.double()
    if not torch.compiler.is_compiling() and not bool(coords.isfinite().all()):
        raise PositionError(f"Got {name} that are not finite; expected a number for each axis of each token.")
    return coords.to(device=device, dtype=torch.promote_types(coords.dtype, torch.float32))


@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """The fresh tokens of one call: the layer has just projected their queries, keys and values.

    S is the number of fresh keys. Inside a model every fresh token is also a query; in `attend` the queries may be only
    the last Q tokens.

    Attributes:
        positions: Positions of the queries and of the fresh keys.
        hidden: The projected hidden states, `[B, S, E]`, if the caller has them.
        real: Mask of tokens, bool `[B|1, S]`, False at padding; `None` means no padding.
        past: Cached state of the scheme for the token before the first fresh one, each `[B, 1, ...]`, zero if there is
            no such token; empty without a cache.
        carried: Output of `carry` and `feed` of the layer before; `None` in the first layer.
        common: The part of the scheme that all layers share, see `Scheme.make_common`.
        host: The layer's own projection of `[B, N, E]` to queries `[B, H, N, D]` and keys `[B, G, N, D]`.
    """

    positions: Positions
    hidden: Tensor | None = None
    real: Tensor | None = None
    past: Mapping[str, Tensor] = field(default_factory=dict)
    carried: Tensor | None = None
    common: nn.Module | None = None
    host: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def hidden_states(self, scheme: str) -> Tensor:
        """Return the hidden states of the keys' tokens `[B, S, E]`."""
        if self.hidden is None:
            raise ShapeError(
                f"{scheme} reads the hidden states of the keys' tokens. Pass attend(..., hidden=) of shape "
                "[batch, keys, hidden_size]."
            )
        return self.hidden

    def previous(self, x: Tensor, name: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Shift per-token values by one token, within each sequence, over padding and over the end of the cache.

        A sequence begins where positions do not grow. Padding within a sequence is skipped, so it changes nothing.

        Args:
            x: Values of the fresh tokens, `[B, S, ...]`.
            name: Name of the values in the cache.

        Returns:
            The value of the real token before each token, zero at the first of a sequence, `[B, S, ...]`; and the value
            and position of the last real token up to each token, which the next call needs: hand them out in
            `Projection.recent`.
        """
        batch, length = x.shape[:2]
        position = self.positions.key.expand(batch, -1)
        # Not the position of the last slot in the cache: that slot may be padding with an arbitrary position.
        place = f"{name}_position"
        before, before_position = self.past.get(name), self.past.get(place)
        if before is None or before_position is None:
            before, before_position = x.new_zeros(x[:, :1].shape), position[:, :1]
        values = torch.cat([before.to(x), x], dim=1)  # slot 0 is the past
        positions = torch.cat([before_position.to(position), position], dim=1)
        latest = torch.arange(1, length + 1, device=x.device).expand(batch, -1)
        if self.real is not None:
            latest = latest.where(self.real.to(x.device), latest.new_zeros(())).cummax(dim=1).values
        earlier = torch.cat([torch.zeros_like(latest[:, :1]), latest], dim=1)[:, :-1]
        begins = positions.gather(1, earlier) >= position
        row = torch.arange(batch, device=x.device)[:, None]
        shifted = values[row, earlier].masked_fill(begins.view(*begins.shape, *(1,) * (x.ndim - 2)), 0)
        return shifted, {name: values[row, latest], place: positions[row, latest]}


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of the attention matrix: the unit on which `score`, `weigh` and `mix` are defined.

    Attributes:
        positions: Positions of these rows and of all keys.
        reach: Upper bound on the distance between any query and any key, so that tables get their size without reading
            tensors.
        keep: Mask of keys each row may see, bool `[B|1, H|1, q|1, K]`; `None` means all keys.
        values: Values of the keys, `[B, G, K, D]`.
        native: True if the logits given to `score` include the model's own encoding besides the product of `q` and `k`.
        causal: False if these rows may see keys at later positions; in decoders a mask may show some.
        state: Per-token state of the keys from `project`, each `[B, K, ...]`.
        own: Per-token state of these rows' own tokens, each `[B, q, ...]`, what no cache keeps included.
        tables: Tensors that `project` made once for the whole call.
    """

    positions: Positions
    reach: int
    keep: Tensor | None = None
    values: Tensor | None = None
    native: bool = False
    causal: bool = True
    state: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)

    def distance(self) -> Tensor:
        """Return query position minus key position, int64 `[B|1, q, K]`; negative for keys ahead of the query."""
        query, key = self.positions.query, self.positions.key
        if query.shape[1] > 1:  # too large to be kept for other layers
            return query[:, :, None] - key[:, None, :]
        return self.positions.once(lambda: (query - key)[:, None], "distance")


@dataclass(frozen=True, eq=False)
class Projection:
    """The return value of `Scheme.project`.

    Attributes:
        q: Queries `[B, H, Q, D]`.
        k: Keys `[B, G, S, D]`, as they are cached.
        v: Values `[B, G, S, D]`, as they are cached.
        state: Per-token state to cache with keys and values, each `[B, S, ...]`.
        recent: Per-token state, each `[B, S, ...]`; the cache keeps it only for the last `Scheme.history` tokens, and
            the next call finds it in `Tokens.past`.
        tables: Tensors of any shape, made once per call, that the seams on blocks read: reshaped parameters, products
            of tables with projections.
        own: State of the queries only, each `[B, Q, ...]`, which is not cached; blocks have it in `own`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)
    recent: Mapping[str, Tensor] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)
