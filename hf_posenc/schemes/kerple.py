from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.facts import Adaptation
from hf_posenc.forms import Bias
from hf_posenc.operands import Block, Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.additive import DistanceBias

# The official code keeps both parameters at least this large, and the exponent at most 2.
_SMALLEST = 0.01
_LARGEST_EXPONENT = 2.0


@register_scheme("kerple", paper="2205.09921", family="additive", usual=True)
class KERPLE(DistanceBias):
    """A learned kernel of the distance per head: logarithmic or power (Chi et al. 2022).

    `"log"`: `bias = -p log(1 + a |i - j|)`. `"power"`: `bias = -a |i - j|^p` (the two parameters swap roles, as in the
    official code). Parameters below 0.01 (and exponents above 2) act as if they were at the bound, with a
    straight-through gradient; the official code overwrites them in the forward pass.

    Args:
        kernel: Kernel: `"log"` or `"power"`.
        init: Start of the exponents of the power kernel: `"slow"` draws them up to 1/2, `"official"` up to 2. No effect
            on the logarithm.
        weighted: Also multiply the logits by `exp(-wei_a n^wei_p)`, the three-parameter ablation of the official code.
        directed: Give keys ahead of the query their own parameters, in encoders. (Our extension: the published form is
            symmetric. No effect in decoders.)
        shared: Use one set of parameters for the whole stack (the official form), not one per layer.
    """

    adaptation = Adaptation(
        fit="native",
        options={"shared": False},
        elsewhere="handover",
        symmetric=True,
        encoder={"directed": True},
        rate=8,
    )

    def __init__(
        self,
        geometry: Geometry,
        *,
        kernel: Literal["log", "power"] = "log",
        init: Literal["slow", "official"] = "slow",
        weighted: bool = False,
        directed: bool = False,
        gate: bool = False,
        shared: bool = True,
    ) -> None:
        super().__init__(geometry, gate=gate, shared=shared)
        if directed and not geometry.causal:
            self.ahead = KERPLE(geometry, kernel=kernel, init=init, gate=gate)
        self.kernel, self.init, self.weighted, self.directed = kernel, init, weighted, directed
        self.bias_p = nn.Parameter(torch.empty(geometry.heads))
        self.bias_a = nn.Parameter(torch.empty(geometry.heads))
        self.wei_p = nn.Parameter(torch.empty(geometry.heads)) if weighted else None
        self.wei_a = nn.Parameter(torch.empty(geometry.heads)) if weighted else None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.uniform_(self.bias_p, 0, 0.5 if self.kernel == "power" and self.init == "slow" else 2)
        nn.init.uniform_(self.bias_a, 0, 1)
        if self.wei_p is not None and self.wei_a is not None:
            nn.init.uniform_(self.wei_p, 0, 2)
            nn.init.uniform_(self.wei_a, 0, 1)

    def values(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        n = distance.abs().to(dtype)
        a = _bounded(self.bias_a, None).to(n)[:, None]
        if self.kernel == "log":
            return -_bounded(self.bias_p, None).to(n)[:, None] * torch.log1p(a * n)
        return -a * _power(n, _bounded(self.bias_p, _LARGEST_EXPONENT).to(n)[:, None])

    def added(self) -> Bias | None:
        # A factor on logits is not a bias.
        return None if self.weighted else super().added()

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        if self.wei_a is not None and self.wei_p is not None:
            n = block.distance().abs().to(logits)[:, None]
            a = _bounded(self.wei_a, None).to(logits)[:, None, None]
            decay = (-a * _power(n, _bounded(self.wei_p, _LARGEST_EXPONENT).to(logits)[:, None, None])).exp()
            if self.gate_weight is not None:
                # A closed gate leaves the logits unchanged.
                decay = torch.lerp(torch.ones_like(decay), decay, self.gate_weight.to(logits)[:, None, None])
            logits = logits * decay
        return super().score(logits, q, k, block)


def _power(n: Tensor, exponent: Tensor) -> Tensor:
    """Return distances to a power above 0, which is 0 at 0: torch's second derivative of that is NaN."""
    return (n.masked_fill(n == 0, 1) ** exponent).masked_fill(n == 0, 0)


def _bounded(parameter: Tensor, largest: float | None) -> Tensor:
    """Return the parameter within its bounds, with the gradient of the identity."""
    return parameter + (parameter.clamp(_SMALLEST, largest) - parameter).detach()
