from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.facts import Adaptation, Facts
from hf_posenc.forms import Bias, PiecewiseLinear
from hf_posenc.operands import Block, Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.additive import AdditiveBias
from hf_posenc.schemes.families.layers import PairNetwork

# Added to the normaliser, as in the paper's listing.
_EPSILON = 1e-6


@register_scheme("fire", paper="2310.04418", family="additive", usual=True)
class FIRE(AdditiveBias):
    """A small network of the distance, relative to the query's position on a log scale (Li et al. 2024, equation 3).

    `bias = f(psi(i - j) / (psi(max(L, i)) + 1e-6))` with `psi(x) = log(|c x| + 1)` and `f` = Linear(1, width), ReLU,
    Linear(width, H). The computation is in float32 or wider.

    Parameters (named as in the paper's listing; scalars have shape [1], as sharding needs): `c`, `L_multiplier`,
    `mlp.0`, `mlp.2`; `init_L` is stored, not trained.

    Args:
        init_c: Start of c.
        threshold: Start of L; up to L the normaliser does not depend on the query.
        width: Hidden width of the network.
        init: Start: `"paper"` is torch's default for linear layers; `"zero"` sets the last layer to zero, a no-op.
        normalizer: Position in the normaliser: `"both"` is the later one of query and key (our extension); `"query"` is
            the paper's listing. They differ for keys ahead of the query only, in encoders or where a mask shows some.
        directed: Give keys ahead of the query their own parameters, in encoders. (Our extension: the published form is
            symmetric. No effect in decoders.)
        shared: Use one network for the whole stack; `None` is true for FIRE-S and false for FIRE.
    """

    neutral_options = {"init": "zero"}
    adaptation = Adaptation(
        fit="native", elsewhere="handover", windows={"threshold": 0.5}, reach=8, encoder={"directed": True}, rate=8
    )
    init_L: Tensor
    _shared = False
    _negative_slope = 0.0

    def __init__(
        self,
        geometry: Geometry,
        *,
        init_c: float = 0.1,
        threshold: float = 512.0,
        width: int = 32,
        init: Literal["paper", "zero"] = "paper",
        normalizer: Literal["both", "query"] = "both",
        directed: bool = False,
        gate: bool = False,
        shared: bool | None = None,
    ) -> None:
        self.require(shared is not False or not self._shared, "shared", shared, "True or None, in this variant")
        super().__init__(geometry, gate=gate, shared=self._shared if shared is None else shared)
        self.require(init_c != 0, "init_c", init_c, "another number than 0, from which c never learns")
        self.require(threshold > 0, "threshold", threshold, "a positive number")
        self.require(width >= 1, "width", width, "at least 1")
        self.init_c, self.threshold, self.width = init_c, threshold, width
        self.init, self.normalizer, self.directed = init, normalizer, directed
        if directed and not geometry.causal:
            self.ahead = type(self)(geometry, **{**self.options(), "directed": False})
        self.c = nn.Parameter(torch.empty(1))
        self.L_multiplier = nn.Parameter(torch.empty(1))
        self.register_buffer("init_L", torch.empty(1))
        self.mlp = PairNetwork(1, width, geometry.heads, negative_slope=self._negative_slope)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.c, self.init_c)
        nn.init.ones_(self.L_multiplier)
        nn.init.constant_(self.init_L, self.threshold)
        self.mlp.reset_parameters()
        if self.init == "zero":
            self.mlp.silence()

    def begin_fit(self) -> None:
        """Space the kinks of the network evenly over its inputs; random ones cluster, and some never turn on."""
        super().begin_fit()
        first, _ = self.mlp.layers
        steepness = self.width / 2
        ends = (torch.arange(self.width) - 1) / self.width
        with torch.no_grad():
            first.weight.fill_(steepness)
            first.bias.copy_(-steepness * ends)
        self.mlp.silence()

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor:
        distance = block.distance()  # [B|1, q, K]
        last = block.positions.query[:, :, None]
        if self.normalizer == "both":
            last = torch.maximum(last, block.positions.key[:, None, :])
        c = self.c.to(dtype)
        distance, last = distance.to(c), last.to(c)
        # Autocast would run the network in half precision.
        with torch.autocast(c.device.type, enabled=False):
            norm = self._psi(c, torch.maximum(last, self._limit().to(c))) + _EPSILON
            ratio = self._psi(c, distance) / norm
            bias: Tensor = self.mlp(ratio.flatten(1)[:, None])  # [B|1, H, q * K]
        return bias.view(ratio.shape[0], -1, *ratio.shape[1:])

    def added(self) -> Bias | None:
        if not self.geometry.causal:
            return super().added()
        return PiecewiseLinear(self.gated_bias, self._feature, self._weight, self._constant_below, self._pieces)

    def _feature(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        c = self.c.to(distance.device, dtype)
        return self._psi(c, distance.to(c))

    def _weight(self, position: Tensor, dtype: torch.dtype) -> Tensor:
        c = self.c.to(position.device, dtype)
        return (self._psi(c, torch.maximum(position.to(c), self._limit().to(c))) + _EPSILON).reciprocal()

    def _limit(self) -> Tensor:
        return (self.L_multiplier * self.init_L).abs()

    def _constant_below(self) -> float:
        return float(self._limit().detach())

    def _pieces(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the kinks of the network, and its slope and offset between them.

        Inputs of the network are from 0 to 1.
        """
        first, second = self.mlp.layers
        (weight, bias), (second_weight, second_bias) = first(), second()
        factor, shift = weight[:, 0].to(dtype), bias.to(dtype)
        with torch.no_grad():
            ends = torch.where(factor == 0, 2.0, -shift / factor).clamp(-1.0, 2.0).sort().values
            edges = torch.cat((ends[:1] - 1, ends, ends[-1:] + 1))
            middle = (edges[1:] + edges[:-1]) / 2
            hidden = middle[:, None] * factor + shift  # [M + 1, width]
            on = torch.where(hidden > 0, 1.0, self._negative_slope).to(hidden)
        weight = second_weight.to(dtype)
        slope, offset = (on * factor) @ weight.T, (on * shift) @ weight.T + second_bias.to(dtype)
        return ends, self.gated(slope), self.gated(offset)

    def is_zero(self) -> bool:
        return super().is_zero() or self.mlp.is_silent()

    @staticmethod
    def _psi(c: Tensor, x: Tensor) -> Tensor:
        return torch.log1p((c * x).abs())

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        exact = native_kept and (self.init == "zero" or self.gate)
        return replace(super().facts(native_kept=native_kept, element=element), exact=exact)
