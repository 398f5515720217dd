import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hf_posenc.equivalents import Equivalent
from hf_posenc.facts import Adaptation, Facts
from hf_posenc.forms import Folded
from hf_posenc.operands import Block, Geometry
from hf_posenc.ops import Layout, grouped_matmul
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.rotary import Annealed, RotaryScheme

# Fading of the first pair, the strongest, within `scale_base` tokens: (0 + 0.4) / 1.4.
_SMALLEST = 0.4 / 1.4

# Bound on the exponent of factors on queries, far from the limits of float32 (e^88).
_LARGEST_EXPONENT = 40.0


@register_scheme("xpos", paper="2212.10554", family="rotary", directions=("causal",))
class XPos(Annealed, RotaryScheme):
    """RoPE in which channel pairs fade with the distance between query and key (Sun et al. 2022).

    The product of a query at m and a key at n in pair i of d / 2 is multiplied by `zeta_i^((m - n) / scale_base)` with
    `zeta_i = (2i + 0.4 d) / (1.4 d)`, which is at most 1: fast pairs fade soonest. Only the distance counts.

    The official code multiplies queries and keys by powers of zeta relative to the middle of the input, which moves as
    a sequence grows. Here keys are cached rotated and not scaled, and the factors are relative to the last query of
    each block of rows. The scheme is defined for causal attention only.

    Starts: a break, since distant keys fade at once. With `anneal` the exponent is multiplied by `progress`, which is
    saved with the model and starts at 0: RoPE, exact on models with rotary encoding. Raise it to 1 while training, with
    `anneal_to`. With `gate`, angles and exponents are multiplied by one learned factor (clamped to 0 to 1 for
    exponents) that starts at 0: an exact no-op if the native encoding is kept.

    Args:
        layout: Pairing of channels: `"half"` (i, i + d/2) or `"interleaved"` (2i, 2i + 1). `None` is that of
            the model's own rotation, if it has one, else `"interleaved"`, the official one.
        scale_base: Distance, in tokens, at which pair i has faded to zeta_i.
        anneal: Start without fading; `anneal_to` phases it in.
        block_length: Length of blocks of blockwise causal attention, which the paper uses for texts beyond the trained
            length, with half of that length: a query sees keys of its own block of positions and of the one before. It
            applies to a kept native encoding too. `None` hides nothing.
        gate: Multiply angles and exponents by one learned factor that starts at 0.
    """

    adaptation = Adaptation(options={"anneal": True}, elsewhere="handover")
    reads_keys = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float | None = None,
        layout: Literal["half", "interleaved"] | None = None,
        scale_base: float = 512.0,
        anneal: bool = False,
        block_length: int | None = None,
        gate: bool = False,
    ) -> None:
        super().__init__(geometry, theta=theta, rotary_dim=None, gate=gate)
        self.set_annealing(anneal)
        self.require(scale_base > 0, "scale_base", scale_base, "a number above 0")
        self.layout: Layout = layout or ("interleaved" if geometry.inv_freq is None else geometry.layout)
        some = block_length is None or block_length > 0
        self.require(some, "block_length", block_length, "a number above 0, or None")
        self.scale_base = scale_base
        self.block_length = block_length

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        q, k = q.to(logits), k.to(logits)
        with torch.autocast(logits.device.type, enabled=False):
            query, key = (place.to(logits.device) for place in (block.positions.query, block.positions.key))
            products = self._faded(q, k, query, key, self._exponents(logits), block.reach)
            # Products ahead of a query grow instead of fading, and an additive mask would not hide them.
            products = products.masked_fill((key[:, None, :] > query[:, :, None])[:, None], 0.0)
            if block.native:
                # The given logits include the model's own encoding, so only the difference is added.
                logits = logits + self.geometry.scale * (products - grouped_matmul(q, k.transpose(-1, -2)))
            else:
                logits = self.geometry.scale * products
            if self.block_length is None:
                return logits
            # Keys that are two or more blocks of positions before the query.
            between = (query // self.block_length)[:, :, None] - (key // self.block_length)[:, None, :]
            return logits.masked_fill((between > 1)[:, None], torch.finfo(logits.dtype).min)

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        own = self._native and self.layout == self.geometry.layout and self.anneal and not self.gate
        exact = self.gate if native_kept else own
        return replace(
            super().facts(native_kept=native_kept, element=element), exact=exact and self.block_length is None
        )

    def is_silent(self) -> bool:
        return super().is_silent() and self.block_length is None

    def stock_equivalent(self) -> Equivalent:
        like = torch.zeros((), dtype=torch.float64)
        other = self.block_length is not None or bool(self._exponents(like).any())
        return super().stock_equivalent() if other else self.rotation()

    def _exponents(self, like: Tensor) -> Tensor:
        """Return the logarithm of each channel's factor per token of distance, never positive, `[rotary_dim]`."""
        pair = torch.arange(0, self.rotary_dim, 2, device=like.device).to(like)
        exponents = self.annealed((pair / self.rotary_dim + 0.4).div(1.4).log() / self.scale_base)
        if self.gate_weight is not None:
            exponents = exponents * self.gate_weight.to(like).clamp(0, 1)
        return exponents.repeat(2) if self.layout == "half" else exponents.repeat_interleave(2)

    def folded(self) -> Folded | None:
        return None if self.block_length is not None else Folded(self._operands, self._span, self._alone)

    @property
    def _span(self) -> int:
        """The largest distance between queries of one block."""
        return int(_LARGEST_EXPONENT * self.scale_base / -math.log(_SMALLEST))

    def _operands(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys times factors relative to the last query, and values, in a dtype that holds them."""
        return self._relative(block.positions.query.amax(dim=1, keepdim=True), q, k, v, block)

    def _alone(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same relative to the last position at which factors are in range."""
        return self._relative(torch.full_like(block.positions.query[:, :1], self._span), q, k, v, block)

    def _relative(self, last: Tensor, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        # The factors overflow float16.
        dtype = torch.float32 if q.dtype == torch.float16 else q.dtype
        query, key, last = (place.to(q.device) for place in (block.positions.query, block.positions.key, last))
        with torch.autocast(q.device.type, enabled=False):
            exponents = self._exponents(q.new_empty(0, dtype=torch.promote_types(dtype, torch.float32)))
            return *self._about(last, q.to(dtype), k.to(dtype), query, key, exponents), v.to(dtype)

    def _about(
        self, last: Tensor, q: Tensor, k: Tensor, query: Tensor, key: Tensor, exponents: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Keys ahead of the last query are masked for all queries: their factor must only be finite.
        return self._scaled(q, query - last, exponents), self._scaled(k, (last - key).clamp_min(0), exponents)

    def _faded(self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, exponents: Tensor, reach: int) -> Tensor:
        """Return the products `[B, H, q, K]` of queries and keys, faded by distance, which `reach` bounds."""
        last = query.amax(dim=1, keepdim=True)
        count = query.shape[1]
        if torch.compiler.is_compiling():
            # A graph has no numbers: queries count as consecutive, and the factors of farther ones overflow.
            far = count > self._span
        else:
            far = count > 1 and reach > self._span and int((last - query).max()) > self._span
        if far:
            halves = [
                self._faded(part, k, places, key, exponents, reach)
                for part, places in zip(q.chunk(2, dim=2), query.chunk(2, dim=1), strict=True)
            ]
            return torch.cat(halves, dim=2)
        q, k = self._about(last, q, k, query, key, exponents)
        return grouped_matmul(q, k.transpose(-1, -2))

    def _scaled(self, x: Tensor, distance: Tensor, exponents: Tensor) -> Tensor:
        factors = (distance[:, None, :, None] * exponents).exp()  # [B|1, 1, S, rotary_dim]
        turned = (x[..., : self.rotary_dim] * factors).to(x.dtype)
        return torch.cat((turned, x[..., self.rotary_dim :]), dim=-1) if self.rotary_dim < x.shape[-1] else turned
