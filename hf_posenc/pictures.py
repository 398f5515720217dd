"""Pictures of numbers that only a scheme can compute, see `Scheme.pictures`."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Picture:
    """Numbers that only the scheme can compute, drawn as colours over a text.

    Attributes:
        name: Name of the kind of picture, in commands and file names.
        of: Returns numbers per head and token, `[B, H, K]`, or per head, query and key, `[B, H, Q, K]`, given the
            scheme and the arguments of `score`.
        high: Number of the last colour; the first is 0. `None` is the largest number.
    """

    name: str
    title: str
    label: str
    of: Callable[..., Tensor]
    high: float | None = None
