from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hf_posenc.facts import Adaptation
from hf_posenc.forms import Bias, DistanceTable
from hf_posenc.operands import Block, Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.additive import DistanceBias

# Bound on memory: each distance needs half as many cosines.
_WIDEST = 2**16


@register_scheme("sandwich", paper="2212.10356", family="additive")
class Sandwich(DistanceBias):
    """The inner product of two sinusoidal encodings as a fixed bias, divided by a number per head (Chi et al. 2023).

    `bias = (sum_t cos(n / base^(2t / dim)) - dim / 2) / (8 (h + 1) / H)`. The shift by `dim / 2` makes the largest
    value 0 and does not change the softmax. The bias is symmetric, so encoders use the same formula.

    Args:
        dim: Channels of the sinusoidal encodings, an even number; the paper uses 128.
        base: Ratio of the wavelengths.
        freq_start: First t: 0 is exactly the sinusoidal inner product (the paper's listing), 1 the formula of its text.
        shared: Use one set of gates for the whole stack.
    """

    adaptation = Adaptation(symmetric=True)

    def __init__(
        self,
        geometry: Geometry,
        *,
        dim: int = 128,
        base: float = 10000.0,
        freq_start: Literal[0, 1] = 0,
        gate: bool = False,
        shared: bool = True,
    ) -> None:
        super().__init__(geometry, gate=gate, shared=shared)
        fits = 2 <= dim <= _WIDEST and dim % 2 == 0
        self.require(fits, "dim", dim, f"an even number, at least 2 and at most {_WIDEST:,}")
        self.require(base > 1, "base", base, "a number above 1")
        self.dim, self.base, self.freq_start = dim, base, freq_start

    def values(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        product = self._angles(distance).cos().sum(-1) - self.dim // 2  # [N]
        return (self._ratio(distance.device)[:, None] * product).to(dtype)

    def added(self) -> Bias | None:
        added = super().added()
        return replace(added, products=self._products) if isinstance(added, DistanceTable) else added

    def _products(self, block: Block) -> list[tuple[Tensor, Tensor]]:
        """Return a product for each channel of the two encodings."""
        query, key = (self._angles(places)[:, None] for places in (block.positions.query, block.positions.key))
        ratio = self.gated(self._ratio(query.device))[:, None, None]
        query, key = (torch.cat((angles.cos(), angles.sin()), dim=-1) for angles in (query, key))
        return list(zip((ratio * query).unbind(-1), key.unbind(-1), strict=True))

    def _angles(self, places: Tensor) -> Tensor:
        step = torch.arange(self.dim // 2, dtype=torch.float64, device=places.device) + self.freq_start
        return places.double()[..., None] * self.base ** (-2 * step / self.dim)

    def _ratio(self, device: torch.device) -> Tensor:
        heads = self.geometry.heads
        return heads / (8 * torch.arange(1, heads + 1, dtype=torch.float64, device=device))
