"""Pictures of numbers that only a scheme can compute, see `Scheme.pictures`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor


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
