import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_posenc.facts import Facts
from hf_posenc.ops import rotate_halves, rotate_neighbours
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.block_rotary import BlockRotary, Turn, rotate_blocks

# The largest product of coordinate and generator for float32: the error of an exponential grows with its size.
_LARGE = 16.0


@register_scheme("liere", paper="2406.10322", family="rotary")
class LieRE(BlockRotary):
    """Rotate blocks of channels by `exp(sum over axes of coordinate * generator)` (Ostmeier et al. 2024).

    Queries and keys of a head are cut into blocks of b channels; remaining channels keep the model's own rotation if
    that is the base, and are unchanged otherwise. Each block has a learned antisymmetric b x b generator per axis, from
    the part of `generator_raw_params` above the diagonal: `A = triu(raw, 1) - triu(raw, 1).T`.

    With one axis, and in texts, where a token has its position on every axis, only distances count. Generators of two
    axes do not commute: with `position_coords` and b > 2, only distances count at the start, but no longer after
    training.

    Parameters: `generator_raw_params` `[axes, 1, G m, b, b]` in the layout of the official code, for each kv head G
    (head by head) and block m, in units of `1 / unit` and added to the base. They should have no weight decay.

    Starts. `"native"`: parameters are zero and the base is the model's own rotation on the first axis, rebuilt from its
    config: exact for texts. A model without rotation starts unrotated. `"zero"`: no base and no rotation: an exact
    no-op if the native encoding is kept. `"official"`: no base, parameters from U(0, 2 pi).

    Args:
        block_size: Channels in a block, an even number; `None` is 8, or less in smaller heads.
    """

    def make_parameters(self) -> None:
        blocks = self.geometry.kv_heads * self._count
        self.generator_raw_params = nn.Parameter(torch.empty(self.axes, 1, blocks, *[self.block_size] * 2))

    def reset_parameters(self) -> None:
        if self.init == "official":
            nn.init.uniform_(self.generator_raw_params, 0, 2 * math.pi)
        else:
            nn.init.zeros_(self.generator_raw_params)

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        found = super().facts(native_kept=native_kept, element=element)
        if self.axes == 1 or self.block_size <= 2:
            return found
        caution = (
            f"Generators of {self.axes} axes do not commute: with position_coords, {self.name} sees where tokens are, "
            "not only how far apart. Texts are not concerned, nor are block_size=2 and schemes whose generators "
            "commute."
        )
        return replace(found, cautions=(*found.cautions, caution))

    def generators(self) -> Tensor:
        """Return the generators, float64 `[axes, G, m, b, b]`."""
        upper = self.generator_raw_params.double().triu(1)
        learned = (upper - upper.mT).view(self.axes, -1, self._count, *[self.block_size] * 2)
        native = self.native_generators(learned.device)
        # The base acts on the first axis.
        base = torch.stack((native, *[torch.zeros_like(native)] * (self.axes - 1)))
        return base[:, None] + learned / self.unit

    def flow(self, coords: Tensor) -> tuple[Tensor, Tensor]:
        return self.generators().sum(0), coords[..., :1]

    def rotation(self, positions: Tensor, coords: Tensor | None, like: Tensor) -> Turn:
        if coords is None or self.axes == 1:
            return super().rotation(positions, coords, like)
        coords = coords.to(positions.device, torch.float64)
        places, index = torch.unique(coords.flatten(0, 1), dim=0, return_inverse=True)
        exponents = torch.einsum("uk,kgmij->ugmij", places, self.generators())
        precise = torch.promote_types(like.dtype, torch.float32)
        if float(exponents.detach().norm(dim=(-2, -1)).max()) <= _LARGE:
            exponents = exponents.to(precise)
        rotations = torch.matrix_exp(exponents).to(precise)[index.view(coords.shape[:2])]
        if not self._native:
            return lambda x: rotate_blocks(x, rotations, self.layout)
        # Channels outside of blocks keep the model's own rotation, and all channels its factor.
        still = coords.new_zeros(len(coords), 1, coords.shape[1], self._count * self.block_size // 2)
        cos, sin = (part[:, :, None] for part in self.cos_sin(still, coords[..., 0], like))
        turn = rotate_halves if self.layout == "half" else rotate_neighbours
        return lambda x: turn(rotate_blocks(x, rotations, self.layout), cos, sin)
