"""Schemes that only add a bias of the distance, on a GPU: torch compiles a kernel that looks it up (`flex_attention`).

Hidden blocks of keys are skipped. Without compilation, `flex_attention` builds the whole matrix, so this executor
needs a compiler; on a CPU, in tests, its graph runs as it was traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.attention.call import Call
from hf_posenc.attention.gpu.trial import CompiledExecutor
from hf_posenc.attention.once import Once
from hf_posenc.derivatives import ending
from hf_posenc.forms import Bias, DistanceTable, PiecewiseLinear
from hf_posenc.scheme import Scheme

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# torch's kernels refuse narrower heads.
_NARROWEST = 16
# Rows and columns of the blocks that are skipped, the size that torch's kernels expect.
_BLOCK = 128
# Numbers of a mask to look at together while it is laid out in blocks.
_AT_ONCE = 2**25
# A function is compiled again for other dtypes, numbers of heads, masks, and operands with or without gradients.
# Beyond torch's own limit of 8 it would raise.
_VARIANTS = 64
# Masks that are the same for every layer and every step.
_MASKS: Once[BlockMask] = Once(size=32)


class Flex(CompiledExecutor):
    """A compiled kernel that reads a table of distances.

    No tensor of size Q x K exists, except a mask that is given as one. Queries that see no key get zeros. Gradients of
    tables are added up in no fixed order.
    """

    name = "flex"

    def structure(self, scheme: Scheme) -> Bias | None:
        added = scheme.added()
        return added if isinstance(added, (DistanceTable, PiecewiseLinear)) else None

    def computes(self, call: Call) -> bool:
        added = call.scheme.added()
        # Straight pieces are a table where the weight of the queries is the same. They look back.
        table = not isinstance(added, PiecewiseLinear) or (call.causal and call.reach < added.constant_below())
        return super().computes(call) and table and call.q.shape[-1] >= _NARROWEST

    def run(self, call: Call) -> tuple[Tensor, None]:
        device = call.device.type
        with torch.autocast(device, enabled=False), torch._dynamo.config.patch(recompile_limit=_VARIANTS):
            *places, table = _of_table(call)
            # torch 2.13 drops the gradients of captured tensors that are views.
            table = ending(table).clone() if table.requires_grad else table
            q, k, v = map(ending, (call.q, call.k, call.v))
            return _compiled(device)(q, k, v, _block_mask(call), call.scale, *places, table), None


@functools.cache
def _compiled(device: str) -> Callable[..., Tensor]:
    """Return attention compiled as a whole: without a kernel it raises, rather than build the matrix unseen."""
    return torch.compile(_attention, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask | None,
    scale: float,
    queries: Tensor,
    keys: Tensor,
    table: Tensor,
) -> Tensor:
    """Return the output. Operands and all that the bias is made of are arguments, so that one graph serves every call.

    Distances are not below 0 but for keys that are hidden, or where what is given makes up for it.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def score(logit: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
        return logit + table[h, (queries[b, i] - keys[b, j]).clamp(min=0)]

    output = flex_attention(
        q, k, v, score_mod=score, block_mask=block_mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    assert isinstance(output, Tensor)
    return output


# -- the table -------------------------------------------------------------------------------------------------------


def _places(call: Call, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Return the positions of queries, shifted, and of keys, int32 `[B, Q]` and `[B, K]`."""
    batch = len(call.q)
    query, key = ((x.to(call.device, torch.int32)) for x in (call.positions.query, call.positions.key))
    return (query + shift).expand(batch, -1), key.expand(batch, -1)


def _of_table(call: Call) -> tuple[Tensor, ...]:
    """Return positions of queries and keys, and the table in which their difference is looked up."""
    added = call.scheme.added()
    low = 0 if call.causal else -call.reach
    distance = torch.arange(low, call.reach + 1, device=call.device)
    if isinstance(added, DistanceTable):
        table = added.at(distance, torch.float32)
    else:
        assert isinstance(added, PiecewiseLinear)
        table = added.table(distance, call.positions.query[:1, :1], torch.float32)
    return (*_places(call, shift=-low), table)


# -- masks -----------------------------------------------------------------------------------------------------------


def _block_mask(call: Call) -> BlockMask | None:
    """Return a mask with the blocks in it that hold any visible key; `None` where all keys are visible."""
    mask = call.mask
    if mask.rule == "all" and mask.keep is None:
        return None
    if mask.only_ahead:
        return _mask_of_slots(mask.ahead, call.queries, call.keys, call.device)
    per_row = mask.rule == "positions" or (mask.keep is not None and len(mask.keep) > 1)
    per_head = mask.keep is not None and mask.keep.shape[1] > 1
    batch, heads = len(call.q) if per_row else None, call.q.shape[1] if per_head else None
    return _layout(_visible(call), batch, heads, (call.queries, call.keys), call.device)


def _mask_of_slots(ahead: int, length: int, keys: int, device: torch.device) -> BlockMask:
    def lay_out() -> BlockMask:
        return _layout(lambda b, h, i, j: j <= i + ahead, None, None, (length, keys), device)

    return _MASKS.get((ahead, length, keys, device), lay_out, device)


def _layout(
    visible: Callable[..., Tensor], batch: int | None, heads: int | None, size: tuple[int, int], device: torch.device
) -> BlockMask:
    # Late, since it takes a second.
    from torch.nn.attention.flex_attention import BlockMask

    length, keys = size
    b, h, j = (torch.arange(number or 1, device=device) for number in (batch, heads, keys))
    # torch's own `create_block_mask` makes the whole matrix.
    rows = max(1, _AT_ONCE // (len(b) * len(h) * keys) // _BLOCK) * _BLOCK
    counts = []
    for i in torch.arange(length, device=device).split(rows):
        seen = visible(b[:, None, None, None], h[:, None, None], i[:, None], j)
        seen = F.pad(seen.expand(len(b), len(h), len(i), keys), (0, -keys % _BLOCK, 0, -len(i) % _BLOCK))
        counts.append(seen.unflatten(3, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK)).sum((3, 5)))
    count = torch.cat(counts, dim=2)
    whole = count == _BLOCK**2
    blocks = (*_in_order((count > 0) & ~whole), *_in_order(whole))
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=size)


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks in each row, and their columns before those of all others."""
    chosen = blocks.int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()


def _visible(call: Call) -> Callable[..., Tensor]:
    """Return the function that says of single keys whether they are visible."""
    mask, ahead = call.mask, call.mask.ahead
    parts: list[Callable[..., Tensor]] = []
    if mask.rule == "slots":
        parts.append(lambda b, h, i, j: j <= i + ahead)
    if mask.rule == "positions":
        query, key = _places(call)
        parts.append(lambda b, h, i, j: key[b, j] <= query[b, i])
    if mask.keep is not None:
        keep = mask.keep.to(call.device).expand(len(call.q), call.q.shape[1], call.queries, call.keys)
        parts.append(lambda b, h, i, j: keep[b, h, i, j])
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    return lambda b, h, i, j: first(b, h, i, j) & second(b, h, i, j)
