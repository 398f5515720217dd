"""Base class of both forms of ComRoPE: generators of different axes commute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_posenc.operands import Geometry
from hf_posenc.schemes.families.block_rotary import BlockRotary, Init
from hf_posenc.schemes.families.generators import skew


class ComRoPE(BlockRotary):
    """A rotation with one learned generator per kv head and block; the axes set the time for which it acts.

    Args:
        geometry: Shape of the layer.
        name: Name of the scheme, for messages.
        axes: Number of coordinates of a token; see `BlockRotary`.
        block_size: Channels in a block; blocks must cover all channels of a head. See `BlockRotary`.
        init: Start; see `BlockRotary`.
        unit: Divisor of coordinates; see `BlockRotary`.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        name: str,
        axes: int | None,
        block_size: int | None,
        init: Init,
        unit: float | None,
    ) -> None:
        super().__init__(geometry, name=name, axes=axes, block_size=block_size, init=init, unit=unit)
        self.freqs = nn.Parameter(torch.empty(geometry.kv_heads, 1, self._count, *[self.block_size] * 2))

    def block_sizes(self, width: int) -> tuple[list[int], str]:
        parts = self.parts()
        sizes = [size for size in range(2, width + 1, 2) if width % (parts * size) == 0]
        cut = f" cut into {parts}, one part per axis" if parts > 1 else ""
        return sizes, f"an even divisor of the {width} channels of a head{cut}"

    def parts(self) -> int:
        """Return the number of equal parts, each of whole blocks, into which a head is cut."""
        return 1

    def reset_parameters(self) -> None:
        if self.init == "official":
            nn.init.normal_(self.freqs)
        else:
            nn.init.zeros_(self.freqs)

    def generators(self) -> Tensor:
        """Return the generators, float64 `[G, m, b, b]`."""
        learned = skew(self.freqs.double()).squeeze(1)
        return self.native_generators(learned.device) + learned / self.unit
