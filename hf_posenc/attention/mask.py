"""Visibility of keys, in a form that any executor can slice by rows."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hf_posenc.errors import ShapeError
from hf_posenc.operands import Positions

# A float mask hides a key by -inf, the smallest number of some dtype, or -1e4, which bfloat16 rounds to -9,984.
_HIDDEN = -9000.0
# Rows of a mask that are compared at once.
_ROWS = 256


@dataclass(frozen=True, eq=False)
class Mask:
    """Visibility of keys, without an S x S tensor where a rule will do.

    Attributes:
        rule: `"all"`, `"slots"` (key i is visible to query j if i <= j + ahead) or `"positions"` (if its position is
            not greater than the query's).
        keep: Keys that may be seen, bool `[B|1, H|1, Q|1, K]`, on top of the rule.
        bias: Float to add to the logits, `[B|1, H|1, Q|1, K]`.
        ahead: Number of keys before the first query's own, K - Q (rule `"slots"`).
        window: Distance in positions, in either direction, from which keys are hidden; `None` hides none.
        span: Distance in slots from which keys behind a query are hidden, too (rule `"slots"`); `None` hides none.
        real: Queries that are no padding, bool `[B|1, Q]`; `None` means all. What others see means nothing.
    """

    rule: Literal["all", "slots", "positions"] = "all"
    keep: Tensor | None = None
    bias: Tensor | None = None
    ahead: int = 0
    window: int | None = None
    span: int | None = None
    real: Tensor | None = None

    @property
    def only_ahead(self) -> bool:
        """Whether only keys ahead of a query by slots are hidden, so that each query sees its own key."""
        return self.rule == "slots" and self.keep is None and self.bias is None and not self.windowed

    @property
    def pads(self) -> bool:
        """Whether padding is hidden, and of all other keys only those in later slots than the query."""
        padding = self.keep is not None and self.keep.shape[1:3] == (1, 1)
        return self.rule == "slots" and padding and self.bias is None and not self.windowed

    @property
    def windowed(self) -> bool:
        return self.window is not None or self.span is not None

    @property
    def learns(self) -> bool:
        return self.bias is not None and self.bias.requires_grad and torch.is_grad_enabled()

    def seen(self, positions: Positions, *, ruled: bool = True) -> tuple[Tensor | None, Tensor | None]:
        """Return the keys that each query may see, `[B|1, H|1, Q|1, K]` (`None`: all), and what is added to the logits.

        With `ruled=False`, keys that only the rule hides count as seen.
        """
        keep = self.keep
        if self.window is not None:
            distance = positions.query[:, :, None] - positions.key[:, None, :]
            keep = _both(keep, (distance.abs() < self.window)[:, None])
        if self.span is not None:
            query, key = self._slots(positions)
            keep = _both(keep, (key > query - self.span)[None, None])
        if ruled and self.rule == "slots" and self.ahead + 1 < positions.key.shape[1]:
            query, key = self._slots(positions)
            keep = _both(keep, (key <= query)[None, None])
        if ruled and self.rule == "positions":
            keep = _both(keep, (positions.key[:, None, :] <= positions.query[:, :, None])[:, None])
        return keep, self.bias

    def _slots(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return the slots of queries `[Q, 1]` and of keys `[K]`."""
        query, key = (torch.arange(x.shape[1], device=x.device) for x in (positions.query, positions.key))
        return query[:, None] + self.ahead, key

    def part(self, start: int, stop: int, keys: int, first: int = 0) -> "Mask":
        """Return the mask of the query rows `start:stop` against the keys `first:keys`."""

        def part(x: Tensor) -> Tensor:
            return (x if x.shape[2] == 1 else x[:, :, start:stop])[..., first:keys]

        keep, bias = (None if x is None else part(x) for x in (self.keep, self.bias))
        ahead = self.ahead + start - first if self.rule == "slots" else self.ahead
        real = None if self.real is None else self.real[:, start:stop]
        return replace(self, keep=keep, bias=bias, ahead=ahead, real=real)

    def first_needed(self, start: int) -> int:
        """Return the first key that the query rows from `start` on may see, where slots tell distances."""
        if self.window is None or self.rule != "slots":
            return 0
        return max(0, start + self.ahead - self.window + 1)

    def keys_needed(self, stop: int, keys: int) -> int:
        """Return the number of leading keys that the query rows before `stop` can see at most."""
        return min(stop + self.ahead, keys) if self.rule == "slots" else keys


def _both(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first & second


def from_tensor(
    mask: Tensor,
    rule: Literal["all", "slots", "positions"],
    shape: tuple[int, int, int, int],
    window: int | None = None,
) -> Mask:
    """Make a `Mask` of a 4-D tensor: bool (`True` may be seen), or float to be added to the logits.

    Values of a float mask below `_HIDDEN` mean "hidden". They become booleans, so that they replace the bias of a
    scheme instead of being added to it, and so that schemes that count keys do not count hidden ones.
    """
    if mask.ndim != 4 or any(got not in (1, want) for got, want in zip(mask.shape, shape, strict=True)):
        raise ShapeError(
            f"Got an attention mask of shape {tuple(mask.shape)}; expected one that broadcasts to [batch, heads, "
            f"queries, keys] = {list(shape)}. Pass a 2-D padding mask, or a 4-D mask of that shape."
        )
    mask = mask.expand(*mask.shape[:3], shape[3])
    if not mask.is_floating_point():
        return Mask(rule, keep=mask if mask.dtype == torch.bool else mask != 0, window=window)
    keep = mask > _HIDDEN
    return Mask(rule, keep=keep, bias=mask.masked_fill(~keep, 0), window=window)


def sees_ahead(positions: Positions, mask: Mask) -> bool:
    """Whether some query, padding aside, may see a key at a later position, as under the mask of a prefix."""
    if mask.rule != "all":
        return False
    length, keys = positions.query.shape[1], positions.key.shape[1]
    if length == 1 and positions.key.device.type != "cpu":
        return False  # a step of decoding must not wait for a GPU
    if length == 1 and not positions.once(lambda: bool((positions.key > positions.query).any()), "ahead"):
        return False
    for start in range(0, length, _ROWS):
        places = positions.rows(start, start + _ROWS, keys)
        part = mask.part(start, start + _ROWS, keys)
        ahead = (places.key[:, None, :] > places.query[:, :, None])[:, None]
        if part.real is not None:
            ahead = ahead & part.real[:, None, :, None]
        seen, _ = part.seen(places)
        if bool((ahead if seen is None else ahead & seen).any()):
            return True
    return False


# -- positions against slots ----------------------------------------------------------------------------------------


def slots_tell_distances(positions: Positions, mask: Mask, *, causal: bool = True) -> bool:
    """Whether distances in positions equal those in slots, for every key that a query sees.

    This holds in a plain sequence, with padding, and in packed sequences that do not see each other. In causal layers
    queries that are padding may stand anywhere.
    """
    slots = torch.arange(positions.key.shape[1], device=positions.key.device)
    length, count = positions.query.shape[1], len(slots)
    # How far positions are ahead of slots.
    queries, keys = positions.query - slots[count - length :], positions.key - slots
    if bool((keys == keys[:, :1]).all()) and bool((queries == keys[:, :1]).all()):
        return True
    if mask.keep is None:
        return False
    keep = mask.keep.any(dim=1)  # [B|1, Q|1, K]
    if keep.shape[1] == 1:
        seen = keep[:, 0]
        first = seen.to(torch.uint8).argmax(dim=-1, keepdim=True)
        shift = keys.expand(len(seen), -1).gather(1, first)
        own = seen[:, count - length :] if causal else torch.ones_like(seen[:, :length])
        return bool(((keys == shift) | ~seen).all()) and bool(((queries == shift) | ~own).all())
    for start in range(0, length, _ROWS):
        rows = slice(start, start + _ROWS)
        if bool((keep[:, rows] & (queries[:, rows, None] != keys[:, None, :])).any()):
            return False
    return True
