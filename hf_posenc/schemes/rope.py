from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Geometry, Projection, Tokens
from hf_posenc.schemes._rotary import RotaryScheme, rotate_halves


@register_scheme("rope", paper="2104.09864", family="rotary")
class RoPE(RotaryScheme):
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

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float | None = None,
        layout: Literal["half", "interleaved"] = "half",
        rotary_dim: int | None = None,
        gate: bool = False,
    ) -> None:
        super().__init__(geometry, name="rope", theta=theta, rotary_dim=rotary_dim, gate=gate)
        self.layout = layout

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        return Projection(self._rotate(q, tokens.positions.query), self._rotate(k, tokens.positions.key), v)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `[B, H, S, D]` by positions `[B|1, S]`."""
        precise = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (part[:, None] for part in self.cos_sin(positions.to(x.device), precise))  # [B|1, 1, S, d / 2]
        turned = x[..., : self.rotary_dim].to(precise)
        if self.layout == "half":
            turned = rotate_halves(turned, cos, sin)
        else:
            u, w = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((u * cos - w * sin, w * cos + u * sin), dim=-1).flatten(-2)
        turned = turned.to(x.dtype)
        return torch.cat((turned, x[..., self.rotary_dim :]), dim=-1) if self.rotary_dim < x.shape[-1] else turned

    def starts_exact(self, *, native_kept: bool) -> bool:
        if native_kept:
            return self.gate
        return self._native and self.layout == "half" and not self.gate
