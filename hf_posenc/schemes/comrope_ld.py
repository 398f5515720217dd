import torch
from torch import Tensor, nn

from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.block_rotary import ComRoPE


@register_scheme("comrope_ld", paper="2506.03737", family="rotary")
class ComRoPELD(ComRoPE):
    """Rotate blocks of channels by `exp(sum over axes of coordinate * factor * generator)` (Yu et al. 2025, "LD").

    Block j has one learned antisymmetric b x b generator `freqs[j] - freqs[j].T`, and a learned factor per axis
    ("linearly dependent"). The rest is as in `comrope_ap`.

    Parameters: `freqs`, and `multiplier` `[1, axes, m, 1, 1]`, the factors, shared by all heads; in the layout of the
    official code, in units of `1 / unit` and added to the base. They should have no weight decay.

    Starts. The factors of the base are 1 on the first axis and 0 on the others. `"official"`: no base; `freqs` and
    `multiplier`, here the factor itself, from N(0, 1).

    Args:
        block_size: Channels in a block, an even number that divides the channels of a head. `None` is the largest such
            number up to 8.
    """

    def make_parameters(self) -> None:
        super().make_parameters()
        self.multiplier = nn.Parameter(torch.empty(1, self.axes, self._count, 1, 1))

    def factors(self) -> Tensor:
        """Return the factor of each coordinate in the time of a block, float64 `[axes, m]`."""
        learned = self.multiplier.double().view(self.axes, -1)
        if self.init == "official":
            return learned
        start = torch.zeros_like(learned)
        start[0] = 1
        return start + learned / self.unit

    def flow(self, coords: Tensor) -> tuple[Tensor, Tensor]:
        return self.generators(), coords @ self.factors()
