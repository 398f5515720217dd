import math
from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.operands import Block, Geometry, NativeTable
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import draw_start, set_start
from hf_posenc.schemes.families.additive import Buckets, GridBias, LearnedTable


@register_scheme("t5_clipped", paper="2310.04418", family="additive")
class T5Clipped(LearnedTable, GridBias):
    """A learned bias per head and distance; distances from `max_distance` on share one (FIRE paper, section 2).

    Parameter `r`: `[H, K + 1]` in decoders, index `min(n, K)`; `[H, 2K + 1]` in encoders, index `clamp(n, -K, K) + K`
    (our extension). In images `[H, (2K + 1)^2]`, a bias for each offset in rows and columns, each clamped to K (Swin,
    arXiv 2103.14030, with the clipping of iRPE, arXiv 2107.14222). The class token has no bias, unless the model has
    biases of offsets of its own (BEiT, arXiv 2106.08254): then `first`, `[H, 3]`, is the bias of patches for the class
    token, of the class token for patches, and of itself.

    Args:
        max_distance: Distance K from which all keys share a bias; `None` is the shortest that represents the model's
            own T5 table exactly, else 128; in images, the longest offset within the trained size.
        init: Start: `"native"` spreads the model's own table, of T5 or of offsets, over the distances, `"normal"` draws
            N(0, 0.02), `"zero"` is a no-op; `"auto"` is `"native"` if the model has such a table, else `"zero"`.
    """

    reproduces = ("t5", "offsets")

    def __init__(
        self,
        geometry: Geometry,
        *,
        max_distance: int | None = None,
        init: Literal["auto", "native", "normal", "zero"] = "auto",
        gate: bool = False,
        shared: bool | None = None,
    ) -> None:
        native = self.own_table(geometry)
        super().__init__(geometry, gate=gate, shared=shared)
        needed = None if native is None else _reach(native, causal=geometry.causal)
        if max_distance is None and self.axes and geometry.max_positions is not None:
            max_distance = max(1, math.isqrt(geometry.max_positions) - 1)
        elif max_distance is None:
            max_distance = 128 if needed is None else needed
        self.require(max_distance >= 1, "max_distance", max_distance, "at least 1")
        fits = needed is not None and max_distance >= needed
        if init == "auto":
            init = "native" if fits else "zero"
        expected = "'normal' or 'zero': the model has no such table, or one that reaches further than max_distance"
        self.require(init != "native" or fits, "init", init, expected)
        self.max_distance, self.init = max_distance, init
        per_axis = max_distance + 1 if geometry.causal and not self.axes else 2 * max_distance + 1
        self.r = nn.Parameter(torch.empty(geometry.heads, per_axis ** (self.axes or 1)))
        self.first = nn.Parameter(torch.empty(geometry.heads, 3)) if self.axes and native is not None else None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        native = self.geometry.native
        if self.init == "native" and native is not None and not native.weight.is_meta:
            weight = native.weight.detach()
            index = _buckets(native, self.max_distance, causal=self.geometry.causal)
            set_start(self.r, weight[index.to(weight.device)].T)
            if self.first is not None:
                set_start(self.first, weight[-3:].T)
            return
        draw_start(self.r, self.init, std=0.02)
        if self.first is not None:
            draw_start(self.first, self.init, std=0.02)

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor:
        bias = super().bias(block, dtype)
        if self.first is None:
            return bias
        query, key = ((place == 0).to(bias.device) for place in (block.positions.query, block.positions.key))
        kinds = query[:, :, None] * 1 + key[:, None] * 2  # [B|1, q, K]; 0 between patches
        values = torch.cat((self.first.new_zeros(len(self.first), 1), self.first), dim=1).to(dtype)
        return bias + values.to(bias.device)[:, kinds].transpose(0, 1)

    def values(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        far = self.max_distance
        index = distance.clamp(0, far) if self.geometry.causal else distance.clamp(-far, far) + far
        return self.r.to(dtype).index_select(1, index.to(self.r.device))

    def grid_values(self, offset: Tensor) -> Tensor:
        far = self.max_distance
        row, column = (offset.round().long().clamp(-far, far) + far).unbind(-1)
        return self.r.to(offset.dtype).index_select(1, ((2 * far + 1) * row + column).to(self.r.device))


def _buckets(native: NativeTable, far: int, *, causal: bool) -> Tensor:
    """Return the bucket of every distance of a clipped table, in its order; the row of every offset in images."""
    if native.kind == "offsets":
        near = _reach(native, causal=causal)
        steps = torch.arange(-far, far + 1, device="cpu").clamp(-near, near) + near
        return ((2 * near + 1) * steps[:, None] + steps).flatten()
    assert native.max_distance is not None
    distance = torch.arange(0 if causal else -far, far + 1, device="cpu")
    buckets = Buckets(num_buckets=native.weight.shape[0], max_distance=native.max_distance, causal=causal)
    return buckets(distance)


def _reach(native: NativeTable, *, causal: bool) -> int:
    """Return the distance from which a T5 table is constant on every side, or the longest offset of a table."""
    if native.kind == "offsets":
        return math.isqrt(len(native.weight) - 3) // 2
    assert native.max_distance is not None
    far = native.max_distance
    buckets = _buckets(native, far, causal=causal)
    sides = [buckets] if causal else [buckets[far:], buckets[: far + 1].flip(0)]
    return max(int((side != side[-1]).sum()) for side in sides)
