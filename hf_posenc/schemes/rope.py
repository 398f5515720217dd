from collections.abc import Hashable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hf_posenc.equivalents import Rotation
from hf_posenc.facts import Adaptation, Facts
from hf_posenc.operands import Geometry
from hf_posenc.ops import Layout
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.rotary import RotaryScheme


@register_scheme("rope", paper="2104.09864", family="rotary", usual=True)
class RoPE(RotaryScheme):
    """Rotate channel pairs of queries and keys by angles proportional to their positions (Su et al. 2021).

    Pair (u, w) at position p becomes `(u cos - w sin, w cos + u sin)` with the angle `p * frequency`. Values are
    unchanged. Angles are computed and applied in float32 (float64 for float64 inputs), and the result is cast.

    On a model with rotary encoding the frequencies are the model's own, rebuilt from its config, and the start is exact
    for all rope types of transformers. The types "dynamic" and "longrope" change frequencies as a sequence grows, which
    cached keys cannot follow: here they are frozen at those up to the original length, or, for "longrope" with
    `freeze="long"`, at those beyond. On models without rotary encoding they are `theta^(-2i / rotary_dim)`.

    Args:
        layout: Pairing of channels: `"half"` (i, i + d/2), as in transformers' Llama, or `"interleaved"` (2i, 2i + 1),
            as in GPT-J and Meta's Llama. `None` is that of the model, else `"half"`.
        freeze: Frequencies of "longrope" to keep: those of `"short"` inputs or of `"long"` ones. With `"long"` the
            start counts as a break.
        proportion: Share of the pairs that turn, from the fastest on: p of p-RoPE (Barbero et al. 2024, arXiv
            2410.06205, section 6), the type "proportional" of transformers. Below 1 the start counts as a break.
    """

    adaptation = Adaptation(elsewhere="handover")

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float | None = None,
        layout: Literal["half", "interleaved"] | None = None,
        rotary_dim: int | None = None,
        gate: bool = False,
        freeze: Literal["short", "long"] = "short",
        proportion: float = 1.0,
    ) -> None:
        super().__init__(geometry, theta=theta, rotary_dim=rotary_dim, gate=gate, freeze=freeze)
        self.require(0 < proportion <= 1, "proportion", proportion, "a number above 0, at most 1")
        self.layout: Layout = layout or geometry.layout
        self.proportion = proportion

    def alike(self) -> Hashable:
        # A gate is learned.
        own = self.gate or not self.geometry.uniform
        return None if own else (self.theta, self.rotary_dim, self.freeze, self.proportion)

    def frequencies(self, like: Tensor) -> Tensor:
        frequencies = super().frequencies(like)
        if self.proportion == 1:
            return frequencies
        turned = int(self.proportion * len(frequencies))
        return torch.cat((frequencies[:turned], torch.zeros_like(frequencies[turned:])))

    def stock_equivalent(self) -> Rotation:
        return self.rotation()

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        whole = self.proportion == 1 and self.freeze == "short"
        own = whole and self._native and self.layout == self.geometry.layout
        return replace(
            super().facts(native_kept=native_kept, element=element),
            exact=self.gate if native_kept else own and not self.gate,
        )
