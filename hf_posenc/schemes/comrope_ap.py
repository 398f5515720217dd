from torch import Tensor

from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.block_rotary import ComRoPE


@register_scheme("comrope_ap", paper="2506.03737", family="rotary")
class ComRoPEAP(ComRoPE):
    """Rotate blocks of channels by `exp(coordinate * generator)`, one axis per block (Yu et al. 2025, "AP").

    Queries and keys of a head are cut into blocks of b channels. Block j has a learned antisymmetric b x b generator
    `freqs[j] - freqs[j].T` and reads axis j mod n ("axial partition"). Only differences of coordinates count, exactly.
    Text tokens have their position on every axis, unless `position_coords` is given.

    Parameters: `freqs` `[G, 1, m, b, b]` for each kv head G and block m, in the layout of the official code, in units
    of `1 / unit` and added to the base. They should have no weight decay.

    Starts. `"native"`: parameters are zero and the base is the model's own rotation, rebuilt from its config: exact for
    texts. A model without rotation starts unrotated. `"zero"`: no base and no rotation: an exact no-op if the native
    encoding is kept. `"official"`: no base, parameters from N(0, 1).

    Args:
        block_size: Channels in a block, an even number that divides the channels of a head divided by axes. `None` is
            the largest such number up to 8.
    """

    def parts(self) -> int:
        return self.axes

    def flow(self, coords: Tensor) -> tuple[Tensor, Tensor]:
        return self.generators(), coords.repeat(1, 1, self._count // self.axes)
