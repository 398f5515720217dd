from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.equivalents import Equivalent
from hf_posenc.facts import Facts
from hf_posenc.forms import Folded
from hf_posenc.operands import Block, Geometry, Projection, Tokens
from hf_posenc.ops import grouped_matmul, turn_pairs
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import draw_start
from hf_posenc.schemes.families.layers import AnyDtypeLinear
from hf_posenc.schemes.families.rotary import RotaryScheme

# The position states of tokens, `[B, S, H, rotary_dim]`: real parts, then imaginary parts, of one complex number per
# head and frequency.
_STATES = "position_states"


@register_scheme("tape", paper="2501.00712", family="contextual")
class TaPE(RotaryScheme):
    """Rotations with angles and lengths that every layer updates from the content of tokens (Zhu et al. 2025).

    A token has one complex number z per head and frequency, initially `exp(i * position * frequency)`, which is RoPE.
    In each layer, queries and keys are multiplied by their token's z; then, with the layer's attention weights A and
    the output y of its feed-forward,

        z <- z + (A z) * sum over columns of post_attention_linear
        z <- z + pe.down_proj(silu(pe.x_proj(y)) * pe.up_proj(z))

    where the linear maps of z act on the head axis only, with the same weights for real and imaginary part. z passes
    from layer to layer with the hidden states, in float32; the cache holds each token's z at the input of the layer, in
    the model's dtype. The last layer updates nothing and has no parameters (official checkpoints hold unused ones
    there).

    Parameters: `post_attention_linear` `[H, H]` and `pe.up_proj` `[P, H]` start at zero, which makes the start RoPE
    exactly; `pe.x_proj` `[P, E]` and `pe.down_proj` `[H, P]` start at N(0, 0.02).

    Args:
        position_size: Hidden width P of the update; `None` is 4 H, as in the official training script.
        head_mix: Mix heads by `post_attention_linear` as a matrix. The official code sums its columns, which leaves one
            factor per head.
        gate: Multiply the first angles by one learned factor that starts at 0: no rotation, an exact no-op if the
            native encoding is kept.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        position_size: int | None = None,
        head_mix: bool = False,
        theta: float | None = None,
        gate: bool = False,
    ) -> None:
        super().__init__(geometry, theta=theta, rotary_dim=None, gate=gate)
        if not geometry.first:
            self.gate_weight = None  # The angles are made in the first layer only.
        heads = geometry.heads
        size = 4 * heads if position_size is None else position_size
        self.require(size >= 1, "position_size", position_size, "at least 1")
        self.position_size, self.head_mix = size, head_mix
        self.post_attention_linear: AnyDtypeLinear | None = None
        self.pe: nn.ModuleDict | None = None
        if not geometry.last:
            self.post_attention_linear = AnyDtypeLinear(heads, heads, bias=False)
            self.pe = nn.ModuleDict(
                {
                    "up_proj": AnyDtypeLinear(heads, size, bias=False),
                    "x_proj": AnyDtypeLinear(geometry.hidden_size, size, bias=False),
                    "down_proj": AnyDtypeLinear(size, heads, bias=False),
                }
            )

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.post_attention_linear is not None:
            nn.init.zeros_(self.post_attention_linear.weight)
        for name, weight in () if self.pe is None else self.pe.named_parameters():
            draw_start(weight, "zero" if name == "up_proj.weight" else "normal", std=0.02)

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        states = self._states(tokens, k)  # [B, S, H, R]
        q = self._turn(q, states[:, states.shape[1] - q.shape[2] :].transpose(1, 2))
        return Projection(q, k, v, {_STATES: states.to(k.dtype)})

    def recall(self, k: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        # Keys are cached as they were projected: with grouped queries, each is rotated once per query head.
        repeats = self.geometry.heads // k.shape[1]
        return self._turn(k.repeat_interleave(repeats, dim=1), state[_STATES].transpose(1, 2))

    def mix(self, weights: Tensor, v: Tensor, block: Block) -> Tensor:
        output = grouped_matmul(weights, v)
        if self.post_attention_linear is None:
            return output
        states = block.state[_STATES].transpose(1, 2).to(v)  # [B, H, K, R]
        return torch.cat((output, weights @ states), dim=-1)

    def folded(self) -> Folded | None:
        return Folded(self._with_states)

    def _with_states(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Return values per query head with the position states appended, and queries and keys padded to that width."""
        v = v.repeat_interleave(k.shape[1] // v.shape[1], dim=1)
        if self.post_attention_linear is None:
            return q, k, v
        states = block.state[_STATES].transpose(1, 2).to(v)  # [B, H, K, R]
        q, k = (F.pad(x, (0, self.rotary_dim)) for x in (q, k))
        return q, k, torch.cat((v, states), dim=-1)

    def carry(self, output: Tensor, tokens: Tokens) -> Tensor | None:
        if self.post_attention_linear is None:
            return None
        states = self._states(tokens, output)
        attended = output[..., self.geometry.head_dim :].permute(0, 2, 3, 1).to(states)  # [B, S, R, H]
        with torch.autocast(states.device.type, enabled=False):
            if self.head_mix:
                attended = self.post_attention_linear(attended)
            else:
                attended = attended * self.post_attention_linear(attended.new_ones(self.geometry.heads))
        moved: Tensor = states + attended.transpose(-1, -2)
        return moved

    def finish(self, output: Tensor, hidden: Tensor | None) -> Tensor:
        return output[..., : self.geometry.head_dim]

    def feed(self, carried: Tensor, fed: Tensor) -> Tensor:
        assert self.pe is not None
        with torch.autocast(carried.device.type, enabled=False):
            gate = F.silu(self.pe["x_proj"](fed.to(carried)))  # [B, S, P]
            update: Tensor = self.pe["down_proj"](gate[..., None, :] * self.pe["up_proj"](carried.transpose(-1, -2)))
        return carried + update.transpose(-1, -2)  # from [B, S, R, H]

    def stock_equivalent(self) -> Equivalent:
        # Gated angles are known to the first layer only.
        if self.gate or (self.post_attention_linear is not None and bool(self.post_attention_linear.weight.any())):
            return super().stock_equivalent()
        if self.pe is not None and all(bool(weight.any()) for weight in self.pe.parameters()):
            return super().stock_equivalent()
        return self.rotation()

    def is_silent(self) -> bool:
        return False  # later layers change the states still

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        # All layers go on from the angles of the first.
        exact = self.gate if native_kept else self._native and not self.gate and self.geometry.uniform
        state = self.geometry.heads * self.rotary_dim * element
        return replace(super().facts(native_kept=native_kept, element=element), exact=exact, state_bytes=(state, 0))

    def _states(self, tokens: Tokens, like: Tensor) -> Tensor:
        """Return the position states of the fresh tokens, float32 or wider `[B, S, H, R]`."""
        if tokens.carried is not None:
            return tokens.carried
        precise = torch.promote_types(like.dtype, torch.float32)
        first = torch.cat(self.cos_sin(tokens.positions.key.to(like.device), precise), dim=-1)  # [B|1, S, R]
        return first[:, :, None].expand(like.shape[0], -1, self.geometry.heads, -1)

    def _turn(self, x: Tensor, states: Tensor) -> Tensor:
        """Multiply the channel pairs of `[B, H, S, D]` by position states `[B, H, S, R]`."""
        cos, sin = states.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
        return turn_pairs(x, cos, sin, self.layout)
