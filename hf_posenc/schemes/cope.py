from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.facts import Adaptation, Facts
from hf_posenc.forms import GateCount, KeyScan, Locality
from hf_posenc.operands import Block, Geometry, Projection, Tokens
from hf_posenc.ops import fill_hidden_, grouped_matmul
from hf_posenc.pictures import Picture
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme
from hf_posenc.schemes.families.layers import AnyDtypeLinear

# Name of the keys of `separate_keys` in the cache.
_GATE_KEYS = "gate_keys"


@register_scheme("cope", paper="2405.18719", family="contextual", usual=True)
class CoPE(Scheme):
    """Positions that count only the tokens that a query selects (Golovneva et al. 2024).

    With `z_ij = s q_i . k_j` (s the softmax scale), key j opens a gate for query i by `g_ij = sigmoid(z_ij)`. Its
    position is the sum of the gates from j to i, both included, and need not be an integer:
    `p_ij = min(g_ij + ... + g_ii, npos - 1)`. The logit is `z_ij + s q_i . e[p_ij]`, where `e[p]` interpolates linearly
    between the embeddings of the two nearest integers. Masked keys are not counted: padding, other sequences, keys
    outside of a window. Keys count in the order of the cache.

    Gates, positions and their logits are computed in float32 or wider, from queries and keys without the model's
    rotation.

    Parameter: `pos_emb` `[1, D, npos]`, shared by the heads, zero at the start. The start equals NoPE, or with
    native='keep' the original model.

    Positions count to the query from both sides (in the official code to the end of the sequence): keys ahead of it, in
    encoders or where a mask shows some, have position `g_i,i+1 + ... + g_ij`. Encoders have a second table for these,
    `pos_emb_right`.

    Args:
        npos: Number of embeddings; keys at position npos - 1 or beyond share the last. The official code has one more
            than the trained length; few suffice.
        scale_position_logits: Multiply `q . e[p]` by the softmax scale, as in the official code; the paper's listing
            does not.
        separate_keys: Compute gates from separate keys, one per kv head: `gate_proj`, a linear layer of the hidden
            states. They are cached too.
        value_gates: Compute gates from the values.
        shared: Use one table for the whole stack; not with `separate_keys`, whose projections belong to layers.
    """

    neutral_options = {}
    adaptation = Adaptation(native="keep", elsewhere="keep", rate=4)

    def __init__(
        self,
        geometry: Geometry,
        *,
        npos: int = 64,
        scale_position_logits: bool = True,
        separate_keys: bool = False,
        value_gates: bool = False,
        shared: bool = False,
    ) -> None:
        super().__init__(geometry)
        self.require(npos >= 2, "npos", npos, "at least 2 (with one embedding all positions are the same)")
        for option, other in (("value_gates", value_gates), ("shared", shared)):
            self.require(not (separate_keys and other), option, other, "False with separate_keys=True")
        self.npos, self.scale_position_logits = npos, scale_position_logits
        self.separate_keys, self.value_gates, self.shared = separate_keys, value_gates, shared
        self.reads_keys = not (separate_keys or value_gates)
        self.pos_emb = nn.Parameter(torch.empty(1, geometry.head_dim, npos))
        self.pos_emb_right = None if geometry.causal else nn.Parameter(torch.empty(1, geometry.head_dim, npos))
        width = geometry.kv_heads * geometry.head_dim
        self.gate_proj = AnyDtypeLinear(geometry.hidden_size, width) if separate_keys else None

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.pos_emb)
        if self.pos_emb_right is not None:
            nn.init.zeros_(self.pos_emb_right)
        if self.gate_proj is not None:
            self.gate_proj.reset_parameters()

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        if self.gate_proj is None:
            return Projection(q, k, v)
        hidden = tokens.hidden_states(self.name)
        keys = self.gate_proj(hidden).to(k)
        return Projection(q, k, v, {_GATE_KEYS: keys.view(*keys.shape[:2], self.geometry.kv_heads, -1)})

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        # Autocast would count in half precision: bfloat16 has no fractions from 128 on.
        with torch.autocast(logits.device.type, enabled=False):
            table = 0 if self.geometry.causal else _ahead(block)
            return logits + between(self._at_whole_counts(q, logits), self.count(logits, q, k, block), table)

    def count(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        """Return the position of each key as counted by each query, `[B, H, q, K]`, given the arguments of `score`."""
        gates = self._gate_logits(logits, q, k, block).sigmoid()
        if block.keep is not None:
            gates = gates.where(block.keep, 0.0)
        if self.geometry.causal and block.causal:
            return _to_the_end(gates).clamp_max(self.npos - 1)
        ahead = _ahead(block)
        behind, onward = _to_the_end(torch.where(ahead, 0, gates)), torch.where(ahead, gates, 0).cumsum(-1)
        return torch.where(ahead, onward, behind).clamp_max(self.npos - 1)

    pictures = (
        Picture(
            "positions", "positions of keys as each query counts them", "position of the key (tokens counted)", count
        ),
    )

    def locality(self) -> Locality | None:
        return Locality(self._enough, self._beyond) if self.geometry.causal else None

    def _enough(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> bool:
        with torch.autocast(logits.device.type, enabled=False):
            gates = fill_hidden_(self._gate_logits(logits, q, k, block).sigmoid(), block.keep, 0.0)
            return bool((gates.sum(-1) >= self.npos).all())  # one more than needed, against rounding of sums

    def _beyond(self, q: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
        bias = (q.to(like) @ self.pos_emb[0, :, -1].to(like))[..., None]
        return self.geometry.scale * bias if self.scale_position_logits else bias, None

    def key_scan(self) -> KeyScan | None:
        return GateCount(self._at_whole_counts, self._gate_keys, self.geometry.scale) if self.geometry.causal else None

    def _at_whole_counts(self, q: Tensor, like: Tensor) -> Tensor:
        """Return logits of integer positions, `[B, H, q, npos]`; in encoders for both sides, `[B, H, q, 2, npos]`."""
        bias = q.to(like) @ self.pos_emb[0].to(like)
        if self.pos_emb_right is not None:
            bias = torch.stack((bias, q.to(like) @ self.pos_emb_right[0].to(like)), dim=-2)
        return self.geometry.scale * bias if self.scale_position_logits else bias

    def _gate_logits(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        keys = self._gate_keys(k, block)
        if keys is None:
            return logits  # the logits are the product already
        return grouped_matmul(q, keys.to(q).transpose(-1, -2)).to(logits) * self.geometry.scale

    def _gate_keys(self, k: Tensor, block: Block) -> Tensor | None:
        """Return the keys of the gates, `[B, G, K, D]`; `None` if the logits are their products already."""
        if self.separate_keys:
            return block.state[_GATE_KEYS].transpose(1, 2)
        if self.value_gates:
            return block.values
        return k if block.native else None

    def is_silent(self) -> bool:
        return not any(bool(table.any()) for table in (self.pos_emb, self.pos_emb_right) if table is not None)

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        state = self.geometry.kv_heads * self.geometry.head_dim * element if self.separate_keys else 0
        return replace(super().facts(native_kept=native_kept, element=element), state_bytes=(state, 0))


def _ahead(block: Block) -> Tensor:
    """Return the mask of keys ahead of the query, bool `[B|1, 1, q, K]`."""
    return (block.distance() < 0)[:, None]


def _to_the_end(gates: Tensor) -> Tensor:
    return gates.flip(-1).cumsum(-1).flip(-1)


def between(at_whole: Tensor, place: Tensor, table: Tensor | int = 0) -> Tensor:
    """Return values at fractional places, on lines between those at whole places.

    Args:
        at_whole: Values `[..., N]`, or `[..., T, N]` of several tables.
        place: Places from 0 to N - 1, `[..., K]`.
        table: Index of the table, int64 `[..., K]`.
    """
    count = at_whole.shape[-1]
    steps = F.pad(at_whole.diff(dim=-1), (0, 1))
    below = place.detach().floor()
    # One index for both tables: those of int64 are the largest tensors here.
    index = below.long() + count * table
    if at_whole.ndim > place.ndim:
        at_whole, steps = at_whole.flatten(-2), steps.flatten(-2)
    return at_whole.gather(-1, index) + (place - below) * steps.gather(-1, index)
