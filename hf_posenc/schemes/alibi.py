import math
from dataclasses import replace

import torch
from torch import Tensor

from hf_posenc.facts import Adaptation
from hf_posenc.forms import Bias, DistanceTable
from hf_posenc.operands import Geometry
from hf_posenc.ops import placed
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import set_start
from hf_posenc.schemes.families.additive import GridBias, slopes


@register_scheme("alibi", paper="2108.12409", family="additive", usual=True)
class ALiBi(GridBias):
    """A penalty proportional to the distance, with a fixed slope per head (Press et al. 2022).

    `bias = -m_h |i - j|`. The official code uses the key's position, which differs by a constant per row, but is coarse
    in bfloat16.

    In images the distance is Euclidean, in patches (CROMA, arXiv 2311.00566); the class token has no bias.

    Args:
        learned_slopes: Train the logarithms of the slopes. They start from `1 / T`, with T from 2 tokens, the steepest
            of the fixed slopes, to the model's context (2,048 tokens if it states none).
        shared: Use one set of learned parameters for the whole stack.
    """

    adaptation = Adaptation(fit="native", options={"learned_slopes": True, "shared": False}, symmetric=True, rate=8)

    def __init__(
        self, geometry: Geometry, *, learned_slopes: bool = False, gate: bool = False, shared: bool = True
    ) -> None:
        super().__init__(geometry, gate=gate, shared=shared)
        self.learned_slopes = learned_slopes
        self.log_slopes = torch.nn.Parameter(torch.empty(geometry.heads)) if learned_slopes else None
        self._slopes = slopes(geometry.heads)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.log_slopes is not None:
            last = math.log(max(2.0, self.geometry.context))
            set_start(self.log_slopes, -torch.linspace(math.log(2.0), last, self.geometry.heads, device="cpu"))

    def grid_values(self, offset: Tensor) -> Tensor:
        return self.values(offset.norm(dim=-1), offset.dtype)

    def values(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        return -self._steepness(distance.device, dtype)[:, None] * distance.abs().to(dtype)

    def _steepness(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        if self.log_slopes is None:
            return placed(self._slopes, device, dtype)
        return self.log_slopes.to(device, dtype).exp()

    def added(self) -> Bias | None:
        added = super().added()
        if not isinstance(added, DistanceTable) or not self.geometry.causal:
            return added
        return replace(added, slope=lambda device, dtype: self.gated(-self._steepness(device, dtype)))
