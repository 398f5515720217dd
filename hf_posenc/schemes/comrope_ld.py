from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.operands import Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.comrope import ComRoPE


@register_scheme("comrope_ld", paper="2506.03737", family="rotary")
class ComRoPELD(ComRoPE):
    """Rotate blocks of channels by `exp(sum over axes of coordinate * factor * generator)` (Yu et al. 2025, "LD").

    Queries and keys of a head are cut into blocks of b channels. Block j has one learned antisymmetric b x b generator
    `freqs[j] - freqs[j].T`, and a learned factor per axis ("linearly dependent"). Only differences of coordinates count,
    exactly. The tokens of a text have their position on every axis, unless `position_coords` says otherwise. Values are not
    touched.

    Parameters: `freqs` `[G, 1, m, b, b]` for each kv head G and block m, and `multiplier` `[1, axes, m, 1, 1]`, the factors,
    which all heads share; in the layouts of the official code. Both are in units of `1 / unit`, and added to where they start.
    Give them no weight decay.

    Starts. `"native"`: all zero, where the base is the model's own rotation, rebuilt from its config, and the factors 1 on the
    first axis and 0 on the others, which is exact for texts; without a rotation to begin with, nothing turns. `"zero"`: the
    same without base, so that nothing turns: the exact no-op beside a kept native encoding. `"official"`: no base, N(0, 1), and
    `multiplier` is the factor itself, also N(0, 1).

    Angles are computed in float64, rotations applied in float32 or wider. No exponential is made: in the planes of its
    generator a rotation is that of RoPE.

    Deviations from the official code: grouped queries, where the query heads of a group share generators; a base; no jitter of
    coordinates in training.

    Args:
        geometry: Shape of the layer.
        axes: Coordinates of a token; `None` is that of the model, 1 for texts.
        block_size: Channels in a block, an even number that divides the channels of a head; `None` is 8, or the largest below that
            will do.
        init: The start, see above.
        unit: Coordinates are divided by this where they meet the parameters, so that learning rates suit any length; `None` is
            how far those that the model was trained on go: the length of a text, or the side of a square of patches.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        axes: int | None = None,
        block_size: int | None = None,
        init: Literal["native", "zero", "official"] = "native",
        unit: float | None = None,
    ) -> None:
        super().__init__(geometry, name="comrope_ld", axes=axes, block_size=block_size, init=init, unit=unit)
        self.multiplier = nn.Parameter(torch.empty(1, self.axes, self._count, 1, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.init == "official":
            nn.init.normal_(self.multiplier)
        else:
            nn.init.zeros_(self.multiplier)

    def factors(self) -> Tensor:
        """Return how much of each coordinate goes into the time of a block, float64 `[axes, m]`."""
        learned = self.multiplier.double().view(self.axes, -1)
        if self.init == "official":
            return learned
        start = torch.zeros_like(learned)
        start[0] = 1
        return start + learned / self.unit

    def flow(self, coords: Tensor) -> tuple[Tensor, Tensor]:
        return self.generators(), coords @ self.factors()
