import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.facts import Adaptation
from hf_posenc.forms import Folded
from hf_posenc.operands import Block, Geometry
from hf_posenc.ops import grouped_matmul, rotate_halves
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme


@register_scheme("pope", paper="2509.10534", family="rotary")
class PoPE(Scheme):
    """Channels as complex numbers: content gives the length, position alone the angle (Gopalakrishnan et al. 2025).

    RoPE makes a complex number of two channels, whose angle depends on content, too. Here each of the d channels is one
    by itself, of length `softplus(x)`, and there are d frequencies `w_c = theta^(-c / d)`:

        logit = s sum over c of softplus(q_ic) softplus(k_jc) cos((i - j) w_c - phase_hc)

    The phases, learned per head and channel, say at which distance a channel answers most. Keys are cached as they are
    projected, and become polar for each call, in float32 or wider.

    Parameters: `phases` `[H, D]`.

    A start is a break. With `gate`, a learned number per head that starts at 0 leads from the product of queries and
    keys to the formula above: an exact no-op if the native encoding is kept. What a kept encoding adds to the logits,
    or changes in the product of queries and keys, comes on top.

    Args:
        theta: Ratio of the wavelengths.
        init: Start of the phases: `"zero"`, or `"uniform"` between -2 pi and 0.
        gate: Multiply the change of the logits by a learned factor per head that starts at 0.
    """

    neutral_options = {"gate": True}
    adaptation = Adaptation(native="handover", elsewhere="handover")
    reads_keys = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float = 10000.0,
        init: Literal["zero", "uniform"] = "zero",
        gate: bool = False,
    ) -> None:
        super().__init__(geometry, gates=geometry.heads if gate else 0)
        self.require(theta > 1, "theta", theta, "a number above 1")
        self.theta, self.init, self.gate = theta, init, gate
        self.phases = nn.Parameter(torch.empty(geometry.heads, geometry.head_dim))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.init == "zero":
            nn.init.zeros_(self.phases)
        else:
            nn.init.uniform_(self.phases, -2 * math.pi, 0)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        q, k = q.to(logits), k.to(logits)
        with torch.autocast(logits.device.type, enabled=False):
            rows, keys = self._polar(q, k, block)
            products = self.geometry.scale * grouped_matmul(rows, keys.mT)
            if not (block.native or self.gate):
                return products
            # The given logits include the model's own encoding where it is kept, so only the difference is added.
            return logits + self.gated(products - self.geometry.scale * grouped_matmul(q, k.mT), 2)

    def folded(self) -> Folded | None:
        return None if self.gate else Folded(self._operands, alone=self._operands)

    def _operands(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            precise = torch.promote_types(q.dtype, torch.float32)
            rows, keys = self._polar(q.to(precise), k.to(precise), block)
        return rows.to(q.dtype), keys.to(k.dtype), v

    def _polar(self, q: Tensor, k: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Return real and imaginary parts of queries and keys, `[B, H, q, 2 D]` and `[B, G, K, 2 D]`."""
        width = self.geometry.head_dim
        frequencies = self.theta ** -(torch.arange(width, device=q.device).to(q) / width)

        def parts(x: Tensor, positions: Tensor) -> Tensor:
            angles, lengths = positions.to(x)[:, None, :, None] * frequencies, F.softplus(x)
            return torch.cat((lengths * angles.cos(), lengths * angles.sin()), dim=-1)

        # Phases go with queries, since heads may share keys.
        phases = self.phases.to(q)[:, None]
        rows = rotate_halves(parts(q, block.positions.query), phases.cos(), -phases.sin())
        return rows, parts(k, block.positions.key)
