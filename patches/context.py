"""The context that the body of a model hands to its attention layers, once per forward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PositionError, ShapeError
from hf_posenc.operands import Block
from hf_posenc.patches.record import FULL, Strengths
from hf_posenc.scheme import Scheme


class _Disabled(threading.local):
    """The ids of the modules whose patch is disabled in the running thread."""

    def __init__(self) -> None:
        # Set on the instance, since torch.compile guards attributes that exist and misses those added later.
        self.modules: frozenset[int] = frozenset()


DISABLED = _Disabled()


class Mixin:
    """Base of mixins, whose other attributes are those of a class of transformers."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Switch(Mixin):
    """Mixin of modules that run their stock forward where `disabled` says so."""

    posenc_disabled: bool = False  # an adapter's doing, or in a replica
    # Strengths of the model's own encoding and of the schemes; whether the former was removed.
    posenc_strengths: Strengths = FULL
    posenc_removed: bool = False

    def is_disabled(self) -> bool:
        """Whether the patch of this module is disabled, by the running thread or by an adapter."""
        return id(self) in DISABLED.modules or self.posenc_disabled

    def _replicate_for_data_parallel(self) -> Any:
        # The threads that run replicas compute a part of the caller's forward.
        replica = super()._replicate_for_data_parallel()  # type: ignore[misc]
        replica.posenc_disabled = self.is_disabled()
        return replica


@dataclass(eq=False)
class Passage:
    """The state that a scheme carries through one layer, see `Scheme.carry` and `Scheme.feed`.

    It lives for one forward of that layer. Layers exchange state by arguments and results only, so that activation
    checkpointing recomputes a layer from the same state.
    """

    carried: Tensor | None = None
    # The scheme of the layer, once its attention has run.
    scheme: Scheme | None = None


@dataclass(frozen=True, eq=False)
class Context:
    """Positions of the new tokens, and the modules that layers share.

    Attributes:
        positions: int64 `[B|1, S]`; `None` while the patch is disabled, which sends every layer to its stock forward.
        coords: Their coordinates in n dimensions, float `[B|1, S, n]`, where the caller gave some.
        reach: The largest position, a bound on every distance.
        real: Mask of the new tokens that are not padding, bool `[B|1, S]`; `None` means all.
        shared: Holds the schemes that are shared by layers, by group.
        native_score: Adds the model's own additive encoding to a block of logits, if it has one.
        native_rotation: Cosines and sines of the model's own rotation at part of its strength, by type of layer (the
            empty string where there is one rotation); empty at full strength.
        passes_native_bias: Whether the first layer must compute that encoding for unpatched layers after it.
        carried: State that the layers of each group hand on, by group; filled between layers, never inside one.
        ruled: Whether padding and the order of tokens say all about which keys a causal layer sees, windows aside.
        packed: Numbers of the packed sequences that the new tokens belong to, int64 `[B|1, S]`; `None` if each row is
            one sequence.
        dense: Whether the dense reference runs, which gives weights.
    """

    positions: Tensor | None = None
    reach: int = 0
    shared: nn.Module | None = None
    strength: float = 1.0
    native_score: Callable[[Tensor, Block], Tensor] | None = None
    native_strength: float = 1.0
    native_parameters: tuple[Tensor, ...] = ()
    native_rotation: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    passes_native_bias: bool = False
    real: Tensor | None = None
    carried: dict[int, Tensor | None] = field(default_factory=dict)
    passage: Passage | None = None
    coords: Tensor | None = None
    packed: Tensor | None = None
    dense: bool = False
    ruled: bool = False

    def to(self, device: torch.device, non_blocking: bool = False) -> Context:
        """Move what belongs to the tokens, as accelerate does with all inputs of a layer on another device."""
        if self.positions is None:
            return self

        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        real, coords = (None if x is None else moved(x) for x in (self.real, self.coords))
        rotation = {kind: (moved(cos), moved(sin)) for kind, (cos, sin) in self.native_rotation.items()}
        return replace(self, positions=moved(self.positions), coords=coords, real=real, native_rotation=rotation)


def check_mask(mask: Tensor | None) -> None:
    """Raise if the values of an attention mask contradict its kind; transformers accepts such masks silently.

    Only floating masks are read, and none while a graph is traced.

    Raises:
        ShapeError: A 2-D mask is to be added, a 4-D one is not, or one holds NaN.
    """
    if mask is None or not mask.is_floating_point() or torch.compiler.is_compiling():
        return
    zeros_and_ones = (mask == 0) | (mask == 1)
    if mask.ndim == 2 and not bool(zeros_and_ones.all()):
        raise ShapeError(
            "Got a 2-D attention_mask with other values than 0 and 1; expected 1 for a token and 0 for padding. Pass "
            "masks that are added to logits in 4-D: [batch, 1, queries, keys]."
        )
    if mask.ndim == 4 and bool(mask.isnan().any()):
        raise ShapeError("Got an attention_mask with NaN in it; expected 0 where a key may be seen, -inf where not.")
    if mask.ndim == 4 and bool((mask == 1).any()) and bool(zeros_and_ones.all()):
        raise ShapeError(
            "Got a 4-D attention_mask of floating zeros and ones, which would be added to logits and hide nothing. "
            "Pass it as bool (True may be seen), or with 0 and -inf."
        )


def real_tokens(mask: Tensor | None, past: int | Tensor, length: int) -> Tensor | None:
    """Return which of the new tokens a 2-D padding mask calls real, bool `[B, S]`; `None` if all are.

    While a graph is traced, it is `None` only without a mask.
    """
    if mask is None or mask.ndim != 2:
        return None
    slots = torch.arange(length, device=mask.device) + (past.to(mask.device) if isinstance(past, Tensor) else past)
    real = mask.index_select(1, slots) != 0
    return None if not torch.compiler.is_compiling() and bool(real.all()) else real


def sequences(positions: Tensor, real: Tensor | None = None) -> Tensor | None:
    """Number the sequences that are packed into each row, int64 `[B|1, S]`; `None` if every row is one sequence.

    A sequence begins where positions `[B|1, S]` do not grow. (A jump ahead, as in position skipping, begins none,
    although transformers takes it for a boundary.) While a graph is traced, one sequence is numbered, too. The mask of
    `real` tokens is bool `[B|1, S]`; `None` means all.

    Raises:
        PositionError: Packed rows are padded, too. A traced graph does not tell.
    """
    restarts = positions[:, 1:] <= positions[:, :-1]
    if not torch.compiler.is_compiling():
        if real is not None:
            restarts = restarts & real[:, 1:] & real[:, :-1]
        if not bool(restarts.any()):
            return None
        if real is not None:
            raise PositionError(
                "Got position_ids that start again inside of rows that have padding; a row is padded or packed. Leave "
                "the padding out, or give a 4-D attention_mask."
            )
    return torch.nn.functional.pad(restarts.long().cumsum(-1), (1, 0))


def same_sequence(queries: Tensor, keys: Tensor, *, causal: bool, float_dtype: torch.dtype | None) -> Tensor:
    """Return a mask `[B|1, 1, Q, K]` that lets tokens see those of their own sequence, by its number `[B|1, Q|K]`.

    If `causal`, it hides keys in later slots too; the queries are the last of the keys. With a `float_dtype` it is to
    be added, without one it is bool.
    """
    keep = queries[:, :, None] == keys[:, None, :]
    keep = (keep.tril(keys.shape[1] - queries.shape[1]) if causal else keep)[:, None]
    if float_dtype is None:
        return keep
    hidden = torch.finfo(float_dtype).min
    return torch.zeros(keep.shape, dtype=float_dtype, device=keep.device).masked_fill(~keep, hidden)


def this_thread() -> int:
    """Return a number of the thread that runs; 0 while code is traced for a compiler, which knows no threads."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def is_this_thread(number: int) -> bool:
    """Whether a number from `this_thread` is that of the running thread, or of none, as in compiled code."""
    return number in (0, this_thread()) or torch.compiler.is_compiling()


def resolve_positions(
    given: Tensor | None, mask: Tensor | None, past: int | Tensor, batch: int, length: int, device: torch.device
) -> Tensor:
    """Return the positions of the new tokens, int64 `[B|1, S]`; one row where all rows agree.

    Explicit positions win. Otherwise a 2-D padding mask is counted, so that the first real token of a left-padded row
    is at 0 (transformers does that in `generate` only). Otherwise tokens follow what is in the cache.

    Raises:
        PositionError: The positions or the mask do not fit the inputs.
    """
    traced = torch.compiler.is_compiling()
    if mask is not None and mask.ndim == 2 and (isinstance(past, int) or (given is None and not traced)):
        # With positions given, reading how much a static cache holds would only make the device wait.
        first = int(past)
        if mask.shape[0] != batch or mask.shape[1] < first + length:
            raise PositionError(
                f"Got an attention_mask of shape {list(mask.shape)}; expected [{batch}, {first + length}]: one entry "
                f"for each of the {first} tokens in the cache and the {length} new ones."
            )
    if given is not None:
        if given.ndim != 2 or given.shape[1] != length or given.shape[0] not in (1, batch):
            raise PositionError(
                f"Got position_ids of shape {list(given.shape)}; expected [{batch} or 1, {length}], one per input "
                "token."
            )
        if given.is_floating_point() or given.dtype == torch.bool:
            raise PositionError(f"Got position_ids of dtype {given.dtype}; expected int64.")
        positions = given.to(device=device, dtype=torch.long)
        if not traced and positions.numel() and int(positions.min()) < 0:
            raise PositionError(f"Got position {int(positions.min())}; positions count from 0.")
    elif mask is not None and mask.ndim == 2:
        counted = ((mask.to(device) != 0).long().cumsum(-1) - 1).clamp_min(0)
        slots = slice(past, past + length) if isinstance(past, int) else torch.arange(length, device=device) + past
        positions = counted[:, slots]
    else:
        positions = (torch.arange(length, device=device) + past)[None]
    if not traced and positions.shape[0] > 1 and bool((positions == positions[:1]).all()):
        # One row of positions lets all rows share one bias.
        positions = positions[:1]
    return positions
