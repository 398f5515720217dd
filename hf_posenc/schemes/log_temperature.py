import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.facts import Facts
from hf_posenc.operands import Geometry, Projection, Tokens
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme

# Assumed context of a model whose config states none: that of Llama 4's original training.
_CONTEXT = 8192


@register_scheme("log_temperature", paper="2501.19399", family="add-on", directions=("causal",))
class LogTemperature(Scheme):
    """Queries times a factor that grows with the logarithm of the number of keys (SSMax, Nakanishi 2025).

    A query at position p sees n = p + 1 keys. The factor is `s_h log n` (SSMax, equation 3), `b_h + s_h log n` (its
    form with a bias, section 3), with a learned s and b per head, or `1 + slope * log(1 + floor(n / floor))`, which is
    fixed (Llama 4, on its layers without rotation).

    It has no positions of its own: `patch(model, "rope+log_temperature")` adds it to another scheme, and
    `native="keep"` to the model's own encoding.

    Starts: `"affine"` has s = 0 and b = 1, an exact no-op. `"ssmax"` has the s for which the mean of `s log n` over the
    trained length is 1, as in the paper's switch of a pretrained model. `"llama4"` is exact up to the position
    `floor - 2`, so for all texts of the trained length.

    Args:
        temperature: Form of the factor, see above: `"affine"`, `"ssmax"` or `"llama4"`.
        slope: Start of s, or the slope of `"llama4"`; `None` is 0 for `"affine"`, the reciprocal of the mean of `log n`
            for `"ssmax"`, and 0.1 for `"llama4"`.
        floor: Tokens of each step of `"llama4"`; `None` is one more than the trained length, or 8,192 without one.
    """

    neutral_options = {}

    def __init__(
        self,
        geometry: Geometry,
        *,
        temperature: Literal["affine", "ssmax", "llama4"] = "affine",
        slope: float | None = None,
        floor: int | None = None,
    ) -> None:
        super().__init__(geometry)
        fixed, context = temperature == "llama4", geometry.max_positions or _CONTEXT
        self.require(fixed or floor is None, "floor", floor, "None unless temperature='llama4' is given")
        self.require(floor is None or floor >= 1, "floor", floor, "a number of tokens, at least 1")
        if fixed and floor is None:
            floor = _CONTEXT if geometry.max_positions is None else context + 1
        if slope is None:
            # The sum of logarithms is that of a factorial.
            mean = math.lgamma(context + 1) / context or 1.0
            slope = {"affine": 0.0, "ssmax": 1 / mean, "llama4": 0.1}[temperature]
        self.temperature, self.slope, self.floor = temperature, slope, floor
        self.slopes = None if fixed else nn.Parameter(torch.empty(geometry.heads))
        self.offsets = nn.Parameter(torch.empty(geometry.heads)) if temperature == "affine" else None

    def reset_parameters(self) -> None:
        if self.slopes is not None:
            nn.init.constant_(self.slopes, self.slope)
        if self.offsets is not None:
            nn.init.ones_(self.offsets)

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        precise = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            factor = self.factor(tokens.positions.query.to(q.device)[:, None, :, None].to(precise))
            return Projection((q * factor).to(q.dtype), k, v)

    def factor(self, position: Tensor) -> Tensor:
        """Return the factor at positions `[B|1, 1, Q, 1]`, `[B|1, H|1, Q, 1]`."""
        if self.floor is not None:
            return 1 + self.slope * ((position + 1) / self.floor).floor().log1p()
        assert self.slopes is not None
        factor = self.slopes.to(position)[:, None, None] * position.log1p()
        return factor if self.offsets is None else factor + self.offsets.to(position)[:, None, None]

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        longest = self.geometry.max_positions
        near = self.floor is not None and longest is not None and longest < self.floor
        still = self.slope == 0 and self.temperature != "ssmax"
        return replace(super().facts(native_kept=native_kept, element=element), exact=native_kept and (near or still))

    def is_silent(self) -> bool:
        if self.offsets is None or self.slopes is None:
            return False
        return not bool(self.slopes.any()) and bool((self.offsets == 1).all())
