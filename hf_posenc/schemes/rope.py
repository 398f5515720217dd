from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Geometry, Positions, Projection, Scheme
from hf_posenc.schemes._additive import require


@register_scheme("rope", paper="2104.09864", family="rotary")
class RoPE(Scheme):
    """Rotate channel pairs of queries and keys by angles proportional to their positions (Su et al. 2021).

    Pair (u, w) at position p becomes `(u cos - w sin, w cos + u sin)` with the angle `p * frequency`. Values are not
    touched. Angles are computed in float32 (float64 for float64 inputs), applied there, and the result is cast; applied in
    bfloat16, logits would be off by 0.2.

    On a model with rotary encoding the frequencies are the model's own, rebuilt from its config (all static rope types),
    and the start is exact. On GPT-2 and T5 they are `theta^(-2i / rotary_dim)`.

    Args:
        geometry: Shape of the layer.
        theta: Ratio of the wavelengths; `None` takes the model's own frequencies, else 10,000.
        layout: Which channels form a pair: `"half"` (i, i + d/2), as in transformers' Llama, or `"interleaved"`
            (2i, 2i + 1), as in GPT-J and Meta's Llama.
        rotary_dim: Rotate only the first channels of each head; `None` is all that the frequencies cover.
        gate: Multiply all angles by one learned factor, started at 0, which makes the start an exact no-op where the
            model has no rotary encoding.
    """

    reproduces = "rotary"
    neutral_options = {"gate": True}

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float | None = None,
        layout: Literal["half", "interleaved"] = "half",
        rotary_dim: int | None = None,
        gate: bool = False,
    ) -> None:
        super().__init__(geometry)
        own = geometry.inv_freq if theta is None else None
        if rotary_dim is None:
            rotary_dim = geometry.head_dim if own is None else 2 * own.numel()
        require(theta is None or theta > 1, "rope", "theta", theta, "a number above 1")
        require(
            2 <= rotary_dim <= geometry.head_dim and rotary_dim % 2 == 0,
            "rope",
            "rotary_dim",
            rotary_dim,
            f"an even number from 2 to head_dim = {geometry.head_dim} (rotations act on pairs of channels)",
        )
        require(
            own is None or rotary_dim == 2 * own.numel(),
            "rope",
            "rotary_dim",
            rotary_dim,
            f"{2 * own.numel() if own is not None else 0}, what the model's own frequencies cover, unless theta is given too",
        )
        self.theta, self.layout, self.rotary_dim, self.gate = theta, layout, rotary_dim, gate
        self._native = own is not None and 2 * own.numel() == rotary_dim
        self.gate_weight = nn.Parameter(torch.zeros(1)) if gate else None

    def reset_parameters(self) -> None:
        if self.gate_weight is not None:
            nn.init.zeros_(self.gate_weight)

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the angle per position of each channel pair, `[rotary_dim / 2]`, in the dtype of `like`."""
        if self._native:
            assert self.geometry.inv_freq is not None
            frequencies = self.geometry.inv_freq.to(like)
        else:
            step = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64, device=like.device).to(like)
            frequencies = 1.0 / (10000.0 if self.theta is None else self.theta) ** (step / self.rotary_dim)
        return frequencies if self.gate_weight is None else frequencies * self.gate_weight.to(like)

    def project(self, hidden: Tensor | None, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Projection:
        return Projection(self._rotate(q, positions.query), self._rotate(k, positions.key), v)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `[B, H, S, D]` by positions `[B|1, S]`."""
        precise = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            place = positions.to(device=x.device, dtype=precise)
            angles = place[:, None, :, None] * self.frequencies(place)  # [B|1, 1, S, d / 2]
            scaling = self.geometry.rotary_scaling if self._native else 1.0
            cos, sin = angles.cos() * scaling, angles.sin() * scaling
            turned = x[..., : self.rotary_dim].to(precise)
            if self.layout == "half":
                u, w = turned.chunk(2, dim=-1)
                turned = torch.cat((u * cos - w * sin, w * cos + u * sin), dim=-1)
            else:
                u, w = turned[..., 0::2], turned[..., 1::2]
                turned = torch.stack((u * cos - w * sin, w * cos + u * sin), dim=-1).flatten(-2)
            turned = turned.to(x.dtype)
        return torch.cat((turned, x[..., self.rotary_dim :]), dim=-1) if self.rotary_dim < x.shape[-1] else turned

    def cautions(self, *, native_kept: bool) -> list[str]:
        limit = self.geometry.rotary_limit
        if limit is None or not self._native:
            return []
        return [
            f"The model changes its rotary frequencies beyond {limit} tokens; rope keeps those used up to there, so that keys in "
            f"a cache stay right. The two are equal up to {limit} tokens only."
        ]

    def starts_exact(self, *, native_kept: bool) -> bool:
        if native_kept:
            return self.gate
        return self._native and self.layout == "half" and not self.gate
