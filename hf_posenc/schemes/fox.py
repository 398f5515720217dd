import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.facts import Adaptation, Facts
from hf_posenc.forms import Bias, KeyBias
from hf_posenc.operands import Block, Geometry, Projection, Tokens
from hf_posenc.pictures import Picture
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme, set_start
from hf_posenc.schemes.families.layers import AnyDtypeLinear

# The sum of the logarithms of all gates up to each token: `[B, S, H]`, or `[B, S, 2 H]` in encoders.
_SUMS = "log_forget_sums"


@register_scheme("fox", paper="2503.02130", family="contextual", usual=True)
class FoX(Scheme):
    """A gate per head and token for the share of the past that is kept (Forgetting Transformer, Lin et al. 2025).

    Let `log f_t = logsigmoid(w . x_t + b)` for the hidden state x that the projections read, and `c_t` the sum of
    `log f` up to and including token t. Then `c_i - c_j`, the sum over gates after key j up to query i, is added to
    their logit. It is 0 for a token itself, never positive, and not multiplied by the softmax scale. Gates belong to
    query heads, also if these share keys. The computation is in float32 or wider, with `c_i - c_j` before the sum with
    the logit; the cache holds c in float32, one number per head and token.

    Keys ahead of the query, where the mask of a decoder shows some, have `c_j - c_i`.

    Encoders have two gates per head: keys behind a query have the difference above, keys ahead of it `cr_j - cr_i` with
    the sums cr of the second gate (as in x-transformers' DataDependentAlibi).

    Parameters: `fgate_proj.weight` `[H, E]` (rows of the second gate last, in encoders) and `fgate_proj.bias` `[H]`; or
    `fgate_bias` `[H]`, which is stored, not trained, if the gate is fixed.

    Starts: `"official"` is `f` near 1/2 for every token (w of N(0, 0.02), b = 0). The others have w = 0 and `log f =
    -1/T` for any content, so 1/e is left after T tokens: `"timescale"` spreads T over the heads; `"horizon"` sets T
    beyond the context, which moves logits by at most context / T and suits a kept native encoding.

    Args:
        forget_gate: Input of the gates: `"full"` is the hidden state; `"bias_only"` a learned number per head;
            `"fixed"` a number per head that is not trained.
        init: Start, see above. The official code has `"official"` for full gates, and for the others `"timescale"`
            with a shortest time of 2 tokens.
        horizon: T of `init="horizon"`; `None` is 10 times the model's context (2,048 tokens if it states none).
        decay_time_min: The shortest T of `init="timescale"`; `None` is 1/128 of the longest, 2 tokens at least.
        decay_time_max: The longest T of `init="timescale"`; `None` is the model's context. Heads are spaced
            geometrically.
    """

    neutral_options: Mapping[str, Any] | None = {"init": "horizon"}
    neutral_is_exact = False
    adaptation = Adaptation(native="keep", options={"init": "horizon"}, elsewhere="handover")
    fgate_bias: Tensor | None

    def __init__(
        self,
        geometry: Geometry,
        *,
        forget_gate: Literal["full", "bias_only", "fixed"] = "full",
        init: Literal["official", "horizon", "timescale"] = "timescale",
        horizon: float | None = None,
        decay_time_min: float | None = None,
        decay_time_max: float | None = None,
    ) -> None:
        super().__init__(geometry)
        timed = forget_gate != "fixed" or init != "official"
        self.require(timed, "init", init, "'horizon' or 'timescale' for fixed gates")
        if init == "horizon":
            horizon = 10.0 * geometry.context if horizon is None else horizon
        if init == "timescale":
            if decay_time_min is None:
                decay_time_min = max(2.0, (decay_time_max or geometry.context) / 128)
            decay_time_max = max(decay_time_min, float(geometry.context)) if decay_time_max is None else decay_time_max
        for option, got, needed in (
            ("horizon", horizon, "horizon"),
            ("decay_time_min", decay_time_min, "timescale"),
            ("decay_time_max", decay_time_max, "timescale"),
        ):
            self.require(got is None or init == needed, option, got, f"None unless init={needed!r} is given")
            self.require(got is None or got > 0, option, got, "a positive number of tokens")
        if decay_time_min is not None and decay_time_max is not None:
            fits = decay_time_min <= decay_time_max
            self.require(fits, "decay_time_max", decay_time_max, f"at least decay_time_min = {decay_time_min}")
        self.forget_gate, self.init, self.horizon = forget_gate, init, horizon
        self.decay_time_min, self.decay_time_max = decay_time_min, decay_time_max
        gates = geometry.heads if geometry.causal else 2 * geometry.heads
        self.fgate_proj: AnyDtypeLinear | None = None
        if forget_gate == "full":
            self.fgate_proj = AnyDtypeLinear(geometry.hidden_size, gates)
            self.fgate_bias = None
        elif forget_gate == "bias_only":
            self.fgate_bias = nn.Parameter(torch.empty(gates))
        else:
            self.register_buffer("fgate_bias", torch.empty(gates))

    def reset_parameters(self) -> None:
        if self.fgate_proj is not None:
            if self.init == "official":
                nn.init.normal_(self.fgate_proj.weight, std=0.02)
            else:
                nn.init.zeros_(self.fgate_proj.weight)
        bias = self.fgate_bias if self.fgate_proj is None else self.fgate_proj.bias
        assert bias is not None
        if self.init == "official":
            nn.init.zeros_(bias)
        else:
            rate = self._decay_times().repeat(bias.numel() // self.geometry.heads).reciprocal()
            # `-log(expm1(rate))`, whose sigmoid is `exp(-rate)`, without overflow at high rates.
            set_start(bias, -rate - (-torch.expm1(-rate)).log())

    def _decay_times(self) -> Tensor:
        """Return the time T of every head at the start, float64 `[H]`."""
        ends = (self.horizon, self.horizon) if self.init == "horizon" else (self.decay_time_min, self.decay_time_max)
        first, last = (math.log(end) for end in ends if end is not None)
        return torch.linspace(first, last, self.geometry.heads, dtype=torch.float64, device="cpu").exp()

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        return Projection(q, k, v, {_SUMS: self.sums(tokens, k)})

    def sums(self, tokens: Tokens, k: Tensor) -> Tensor:
        """Return the sum of log gates up to each fresh token, float32 or wider `[B, S, H]`, given keys `k`."""
        precise = torch.promote_types(k.dtype, torch.float32)
        with torch.autocast(k.device.type, enabled=False):
            if self.fgate_proj is not None:
                logits = self.fgate_proj(tokens.hidden_states(self.name).to(precise))
            else:
                assert self.fgate_bias is not None
                logits = self.fgate_bias.to(precise).expand(k.shape[0], k.shape[2], -1)
            log_gates = F.logsigmoid(logits)
            if tokens.real is not None:
                log_gates = log_gates.masked_fill(~tokens.real[..., None], 0)
            sums = log_gates.cumsum(dim=1)
        before = tokens.past.get(_SUMS)
        return sums if before is None else sums + before

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return logits + self._bias(block, logits)

    def _bias(self, block: Block, like: Tensor) -> Tensor:
        own = block.own[_SUMS].transpose(1, 2)[..., None]  # [B, H, q, 1]
        keys = block.state[_SUMS].transpose(1, 2)[:, :, None]  # [B, H, 1, K]
        if self.geometry.causal and block.causal:
            return own - keys
        heads = self.geometry.heads
        behind = (block.distance() >= 0)[:, None]
        # Encoders have a second gate.
        return torch.where(behind, own[:, :heads] - keys[:, :heads], keys[:, -heads:] - own[:, -heads:])

    def added(self) -> Bias | None:
        if not self.geometry.causal:
            return Bias(self._bias)
        return KeyBias(self._bias, self._products)

    def _products(self, block: Block) -> list[tuple[Tensor | None, Tensor | None]]:
        own, keys = (state[_SUMS].transpose(1, 2) for state in (block.own, block.state))
        return [(own, None), (None, -keys)]

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        horizon = self.horizon if native_kept else None
        bound = None if horizon is None else self.geometry.context / horizon
        return Facts(tolerance=bound, state_bytes=(4 * self.geometry.heads, 0))

    def gates(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        """Return the gate of each token, `[B, H, K]`, given the arguments of `score`; the first one in encoders."""
        sums = block.state[_SUMS].transpose(1, 2)[:, : self.geometry.heads]
        return F.pad(sums, (1, 0)).diff(dim=-1).exp()

    pictures = (Picture("gates", "forget gates", "kept at this token (factor)", gates, high=1.0),)
