import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.errors import ShapeError
from hf_posenc.facts import Adaptation, Facts
from hf_posenc.forms import Bias, ContentBias, Vectors
from hf_posenc.operands import Block, Geometry, Projection, Tokens
from hf_posenc.ops import by_distance, grouped_matmul, placed
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme, draw_start
from hf_posenc.schemes.families.layers import AnyDtypeLinear

# Names of the tables that `project` makes, with a vector per distance, from the largest down.
_KEYS, _QUERIES = "position_keys", "position_queries"

# Values of DeBERTa.
_STD = 0.02
_LAYER_NORM_EPSILON = 1e-7


class RelativeEmbeddings(Scheme):
    """Embeddings of relative positions that all layers of a stack project, `rel_embeddings` `[2 * span, E]`.

    Args:
        geometry: Shape of the first layer.
        span: Half the number of embeddings.
        normalize: Apply layer normalisation (`LayerNorm`).
        zero: Start at zero: the table or, if normalised, the factor after the normalisation.
    """

    def __init__(self, geometry: Geometry, *, span: int, normalize: bool, zero: bool) -> None:
        super().__init__(geometry)
        self.span, self.normalize, self.zero = span, normalize, zero
        self.rel_embeddings = nn.Parameter(torch.empty(2 * span, geometry.hidden_size))
        self.LayerNorm = nn.LayerNorm(geometry.hidden_size, eps=_LAYER_NORM_EPSILON) if normalize else None

    def reset_parameters(self) -> None:
        draw_start(self.rel_embeddings, "zero" if self.zero and not self.normalize else "normal", _STD)
        if self.LayerNorm is not None:
            nn.init.constant_(self.LayerNorm.weight, 0.0 if self.zero else 1.0)
            nn.init.zeros_(self.LayerNorm.bias)

    def table(self, first: int) -> Tensor:
        """Return the embeddings from row `first` on, in the parameters' dtype."""
        rows = self.rel_embeddings[first:]
        normalized: Tensor = rows if self.LayerNorm is None else self.LayerNorm(rows)
        return normalized


@register_scheme("disentangled", paper="2006.03654", family="content-relative")
class Disentangled(Scheme):
    """Attention between content and relative positions, each with its own projections (DeBERTa, He et al. 2021).

    With embeddings P `[2 * span, E]` of relative positions that all layers share, the layer's projections of them
    `Kr = pos_key_proj(P)` and `Qr = pos_query_proj(P)`, `d(i, j) = clamp(bucket(i - j) + span, 0, 2 * span - 1)` and
    the softmax scale s:

        logit = s (q_i . k_j + q_i . Kr[d(i, j)] + k_j . Qr[d(i, j)])

    The second term is "content to position" (c2p), the third "position to content" (p2c). The third has `d(j, i)` in
    the paper (equation 4), but `d(i, j)` in both official codes, and so in all trained weights, and here. The
    computation is in float32 or wider, from queries and keys without the model's rotation.

    Parameters: `common.rel_embeddings` `[2 * span, E]`, one for the stack; `pos_key_proj` and `pos_query_proj` of each
    layer, from E to H * D with bias. In decoders the table has the official shape too; nothing reads its half for keys
    ahead of the query: where a mask shows some, they have the embedding of their distance behind it.

    Args:
        max_distance: Distance from which all keys share one embedding.
        buckets: Half the number of embeddings if far distances share them in logarithmic buckets, an even number
            (DeBERTa v2 and v3: 256 with `max_distance` 512); `None` gives every distance its own embedding.
        c2p: Use the second term.
        p2c: Use the third term.
        share_att_key: Project P with the layer's own query and key projections; there is no `pos_key_proj` or
            `pos_query_proj` then (DeBERTa v2 and v3).
        share_bias: With `share_att_key`, also add the biases of these projections, as DeBERTa does; then the start is
            not exact.
        normalize: Apply layer normalisation to P (DeBERTa v2 and v3).
        scale: Scale of the logits: `"host"` multiplies all terms by s; `"deberta"` divides their sum by sqrt(2), or by
            sqrt(3) if both terms are used.
        init: Start: `"normal"` draws P and the projections from N(0, 0.02); `"zero"` sets P (if normalised, the factor
            after it) to zero, a no-op if the native encoding is kept.
    """

    neutral_options = {"init": "zero"}
    # The embedding of all far distances must occur often in training.
    adaptation = Adaptation(native="handover", elsewhere="handover", windows={"max_distance": 0.75})

    def __init__(
        self,
        geometry: Geometry,
        *,
        max_distance: int = 512,
        buckets: int | None = None,
        c2p: bool = True,
        p2c: bool = True,
        share_att_key: bool = False,
        share_bias: bool = False,
        normalize: bool = False,
        scale: Literal["host", "deberta"] = "host",
        init: Literal["normal", "zero"] = "normal",
    ) -> None:
        super().__init__(geometry)
        self.require(max_distance >= 1, "max_distance", max_distance, "at least 1")
        if buckets is not None:
            self.require(buckets >= 2 and buckets % 2 == 0, "buckets", buckets, "None or an even number")
            near = buckets // 2 + 1  # half of the buckets hold one distance each
            self.require(max_distance > near, "max_distance", max_distance, f"more than buckets / 2 + 1 = {near}")
        self.require(c2p or p2c, "p2c", p2c, "True with c2p=False: at least one of both terms")
        self.require(share_att_key or not share_bias, "share_bias", share_bias, "False unless share_att_key=True")
        self.max_distance, self.buckets, self.c2p, self.p2c = max_distance, buckets, c2p, p2c
        self.share_att_key, self.share_bias, self.normalize = share_att_key, share_bias, normalize
        self.scale, self.init = scale, init
        self.reads_keys = p2c
        self.span = max_distance if buckets is None else buckets
        # The row d(i, j) of P for each distance, from the largest down; decoders see distances from 0 on. A table from
        # the CPU: a GPU's logarithm may round a boundary to the other side.
        distance = torch.arange(max_distance, -1 if geometry.causal else -max_distance - 1, -1, device="cpu")
        if buckets is not None:
            distance = log_buckets(distance, buckets, max_distance)
        rows = (distance + self.span).clamp(0, 2 * self.span - 1)
        # That of the last distance is the first that is used.
        self.first = int(rows[-1])
        self.rows = rows - self.first
        width = geometry.heads * geometry.head_dim
        self.pos_key_proj = AnyDtypeLinear(geometry.hidden_size, width) if c2p and not share_att_key else None
        self.pos_query_proj = AnyDtypeLinear(geometry.hidden_size, width) if p2c and not share_att_key else None

    def reset_parameters(self) -> None:
        for projection in (self.pos_key_proj, self.pos_query_proj):
            if projection is not None:
                nn.init.normal_(projection.weight, std=_STD)
                nn.init.zeros_(projection.bias)

    def make_common(self) -> Scheme:
        return RelativeEmbeddings(self.geometry, span=self.span, normalize=self.normalize, zero=self.init == "zero")

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        precise = torch.promote_types(q.dtype, torch.float32)
        common = tokens.common
        assert isinstance(common, RelativeEmbeddings)
        with torch.autocast(q.device.type, enabled=False):
            table = common.table(self.first).to(q.device)
            tables = {} if self.share_att_key else self._projected(table)
        if self.share_att_key:
            tables = self._shared(tokens, table.to(q.dtype))
        rows = placed(self.rows, q.device)
        return Projection(q, k, v, tables={name: part[:, rows].to(precise) for name, part in tables.items()})

    def _projected(self, table: Tensor) -> dict[str, Tensor]:
        """Return the projections of rows of P `[N, E]` that are used: keys and queries, each `[H, N, D]`."""
        shape = (len(table), self.geometry.heads, self.geometry.head_dim)
        parts = ((_KEYS, self.pos_key_proj), (_QUERIES, self.pos_query_proj))
        return {name: part(table).view(shape).transpose(0, 1) for name, part in parts if part is not None}

    def _shared(self, tokens: Tokens, table: Tensor) -> dict[str, Tensor]:
        """Return these rows projected by the layer itself: queries `[H, N, D]`, keys `[G, N, D]`."""
        if tokens.host is None:
            raise ShapeError(
                "disentangled with share_att_key=True uses the layer's own projections. Pass attend(..., host=), a "
                "function from [batch, length, hidden_size] to queries and keys."
            )
        # The projection of a row of zeros is the bias.
        table = nn.functional.pad(table, (0, 0, 0, 1))
        tables = {}
        for name, part, used in zip((_QUERIES, _KEYS), tokens.host(table[None]), (self.p2c, self.c2p), strict=True):
            rows, bias = part[0, :, :-1], part[0, :, -1:]
            if used:
                tables[name] = rows if self.share_bias else rows - bias
        return tables

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        logits = logits + self._bias(block, logits, q, k)
        return logits / math.sqrt(1 + self.c2p + self.p2c) if self.scale == "deberta" else logits

    def added(self) -> Bias | None:
        return ContentBias(self._bias, self._vectors) if self.scale == "host" else None

    def _vectors(self, tables: Mapping[str, Tensor]) -> Vectors:
        return Vectors(tables.get(_KEYS), tables.get(_QUERIES))

    def _bias(self, block: Block, like: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the sum of both terms, as added to the scaled logits, `[B, H, q, K]`."""
        distance, scale = block.distance().to(like.device), self.geometry.scale
        if self.geometry.causal:
            distance = distance.abs()
        # A graph that is traced does not know the largest distance in reach.
        last = self.max_distance if torch.compiler.is_compiling() else min(block.reach, self.max_distance)
        in_reach = slice(self.max_distance - last, self.max_distance + last + 1)
        terms = []
        with torch.autocast(like.device.type, enabled=False):
            if self.c2p:
                keys = block.tables[_KEYS][:, in_reach]
                products = grouped_matmul(q.to(like) * scale, keys.mT[None])  # [B, H, q, N]
                terms.append(by_distance(products, distance, last))
            if self.p2c:
                queries = block.tables[_QUERIES][:, in_reach] * scale
                index = (last - distance).clamp(0, queries.shape[1] - 1)[:, None]
                terms.append(_meet_keys(k.to(like), queries, index))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        # A bias as a position query changes attention; as a position key it only shifts a row of logits.
        biased = self.share_bias and self.p2c
        exact = native_kept and self.init == "zero" and self.scale == "host" and not biased
        return replace(super().facts(native_kept=native_kept, element=element), exact=exact)


def log_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the signed bucket of each distance: half of `buckets` per side hold one distance, the others grow.

    Values are float64, and slightly reduced before they are rounded up: at the last distance before `max_distance` the
    value is an integer, which a rounded logarithm may exceed.
    """
    half, size = buckets // 2, distance.abs()
    grown = torch.log(size.clamp_min(half).double() / half) / math.log((max_distance - 1) / half) * (half - 1)
    far = (grown - 1e-9).ceil().long() + half
    return torch.where(size <= half, distance, distance.sign() * far)


def _meet_keys(k: Tensor, queries: Tensor, index: Tensor) -> Tensor:
    """Return products of keys `[B, G, K, D]` with rows of position queries `[H, N, D]` at an index `[B|1, 1, q, K]`.

    For few queries (a step of decoding) these rows are smaller than the products of every key with every row.
    """
    batch, groups, length, width = k.shape
    heads, count, _ = queries.shape
    # A graph of any length has one form.
    if torch.compiler.is_exporting() or index.shape[2] * width > count:
        rows = queries.reshape(groups, heads // groups * count, width)
        products = torch.einsum("gnd,bgkd->bgnk", rows, k).reshape(batch, heads, count, length)
        return products.gather(2, index.expand(batch, heads, -1, -1))
    met = queries[:, index[:, 0]].view(groups, heads // groups, *index[:, 0].shape, width)  # [G, H / G, B|1, q, K, D]
    return torch.einsum("grbqkd,bgkd->bgrqk", met, k).flatten(1, 2)
