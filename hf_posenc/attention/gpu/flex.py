"""Schemes that only add a bias, on a GPU: torch compiles a kernel for each form of it (`flex_attention`).

A bias is read element by element from its inputs: a table of distances, a number per token, or straight pieces.
Hidden blocks of keys are skipped. Without compilation, `flex_attention` builds the whole matrix, so this executor
needs a compiler; on a CPU, in tests, its graph runs as it was traced.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.attention.call import Call
from hf_posenc.attention.gpu.trial import CompiledExecutor
from hf_posenc.scheme import Scheme
from hf_posenc.structures import Bias, DistanceTable, KeyBias, PiecewiseLinear

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# torch's kernels refuse narrower heads.
_NARROWEST = 16
# Rows and columns of the blocks that are skipped, the size that torch's kernels expect.
_BLOCK = 128
# A function is compiled again for other dtypes, numbers of heads, masks, and operands with or without gradients.
# Beyond torch's own limit of 8 it would raise.
_VARIANTS = 64

_NAMES: dict[type[Bias], str] = {
    DistanceTable: "distance table",
    KeyBias: "key bias",
    PiecewiseLinear: "straight pieces",
}


class Flex(CompiledExecutor):
    """A compiled kernel for each form of a bias. No tensor of size Q x K exists, except a mask that is given as one.

    Queries that see no key get zeros. Gradients of tables are added up in no fixed order.
    """

    name = "flex"

    def structure(self, scheme: Scheme) -> Bias | None:
        added = scheme.added()
        return added if isinstance(added, tuple(_NAMES)) else None

    def computes(self, call: Call) -> bool:
        return super().computes(call) and call.q.shape[-1] >= _NARROWEST

    def form(self, call: Call) -> str:
        added = call.scheme.added()
        assert added is not None
        return _NAMES[DistanceTable if _is_one_table(added, call) else type(added)]

    def run(self, call: Call) -> tuple[Tensor, None]:
        q, device = call.q, call.device.type
        with torch.autocast(device, enabled=False), torch._dynamo.config.patch(recompile_limit=_VARIANTS):
            block_mask = _block_mask(call)
            function, inputs = _form_of(call.scheme.added(), call)
            # torch 2.13 drops the gradients of captured tensors that are views.
            inputs = tuple(x.clone() if x.requires_grad else x for x in inputs)
            output: Tensor = _compiled(function, device)(q, call.k, call.v, block_mask, call.scale, *inputs)
        return output, None


def _form_of(added: Bias | None, call: Call) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return the function that adds a bias, and what it reads."""
    if isinstance(added, KeyBias):
        return _add_of_keys, _of_keys(added, call)
    if isinstance(added, PiecewiseLinear) and not _is_one_table(added, call):
        return _add_of_pieces, _of_pieces(added, call)
    assert isinstance(added, (DistanceTable, PiecewiseLinear))
    return _add_of_table, _of_table(added, call)


@functools.cache
def _compiled(function: Callable[..., Tensor], device: str) -> Callable[..., Tensor]:
    """Return a function compiled as a whole: without a kernel it raises, rather than build the matrix unseen."""
    return torch.compile(function, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")


def _is_one_table(added: Bias, call: Call) -> bool:
    """Whether a bias is a table of distances, for all queries of this call."""
    if isinstance(added, PiecewiseLinear):
        return call.reach < added.constant_below()
    return isinstance(added, DistanceTable)


# -- what is compiled ------------------------------------------------------------------------------------------------
#
# Operands and all that a bias is made of are arguments, so that one graph serves every call. Distances are not below
# 0 but for keys that are hidden, or where what is given makes up for it. Each input that learns is read at one place:
# torch gives several no gradient.


def _add_of_table(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask | None,
    scale: float,
    queries: Tensor,
    keys: Tensor,
    table: Tensor,
) -> Tensor:
    def score(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return logit + table[h, (queries[b, i] - keys[b, j]).clamp(min=0)]

    return _attention(q, k, v, score, block_mask, scale)


def _add_of_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask | None,
    scale: float,
    of_queries: Tensor,
    of_keys: Tensor,
) -> Tensor:
    def score(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # Both are large, and their difference is not.
        return logit + (of_keys[b, h, j] - of_queries[b, h, i])

    return _attention(q, k, v, score, block_mask, scale)


def _add_of_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask | None,
    scale: float,
    queries: Tensor,
    keys: Tensor,
    feature: Tensor,
    weight: Tensor,
    ends: Tensor,
    slope: Tensor,
    offset: Tensor,
) -> Tensor:
    steps = len(ends).bit_length()  # `ends` has one less than a power of two

    def score(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = feature[(queries[b, i] - keys[b, j]).clamp(min=0)] * weight[b, i]
        # How many ends are below x, found by halves.
        piece = torch.zeros_like(i)
        for step in reversed(range(steps)):
            piece = piece + torch.where(ends[piece + (2**step - 1)] < x, 2**step, 0)
        return logit + (slope[piece, h] * x + offset[piece, h])

    return _attention(q, k, v, score, block_mask, scale)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
    block_mask: BlockMask | None,
    scale: float,
) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    output = flex_attention(
        q, k, v, score_mod=score, block_mask=block_mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    assert isinstance(output, Tensor)
    return output


# -- what biases are made of -----------------------------------------------------------------------------------------


def _places(call: Call, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Return the positions of queries, shifted, and of keys, int32 `[B, Q]` and `[B, K]`."""
    batch = len(call.q)
    query, key = ((x.to(call.device, torch.int32)) for x in (call.positions.query, call.positions.key))
    return (query + shift).expand(batch, -1), key.expand(batch, -1)


def _of_table(added: DistanceTable | PiecewiseLinear, call: Call) -> tuple[Tensor, ...]:
    low = 0 if call.causal else -call.reach
    distance = torch.arange(low, call.reach + 1, device=call.device)
    if isinstance(added, DistanceTable):
        table = added.at(distance, torch.float32)
    else:
        table = added.table(distance, call.positions.query[:1, :1], torch.float32)
    return (*_places(call, shift=-low), table)


def _of_keys(added: KeyBias, call: Call) -> tuple[Tensor, Tensor]:
    batch = len(call.q)
    own, keys = (added.at(state).float().expand(batch, -1, -1) for state in (call.own, call.state))
    return own, keys


def _of_pieces(added: PiecewiseLinear, call: Call) -> tuple[Tensor, ...]:
    feature = added.feature(torch.arange(call.reach + 1, device=call.device), torch.float32)
    weight = added.weight(call.positions.query, torch.float32).expand(len(call.q), -1)
    ends, slope, offset = added.pieces(torch.float32)
    missing = 2 ** len(ends).bit_length() - 1 - len(ends)
    ends = F.pad(ends.detach(), (0, missing), value=math.inf)
    return (*_places(call), feature, weight, ends, slope, offset)


# -- masks -----------------------------------------------------------------------------------------------------------


def _block_mask(call: Call) -> BlockMask | None:
    """Return a mask with the blocks in it that hold any visible key; `None` where all keys are visible."""
    length, keys, mask = call.queries, call.keys, call.mask
    keep = mask.keep
    if mask.rule == "all" and keep is None:
        return None
    visible = _visible(call)
    ahead = mask.ahead if mask.rule == "slots" else keys
    if mask.rule != "positions" and (keep is None or keep.shape[1:3] == (1, 1)):
        # The same for every layer and every step. Padding is looked up key by key, within the blocks of the rule.
        found = copy.copy(_blocks_of_slots(length, keys, ahead, keep is None, call.device))
        found.mask_mod = visible
        return found
    some, every = (x[None, None] for x in _slot_blocks(length, keys, ahead, call.device))
    if mask.rule == "positions":
        query, key = call.positions.query.to(some.device), call.positions.key.to(some.device)
        first_query, last_query = (x[:, None, :, None] for x in _extremes(query))
        first_key, last_key = (x[:, None, None, :] for x in _extremes(key))
        some, every = some & (first_key <= last_query), every & (last_key <= first_query)
    if keep is not None:
        some, every = some & _in_blocks(keep).any(-1).any(-1), every & _in_blocks(keep).all(-1).all(-1)
    return _sparse(some, every, length, keys, visible)


def _visible(call: Call) -> Callable[..., Tensor]:
    """Return the function that says of single keys whether they are visible."""
    batch, mask = len(call.q), call.mask
    ahead = mask.ahead
    parts: list[Callable[..., Tensor]] = []
    if mask.rule == "slots":
        parts.append(lambda b, h, i, j: j <= i + ahead)
    if mask.rule == "positions":
        query, key = _places(call)
        parts.append(lambda b, h, i, j: key[b, j] <= query[b, i])
    if mask.keep is not None:
        keep = mask.keep.to(call.device).expand(batch, -1, -1, call.keys)
        if keep.shape[1:3] == (1, 1):
            of_keys = keep[:, 0, 0]
            parts.append(lambda b, h, i, j: of_keys[b, j])
        else:
            full = keep.expand(-1, call.q.shape[1], call.queries, -1)
            parts.append(lambda b, h, i, j: full[b, h, i, j])
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    return lambda b, h, i, j: first(b, h, i, j) & second(b, h, i, j)


@functools.lru_cache(maxsize=32)
def _blocks_of_slots(length: int, keys: int, ahead: int, exact: bool, device: torch.device) -> BlockMask:
    some, every = _slot_blocks(length, keys, ahead, device)
    return _sparse(some[None, None], every[None, None] & exact, length, keys, None)


def _slot_blocks(length: int, keys: int, ahead: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the blocks with any visible key, and those with all, where row i sees the first i + 1 + ahead keys."""
    rows = torch.arange(0, length, _BLOCK, device=device)[:, None]
    columns = torch.arange(0, keys, _BLOCK, device=device)
    # A block that goes over an end is never whole.
    whole = (rows + _BLOCK <= length) & (columns + _BLOCK <= keys)
    last_row = (rows + _BLOCK - 1).clamp(max=length - 1)
    return columns <= last_row + ahead, whole & (columns + _BLOCK - 1 <= rows + ahead)


def _extremes(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest position of each block, `[B|1, blocks]`."""
    missing = -positions.shape[1] % _BLOCK
    padded = torch.cat((positions, positions[:, -1:].expand(-1, missing)), dim=1).view(len(positions), -1, _BLOCK)
    return padded.amin(-1), padded.amax(-1)


def _in_blocks(keep: Tensor) -> Tensor:
    """Return a mask `[B|1, H|1, Q|1, K]` by blocks, `[B|1, H|1, rows|1, columns, 128|1, 128]`, False outside."""
    rows, columns = keep.shape[2:]
    size = 1 if rows == 1 else _BLOCK
    padded = F.pad(keep, (0, -columns % _BLOCK, 0, -rows % size))
    return padded.reshape(*keep.shape[:2], -(-rows // size), size, -1, _BLOCK).transpose(3, 4)


def _sparse(some: Tensor, every: Tensor, length: int, keys: int, visible: Callable[..., Tensor] | None) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    partly = _ordered(some & ~every)
    wholly = _ordered(every)
    return BlockMask.from_kv_blocks(*partly, *wholly, BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(length, keys))


def _ordered(present: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks there are in each row, and the blocks of the row with these first."""
    numbers = present.to(torch.int32)
    order = numbers.argsort(dim=-1, descending=True, stable=True)
    return numbers.sum(-1, dtype=torch.int32), order.to(torch.int32)
