from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_posenc.facts import Adaptation
from hf_posenc.forms import Bias, ContentBias, Vectors
from hf_posenc.operands import Block, Geometry, Positions, Projection, Tokens
from hf_posenc.ops import by_distance, grouped_matmul
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme, draw_start
from hf_posenc.schemes.families.layers import AnyDtypeLinear

# Names of the tables that `project` makes: both biases, and W_r R_n from the largest distance down.
_CONTENT_BIAS, _POSITION_BIAS, _FALLING = "r_w_bias", "r_r_bias", "positions_by_distance"

_BASE, _STD = 10000.0, 0.02


class GlobalBiases(Scheme):
    """Biases `r_w_bias` (u) and `r_r_bias` (v) that all layers of a stack share, each `[H, D]`."""

    def __init__(self, geometry: Geometry, *, init: str) -> None:
        super().__init__(geometry)
        self.init = init
        self.r_w_bias = nn.Parameter(torch.empty(geometry.heads, geometry.head_dim))
        self.r_r_bias = nn.Parameter(torch.empty(geometry.heads, geometry.head_dim))

    def reset_parameters(self) -> None:
        draw_start(self.r_w_bias, self.init, _STD)
        draw_start(self.r_r_bias, self.init, _STD)


class PositionProjection(AnyDtypeLinear):
    """W_r, applied to encodings `[..., E]`, or, transposed (`backwards`), to queries `[B, H, q, D]`."""

    def forward(self, input: Tensor, *, backwards: bool = False) -> Tensor:
        if not backwards:
            return super().forward(input)
        return input @ self.weight.to(input).view(input.shape[1], input.shape[3], -1)  # [B, H, q, E]


@register_scheme("transformer_xl", paper="1901.02860", family="content-relative")
class TransformerXL(Scheme):
    """Products of queries with projected sinusoids of the distance, and biases u and v (Dai et al. 2019).

    With R_n the sinusoidal encoding of the distance n `[E]`, all sines first, and the softmax scale s (section 3.3):

        logit = s ((q_i + u) . k_j + (q_i + v) . (W_r R_{i - j}))

    Parameters: `r_net.weight` (W_r) `[H * D, E]` of each layer; `common.r_w_bias` (u) and `common.r_r_bias` (v), each
    `[H, D]`, for all layers of the stack. Keys ahead of the query have a negative n, as in XLNet. The computation is in
    float32 or wider (angles in float64), from queries and keys without the model's rotation. For odd E, R ends with a
    zero.

    Args:
        untie: Give each layer its own biases u and v (`r_w_bias`, `r_r_bias`), as XLNet does.
        clamp_len: Distance from which R is constant; `None` is no limit.
        init: Start: `"normal"` draws all parameters from N(0, 0.02), as the official code does; `"zero"` is a no-op if
            the native encoding is kept.
    """

    neutral_options = {"init": "zero"}
    adaptation = Adaptation(native="handover", elsewhere="handover", rate_width=64)
    reads_keys = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        untie: bool = False,
        clamp_len: int | None = None,
        init: Literal["normal", "zero"] = "normal",
    ) -> None:
        super().__init__(geometry)
        self.require(clamp_len is None or clamp_len >= 1, "clamp_len", clamp_len, "None or at least 1")
        self.untie, self.clamp_len, self.init = untie, clamp_len, init
        self.r_net = PositionProjection(geometry.hidden_size, geometry.heads * geometry.head_dim, bias=False)
        shape = (geometry.heads, geometry.head_dim)
        self.r_w_bias = nn.Parameter(torch.empty(shape)) if untie else None
        self.r_r_bias = nn.Parameter(torch.empty(shape)) if untie else None

    def reset_parameters(self) -> None:
        for parameter in (self.r_net.weight, self.r_w_bias, self.r_r_bias):
            if parameter is not None:
                draw_start(parameter, self.init, _STD)

    def make_common(self) -> Scheme | None:
        return None if self.untie else GlobalBiases(self.geometry, init=self.init)

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        precise = torch.promote_types(q.dtype, torch.float32)
        biases: Any = self if self.untie else tokens.common
        tables = {
            _CONTENT_BIAS: biases.r_w_bias.to(q.device, precise),
            _POSITION_BIAS: biases.r_r_bias.to(q.device, precise),
        }
        count = self._distances(tokens.positions, q.shape[2] * k.shape[2])
        if count is not None:
            ahead = 0 if self.geometry.causal else count - 1
            distance = torch.arange(count - 1, -ahead - 1, -1, device=q.device)
            with torch.autocast(q.device.type, enabled=False):
                projected = self.r_net(self._encoding(distance, precise))
            tables[_FALLING] = projected.view(len(projected), self.geometry.heads, -1).transpose(0, 1)  # [H, N, D]
        return Projection(q, k, v, tables=tables)

    def _distances(self, positions: Positions, pairs: int) -> int | None:
        """Return the number of distances per side in reach, or `None` if applying W_r to the queries is cheaper."""
        if torch.compiler.is_compiling() or pairs < self.geometry.head_dim:
            return None  # A step of decoding must not wait for a tensor to be read, and a graph cannot read one.
        # Positions of cached keys are unknown but not negative. Encoders have no cache.
        farthest = int(positions.query.max())
        if not self.geometry.causal:
            farthest = max(farthest, int(positions.key.max()))
        if self.clamp_len is not None:
            farthest = min(farthest, self.clamp_len)
        # W_r R for each distance takes E * D products per head, backwards E per pair.
        return farthest + 1 if (farthest + 1) * self.geometry.head_dim <= pairs else None

    def _sin_cos(self, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return sines and cosines at int64 places `[...]`, each `[..., E // 2]`."""
        width = self.geometry.hidden_size
        step = torch.arange(width // 2, dtype=torch.float64, device=places.device)
        angles = places[..., None].double() * _BASE ** (-2 * step / width)
        return angles.sin().to(dtype), angles.cos().to(dtype)

    def _encoding(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        """Return R at int64 distances `[N]`, `[N, E]`."""
        return nn.functional.pad(torch.cat(self._sin_cos(distance, dtype), dim=-1), (0, self.geometry.hidden_size % 2))

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return logits + self._bias(block, logits, q, k)

    def added(self) -> Bias:
        return ContentBias(self._bias, self._vectors)

    def _vectors(self, tables: Mapping[str, Tensor]) -> Vectors | None:
        if _FALLING not in tables:
            return None
        bias, always = tables[_POSITION_BIAS], tables[_CONTENT_BIAS]
        return Vectors(tables[_FALLING], bias=bias, always=always)

    def _bias(self, block: Block, like: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return all terms added to the scaled logits, `[B, H, q, K]`."""
        with torch.autocast(like.device.type, enabled=False):
            u = block.tables[_CONTENT_BIAS].to(like)[None, :, None] * self.geometry.scale  # [1, H, 1, D]
            content = grouped_matmul(u.expand(k.shape[0], -1, -1, -1), k.to(like).transpose(-1, -2))  # [B, H, 1, K]
            q = (q.to(like) + block.tables[_POSITION_BIAS].to(like)[:, None]) * self.geometry.scale
            # In decoders the table has no distances of keys ahead, which a mask may show.
            tabled = _FALLING in block.tables and (block.causal or not self.geometry.causal)
            return content + (self._from_table(q, block) if tabled else self._backwards(q, block))

    def _from_table(self, q: Tensor, block: Block) -> Tensor:
        """Return `q . (W_r R_{i - j})`, `[B, H, q, K]`, for queries `[B, H, q, D]`, by one product per distance."""
        falling = block.tables[_FALLING].to(q)
        last = falling.shape[1] - 1 if self.geometry.causal else falling.shape[1] // 2
        return by_distance(q @ falling.mT, block.distance().to(q.device), last)

    def _backwards(self, q: Tensor, block: Block) -> Tensor:
        """Return the same by products of sinusoids of both positions, of which sine and cosine of i - j are sums."""
        half = self.geometry.hidden_size // 2
        a, b = self.r_net(q, backwards=True)[..., : 2 * half].split(half, dim=-1)  # factors of sine and cosine
        sin, cos = (part[:, None] for part in self._sin_cos(block.positions.query.to(q.device), q.dtype))
        own = torch.cat((a * sin + b * cos, b * sin - a * cos), dim=-1)  # [B, H, q, 2 * half]
        sin, cos = (part[:, None] for part in self._sin_cos(block.positions.key.to(q.device), q.dtype))
        products = own @ torch.cat((cos, sin), dim=-1).transpose(-1, -2)
        distance = block.distance().to(q.device)[:, None]
        if self.clamp_len is None:
            return products
        sin, cos = self._sin_cos(torch.tensor(self.clamp_len, device=q.device), q.dtype)
        sine, cosine = (a @ sin)[..., None], (b @ cos)[..., None]
        products = torch.where(distance > self.clamp_len, cosine + sine, products)
        return torch.where(distance < -self.clamp_len, cosine - sine, products)
