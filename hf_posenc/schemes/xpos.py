from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from hf_posenc.operands import Block, Geometry, Projection, Tokens
from hf_posenc.ops.linear import grouped_matmul
from hf_posenc.ops.rotations import Layout
from hf_posenc.registry import register_scheme, require
from hf_posenc.schemes.families.rotary import Annealed, RotaryScheme
from hf_posenc.structures import Equivalent, Folded

# The first pair fades most: to (0 + 0.4) / 1.4 within `scale_base` tokens.
_SMALLEST = 0.4 / 1.4

# Factors on queries stay below e^this, far from the end of float32 (e^88) on either side.
_LARGEST_EXPONENT = 40.0


@register_scheme("xpos", paper="2212.10554", family="rotary", directions=("causal",))
class XPos(Annealed, RotaryScheme):
    """RoPE whose channel pairs fade with the distance between query and key (Sun et al. 2022).

    The product of a query at m and a key at n in pair i of d / 2 is multiplied by `zeta_i^((m - n) / scale_base)` with
    `zeta_i = (2i + 0.4 d) / (1.4 d)`, which is at most 1: fast pairs fade soonest. Only the distance counts.

    The official code multiplies queries and keys by powers of zeta about the middle of the input, which moves as a sequence
    grows, so it caches keys without rotation; about a fixed place the factor of a key leaves float32 near position 36,000.
    Here keys are cached rotated and not scaled, and the factors are taken about the last query of each block of rows: those
    of keys are at most 1, those of queries bounded by the length of the block. Nothing overflows at any position, and the
    cache holds nothing else than with RoPE. Up to 16,347 tokens, with the official `scale_base`, are one block, of which the
    products are those of plain attention. Defined for causal attention only: ahead of a query the factor would grow without bound.

    Starts: a break, since distant keys fade at once. With `anneal` the exponent is multiplied by `progress`, which is saved
    with the model and starts at 0: RoPE, exact on models with rotary encoding. Raise it to 1 while training, with
    `anneal_to`. With `gate` angles and exponents are multiplied by one learned factor (within 0 and 1 for the exponents),
    started at 0: the exact no-op beside a kept native encoding.

    Args:
        geometry: Shape of the layer.
        theta: Ratio of the wavelengths; `None` takes the model's own frequencies, else 10,000.
        layout: Which channels form a pair: `"half"` (i, i + d/2) or `"interleaved"` (2i, 2i + 1). `None` is that of the
            model's own rotation, `"half"`, if it has one, else the official one, `"interleaved"`.
        scale_base: The distance, in tokens, at which pair i has faded to zeta_i.
        anneal: Start without fading, and bring it in by `anneal_to`.
        block_length: Blockwise causal attention, the paper's for texts beyond the trained length, half of which it takes: positions
            are cut into blocks of so many, and a query sees keys of its own block and of the one before. Also of a native
            encoding that is kept. `None` hides nothing.
        gate: Multiply angles and exponents by one learned factor, started at 0.
    """

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
        super().__init__(geometry, name="xpos", theta=theta, rotary_dim=None, gate=gate)
        self.set_annealing(anneal)
        require(scale_base > 0, "xpos", "scale_base", scale_base, "a number above 0")
        self.layout: Layout = layout or ("interleaved" if geometry.inv_freq is None else "half")
        require(
            block_length is None or block_length > 0, "xpos", "block_length", block_length, "a number above 0, or None"
        )
        self.scale_base = scale_base
        self.block_length = block_length

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        return Projection(*self.rotated(tokens.positions, q, k, self.layout), v)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        assert self.geometry.scale is not None
        q, k = q.to(logits), k.to(logits)
        with torch.autocast(logits.device.type, enabled=False):
            query, key = (place.to(logits.device) for place in (block.positions.query, block.positions.key))
            products = self._faded(q, k, query, key, self._exponents(logits), block.reach)
            # Ahead of a query nothing fades, it grows: a mask that is added would not hide it.
            products = products.masked_fill((key[:, None, :] > query[:, :, None])[:, None], 0.0)
            if block.native:
                # What came holds the model's own encoding too: only the difference is added.
                logits = logits + self.geometry.scale * (products - grouped_matmul(q, k.transpose(-1, -2)))
            else:
                logits = self.geometry.scale * products
            return logits if self.block_length is None else self._blockwise(logits, query, key, self.block_length)

    @staticmethod
    def _blockwise(logits: Tensor, query: Tensor, key: Tensor, length: int) -> Tensor:
        """Return logits `[B, H, q, K]` in which keys two blocks of positions before a query, or more, are hidden."""
        between = (
            query.div(length, rounding_mode="floor")[:, :, None] - key.div(length, rounding_mode="floor")[:, None, :]
        )
        return logits.masked_fill((between > 1)[:, None], torch.finfo(logits.dtype).min)

    def starts_exact(self, *, native_kept: bool) -> bool:
        if self.block_length is not None:
            return False
        if native_kept:
            return self.gate
        return self._native and self.layout == "half" and self.anneal and not self.gate

    def stock_equivalent(self) -> Equivalent:
        like = torch.zeros((), dtype=torch.float64)
        other = self.block_length is not None or bool(self._exponents(like).any())
        return super().stock_equivalent() if other else self.rotation(self.layout)

    def _exponents(self, like: Tensor) -> Tensor:
        """Return the logarithm of each channel's factor per token of distance, none positive, `[rotary_dim]`."""
        pair = torch.arange(0, self.rotary_dim, 2, device=like.device).to(like)
        exponents = self.annealed((pair / self.rotary_dim + 0.4).div(1.4).log() / self.scale_base)
        if self.gate_weight is not None:
            exponents = exponents * self.gate_weight.to(like).clamp(0, 1)
        return exponents.repeat(2) if self.layout == "half" else exponents.repeat_interleave(2)

    def folded(self) -> Folded | None:
        return None if self.block_length is not None else Folded(self._operands, self._span, ahead=False)

    @property
    def _span(self) -> int:
        """How far queries may be apart that share their factors' place."""
        return int(_LARGEST_EXPONENT * self.scale_base / -math.log(_SMALLEST))

    def _operands(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys times factors about the last query, in a dtype that holds them, and values in the same."""
        # The powers leave float16.
        dtype = torch.float32 if q.dtype == torch.float16 else q.dtype
        query, key = (place.to(q.device) for place in (block.positions.query, block.positions.key))
        with torch.autocast(q.device.type, enabled=False):
            exponents = self._exponents(q.new_empty(0, dtype=torch.promote_types(dtype, torch.float32)))
            return *self._about_the_last(q.to(dtype), k.to(dtype), query, key, exponents), v.to(dtype)

    def _about_the_last(
        self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, exponents: Tensor
    ) -> tuple[Tensor, Tensor]:
        last = query.amax(dim=1, keepdim=True)
        # Keys behind the last query are hidden from all: their factor must be finite only.
        return self._scaled(q, query - last, exponents), self._scaled(k, (last - key).clamp_min(0), exponents)

    def _faded(self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, exponents: Tensor, reach: int) -> Tensor:
        """Return the products `[B, H, q, K]` of queries and keys, faded by distance.

        Args:
            q: `[B, H, q, D]`.
            k: `[B, G, K, D]`.
            query: Positions of the queries, `[B|1, q]`.
            key: Positions of the keys, `[B|1, K]`.
            exponents: Of each channel, `[rotary_dim]`.
            reach: A bound on every distance.
        """
        last = query.amax(dim=1, keepdim=True)
        if query.shape[1] > 1 and reach > self._span and int((last - query).max()) > self._span:
            halves = [
                self._faded(part, k, places, key, exponents, reach)
                for part, places in zip(q.chunk(2, dim=2), query.chunk(2, dim=1), strict=True)
            ]
            return torch.cat(halves, dim=2)
        q, k = self._about_the_last(q, k, query, key, exponents)
        return grouped_matmul(q, k.transpose(-1, -2))

    def _scaled(self, x: Tensor, distance: Tensor, exponents: Tensor) -> Tensor:
        factors = (distance[:, None, :, None] * exponents).exp()  # [B|1, 1, S, rotary_dim]
        turned = (x[..., : self.rotary_dim] * factors).to(x.dtype)
        return torch.cat((turned, x[..., self.rotary_dim :]), dim=-1) if self.rotary_dim < x.shape[-1] else turned
