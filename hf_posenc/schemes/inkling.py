from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.facts import Adaptation
from hf_posenc.forms import Bias, ContentBias, Vectors
from hf_posenc.operands import Block, Geometry, Projection, Tokens
from hf_posenc.ops import by_distance
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme, draw_start
from hf_posenc.schemes.families.layers import AnyDtypeLinear

# How much each query takes of each curve, `[B, Q, H, rank]`.
_SHARES = "curve_shares"


@register_scheme("inkling", paper="Inkling, Thinking Machines Lab 2026", family="contextual")
class Inkling(Scheme):
    """A bias that each query mixes from a few learned curves over the distance (Inkling, Thinking Machines Lab 2026).

    With the hidden state x_i that the projections read, a vector `r_hi = W_h x_i` of `rank` numbers per head, and one
    bank of curves c, which all heads share:

        bias = r_hi . c(i - j)

    It is 0 from the distance `extent` on, and not multiplied by the softmax scale. The computation is in float32 or
    wider. Only queries need r, so the cache holds nothing of it.

    Parameters: `r_proj.weight` `[H * rank, E]` (W) and `proj` `[rank, extent]` (c), named as in the official code.
    Encoders have `proj` `[rank, 2 * extent - 1]`, for the distances from `1 - extent` up; in decoders, keys ahead of
    the query, where a mask shows some, count as those behind it.

    Args:
        rank: Number of curves.
        extent: Distance from which there is no bias.
        init: Start: `"zero"` has flat curves, a no-op if the native encoding is kept; `"normal"` draws them from
            N(0, 0.02), as the official code does. W is of N(0, 0.02) in both.
    """

    neutral_options = {"init": "zero"}
    # Every distance has numbers of its own, which must occur often in training. A product of two weights learns at the
    # usual rate; at the rate of tables, a transfer on stories260K ended 15 times as far from the original attention.
    adaptation = Adaptation(fit="transfer", elsewhere="handover", windows={"extent": 0.75})

    def __init__(
        self,
        geometry: Geometry,
        *,
        rank: int = 16,
        extent: int = 1024,
        init: Literal["zero", "normal"] = "zero",
    ) -> None:
        super().__init__(geometry)
        self.require(rank >= 1, "rank", rank, "at least 1")
        self.require(extent >= 1, "extent", extent, "at least 1")
        self.rank, self.extent, self.init = rank, extent, init
        self.r_proj = AnyDtypeLinear(geometry.hidden_size, geometry.heads * rank, bias=False)
        self.proj = nn.Parameter(torch.empty(rank, extent if geometry.causal else 2 * extent - 1))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.r_proj.weight, std=0.02)
        draw_start(self.proj, self.init, std=0.02)

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        hidden = tokens.hidden_states(self.name)[:, -q.shape[2] :]
        with torch.autocast(hidden.device.type, enabled=False):
            shares = self.r_proj(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))
        return Projection(q, k, v, own={_SHARES: shares.unflatten(-1, (-1, self.rank))})

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return logits + self._bias(block, logits)

    def added(self) -> Bias:
        return ContentBias(self._bias, self._vectors)

    def _bias(self, block: Block, like: Tensor, *content: Tensor) -> Tensor:
        # A graph that is traced does not know the largest distance in reach.
        last = self.extent if torch.compiler.is_compiling() else min(block.reach, self.extent)
        distance = block.distance().to(like.device)
        if self.geometry.causal:
            distance = distance.abs()
        with torch.autocast(like.device.type, enabled=False):
            curves = self._falling().to(like)[:, self.extent - last : self.extent + last + 1]
            products = block.own[_SHARES].to(like).transpose(1, 2) @ curves  # [B, H, q, N]
            return by_distance(products, distance, last)

    def _falling(self) -> Tensor:
        """Return the curves from the distance `extent` down, with zeros where they end, `[rank, N]`."""
        return F.pad(self.proj.flip(1), (1, 0 if self.geometry.causal else 1))

    def _vectors(self, tables: Mapping[str, Tensor]) -> Vectors:
        """Return the curves as one vector of shares per distance, to be multiplied with the shares of each query."""
        # Products with vectors are multiplied by the softmax scale.
        return Vectors(self._falling().T[None] / self.geometry.scale, queries=_SHARES)

    def is_silent(self) -> bool:
        return not bool(self.proj.any())
