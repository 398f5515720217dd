from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.facts import Adaptation
from hf_posenc.forms import Locality
from hf_posenc.operands import Block, Geometry
from hf_posenc.ops import by_distance, sums_by_distance
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme, draw_start


@register_scheme("shaw", paper="1803.02155", family="content-relative")
class Shaw(Scheme):
    """Learned vectors per clipped distance, added to keys and to values (Shaw et al. 2018, equations 3 to 5).

    With `r(i, j) = clip(j - i, -K, K) + K` (key minus query) and the softmax scale s:

        logit = s q_i . (k_j + rel_k[r(i, j)])
        output = sum_j p_ij (v_j + rel_v[r(i, j)])

    Parameters `rel_k` and `rel_v`, each `[2K + 1, D]`, shared by the heads, one pair per layer. In decoders the tables
    have the official shape too; their rows for keys ahead of the query are read only where a mask shows such keys.

    The computation is in float32 or wider: `q @ rel_k.T`, gathered, and weights summed per distance, times `rel_v`.
    Queries meet `rel_k` without a kept native rotation.

    Args:
        max_distance: K; the paper uses 16.
        values: Also add vectors to values; without it there is no `rel_v`.
        init: Start: `"zero"` is a no-op if the native encoding is kept, and both tables learn from the first step;
            `"normal"` is N(0, 0.02). (The official code has the defaults of its framework.)
    """

    neutral_options = {"init": "zero"}
    # The vectors of all far distances must occur often in training.
    adaptation = Adaptation(fit="transfer", elsewhere="handover", windows={"max_distance": 0.75}, rate=8)

    def __init__(
        self,
        geometry: Geometry,
        *,
        max_distance: int = 16,
        values: bool = True,
        init: Literal["zero", "normal"] = "zero",
    ) -> None:
        super().__init__(geometry)
        self.require(max_distance >= 1, "max_distance", max_distance, "at least 1")
        self.max_distance, self.values, self.init = max_distance, values, init
        shape = (2 * max_distance + 1, geometry.head_dim)
        self.rel_k = nn.Parameter(torch.empty(shape))
        self.rel_v = nn.Parameter(torch.empty(shape)) if values else None

    def reset_parameters(self) -> None:
        for table in self.parameters():
            draw_start(table, self.init, std=0.02)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            products = q.to(logits) @ self.rel_k.to(logits).T  # [B, H, q, 2K + 1], from distance K down
            distance = block.distance().to(logits.device)
            return torch.add(logits, by_distance(products, distance, self.max_distance), alpha=self.geometry.scale)

    def mix(self, weights: Tensor, v: Tensor, block: Block) -> Tensor:
        output = super().mix(weights, v, block)
        if self.rel_v is None:
            return output
        # In half precision a sum of many small weights would stop growing.
        precise = weights.to(torch.promote_types(weights.dtype, torch.float32))
        distance = block.distance().to(weights.device)
        sums = sums_by_distance(precise, distance, self.max_distance, len(self.rel_v))
        with torch.autocast(weights.device.type, enabled=False):
            return output + (sums @ self.rel_v.to(sums)).to(output.dtype)

    def locality(self) -> Locality | None:
        return Locality(self._enough, self._beyond, first_try=self.max_distance) if self.geometry.causal else None

    def _enough(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> bool:
        return bool((block.distance()[..., 0] >= self.max_distance).all())

    def _beyond(self, q: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
        last = self.rel_k[0].to(like)
        return self.geometry.scale * (q.to(like) @ last)[..., None], None if self.rel_v is None else self.rel_v[0]

    def is_silent(self) -> bool:
        return not any(bool(table.any()) for table in self.parameters())
