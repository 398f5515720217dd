import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.facts import Adaptation, Facts
from hf_posenc.forms import Bias, KeyBias
from hf_posenc.operands import Block, Geometry, Projection, Tokens
from hf_posenc.ops import placed
from hf_posenc.pictures import Picture
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme
from hf_posenc.schemes.families.additive import slopes

# The slope of the penalty of each key, `[B, S, H]`.
_RATES = "penalty_rates"


@register_scheme("grape_a", paper="2512.07805", family="contextual")
class GRAPEA(Scheme):
    """A penalty proportional to the distance, with a slope that each key sets (Zhang et al. 2025, GRAPE-A, key-gated).

    `bias = -|i - j| * w_h * softplus(u_h . k_j / sqrt(D))`, where w_h is the slope of ALiBi times a learned positive
    number, and u_h has length 1. ALiBi is the case of one slope for all keys. Slopes belong to query heads, also if
    these share keys. The computation is in float32 or wider; the cache holds one number per head and token.

    Parameters: `omega` `[H]`, whose softplus is the learned number, `u` `[H, D]`.

    Args:
        gate: Multiply the bias by a learned factor per head that starts at 0.
    """

    neutral_options = {"gate": True}
    adaptation = Adaptation(rate=8)

    def __init__(self, geometry: Geometry, *, gate: bool = False) -> None:
        super().__init__(geometry, gates=geometry.heads if gate else 0)
        self.gate = gate
        self.omega = nn.Parameter(torch.empty(geometry.heads))
        self.u = nn.Parameter(torch.empty(geometry.heads, geometry.head_dim))
        self._slopes = slopes(geometry.heads)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.omega, math.log(math.expm1(1)))
        nn.init.normal_(self.u, std=self.geometry.head_dim**-0.5)

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        precise = torch.promote_types(k.dtype, torch.float32)
        with torch.autocast(k.device.type, enabled=False):
            directions = F.normalize(self.u.to(precise), dim=-1).view(k.shape[1], -1, k.shape[-1])
            opened = torch.einsum("bgsd,grd->bsgr", k.to(precise), directions).flatten(2) * k.shape[-1] ** -0.5
            scale = F.softplus(self.omega.to(precise)) * placed(self._slopes, k.device, precise)
            return Projection(q, k, v, {_RATES: self.gated((scale * F.softplus(opened)).mT, 1).mT})

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return logits + self._bias(block, logits)

    def _bias(self, block: Block, like: Tensor) -> Tensor:
        rates = block.state[_RATES].to(like).transpose(1, 2)[:, :, None]  # [B, H, 1, K]
        return -block.distance().abs().to(like)[:, None] * rates

    def added(self) -> Bias | None:
        return KeyBias(self._bias, self._products) if self.geometry.causal else Bias(self._bias)

    def _products(self, block: Block) -> list[tuple[Tensor | None, Tensor | None]]:
        rates = block.state[_RATES].transpose(1, 2)  # [B, H, K]
        query, key = (x.to(rates.device)[:, None] for x in (block.positions.query, block.positions.key))
        return [(None, rates.double() * key), (query, -rates)]

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        return replace(
            super().facts(native_kept=native_kept, element=element), state_bytes=(4 * self.geometry.heads, 0)
        )

    pictures = (
        Picture(
            "slopes",
            "slopes of keys",
            "penalty per token of distance (nats)",
            lambda scheme, logits, q, k, block: block.state[_RATES].transpose(1, 2),
        ),
    )
