"""Terms of stock models in which a scheme says what it computes, see `Scheme.stock_equivalent`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hf_posenc.forms import DistanceTable


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
        """Whether the rotation changes nothing: all frequencies are 0, and no factor acts."""
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
