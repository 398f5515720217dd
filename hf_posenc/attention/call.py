"""One call of attention in one record, and what every executor can be asked about it."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hf_posenc.attention.mask import Mask, sees_ahead, slots_tell_distances
from hf_posenc.operands import Block, Positions, Projection, Tokens
from hf_posenc.ops import transformed
from hf_posenc.scheme import Scheme

# Minimum number of queries for the fused paths: fewer are not worth their calls.
FEWEST_QUERIES = 32
# Part of a tensor.
Index: TypeAlias = tuple[slice, ...]
# Operands of a call: the axis along which they have a part for each query or key.
_SIDES = {
    "q": (2, "queries"),
    "k": (2, "keys"),
    "v": (2, "keys"),
    "content_q": (2, "queries"),
    "content_k": (2, "keys"),
    "state": (1, "keys"),
    "own": (1, "queries"),
    "tables": (0, "all"),
}


class Rows(NamedTuple):
    """The queries `start:stop` and the keys `first:keys`."""

    start: int
    stop: int
    keys: int
    first: int = 0

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class Call:
    """All that an executor needs to know.

    Attributes:
        scheme: Scheme; its `score`, `weigh` and `mix` are run.
        q: Projected queries `[B, H, Q, D]`.
        k: Keys `[B, G, K, D]`, or `[B, H, K, D]` from a scheme whose keys differ by query head.
        v: Values `[B, G, K, D]`.
        reach: Upper bound on every distance, see `Block`.
        scale: Factor on `q @ k.T`.
        state: Per-token state of the keys.
        own: Per-token state of the queries' tokens.
        tables: Tensors that the scheme made once for this call.
        content_q: Queries without the native rotation, if there is one.
        content_k: Keys without the native rotation, if the scheme reads them.
        native_score: Adds the model's own additive encoding to the logits of a block, where that is kept.
        parameters: Trained tensors that `native_score` reads, and the sinks.
        softcap: Bound c on the products: logits are `c * tanh(logits / c)` before the scheme sees them.
        sinks: Logit of each head `[H]` that takes part in the softmax for no key.
        dropout: Probability that a weight is dropped; 0 outside training.
        upcast: Multiply queries and keys in float32 whatever their dtype.
        need_weights: Return the weights, too.
    """

    scheme: Scheme
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Positions
    reach: int
    scale: float
    mask: Mask = field(default_factory=Mask)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    content_q: Tensor | None = None
    content_k: Tensor | None = None
    native_score: Callable[[Tensor, Block], Tensor] | None = None
    parameters: tuple[Tensor, ...] = ()
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    upcast: bool = False
    need_weights: bool = False

    @classmethod
    def of(
        cls,
        scheme: Scheme,
        tokens: Tokens,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        meet: Callable[[Projection], Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> "Call":
        """Project tokens and recall the keys that they meet: the one way from a scheme to a call."""
        projected = scheme.project(tokens, q, k, v)
        own, length = projected.state, q.shape[2]
        if k.shape[2] != length:
            own = {name: tensor[:, -length:] for name, tensor in own.items()}
        given: dict[str, Any] = {
            "q": projected.q,
            "k": projected.k,
            "v": projected.v,
            "positions": tokens.positions,
            "scale": scheme.geometry.scale,
            "state": projected.state,
            "own": {**own, **projected.own},
            "tables": projected.tables,
            **fields,
        }
        if meet is not None:
            given.update(meet(projected))
        given["k"] = scheme.recall(given["k"], given["state"])
        if "reach" not in given:
            given["reach"] = reach(given["positions"])
        return cls(scheme, **given)

    @property
    def queries(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def precise(self) -> torch.dtype:
        """Dtype of logits and biases: float32, or that of the queries if it is wider."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def causal(self) -> bool:
        """Whether the layer is causal, and no query sees a key at a later position all the same.

        While a graph is traced, which has no numbers, some may wherever no rule forbids it.
        """
        if not self.scheme.geometry.causal or self.mask.rule != "all":
            return self.scheme.geometry.causal
        return not (torch.compiler.is_compiling() or transformed() or self._sees_ahead)

    @functools.cached_property
    def _sees_ahead(self) -> bool:
        return sees_ahead(self.positions, self.mask)

    @property
    def one_softmax(self) -> bool:
        """Whether nothing but the scheme and the mask acts on the logits and weights, and operands have one dtype."""
        plain = self.native_score is None and not self.dropout and not self.upcast and not self.reshaped
        return plain and self.q.dtype == self.k.dtype == self.v.dtype

    @property
    def reshaped(self) -> bool:
        """Whether the call has a softcap on its logits, or attention sinks."""
        return self.softcap is not None or self.sinks is not None

    @functools.cached_property
    def slots_tell_distances(self) -> bool:
        """Whether every visible key is as far from its query in positions as in slots."""
        # Queries are the last of the keys, or no slots of theirs are known.
        return self.queries <= self.keys and slots_tell_distances(
            self.positions, self.mask, causal=self.scheme.geometry.causal
        )

    def blocks(self, rows: int) -> Iterator[Rows]:
        """Return blocks of so many queries, each with the keys that it can see."""
        cut = self.mask.window is not None and self.slots_tell_distances
        for start in range(0, self.queries, rows):
            stop = min(start + rows, self.queries)
            first = self.mask.first_needed(start) if cut else 0
            yield Rows(start, stop, self.mask.keys_needed(stop, self.keys), first)

    def block(self, keep: Tensor | None) -> Block:
        """Return the whole call as one block, given the keys that may be seen."""
        return Block(
            positions=self.positions,
            reach=self.reach,
            keep=keep,
            values=self.v,
            native=self.native_score is not None or self.content_q is not None,
            causal=self.causal,
            state=self.state,
            own=self.own,
            tables=self.tables,
        )

    def content(self) -> tuple[Tensor, Tensor]:
        """Return queries and keys as `Scheme.score` gets them: without the native rotation, if there is one."""
        q, k = self.content_q, self.content_k
        return self.q if q is None else q, self.k if k is None else k

    def _named(self) -> Iterator[tuple[str, str | None, Tensor]]:
        """Return all tensors that gradients may flow into, with their field and, in a mapping, their name."""
        for field_name in _SIDES:
            found = getattr(self, field_name)
            if isinstance(found, Tensor):
                yield field_name, None, found
            elif found is not None:
                yield from ((field_name, name, tensor) for name, tensor in found.items())

    def operands(self) -> tuple[Tensor, ...]:
        """Return all tensors that gradients may flow into."""
        return tuple(tensor for _, _, tensor in self._named())

    def places(self, start: int, stop: int, keys: int, first: int = 0) -> tuple[Index, ...]:
        """Return the parts of `operands` that belong to the queries `start:stop` and the keys `first:keys`."""
        sides = {"queries": slice(start, stop), "keys": slice(first, keys), "all": slice(None)}
        axes = (_SIDES[field_name] for field_name, _, _ in self._named())
        return tuple((slice(None),) * axis + (sides[side],) for axis, side in axes)

    def part(self, start: int, stop: int, keys: int, first: int = 0) -> "Call":
        """Return the call of the queries `start:stop` against the keys `first:keys`."""
        places = self.places(start, stop, keys, first)
        operands = [x[place] for x, place in zip(self.operands(), places, strict=True)]
        positions, mask = self.positions.rows(start, stop, keys, first), self.mask.part(start, stop, keys, first)
        return self.with_operands(operands, positions=positions, mask=mask)

    def outline(self) -> "Call":
        """Return the same call with only the shapes of its operands, to be kept after the forward pass.

        Autograd keeps the operands for the backward pass, or drops them under gradient checkpointing.
        """
        return self.with_operands([torch.empty_like(x, device="meta") for x in self.operands()])

    def with_operands(self, operands: Sequence[Tensor], **changed: Any) -> "Call":
        """Return the same call on other tensors, in the order of `operands`, with other fields changed."""
        for (field_name, name, _), tensor in zip(self._named(), operands, strict=True):
            if name is None:
                changed[field_name] = tensor
            else:
                changed.setdefault(field_name, {})[name] = tensor
        return replace(self, **changed)


def reach(positions: Positions) -> int:
    """Return a bound on every distance between a query and a key (positions are never negative)."""
    return max(int(positions.query.max()), int(positions.key.max()))


# -- what runs it ----------------------------------------------------------------------------------------------------


class Executor(ABC):
    """One way to run attention. Every executor equals `Dense`, in outputs and in all gradients.

    Attributes:
        name: Name in `attend(executor=...)`, `plan` and `explain`.
        learns_masks: A float mask that requires a gradient gets one.
        traces: It can be part of a graph that is compiled or exported, which has no numbers to choose a form by.
        refusal: Reasons not to compute a call, for an error; `None` leaves a call that was forced on it to the blocks.
    """

    name: ClassVar[str]
    learns_masks: ClassVar[bool] = False
    traces: ClassVar[bool] = False
    refusal: ClassVar[str | None] = None

    def knows(self, scheme: Scheme, device: torch.device) -> bool:
        """Whether the scheme has the structure that the executor needs, on this kind of device."""
        return True

    def computes(self, call: Call) -> bool:
        """Whether the result for a call is right, for instance with a softcap; the executor must know the scheme."""
        return True

    def pays(self, call: Call) -> bool:
        """Whether the call is large enough for the executor."""
        return True

    def takes(self, call: Call) -> bool:
        """Whether the executor runs this call, unless one before it in `EXECUTORS` does."""
        return self.pays(call) and (self.learns_masks or not call.mask.learns) and self.fits(call)

    def fits(self, call: Call) -> bool:
        """Whether the executor computes this call correctly."""
        return self.knows(call.scheme, call.device) and self.computes(call)

    def form(self, call: Call) -> str | None:
        """Return the form in which positions enter, where the executor has several."""
        return None

    def describe(self, call: Call) -> str:
        form = self.form(call)
        return self.name if form is None else f"{self.name} ({form})"

    @abstractmethod
    def run(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Return the output `[B, H, Q, D]`, and the weights `[B, H, Q, K]` if the executor gives any."""
