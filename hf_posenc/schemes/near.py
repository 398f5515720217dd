from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.facts import Adaptation, Facts
from hf_posenc.operands import Geometry
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.additive import DistanceBias


@register_scheme("near", paper="1910.10683", family="add-on")
class Near(DistanceBias):
    """A learned bias per head at each of the nearest distances, and none beyond.

    `logits += b_h[i - j]` for `|i - j| < N`, with a number for each sign in encoders. A bias that only falls with the
    distance cannot point at the previous token, which is the first half of looking up; this one can.

    It is added to another scheme, `patch(model, "kerple+near")`, or with `native="keep"` to the model's own encoding.

    Parameters: `offsets`, `[H, N]` in decoders, index `i - j`; `[H, 2N - 1]` in encoders, index `i - j + N - 1`.

    Args:
        near_distances: Number N of distances, from 0 on.
    """

    neutral_options = {}
    adaptation = Adaptation(rate=8)

    def __init__(self, geometry: Geometry, *, near_distances: int = 8) -> None:
        super().__init__(geometry)
        self.require(near_distances >= 1, "near_distances", near_distances, "a number of distances, at least 1")
        self.near_distances = near_distances
        count = near_distances if geometry.causal else 2 * near_distances - 1
        self.offsets = nn.Parameter(torch.empty(geometry.heads, count))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.offsets)

    def values(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        far = self.near_distances
        # A column of zeros on each side stands for what lies beyond.
        table = F.pad(self.offsets.to(distance.device, dtype), (0, 1) if self.geometry.causal else (1, 1))
        index = distance.clamp(0, far) if self.geometry.causal else distance.clamp(-far, far) + far
        return table.index_select(1, index)

    def reach(self) -> int:
        return self.near_distances

    def is_silent(self) -> bool:
        return not bool(self.offsets.any())

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        return replace(super().facts(native_kept=native_kept, element=element), exact=native_kept)
