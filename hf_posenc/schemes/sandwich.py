from typing import Literal

import torch
from torch import Tensor

from hf_posenc.facts import Adaptation
from hf_posenc.operands import Geometry
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
        heads, half = self.geometry.heads, self.dim // 2
        step = torch.arange(half, dtype=torch.float64, device=distance.device) + self.freq_start
        angles = distance.double()[:, None] * self.base ** (-2 * step / self.dim)
        product = angles.cos().sum(-1) - half  # [N]
        ratio = heads / (8 * torch.arange(1, heads + 1, dtype=torch.float64, device=distance.device))
        return (ratio[:, None] * product).to(dtype)
