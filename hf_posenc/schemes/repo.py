from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.operands import Geometry, Tokens
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.layers import AnyDtypeLinear
from hf_posenc.schemes.families.rotary import ContentRotation


@register_scheme("repo", paper="2512.14391", family="contextual")
class RePo(ContentRotation):
    """RoPE at positions that a small network reads from the hidden state of each token (RePo, Li et al. 2025).

    `z = W_z (silu(W_g x) * W_c x)` is a real number per token and head, and the token's queries and keys turn by `z *
    frequency`, where RoPE has `position * frequency`. Keys are cached rotated.

    Parameters: `gate_map.weight` and `content_map.weight` `[width, E]`, `final_map.weight` `[G, width]`, as in the
    official code, without biases.

    Starts. `"native"`: the position plus z, with `W_z = 0`: exact on models with rotary encoding, whose frequencies are
    taken. `"zero"`: z alone, with `W_z = 0`: no rotation, an exact no-op if the native encoding is kept.
    `"official"`: z alone, with all weights from N(0, 0.02).

    Args:
        width: Hidden channels of the network; `None` is an eighth of the hidden state.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        init: Literal["native", "zero", "official"] = "native",
        theta: float | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__(geometry, init=init, theta=theta)
        self.require(width is None or width >= 1, "width", width, "at least 1")
        self.width = max(1, geometry.hidden_size // 8) if width is None else width
        self.gate_map = AnyDtypeLinear(geometry.hidden_size, self.width, bias=False)
        self.content_map = AnyDtypeLinear(geometry.hidden_size, self.width, bias=False)
        self.final_map = AnyDtypeLinear(self.width, geometry.kv_heads, bias=False)

    def reset_parameters(self) -> None:
        for layer in (self.gate_map, self.content_map, self.final_map):
            nn.init.normal_(layer.weight, std=0.02)
        if self.init != "official":
            nn.init.zeros_(self.final_map.weight)

    def places(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = tokens.hidden_states(self.name)
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        found: Tensor = self.final_map(F.silu(self.gate_map(hidden)) * self.content_map(hidden))  # [B, S, G]
        return found.transpose(1, 2)[..., None].double(), {}
