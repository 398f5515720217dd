from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.facts import Facts
from hf_posenc.operands import Geometry, Projection, Tokens
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.layers import AnyDtypeLinear
from hf_posenc.schemes.fox import FoX

# Epsilons of the official code, which differ.
_QK_EPSILON, _OUTPUT_EPSILON = 1e-5, 1e-6


class HeadNorm(nn.Module):
    """Root-mean-square norm of each head `[B, H, S, D]`, with a factor per channel of each head, or shared by heads."""

    def __init__(self, heads: int, head_dim: int, epsilon: float) -> None:
        super().__init__()
        self.head_dim, self.epsilon = head_dim, epsilon
        self.weight = nn.Parameter(torch.empty(heads * head_dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, (self.head_dim,), eps=self.epsilon)
        return normed * self.weight.to(x).view(-1, 1, self.head_dim)


@register_scheme("fox_pro", paper="2503.02130", family="contextual", directions=("causal",))
class FoXPro(FoX):
    """FoX with normalised queries and keys, token shift of keys and values, and a gated output (Lin et al. 2025).

    The "Pro" block of the paper, in this order, each step with a switch:

    1. `k_t <- a_t k_{t-1} + (1 - a_t) k_t` with `a_t = sigmoid(k_shift_proj x_t)` per kv head, on projected keys; the
       key before the first token of a sequence is zero. Values are shifted likewise.
    2. Queries and keys of each head are divided by their root mean square (epsilon 1e-5) and multiplied by a learned
       factor per channel. A kept native rotation follows here.
    3. Attention with the forget gates of `fox`.
    4. The output of each head is normalised likewise (epsilon 1e-6), then multiplied by `sigmoid(ogate_proj x)`.

    The computation is in float32 or wider, except for the product with `ogate_proj`, which uses the model's dtype. The
    cache holds shifted values and shifted, normalised keys; for the last tokens it also holds the projected ones.

    Parameters in addition to those of `fox`: `k_shift_proj.weight` and `v_shift_proj.weight` `[G, E]`, `q_norm.weight`
    `[H D]`, `k_norm.weight` `[G D]`, `o_norm.weight` `[H D]`, `ogate_proj.weight` `[H D, E]`. In official checkpoints
    the first two are `k_proj.shift_proj.weight` and `v_proj.shift_proj.weight`, and `o_norm` is `output_norm`. Norms
    start at one (that of queries compensates a softmax scale other than 1 / sqrt(D)), the rest at N(0, 0.02): a break
    even if the native encoding is kept.

    Args:
        output_gate: Gate the output.
        output_norm: Normalise the output.
        qk_norm: Normalise queries and keys.
        share_qk_norm: Use one factor per channel for all heads, `[D]`, as in the checkpoints of the paper.
        k_shift: Mix keys with those of the token before.
        v_shift: Mix values with those of the token before.
        gate_activation: Activation of the output gate; `"silu"` needs `output_norm=False`.
        shift_history: Number of tokens for which a cache keeps projected keys and values; fewer than that can be taken
            back (assisted decoding takes back wrong guesses).
    """

    neutral_options = None

    def __init__(
        self,
        geometry: Geometry,
        *,
        forget_gate: Literal["full", "bias_only", "fixed"] = "full",
        init: Literal["official", "horizon", "timescale"] = "timescale",
        horizon: float | None = None,
        decay_time_min: float | None = None,
        decay_time_max: float | None = None,
        output_gate: bool = True,
        output_norm: bool = True,
        qk_norm: bool = True,
        share_qk_norm: bool = False,
        k_shift: bool = True,
        v_shift: bool = True,
        gate_activation: Literal["sigmoid", "silu"] = "sigmoid",
        shift_history: int = 64,
    ) -> None:
        allowed = gate_activation == "sigmoid" or not output_norm
        self.require(allowed, "gate_activation", gate_activation, "'sigmoid', unless output_norm=False")
        self.require(shift_history >= 1, "shift_history", shift_history, "at least 1 token")
        super().__init__(
            geometry,
            forget_gate=forget_gate,
            init=init,
            horizon=horizon,
            decay_time_min=decay_time_min,
            decay_time_max=decay_time_max,
        )
        self.output_gate, self.output_norm, self.gate_activation = output_gate, output_norm, gate_activation
        self.qk_norm, self.share_qk_norm = qk_norm, share_qk_norm
        self.k_shift, self.v_shift, self.shift_history = k_shift, v_shift, shift_history
        heads, groups, width = geometry.heads, geometry.kv_heads, geometry.head_dim
        self.k_shift_proj = AnyDtypeLinear(geometry.hidden_size, groups, bias=False) if k_shift else None
        self.v_shift_proj = AnyDtypeLinear(geometry.hidden_size, groups, bias=False) if v_shift else None
        self.q_norm = HeadNorm(1 if share_qk_norm else heads, width, _QK_EPSILON) if qk_norm else None
        self.k_norm = HeadNorm(1 if share_qk_norm else groups, width, _QK_EPSILON) if qk_norm else None
        self.o_norm = HeadNorm(heads, width, _OUTPUT_EPSILON) if output_norm else None
        self.ogate_proj = AnyDtypeLinear(geometry.hidden_size, heads * width, bias=False) if output_gate else None
        self.history = shift_history if k_shift or v_shift else 0

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for linear in (self.k_shift_proj, self.v_shift_proj, self.ogate_proj):
            if linear is not None:
                nn.init.normal_(linear.weight, std=0.02)
        for norm in (self.k_norm, self.o_norm):
            if norm is not None:
                nn.init.ones_(norm.weight)
        if self.q_norm is not None:
            nn.init.constant_(self.q_norm.weight, self.geometry.head_dim**-0.5 / self.geometry.scale)

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        if self.ogate_proj is not None:
            tokens.hidden_states(self.name)  # `finish` would miss them too late
        precise = torch.promote_types(q.dtype, torch.float32)
        state = super().project(tokens, q, k, v).state
        recent: dict[str, Tensor] = {}
        new_q, new_k, new_v = (x.to(precise) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            if self.k_shift_proj is not None:
                new_k = self._shift(tokens, k, self.k_shift_proj, "key_shift", recent)
            if self.v_shift_proj is not None:
                new_v = self._shift(tokens, v, self.v_shift_proj, "value_shift", recent)
            if self.q_norm is not None and self.k_norm is not None:
                new_q, new_k = self.q_norm(new_q), self.k_norm(new_k)
        return Projection(new_q.to(q.dtype), new_k.to(k.dtype), new_v.to(v.dtype), state, recent)

    def _shift(self, tokens: Tokens, x: Tensor, gate: nn.Module, name: str, recent: dict[str, Tensor]) -> Tensor:
        """Mix `[B, G, S, D]` with the token before, and add the state that the next call needs to `recent`."""
        fresh = x.transpose(1, 2)
        before, needed = tokens.previous(fresh, name)
        recent.update(needed)
        precise = torch.promote_types(x.dtype, torch.float32)
        share: Tensor = gate(tokens.hidden_states(self.name).to(precise)).sigmoid()[..., None]  # [B, S, G, 1]
        return (share * before.to(precise) + (1 - share) * fresh.to(precise)).transpose(1, 2)

    def finish(self, output: Tensor, hidden: Tensor | None) -> Tensor:
        precise = torch.promote_types(output.dtype, torch.float32)
        result = output.to(precise)
        if self.o_norm is not None:
            result = self.o_norm(result)
        if self.ogate_proj is not None:
            assert hidden is not None
            logits: Tensor = self.ogate_proj(hidden).to(precise)
            gates = logits.sigmoid() if self.gate_activation == "sigmoid" else F.silu(logits)
            result = result * gates.view(*gates.shape[:2], self.geometry.heads, -1).transpose(1, 2)
        return result.to(output.dtype)

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        found = super().facts(native_kept=native_kept, element=element)
        shifted = self.k_shift + self.v_shift
        values = self.geometry.kv_heads * self.geometry.head_dim * element
        found = replace(found, state_bytes=(found.state_bytes[0], self.history * shifted * (values + 8)))
        changes = any((self.output_gate, self.output_norm, self.qk_norm, self.k_shift, self.v_shift))
        if self.horizon is not None and not changes:
            return found
        caution = (
            "fox_pro also changes what the layer computes apart from positions (norms, gates, mixing of neighbours), "
            "so the model must be trained for longer than with a change of positions alone. fox with native='keep' "
            "starts near the original."
        )
        return replace(found, tolerance=None if changes else found.tolerance, cautions=(caution,))
