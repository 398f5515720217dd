import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.facts import Facts
from hf_posenc.forms import KeyScan, Locality, Stick
from hf_posenc.operands import Block, Geometry
from hf_posenc.ops import fill_hidden_, grouped_matmul
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme, set_start

# Epsilon of lm-engine, and torch's default.
_NORM_EPSILON = 1e-5
# The longest reach at the start, for models that state no length.
_REACH = 1024


@register_scheme("stick_breaking", paper="2410.17980", family="contextual", directions=("causal",))
class StickBreaking(Scheme):
    """Keys, the nearest first, each take a share of the rest left by nearer keys; no softmax (Tan et al. 2024).

    With `beta_ij = sigmoid(s q_i . k_j)` the weight is `A_ij = beta_ij * prod_{j<t<i} (1 - beta_it)`, by default
    without the query's own key. The weights of a row do not sum to 1: the remainder `prod_t (1 - beta_it)` is the rest
    of the stick after the first key of the sequence. Only the order of keys matters; masked keys take nothing.

    Weights are computed in float32 or wider as `exp(z_ij - sum_{j<=t<i} softplus(z_it))`.

    Args:
        attend_current: Break the first piece off at the query's own key, not at the one before.
        remainder: Use of the rest of the stick: `"drop"` leaves it (as in the published checkpoints; a first token then
            attends to nothing); `"self"` gives it to the query's own key, so rows sum to 1; `"head_bias"` gives it to a
            learned vector per head and normalises the output of each head (GroupNorm with mean and variance), as
            lm-engine does: parameters `head_bias` `[H, D]`, zero at the start, and `norm`.
        start_bias: Add a learned bias per head to the logits (not in the paper). It starts at `-ln(T_h)`, a reach of
            about T_h tokens, from `T_1 = L^(1 / H)` to `T_H = L`, the trained length (1,024 if the model states none).
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        attend_current: bool = False,
        remainder: Literal["drop", "self", "head_bias"] = "drop",
        start_bias: bool = False,
    ) -> None:
        super().__init__(geometry)
        self.attend_current, self.remainder, self.start_bias = attend_current, remainder, start_bias
        heads, width = geometry.heads, geometry.head_dim
        self.logit_bias = nn.Parameter(torch.empty(heads)) if start_bias else None
        with_bias = remainder == "head_bias"
        self.head_bias = nn.Parameter(torch.empty(heads, width)) if with_bias else None
        self.norm = nn.GroupNorm(heads, heads * width, eps=_NORM_EPSILON) if with_bias else None

    def reset_parameters(self) -> None:
        if self.logit_bias is not None:
            heads, longest = self.geometry.heads, self.geometry.max_positions or _REACH
            set_start(self.logit_bias, -torch.arange(1, heads + 1) / heads * torch.tensor(longest).log())
        if self.head_bias is not None and self.norm is not None:
            nn.init.zeros_(self.head_bias)
            nn.init.ones_(self.norm.weight)
            nn.init.zeros_(self.norm.bias)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return logits if self.logit_bias is None else logits + self.logit_bias.to(logits)[:, None, None]

    def locality(self) -> Locality | None:
        return Locality(self._enough)

    def key_scan(self) -> KeyScan | None:
        return Stick(self.attend_current, self.logit_bias, self.remainder == "self", self.head_bias)

    def _enough(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> bool:
        logits = self.score(logits, q, k, block)
        # Farther keys share a rest smaller than the smallest normal weight; the 1 is a margin for rounding.
        left = fill_hidden_(F.softplus(logits), self._taking(block), 0.0).sum(-1)
        return bool((left > 1 - math.log(torch.finfo(logits.dtype).tiny)).all())

    def weigh(self, logits: Tensor, block: Block) -> Tensor:
        weights, rest = self.break_stick(logits, block)
        if self.remainder == "self":
            own = (block.distance() == 0)[:, None]
            if block.keep is not None:
                own = own & block.keep
            return weights + rest * own
        return torch.cat([weights, rest], dim=-1) if self.remainder == "head_bias" else weights

    def break_stick(self, logits: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Return the keys' weights `[B, H, q, K]` and the remainder, `[B, H, q, 1]`."""
        # So low a logit takes nothing and leaves all.
        logits = torch.where(self._taking(block), logits, torch.finfo(logits.dtype).min)
        left = F.logsigmoid(-logits).flip(-1).cumsum(-1).flip(-1)  # log(1 - beta), summed from each key to the last
        # Pieces too small for a normal number would take most of the time on a CPU, here and where they are multiplied.
        smallest = 4 * torch.finfo(logits.dtype).tiny
        pieces = (logits + left).clamp_min(math.log(smallest)).exp()
        return F.threshold(pieces, 2 * smallest, 0), left[..., :1].exp()

    def _taking(self, block: Block) -> Tensor:
        """Return the mask of keys that break a piece off, bool `[B|1, H|1, q, K]`."""
        distance = block.distance()
        taking = (distance >= 0 if self.attend_current else distance > 0)[:, None]
        return taking if block.keep is None else taking & block.keep

    def mix(self, weights: Tensor, v: Tensor, block: Block) -> Tensor:
        if self.head_bias is None:
            return grouped_matmul(weights, v)
        return grouped_matmul(weights[..., :-1], v) + weights[..., -1:] * self.head_bias.to(v)[:, None]

    def finish(self, output: Tensor, hidden: Tensor | None) -> Tensor:
        if self.norm is None:
            return output
        batch, heads, length, width = output.shape
        rows = output.transpose(1, 2).reshape(-1, heads * width).to(self.norm.weight.dtype)
        normed: Tensor = self.norm(rows)  # [B * Q, H * D]
        return normed.view(batch, length, heads, width).transpose(1, 2).to(output)

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        whole = self.remainder == "self"
        cautions = ["The attention weights are no softmax" + ("" if whole else " and do not sum to 1") + "."]
        if not self.start_bias:
            cautions.append(
                "Heads start with a reach of few tokens; start_bias=True spreads them up to the trained length."
            )
        return Facts(cautions=tuple(cautions), sums_to_one=whole)
