"""Biases that are products of a number of the query and a number of the key, as channels of queries and keys.

The kernels of plain attention then compute them, with their gradients, dropout and grouped queries.

A channel holds few bits in half precision, and a GPU may multiply float32 by as few. So a number is split into parts
that every kernel multiplies without rounding. The channels stand before all others, the largest parts first: where
large numbers of query and key cancel, they do so before the small ones are added.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.attention.call import FEWEST_QUERIES, Call, Executor
from hf_posenc.attention.cpu import kernel
from hf_posenc.attention.cpu.biases import Unbiased
from hf_posenc.attention.cpu.fused import STEEP, bias_of, by_kernel
from hf_posenc.attention.sdpa import plain
from hf_posenc.forms import DistanceTable, KeyBias, Spared
from hf_posenc.scheme import Scheme

# The factors of a product, `[B|1, H|1, Q]` of queries and `[B|1, H|1, K]` of keys; `None` is 1. See `KeyBias`.
Product: TypeAlias = tuple[Tensor | None, Tensor | None]

# Kernels of a GPU want widths that are multiples of this.
_STEP = 8
# The widest heads that fast kernels of GPUs take.
_WIDEST = 256
# Channels of all heads that share a key go next to each other; beyond so many the key is repeated for each head.
_MOST = 32
# float16 ends at 65,504: what meets a number there is this instead of 1, and the number is smaller by as much. Only
# positions are themselves.
_UNIT = 256.0
# The logit of padding, which no other comes near.
_HIDDEN = -1e4
# Number of parts, by their dtype, of numbers in float32 and in float64.
_PARTS = {torch.float64: (1, 1), torch.float32: (1, 2), torch.bfloat16: (3, 3), torch.float16: (3, 3)}


class Channels(Executor):
    """Plain attention on queries and keys with a few more channels. No tensor of size Q x K exists, but masks."""

    name = "channels"

    def knows(self, scheme: Scheme, device: torch.device) -> bool:
        added = scheme.added()
        if isinstance(added, Spared):
            return device.type == "cpu" and kernel.works()
        return isinstance(added, KeyBias) or (isinstance(added, DistanceTable) and added.slope is not None)

    def pays(self, call: Call) -> bool:
        # On a CPU a table is a view, whose backward pass costs less.
        table = isinstance(call.scheme.added(), DistanceTable) and call.device.type == "cpu" and kernel.works()
        return call.queries >= FEWEST_QUERIES and not (table and _learns(_inputs(call)) and call.slots_tell_distances)

    def computes(self, call: Call) -> bool:
        on_cpu, width = call.device.type == "cpu", call.q.shape[-1]
        plain = call.native_score is None and not (call.upcast or call.reshaped or (on_cpu and call.dropout))
        alike = call.k.shape == call.v.shape and call.q.dtype == call.k.dtype == call.v.dtype
        added = call.scheme.added()
        table = added.rest if isinstance(added, Spared) else added
        slopes = isinstance(table, DistanceTable) and table.slope is not None
        if slopes and call.q.dtype.itemsize == 2 and _learns(call.scheme.parameters()):
            return False  # gradients of slopes are differences of sums over positions, of which nothing would be left
        # float16 has no room for larger positions, and fast kernels of a GPU none for more channels.
        fits = (call.reach < 2**16 or call.q.dtype != torch.float16) and (on_cpu or width + _MOST <= _WIDEST)
        # What else there is of a bias must be a table.
        pure = table is added or call.slots_tell_distances
        return plain and alike and fits and pure and call.causal

    def run(self, call: Call) -> tuple[Tensor, None]:
        with torch.autocast(call.device.type, enabled=False):
            return _attended(call)[..., : call.q.shape[-1]].to(call.q.dtype), None


def _attended(call: Call) -> Tensor:
    """Return the output with its further channels."""
    mask, learns = call.mask, _learns(_inputs(call))
    if call.q.dtype.itemsize == 2 and _learns(call.state.values()):
        # Gradients of channels come in the dtype of the keys. Summed up over a text, their rounding would prevail.
        call = replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
    found, on_diagonal = products(call), not mask.ahead and (mask.only_ahead or mask.pads)
    added = call.scheme.added()
    if isinstance(added, Spared):
        wide = widened(call, found)
        bias = bias_of(wide, added.rest)
        bias.in_channels = True
        return by_kernel(bias, wide)
    if call.device.type == "cpu" and kernel.works():
        steep = learns and spread(found) > STEEP
        if steep or not on_diagonal:
            wide = widened(call, found)
            return by_kernel(Unbiased(wide, steep=steep), wide)
    if mask.keep is None or not on_diagonal:
        return plain(widened(call, found))
    # Padding is hidden by a channel, so that the kernel's own causal rule will do.
    real = mask.keep[:, 0]
    found.append((None, torch.zeros(real.shape, dtype=call.precise, device=call.device).masked_fill_(~real, _HIDDEN)))
    output = plain(replace(widened(call, found), mask=replace(mask, keep=None)))
    # Queries that see no key pass no gradient on.
    return output.masked_fill(~real[..., None], 0)


def _learns(tensors: Iterable[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _inputs(call: Call) -> tuple[Tensor, ...]:
    return (*call.operands(), *call.scheme.parameters())


def products(call: Call) -> list[Product]:
    """Return the products that make up the bias of a call."""
    added = call.scheme.added()
    if isinstance(added, KeyBias | Spared):
        return list(added.products(call.block(None)))
    assert isinstance(added, DistanceTable)
    assert added.slope is not None
    slope, places = added.slope(call.device, call.precise)[:, None], call.positions
    query, key = (x.to(call.device)[:, None] for x in (places.query, places.key))
    return [(slope.double() * query, None), (-slope, key)]


def spread(found: Sequence[Product]) -> float:
    """Return the largest difference between the biases of keys, for the last query."""
    with torch.no_grad():
        one = torch.ones(1, 1, 1, device="cpu")  # whatever the default is; on a GPU nobody asks
        terms = ((one if x is None else x[..., -1:]) * (one if y is None else y) for x, y in found)
        total = functools.reduce(torch.add, terms)
        return float((total.amax(-1) - total.amin(-1)).max())


def widened(call: Call, found: Sequence[Product]) -> Call:
    """Return the call on queries, keys and values with channels for these products. Values get as many zeros."""
    q, k, v = call.q, call.k, call.v
    # What a part must not have more bits than.
    grain = torch.bfloat16 if q.dtype == torch.float32 and call.device.type != "cpu" else q.dtype
    pairs = sorted((pair for product in found for pair in _parts(product, call, grain)), key=lambda pair: pair[0])
    repeats = q.shape[1] // k.shape[1]
    own = sum(y is not None and y.shape[1] > 1 for _, _, y in pairs)
    if repeats > 1 and own * repeats > _MOST:
        k, v, repeats = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1), 1
    unit = q.new_full((), _UNIT if q.dtype == torch.float16 else 1.0)
    of_queries, of_keys = [], []
    for _, x, y in pairs:
        x, y = (unit.view(1, 1, 1) if z is None else z for z in (x, y))
        x, y = x[..., None].expand(*q.shape[:3], 1), y[..., None].expand(len(k), -1, k.shape[2], 1)
        if repeats > 1 and y.shape[1] > 1:
            # A channel for each head of a group, which the others do not look at.
            mine = torch.eye(repeats, dtype=q.dtype, device=q.device).repeat(k.shape[1], 1)
            x, y = x * mine[:, None], y.reshape(len(y), -1, repeats, k.shape[2]).mT
        of_queries.append(x)
        of_keys.append(y.expand(-1, k.shape[1], -1, -1))
    width = q.shape[-1] + sum(x.shape[-1] for x in of_queries)
    room = 0 if call.device.type == "cpu" else -width % _STEP
    zero = q.new_zeros(())
    q = torch.cat((*of_queries, q, zero.expand(*q.shape[:3], room)), dim=-1)
    k = torch.cat((*of_keys, k, zero.expand(*k.shape[:3], room)), dim=-1)
    return replace(call, q=q, k=k, v=F.pad(v, (0, width + room - v.shape[-1])))


def _parts(product: Product, call: Call, grain: torch.dtype) -> Iterator[tuple[int, Tensor | None, Tensor | None]]:
    """Return the products of all parts of two factors, with the rank of the part that is not a position."""
    x, y = product
    if x is not None and y is not None and x.is_floating_point() and y.is_floating_point():
        # As exact as the products of queries and keys.
        yield 0, (x / call.scale).to(call.q.dtype), y.to(call.q.dtype)
        return
    number = x if x is not None and x.is_floating_point() else y
    assert number is not None
    place = y if number is x else x
    alone = place is None or place.dtype == torch.bool
    for rank, part in enumerate(_parts_of_number(number, call, grain, alone=alone)):
        for at in [None] if place is None else _parts_of_place(place, call, grain):
            yield (rank, part, at) if number is x else (rank, at, part)


def _parts_of_number(number: Tensor, call: Call, grain: torch.dtype, *, alone: bool) -> Iterator[Tensor]:
    """Return the parts of a number less the softmax scale, the largest first; gradients go through that one."""
    dtype = call.q.dtype
    if grain == torch.float32 and math.frexp(call.scale)[0] != 0.5:
        number = number.double()  # float32 would round the quotient
    rest = number / (call.scale * (_UNIT if alone and dtype == torch.float16 else 1.0))
    for rank in range(_PARTS[grain][number.dtype == torch.float64]):
        part = rest.detach().to(grain)
        yield rest.to(dtype) + (part - rest.detach()).to(dtype) if rank == 0 and grain != dtype else rest.to(dtype)
        rest = rest.detach() - part.to(rest)


def _parts_of_place(place: Tensor, call: Call, grain: torch.dtype) -> Iterator[Tensor]:
    """Return the parts of positions, which are integers, the largest first; a bool has one part."""
    if place.dtype == torch.bool:
        yield place.to(call.q.dtype) * (_UNIT if call.q.dtype == torch.float16 else 1.0)
        return
    if grain in (torch.float32, torch.float64):
        yield place.to(call.q.dtype)
        return
    for low in range((max(1, call.reach).bit_length() - 1) // 8 * 8, -1, -8):
        yield (place & (255 << low)).to(call.q.dtype)
