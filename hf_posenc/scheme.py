"""What a positional scheme is: a module with a few seams, each the identity unless overridden.

Letters in shape comments: B batch, H query heads, G kv heads, Q queries, K keys, D head_dim, E hidden size. A size
that may also be 1, to be broadcast, is written `B|1`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from hf_posenc.errors import OptionError

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class NativeTable:
    """The table of a model's own encoding, which a scheme of the same kind can start from.

    Attributes:
        kind: `"learned"` (GPT-2, `[positions, E]`) or `"t5"` (log buckets, `[buckets, H]`).
        weight: The table.
        max_distance: Distance from which all keys share the last bucket (`"t5"` only).
    """

    kind: str
    weight: Tensor
    max_distance: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Geometry:
    """The shape of one attention layer, all that a scheme may know of the model around it.

    Attributes:
        heads: Query heads H.
        kv_heads: Key/value heads G; H must be a multiple of it.
        head_dim: Channels per head D.
        hidden_size: Channels of the residual stream E.
        scale: Factor on `q @ k.T`; `None` means `head_dim ** -0.5` (T5 uses 1).
        layer: Index of the layer in its stack.
        causal: Whether queries see earlier keys only (decoders) or all keys (encoders).
        inv_freq: Frequencies of the model's own rotary encoding, float `[D / 2]`, if it has one.
        max_positions: The length the model was trained for, if it says so.
        rotary_scaling: Factor on the rotated queries and keys that goes with `inv_freq` (YaRN, longrope).
        rotary_limit: The length up to which the model uses `inv_freq`, if it changes them beyond (dynamic, longrope).
        native: The model's own table of positions or distances, if it has one.
        embedding_rms: Root mean square of the token embeddings, to bring absolute encodings to their size.
    """

    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    scale: float | None = None
    layer: int = 0
    causal: bool = True
    inv_freq: Tensor | None = None
    max_positions: int | None = None
    rotary_scaling: float = 1.0
    rotary_limit: int | None = None
    native: NativeTable | None = None
    embedding_rms: float | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "hidden_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"Geometry({name}={value!r}): expected a positive integer.")
        if self.heads % self.kv_heads:
            raise OptionError(
                f"Geometry(heads={self.heads}, kv_heads={self.kv_heads}): heads must be a multiple of kv_heads."
            )
        if self.scale is None:
            object.__setattr__(self, "scale", self.head_dim**-0.5)

    def native_table(self, kind: str) -> NativeTable | None:
        """Return the model's own table if it is of this kind."""
        return self.native if self.native is not None and self.native.kind == kind else None


@dataclass(frozen=True, eq=False)
class Positions:
    """Where queries and keys stand, in tokens (never where they are stored).

    Attributes:
        query: int64 `[B|1, Q]`.
        key: int64 `[B|1, K]`.
        coords: Optional float coordinates of the queries' tokens for n-dimensional schemes, `[B|1, Q, n]`.
    """

    query: Tensor
    key: Tensor
    coords: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of the attention matrix: the unit on which `score`, `weigh` and `mix` are defined.

    Attributes:
        positions: Positions of these rows, and of all keys.
        reach: A bound on the distance between any query and any key; lets tables be sized without reading tensors.
        keep: Which keys each row may see, bool `[B|1, H|1, q|1, K]`; `None` means all.
        hidden: The hidden states that the rows were projected from, `[B, q, E]`, where the caller has them.
        state: Per-token state of the keys that `project` handed out, each `[B, ..., K, ...]`.
    """

    positions: Positions
    reach: int
    keep: Tensor | None = None
    hidden: Tensor | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def distance(self) -> Tensor:
        """Return query position minus key position, int64 `[B|1, q, K]`; negative for keys ahead of the query."""
        return self.positions.query[:, :, None] - self.positions.key[:, None, :]


@dataclass(frozen=True, eq=False)
class Projection:
    """What `Scheme.project` returns: queries `[B, H, Q, D]`, keys and values `[B, G, K, D]`, state to be cached."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)


class Scheme(nn.Module):
    """A positional scheme for one attention layer, or shared by all layers of a stack.

    A subclass overrides one or more of the seams `embed`, `project`, `score`, `weigh`, `mix` and `finish`. Options are
    the keyword-only arguments of its `__init__`; each is stored, resolved, as an attribute of the same name.

    Parameters are created in float32 and stay so when the model is cast to half precision: distances and tables lose
    their meaning there (the first integer that bfloat16 cannot hold is 257).
    """

    # The kind of native encoding that this scheme can reproduce ("rotary", "learned", "t5"), if any.
    reproduces: ClassVar[str | None] = None
    # Options with which the scheme starts as an exact no-op beside the kept native encoding; None if there are none.
    neutral_options: ClassVar[Mapping[str, Any] | None] = None
    # Whether the scheme is one module for the whole stack rather than one per layer.
    shared: bool = False

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry

    def reset_parameters(self) -> None:
        """Set the parameters to their start, with the functions of `torch.nn.init` only.

        Loading a checkpoint calls this for parameters that the file lacks; transformers guards `torch.nn.init` then, so
        that loaded values are left alone.
        """

    # -- seams ---------------------------------------------------------------------------------------------------------

    def embed(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first layer, `[B, S, E]`, given token embeddings and int64 positions `[B|1, S]`."""
        return inputs

    def project(self, hidden: Tensor | None, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Projection:
        """Transform fresh queries, keys and values before they are cached; may hand out per-token state."""
        return Projection(q, k, v)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        """Return the logits `[B, H, q, K]` with positions in them; the given ones are scaled, float32 or wider."""
        return logits

    def weigh(self, logits: Tensor, keep: Tensor | None) -> Tensor:
        """Turn logits into weights `[B, H, q, K]`. Masking replaces: `-inf + bias` could overflow or give NaN."""
        if keep is not None:
            logits = logits.masked_fill(~keep, torch.finfo(logits.dtype).min)
        return logits.softmax(dim=-1)

    def mix(self, weights: Tensor, v: Tensor, block: Block) -> Tensor:
        """Combine values `[B, G, K, D]` by weights `[B, H, q, K]` into `[B, H, q, D]`."""
        return grouped_matmul(weights, v)

    def finish(self, output: Tensor, hidden: Tensor | None) -> Tensor:
        """Return the output `[B, H, Q, D]` as the output projection gets it."""
        return output

    # -- what a scheme says of itself ------------------------------------------------------------------------------

    def overrides(self, seam: str) -> bool:
        """Whether this scheme does anything at `seam`."""
        return getattr(type(self), seam) is not getattr(Scheme, seam)

    def starts_exact(self, *, native_kept: bool) -> bool:
        """Whether a freshly patched model computes the same function as before."""
        return False

    def cautions(self, *, native_kept: bool) -> list[str]:
        """Return what a user should know before giving a model this scheme."""
        return []

    def state_bytes_per_token(self) -> int:
        """Bytes that `project` hands to the cache per token and layer, beside keys, values and positions."""
        return 0

    def options(self) -> dict[str, Any]:
        """Return the resolved options: what `build` needs to make the same scheme again."""
        return {name: getattr(self, name) for name in option_names(type(self))}

    # -- module behaviour --------------------------------------------------------------------------------------------

    def forward(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call `function(self, ...)` as this module's forward.

        Wrappers that bring parameters in just in time (offloading, FSDP) or choose between copies (PEFT) act on a
        module's `forward`; going through it makes every use of the scheme visible to them.
        """
        return function(self, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Scheme:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype.itemsize < 4:
                return tensor.to(device=moved.device, dtype=torch.promote_types(tensor.dtype, torch.float32))
            return moved

        super()._apply(keep_precision, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options().items())


def option_names(scheme: type[Scheme]) -> tuple[str, ...]:
    """Return the names of the options of a scheme class, in order."""
    parameters = inspect.signature(scheme.__init__).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def grouped_matmul(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply `[B, H, q, x]` by `[B, G, x, y]` with each kv head serving H / G query heads, without repeating it."""
    batch, heads, length, width = rows.shape
    groups = shared.shape[1]
    if groups == heads:
        return rows @ shared
    folded = rows.reshape(batch, groups, heads // groups * length, width) @ shared  # [B, G, H/G * q, y]
    return folded.view(batch, heads, length, shared.shape[-1])


def set_start(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter to a computed start, as `torch.nn.init` does to fixed ones.

    A parameter that transformers has just loaded, or one without storage (meta device), is left alone.
    """
    if getattr(parameter, "_is_hf_initialized", False) or parameter.is_meta or value.is_meta:
        return
    with torch.no_grad():
        parameter.copy_(value)
