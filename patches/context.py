"""The context that the body of a model hands to its layers: the new tokens, read from the arguments of a forward.

The steps are `read` (mask, packed samples, real tokens), `resolve_positions`, `sequences` and `same_sequence`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from hf_posenc.errors import CacheError, PositionError, ShapeError
from hf_posenc.operands import LARGEST_COUNT, Block, Positions, check_tensor
from hf_posenc.patches.record import FULL, Strengths
from hf_posenc.scheme import Scheme


class _Disabled(threading.local):
    """The ids of the modules whose patch is disabled in the running thread."""

    def __init__(self) -> None:
        # Set on the instance, since torch.compile guards attributes that exist and misses those added later.
        self.modules: frozenset[int] = frozenset()


class _Running(threading.local):
    """State of the body that runs in this thread, for its parts to which the stock forward passes no keywords.

    Attributes:
        context: Context of the call, for layers.
        embed: Function that lets schemes act on embeddings, for a table that is read and not called.
    """

    def __init__(self) -> None:
        self.context: Context | None = None
        self.embed: Callable[[Tensor], Tensor] | None = None


DISABLED, RUNNING = _Disabled(), _Running()

# Keywords of transformers that say where packed samples begin: ends, numbers, and the lengths of the longest.
_ENDS, _NUMBERS = ("cu_seq_lens_q", "cu_seq_lens_k"), "seq_idx"
STARTS = (*_ENDS, _NUMBERS, "max_length_q", "max_length_k")


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
class Inputs:
    """The new tokens of a forward.

    Attributes:
        positions: int64 `[B|1, S]`.
        reach: The largest position, a bound on every distance.
        real: Mask of tokens that are not padding, bool `[B|1, S]`; `None` means all.
        coords: Coordinates in n dimensions, float `[B|1, S, n]`, where the caller gave some.
        packed: Numbers of the sequences that are packed into rows, int64 `[B|1, S]`, 0 at padding; `None` if each row
            is one sequence.
        ruled: Whether padding and the order of tokens say all about which keys a causal layer sees, windows aside.
        made: Values that layers share, see `Positions.once`.
    """

    positions: Tensor
    reach: int
    real: Tensor | None = None
    coords: Tensor | None = None
    packed: Tensor | None = None
    ruled: bool = False
    made: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def places(self) -> Positions:
        """Positions and coordinates of the tokens as queries and as keys."""
        return Positions(self.positions, self.positions, self.coords, self.coords, self.made)

    def rows(self, batch: int) -> Tensor:
        """Return a position for each token of each row, one tensor for all layers, `[B, S]`."""
        return self.places.once(lambda: self.positions.expand(batch, -1), "rows", batch)

    def joined(self, held: Tensor, fresh: Tensor) -> Tensor:
        """Return the positions that a layer's cache held, `[B, K]`, and fresh ones; one tensor for layers with one."""
        _, found = self.places.once(lambda: (held, torch.cat([held, fresh], dim=1)), "joined", id(held))
        return found

    def against(self, keys: Tensor) -> Positions:
        """Return the positions of the tokens against those of keys `[B, K]`, one record for layers that have these."""
        _, found = self.places.once(lambda: (keys, self._against(keys)), "against", id(keys))
        return found

    def _against(self, keys: Tensor) -> Positions:
        # An empty cache hands the expanded row back: one bias serves all rows.
        return Positions(self.positions, keys[:1] if keys.stride(0) == 0 else keys)


@dataclass(frozen=True, eq=False)
class Native:
    """The model's own encoding, where it is kept.

    Attributes:
        strength: Strength of it.
        score: Adds the bias to a block of logits, if there is one.
        parameters: Trained tensors that `score` reads.
        passes_bias: Whether the first layer must compute the bias for unpatched layers after it.
        rotation: Cosines and sines at part of the strength, by type of layer (the empty string where there is one
            rotation); empty at full strength.
        shares: Cosines and sines of the rotations of which a share stays, by share, type of layer and device.
    """

    strength: float = 1.0
    score: Callable[[Tensor, Block], Tensor] | None = None
    parameters: tuple[Tensor, ...] = ()
    passes_bias: bool = False
    rotation: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    shares: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)


# Given a scheme, and queries, keys and values with their positions: the ones that a server keeps and attends with.
Kept: TypeAlias = Callable[[Scheme, Tensor, Tensor, Tensor, Positions], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Context:
    """What a body hands to its layers.

    Attributes:
        inputs: The new tokens; `None` while the patch is disabled, which sends every layer to its stock forward.
        native: The model's own encoding.
        shared: Holds the schemes that are shared by layers, by group.
        strength: Strength of the schemes.
        dense: Whether the dense reference runs, which gives weights.
        carried: State that the layers of each group hand on, by group; filled between layers, never inside one.
        passage: The state inside of a layer that carries some.
        outside: By layer, if a server attends, which has the earlier keys: its queries, keys and values, where they
            are not those of the scheme. `None` if no server attends.
    """

    inputs: Inputs | None
    native: Native  # no default: torch.compile could not make one
    shared: nn.Module | None = None
    strength: float = 1.0
    dense: bool = False
    carried: dict[int, Tensor | None] = field(default_factory=dict)
    passage: Passage | None = None
    outside: Mapping[int, Kept] | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Context:
        """Move what belongs to the tokens, as accelerate does with all inputs of a layer on another device."""
        if self.inputs is None:
            return self

        def moved(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=non_blocking)

        real, coords = (None if x is None else moved(x) for x in (self.inputs.real, self.inputs.coords))
        inputs = replace(self.inputs, positions=moved(self.inputs.positions), real=real, coords=coords, made={})
        rotation = {kind: (moved(cos), moved(sin)) for kind, (cos, sin) in self.native.rotation.items()}
        return replace(self, inputs=inputs, native=replace(self.native, rotation=rotation))


# -- the arguments of a forward ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Request:
    """What the arguments of a forward say about its new tokens.

    Attributes:
        past: Number of tokens in the cache; a static cache counts in a tensor.
        mask: The `attention_mask`, 2-D or 4-D; `None` where there is none, or one for each type of layer.
        ruled: Whether no mask but one for padding was given.
        given: Positions that the caller passed.
    """

    batch: int
    length: int
    device: torch.device
    past: int | Tensor = 0
    mask: Tensor | None = None
    ruled: bool = True
    given: Tensor | None = None
    samples: Mapping[str, Tensor] = field(default_factory=dict)
    real: Tensor | None = None

    @property
    def placed(self) -> bool:
        """Whether the caller said where tokens are, by positions or by samples."""
        return self.given is not None or bool(self.samples)

    def may_be_packed(self) -> bool:
        """Whether rows may hold several sequences: the caller said where tokens are, and nothing came before."""
        # A graph cannot read how much a static cache holds, and takes rows with a mask for padded.
        readable = not torch.compiler.is_compiling() or (isinstance(self.past, int) and self.mask is None)
        return self.ruled and self.placed and self.length > 1 and readable and bool(self.past == 0)


def read(
    call: dict[str, Any], tokens: Tensor, past: int | Tensor, given: Tensor | None, real: Tensor | None = None
) -> Request:
    """Check the mask of a forward, take the numbers of packed samples out of its arguments, and tell real tokens."""
    stated = call.get("attention_mask")
    # A dict has the masks of generation, one for each type of layer.
    mask = None if isinstance(stated, dict) else stated
    ruled = stated is None or (mask is not None and mask.ndim == 2)
    check_mask(mask)
    request = Request(tokens.shape[0], tokens.shape[1], tokens.device, past, mask, ruled, given)
    check_length(request, counts=given is None)
    samples = stated_samples(call, request)
    return replace(request, samples=samples, real=real_tokens(mask, past, request.length) if real is None else real)


def check_tensors(call: Mapping[str, Any]) -> None:
    """Raise if an argument of a forward that holds numbers for each token is of a wrong type.

    A dict of masks has one for each type of layer.
    """
    for name, value in call.items():
        if not (name.endswith(("_ids", "_mask", "_embeds")) or name in (*_ENDS, _NUMBERS)):
            continue
        for each in value.values() if name.endswith("_mask") and isinstance(value, Mapping) else (value,):
            check_tensor(name, each, optional=True)
        counts = not isinstance(value, Tensor) or not (
            value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
        )
        if name.endswith("position_ids") and not counts:
            raise PositionError(f"Got {name} of dtype {value.dtype}; expected int64.")


def check_mask(mask: Tensor | None) -> None:
    """Raise if the shape or the values of an attention mask contradict its kind; transformers accepts some silently.

    Values are not read while a graph is traced.
    """
    if mask is None:
        return
    if mask.ndim not in (2, 4) or mask.is_complex():
        raise ShapeError(
            f"Got an attention_mask of {mask.dtype} and shape {list(mask.shape)}; expected [batch, tokens], with 0 for "
            "padding, or [batch, 1, queries, keys] of bool or float."
        )
    if mask.dtype == torch.bool or torch.compiler.is_compiling():
        return
    zeros_and_ones = (mask == 0) | (mask == 1)
    if mask.ndim == 2 and (bool((mask < 0).any()) or (mask.is_floating_point() and not bool(zeros_and_ones.all()))):
        raise ShapeError(
            "Got a 2-D attention_mask with other values than 0 and 1; expected 1 for a token and 0 for padding, or "
            "integers that number packed samples from 1 on. Pass masks that are added to logits in 4-D: [batch, 1, "
            "queries, keys]."
        )
    if mask.ndim == 4 and not mask.is_floating_point() and not bool(zeros_and_ones.all()):
        raise ShapeError(
            f"Got a 4-D attention_mask of {mask.dtype} with other values than 0 and 1; expected bool (True may be "
            "seen), or floats that are added to the logits."
        )
    if mask.ndim == 4 and bool((mask.isnan() | (mask == torch.inf)).any()):
        raise ShapeError(
            "Got an attention_mask with NaN in it, or +inf; expected 0 where a key may be seen, -inf where not."
        )
    if mask.ndim == 4 and mask.is_floating_point() and bool((mask == 1).any()) and bool(zeros_and_ones.all()):
        raise ShapeError(
            "Got a 4-D attention_mask of floating zeros and ones, which would be added to logits and hide nothing. "
            "Pass it as bool (True may be seen), or with 0 and -inf."
        )


def check_length(request: Request, *, counts: bool) -> None:
    """Raise `PositionError` unless a 2-D mask has an entry for each token, in the cache or new.

    How much a static cache holds is read only if the mask `counts` tokens: else the device would wait for nothing.
    """
    mask, past, batch, length = request.mask, request.past, request.batch, request.length
    if mask is None or mask.ndim != 2 or not (isinstance(past, int) or (counts and not torch.compiler.is_compiling())):
        return
    first = int(past)
    if mask.shape[0] != batch or mask.shape[1] < first + length:
        raise PositionError(
            f"Got an attention_mask of shape {list(mask.shape)}; expected [{batch}, {first + length}]: one entry for "
            f"each of the {first} tokens in the cache and the {length} new ones."
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


# -- packed rows -----------------------------------------------------------------------------------------------------


def stated_samples(call: dict[str, Any], request: Request) -> dict[str, Tensor]:
    """Take the arguments of a forward that say where packed samples begin.

    These are `cu_seq_lens_q` and `cu_seq_lens_k`, ends of samples for kernels that read no mask; `seq_idx`, numbers
    from 0 on; or a 2-D mask of numbers from 1 on, of which a traced graph does not tell.

    Returns:
        The numbers of samples by each argument, which never fall within a row, int64 `[B, S]`.
    """
    mask, past, batch, length = request.mask, request.past, request.batch, request.length
    device = request.device
    given = {name: call.pop(name, None) for name in STARTS}
    found, traced = {}, torch.compiler.is_compiling()
    for name, ends in given.items():
        if ends is None or name not in _ENDS:
            continue  # Lengths of the longest say nothing more.
        numbers = torch.bucketize(torch.arange(batch * length, device=device), ends.to(device)[1:], right=True)
        found[name] = numbers = numbers.view(batch, length)
        whole = ends.ndim == 1 and len(ends) > 1 and not ends.is_floating_point()
        if not traced and whole:
            whole = int(ends[0]) == 0 and int(ends[-1]) == batch * length and bool((ends.diff() >= 0).all())
            whole = whole and not bool((numbers[1:, 0] == numbers[:-1, -1]).any())
        if not whole:
            raise PositionError(
                f"Got {name} of shape {list(ends.shape)} that do not fit {batch} rows of {length} tokens; expected the "
                f"ends of all samples, from 0 to {batch * length}, and none that goes on in the next row."
            )
    if given[_NUMBERS] is not None:
        found[_NUMBERS] = given[_NUMBERS].to(device)
    if mask is not None and mask.ndim == 2 and not (mask.is_floating_point() or mask.dtype == torch.bool or traced):
        several = bool(_starts(mask, mask != 0, torch.ne).any())
        found |= {"attention_mask": mask[:, :length].to(device)} if several else {}
    for name, numbers in found.items():
        if not traced and bool(past != 0):
            raise CacheError(
                f"Got {name} with packed samples, and {int(past)} tokens are in the cache. Use a row for each sample."
            )
        real = None if mask is None or mask.ndim != 2 or traced else mask[:, :length].to(device) != 0
        if list(numbers.shape) != [batch, length] or numbers.is_floating_point() or numbers.dtype == torch.bool:
            raise PositionError(
                f"Got {name} of shape {list(numbers.shape)} and dtype {numbers.dtype}; expected integers [{batch}, "
                f"{length}], the number of the sample of each token."
            )
        if not traced and bool(_starts(numbers, real, torch.lt).any()):
            raise PositionError(f"Got {name} with numbers of samples that fall within a row; expected them to rise.")
    return {name: numbers.long() for name, numbers in found.items()}


def refuse_samples(call: Mapping[str, Any], instead: str) -> None:
    """Raise `PositionError` if there is any argument that says where samples begin, other than masks."""
    given = next((name for name in STARTS if call.get(name) is not None), None)
    if given is not None:
        raise PositionError(f"Got {given}; {instead}")


def _starts(values: Tensor, real: Tensor | None, compare: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return where a value `[B|1, S]` and that of the real token before it compare, bool; not at padding."""
    if real is None:
        return nn.functional.pad(compare(values[:, 1:], values[:, :-1]), (1, 0))
    values = values.expand(len(real), -1)
    slots = torch.arange(values.shape[1], device=values.device).expand(values.shape)
    earlier = nn.functional.pad(slots.where(real, -1).cummax(1).values[:, :-1], (1, 0), value=-1)
    return real & (earlier >= 0) & compare(values, values.gather(1, earlier.clamp_min(0)))


def counted_within(numbers: Tensor, real: Tensor | None) -> Tensor:
    """Return positions that count the real tokens of each sample, int64 `[B, S]`, given the numbers of samples."""
    count = (torch.ones_like(numbers) if real is None else real.long()).cumsum(-1) - 1
    return (count - count.where(_starts(numbers, real, torch.ne), 0).cummax(-1).values).clamp_min(0)


def sequences(
    positions: Tensor, real: Tensor | None = None, stated: Mapping[str, Tensor] | None = None
) -> Tensor | None:
    """Number the sequences that are packed into each row, int64 `[B|1, S]`; `None` if every row is one sequence.

    A sequence begins where the position `[B|1, S]` of a token is not greater than that of the one before it. (A jump
    ahead, as in position skipping, begins none, although transformers takes it for a boundary.) Padding is skipped, and
    has the number 0. While a graph is traced, one sequence is numbered, too.
    """
    stated, begins = stated or {}, _starts(positions, real, torch.le)
    if not torch.compiler.is_compiling():
        for name, numbers in stated.items():
            if bool((_starts(numbers, real, torch.ne) != begins).any()):
                raise PositionError(
                    f"Got {name} that begins samples at other tokens than position_ids or another argument does; "
                    "expected positions that start again with each sample. Leave one of them out."
                )
        if not bool(begins.any()):
            return None
    # Numbers of the mask are compared with those of another stack.
    numbers = stated.get("attention_mask", begins.long().cumsum(-1) + 1)
    return numbers if real is None else numbers.masked_fill(~real, 0)


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


def resolve_positions(request: Request, counted: Tensor | None = None) -> Tensor:
    """Return the positions of the new tokens, int64 `[B|1, S]`; one row where all rows agree.

    Explicit positions win. Otherwise the real tokens of stated samples are counted; otherwise the model counts in a way
    of its own (`counted`). Otherwise a 2-D padding mask is counted, so that the first real token of a left-padded row
    is at 0 (transformers does that in `generate` only). Otherwise tokens follow what is in the cache.
    """
    batch, length, device, past, mask = request.batch, request.length, request.device, request.past, request.mask
    traced = torch.compiler.is_compiling()
    if request.given is not None:
        counted = request.given
    elif request.samples:
        counted = counted_within(next(iter(request.samples.values())), request.real)
    if counted is not None:
        if counted.ndim != 2 or counted.shape[1] != length or counted.shape[0] not in (1, batch):
            raise PositionError(
                f"Got position_ids of shape {list(counted.shape)}; expected [{batch} or 1, {length}], one per input "
                "token."
            )
        positions = counted.to(device=device, dtype=torch.long)
        if not traced and positions.numel() and int(positions.min()) < 0:
            raise PositionError(f"Got position {int(positions.min())}; positions count from 0.")
        if not traced and positions.numel() and int(positions.max()) > LARGEST_COUNT:
            raise PositionError(f"Got position {int(positions.max())}; expected at most {LARGEST_COUNT:,}.")
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
