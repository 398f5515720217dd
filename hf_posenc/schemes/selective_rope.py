from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.facts import Facts
from hf_posenc.operands import Geometry, Tokens
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.layers import LowRank, convolved
from hf_posenc.schemes.families.rotary import ContentRotation

# Names of the sums of all steps up to a token, `[B, S, G, M]`, and of the projections of the tokens before.
_SUMS, _BEFORE = "selective_steps", "selective_before"


@register_scheme("selective_rope", paper="2511.17388", family="contextual")
class SelectiveRoPE(ContentRotation):
    """RoPE in which each token decides by how much the clock of each channel pair goes on (Movahedi et al. 2025).

    A token makes a step per channel pair, and queries and keys turn by `frequency * sum of all steps up to their
    token`. With steps of 1 it is RoPE. Steps are a projection of rank `rank` of the hidden state, whose length is 1 in
    each head's part, mixed by a causal convolution over `kernel` tokens. Sums are in float64, and the cache holds those
    of the last 64 tokens.

    Parameters: `phi_proj.0.weight` `[rank, E]`, `phi_proj.1.weight` `[G M, rank]` for each kv head G and pair M, and
    `phi_conv1d` `[G M, kernel]`.

    Starts. `"native"`: the position plus the sums, with `phi_proj.1` at zero: exact on models with rotary encoding,
    whose frequencies are taken. `"zero"`: the sums alone, at zero: no rotation, an exact no-op if the native encoding
    is kept. `"official"`: the sums alone, with torch's default for all weights.

    Args:
        theta: Ratio of the wavelengths; `None` uses the model's own frequencies, else 10,000 (500,000 in the official
            code).
        rank: Rank of the projection.
        kernel: Tokens under the convolution: the token itself and those before it.
    """

    history = 64

    def __init__(
        self,
        geometry: Geometry,
        *,
        init: Literal["native", "zero", "official"] = "native",
        theta: float | None = None,
        rank: int = 32,
        kernel: int = 4,
    ) -> None:
        super().__init__(geometry, init=init, theta=theta)
        self.require(rank >= 1, "rank", rank, "at least 1")
        self.require(1 <= kernel <= self.history, "kernel", kernel, f"a number from 1 to {self.history}")
        self.rank, self.kernel = rank, kernel
        # The official code's own parts of the hidden state.
        self._parts = geometry.heads if geometry.hidden_size % geometry.heads == 0 else 1
        steps = geometry.kv_heads * self.pairs
        self.phi_proj = LowRank(geometry.hidden_size, rank, steps)
        self.phi_conv1d = nn.Parameter(torch.empty(steps, kernel))

    def reset_parameters(self) -> None:
        self.phi_proj.reset_parameters()
        if self.init != "official":
            nn.init.zeros_(self.phi_proj.get_parameter("1.weight"))
        nn.init.uniform_(self.phi_conv1d, -(self.kernel**-0.5), self.kernel**-0.5)

    def places(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = tokens.hidden_states(self.name)
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        parts = F.normalize(hidden.reshape(*hidden.shape[:-1], self._parts, -1), dim=-1)
        steps, recent = convolved(tokens, parts.flatten(-2), self.phi_proj, self.phi_conv1d, _BEFORE)
        if tokens.real is not None:
            steps = steps.masked_fill(~tokens.real[..., None], 0)
        sums = steps.double().cumsum(1)
        before = tokens.past.get(_SUMS)
        if before is not None:
            sums = sums + before.flatten(2).to(sums)
        # Sums begin again with each packed sequence: where the scheme acts in part, absolute angles count.
        goes_on, needed = tokens.previous(torch.ones_like(sums[..., :1]), f"{_BEFORE}_any")
        slots = torch.arange(sums.shape[1], device=sums.device)[:, None]
        begins = goes_on == 0 if tokens.real is None else (goes_on == 0) & tokens.real[..., None]
        first = torch.where(begins, slots, -1).cummax(1).values
        earlier = (sums - steps).gather(1, first.clamp_min(0).expand_as(sums))
        sums, recent = sums - earlier.masked_fill(first < 0, 0), recent | needed
        sums = torch.unflatten(sums, -1, (self.geometry.kv_heads, -1))  # [B, S, G, M]
        return sums.transpose(1, 2), {**recent, _SUMS: sums}

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        of_shifts = (self.kernel - 1) * (4 * self.rank + 8) + 16
        per_sequence = self.history * (8 * self.geometry.kv_heads * self.pairs + of_shifts)
        return replace(super().facts(native_kept=native_kept, element=element), state_bytes=(0, per_sequence))
