import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.facts import Facts
from hf_posenc.operands import Block, Geometry, Projection, Tokens
from hf_posenc.pictures import Picture
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme
from hf_posenc.schemes.families.layers import AnyDtypeLinear, LowRank, convolved

# Direction `[B, S, G, D]` and strength `[B, S, G]` of each token's reflection; projections of the tokens before.
_DIRECTIONS, _STRENGTHS, _BEFORE = "reflection_directions", "reflection_strengths", "reflections_before"
# Keys of a chunk. All that stand in one are passed at once, with matrices of this size.
_CHUNK = 64


@register_scheme("path", paper="2505.16381", family="contextual", directions=("causal",))
class PaTH(Scheme):
    """A reflection by each token that stands between a query and a key (PaTH attention, Yang et al. 2025).

    Token t has a matrix `H_t = I - beta_t w_t w_t^T`, with w_t of length 1 and beta_t between 0 and 2: the identity at
    0, a projection at 1, a reflection at 2. The logit is `s k_j^T H_{j+1} ... H_i q_i` (s the softmax scale). Only the
    order of tokens matters; padding does not reflect. Query heads that share keys share the matrices. The computation
    is in float32 or wider.

    `w` is a projection of rank `rank` of the hidden state, mixed by a causal convolution over `kernel` tokens, through
    SiLU, and of length 1 in each kv head; `beta = 2 sigmoid(b . x + c)`.

    Parameters: `w_proj.0.weight` `[rank, E]`, `w_proj.1.weight` `[G D, rank]`, `w_conv1d` `[G D, kernel]`,
    `bt_proj.weight` `[G, E]`, `bt_proj.bias` `[G]`.

    Args:
        rank: Rank of the projection.
        kernel: Tokens under the convolution: the token itself and those before it.
        gate: Multiply every beta by a learned factor per kv head that starts at 0. A product below 0
            or above 2 is mirrored there.
    """

    neutral_options = {"gate": True}
    reads_keys = True
    history = 64

    def __init__(self, geometry: Geometry, *, rank: int = 32, kernel: int = 3, gate: bool = False) -> None:
        super().__init__(geometry, gates=geometry.kv_heads if gate else 0)
        self.require(rank >= 1, "rank", rank, "at least 1")
        self.require(1 <= kernel <= self.history, "kernel", kernel, f"a number from 1 to {self.history}")
        self.rank, self.kernel, self.gate = rank, kernel, gate
        width = geometry.kv_heads * geometry.head_dim
        self.w_proj = LowRank(geometry.hidden_size, rank, width)
        self.w_conv1d = nn.Parameter(torch.empty(width, kernel))
        self.bt_proj = AnyDtypeLinear(geometry.hidden_size, geometry.kv_heads)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.w_proj.reset_parameters()
        self.bt_proj.reset_parameters()
        nn.init.zeros_(self.bt_proj.bias)
        nn.init.uniform_(self.w_conv1d, -(self.kernel**-0.5), self.kernel**-0.5)

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        hidden = tokens.hidden_states(self.name)
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
            mixed, recent = convolved(tokens, hidden, self.w_proj, self.w_conv1d, _BEFORE)
            in_heads = F.silu(mixed).view(*mixed.shape[:-1], self.geometry.kv_heads, -1)
            directions = F.normalize(in_heads, dim=-1)
            strengths = self.gated(2 * self.bt_proj(hidden).sigmoid())
            if self.gate:
                # Below 0 or above 2, each token would lengthen the queries that pass it.
                strengths = strengths.remainder(4)
                strengths = strengths.where(strengths <= 2, 4 - strengths)
        if tokens.real is not None:
            strengths = strengths.masked_fill(~tokens.real[..., None], 0)
        return Projection(q, k, v, {_DIRECTIONS: directions, _STRENGTHS: strengths}, recent)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            w, beta = (block.state[name].to(logits).transpose(1, 2) for name in (_DIRECTIONS, _STRENGTHS))
            return logits + self.geometry.scale * _change(q.to(logits), k.to(logits), w, beta, block.keep)

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        per_token = 4 * self.geometry.kv_heads * (self.geometry.head_dim + 1)
        per_sequence = self.history * (self.kernel - 1) * (4 * self.rank + 8)
        return replace(super().facts(native_kept=native_kept, element=element), state_bytes=(per_token, per_sequence))

    pictures = (
        Picture(
            "strengths",
            "strengths of reflections",
            "strength (0: none, 1: projection, 2: reflection)",
            lambda scheme, logits, q, k, block: block.state[_STRENGTHS].transpose(1, 2),
            high=2.0,
        ),
    )


def _change(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, keep: Tensor | None) -> Tensor:
    """Return `k_j^T (H_{j+1} ... H_i - I) q_i`, `[B, H, Q, K]`.

    A query passes the chunks of keys from the last to the first. Within a chunk let x be the query as it comes in. The
    token t takes `u_t w_t` from it, with `u_t = beta_t w_t^T (x - sum of u_s w_s over later s)`: a triangular system,
    whose matrix all queries share. So key j has `k_j^T (x - sum of u_t w_t over t > j)`.

    Args:
        q: Queries, `[B, H, Q, D]`.
        k: Keys, `[B, G, K, D]`.
        w: Directions, `[B, G, K, D]`.
        beta: Strengths, `[B, G, K]`.
        keep: Mask of the keys that each query may see, bool `[B|1, H|1, Q|1, K]`. Tokens ahead of a query take nothing
            from it. Those hidden for another reason change keys farther away only, which are hidden, too, or padding.
    """
    (batch, heads, queries, width), (groups, keys) = q.shape, k.shape[1:3]
    # A graph of any length has one chunk.
    count = 1 if torch.compiler.is_exporting() else math.ceil(keys / _CHUNK)
    size = keys if count == 1 else _CHUNK
    missing = count * size - keys
    if missing:
        k, w, beta = F.pad(k, (0, 0, 0, missing)), F.pad(w, (0, 0, 0, missing)), F.pad(beta, (0, missing))
    k, w, beta = (x.reshape(*x.shape[:2], count, size, *x.shape[3:]) for x in (k, w, beta))  # [B, G, chunks, size, ...]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).tril(-1)  # row t, column j: t > j
    one = torch.eye(size, dtype=q.dtype, device=q.device)
    system = torch.where(later, w @ w.mT * beta[..., None, :], 0)  # the diagonal of ones is implied
    inverse = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
    passed = torch.where(later, w @ k.mT, 0)
    if keep is not None:
        keep = F.pad(keep, (0, missing)).expand(-1, -1, queries, -1)
        if keep.shape[1] > 1:
            keep = keep.reshape(keep.shape[0], groups, -1, keep.shape[-1])
        else:
            keep = torch.cat([keep] * (heads // groups), dim=2)
    first = q.reshape(batch, groups, heads // groups * queries, width)  # query heads of a group, one after the other
    x, found = first, []
    for chunk in reversed(range(k.shape[2])):
        at = w[:, :, chunk]
        wanted = x @ at.mT * beta[:, :, None, chunk]
        if keep is not None:
            wanted = wanted.where(keep[..., chunk * size : (chunk + 1) * size], 0)
        taken = wanted @ inverse[:, :, chunk]
        found.append((x - first) @ k[:, :, chunk].mT - taken @ passed[:, :, chunk])
        x = x - taken @ at
    return torch.cat(found[::-1], dim=-1)[..., :keys].reshape(batch, heads, queries, keys)
