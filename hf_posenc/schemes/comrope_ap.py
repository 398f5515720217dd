from __future__ import annotations

from typing import Literal

from torch import Tensor

from hf_posenc.operands import Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.comrope import ComRoPE


@register_scheme("comrope_ap", paper="2506.03737", family="rotary")
class ComRoPEAP(ComRoPE):
    """Rotate blocks of channels by `exp(coordinate * generator)`, where each block reads one axis (Yu et al. 2025, "AP").

    Queries and keys of a head are cut into blocks of b channels. Block j has a learned antisymmetric b x b generator
    `freqs[j] - freqs[j].T` and reads axis j mod n ("axial partition"). Only differences of coordinates count, exactly. The
    tokens of a text have their position on every axis, unless `position_coords` says otherwise. Values are not touched.

    Parameters: `freqs` `[G, 1, m, b, b]` for each kv head G and block m, in the layout of the official code; in units of
    `1 / unit`, and added to the base. Give them no weight decay.

    Starts. `"native"`: all zero, and the base is the model's own rotation, rebuilt from its config, which is exact for texts;
    without one, nothing turns. `"zero"`: no base, and nothing turns: the exact no-op beside a kept native encoding.
    `"official"`: no base, and N(0, 1).

    Angles are computed in float64, rotations applied in float32 or wider. No exponential is made: in the planes of its
    generator a rotation is that of RoPE.

    Deviations from the official code: grouped queries, where the query heads of a group share generators; a base; no jitter of
    coordinates in training.

    Args:
        geometry: Shape of the layer.
        axes: Coordinates of a token; `None` is that of the model, 1 for texts.
        block_size: Channels in a block, an even number; the channels of a head, divided by axes, must be a multiple of it.
            `None` is 8, or the largest below that will do.
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
        super().__init__(geometry, name="comrope_ap", axes=axes, block_size=block_size, init=init, unit=unit)
        self.reset_parameters()

    def parts(self) -> int:
        return self.axes

    def flow(self, coords: Tensor) -> tuple[Tensor, Tensor]:
        return self.generators(), coords.repeat(1, 1, self._count // self.axes)
