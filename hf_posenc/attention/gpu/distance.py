"""Biases of the distance: plain attention by tiles, each of which reads its bias. Imports Triton.

A bias is a table with a number for each head and distance, or a function of straight pieces; see `forms.DistanceTable`
and `forms.PiecewiseLinear`. In a tile whose tokens lie one after the other a distance is a diagonal. So gradients of
tables are summed along the diagonals of a tile first, and added once.

The backward pass has a kernel for queries and the bias, and one for keys and values, which adds nothing up across
programs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from hf_posenc.attention.call import Call
from hf_posenc.attention.gpu import tiles
from hf_posenc.attention.gpu.tiles import (
    Shape,
    dot,
    keys_of,
    last_block,
    load_rows,
    merge,
    queries_of,
    start,
    store_rows,
)
from hf_posenc.derivatives import first_order
from hf_posenc.forms import DistanceTable, PiecewiseLinear

# Beyond any place of a token.
_NOWHERE = tl.constexpr(2**30)


class Curve(NamedTuple):
    """Tensors that a bias is made of, or their gradients. Only straight pieces have others than the first.

    Attributes:
        table: The bias of each head and distance, `[H, N]`, or the feature of each distance, `[N]` (of its gradient,
            one for each head).
        weight: Factor of each query on the feature, `[B|1, Q]`.
        slope: Slopes of the pieces, `[H, M + 1]`.
        offset: Their offsets, likewise.
        ends: Their ends, `[M]`.
    """

    table: Any
    weight: Any
    slope: Any
    offset: Any
    ends: Any


class Counts(NamedTuple):
    """Numbers of distances and of ends, what is added to a distance, and strides of heads and of sequences."""

    distances: Any
    ends: Any
    shift: Any
    head: Any
    batch: Any


class Form(NamedTuple):
    """Constants: pieces and room for their ends, a softcap, sinks, ranges of tiles that are given, and gradients."""

    PIECES: bool
    ENDS: int
    CAPPED: bool
    SINKS: bool
    GIVEN: bool
    LEARNS: bool


# -- the bias of a tile ----------------------------------------------------------------------------------------------


@triton.jit
def _looked_up(curve, counts, h, query, key, seen):
    place = tl.minimum(tl.maximum(query[:, None] - key[None, :] + counts.shift, 0), counts.distances - 1)
    return tl.load(curve.table + h * counts.head + place, mask=seen, other=0.0)


@triton.jit
def _on_pieces(curve, counts, h, x, seen, C: tl.constexpr):
    """Return the function at x and its slope there, and the range of the ends that lie in the tile."""
    e = tl.arange(0, C.ENDS)
    ends = tl.load(curve.ends + e, mask=e < counts.ends, other=float("inf"))
    lowest = tl.min(tl.min(tl.where(seen, x, float("inf")), 1), 0)
    highest = tl.max(tl.max(tl.where(seen, x, float("-inf")), 1), 0)
    first = tl.sum((ends < lowest).to(tl.int32), 0)
    stop = tl.sum((ends < highest).to(tl.int32), 0)
    of_head = h * (counts.ends + 1)
    slope = tl.load(curve.slope + of_head + first)
    value = slope * x + tl.load(curve.offset + of_head + first)
    slopes = tl.where(seen, slope, 0.0)
    # Most tiles have none: ends lie close together only next to the diagonal.
    for end in range(first, stop):
        at = curve.slope + of_head + end
        bend = tl.load(at + 1) - tl.load(at)
        above = x - tl.load(curve.ends + end)
        value += tl.where(above > 0, bend * above, 0.0)
        slopes += tl.where(above > 0, bend, 0.0)
    return value, slopes, first, stop


@triton.jit
def _logits(q_tile, k_tile, curve, counts, h, weight, query, key, seen, scale, cap, T: tl.constexpr, C: tl.constexpr):
    """Return the products before and after the bias, which is `-inf` where nothing is seen."""
    z = dot(q_tile, tl.trans(k_tile), T) * scale
    if C.CAPPED:
        z = cap * (2.0 * tl.sigmoid(2.0 * z / cap) - 1.0)
    bias = _looked_up(curve, counts, h, query, key, seen)
    if C.PIECES:
        bias, _slopes, _first, _stop = _on_pieces(curve, counts, h, bias * weight[:, None], seen, C)
    return z, tl.where(seen, z + bias, float("-inf"))


@triton.jit
def _of_products(of_logits, z, scale, cap, C: tl.constexpr):
    """Return the gradient of the products of queries and keys."""
    if C.CAPPED:
        of_logits = of_logits * (1.0 - (z / cap) * (z / cap))
    return of_logits * scale


@triton.jit
def _weight_of(curve, counts, b, i, sizes, C: tl.constexpr):
    if C.PIECES:
        return tl.load(curve.weight + b * counts.batch + i, mask=i < sizes.queries, other=0.0)
    else:
        return i


@triton.jit
def _add_by_distance(table, x, counts, i, j, query, key, sizes, T: tl.constexpr):
    """Add the numbers of a tile, which are 0 where nothing is seen, to the row of a table by their distances."""
    ahead_i, ahead_j = query - i, key - j
    lowest_i = tl.min(tl.where(i < sizes.queries, ahead_i, _NOWHERE), 0)
    highest_i = tl.max(tl.where(i < sizes.queries, ahead_i, -_NOWHERE), 0)
    lowest_j = tl.min(tl.where(j < sizes.keys, ahead_j, _NOWHERE), 0)
    highest_j = tl.max(tl.where(j < sizes.keys, ahead_j, -_NOWHERE), 0)
    if (lowest_i == highest_i) & (lowest_j == highest_j):
        # Each row is turned until diagonals are columns; a column holds parts of several, one for each turn.
        c = tl.arange(0, T.BN)
        column = tl.arange(0, T.BM)[:, None] + c[None, :]
        turned = tl.gather(x, column % T.BN, 1)
        corner = tl.min(i, 0) + lowest_i - tl.min(j, 0) - lowest_j + counts.shift
        for turn in tl.static_range(T.BM // T.BN + 1):
            total = tl.sum(tl.where(column // T.BN == turn, turned, 0.0), 0)
            diagonal = tl.minimum(tl.maximum(corner + turn * T.BN - c, 0), counts.distances - 1)
            tl.atomic_add(table + diagonal, total, mask=total != 0.0, sem="relaxed")
    else:
        place = tl.minimum(tl.maximum(query[:, None] - key[None, :] + counts.shift, 0), counts.distances - 1)
        tl.atomic_add(table + place, x, mask=x != 0.0, sem="relaxed")


@triton.jit
def _add_to_piece(of, place, of_slope, of_offset):
    tl.atomic_add(of.slope + place, of_slope, sem="relaxed")
    tl.atomic_add(of.offset + place, of_offset, sem="relaxed")


@triton.jit
def _learn(
    of, of_logits, curve, counts, h, weight, i, j, query, key, seen, sizes, T: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Add the gradients of the bias of a tile, but for the weights, whose gradient is returned."""
    row = of.table + h * counts.distances
    if C.PIECES:
        feature = _looked_up(curve, counts, h, query, key, seen)
        x = feature * weight[:, None]
        _value, slopes, first, stop = _on_pieces(curve, counts, h, x, seen, C)
        of_head = h * (counts.ends + 1)
        _add_to_piece(of, of_head + first, tl.sum(tl.sum(of_logits * x, 1), 0), tl.sum(tl.sum(of_logits, 1), 0))
        for end in range(first, stop):
            beyond = tl.where(x > tl.load(curve.ends + end), of_logits, 0.0)
            of_slope, of_offset = tl.sum(tl.sum(beyond * x, 1), 0), tl.sum(tl.sum(beyond, 1), 0)
            _add_to_piece(of, of_head + end + 1, of_slope, of_offset)
            _add_to_piece(of, of_head + end, -of_slope, -of_offset)
        of_x = of_logits * slopes
        _add_by_distance(row, of_x * weight[:, None], counts, i, j, query, key, sizes, T)
        return tl.sum(of_x * feature, 1)
    else:
        _add_by_distance(row, of_logits, counts, i, j, query, key, sizes, T)
        return tl.zeros([T.BM], dtype=tl.float32)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _keys_for(m, ranges, sizes, T: tl.constexpr, C: tl.constexpr):
    """Return the range of the tiles of keys that any query of tile m may see."""
    first, stop = 0, last_block(m, sizes, T) + 1
    if C.GIVEN:
        at = ranges + 2 * (tl.program_id(1) * tl.num_programs(0) + m)
        first, stop = tl.load(at), tl.load(at + 1)
    return first, stop


@triton.jit
def _queries_for(n, row, ranges, sizes, T: tl.constexpr, C: tl.constexpr):
    """Return the range of the tiles of queries of a head that may see any key of tile n."""
    first, stop = 0, tl.cdiv(sizes.queries, T.BM)
    if T.RULE == 1:
        first = tl.maximum(n * T.BN - sizes.ahead, 0) // T.BM
    if C.GIVEN:
        at = ranges + 2 * (row * tl.num_programs(0) + n)
        first, stop = tl.load(at), tl.load(at + 1)
    return first, stop


@triton.jit(do_not_specialize=("sizes", "counts"))
def _forward(
    q, k, v, out, lse, curve, sinks, ranges, hidden, sizes, counts, scale, cap, T: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    m, b, h, i, rows, query = start(hidden, sizes, T)
    g = h // sizes.group
    q_tile = load_rows(q, b, h, i, sizes.queries, T)
    weight = _weight_of(curve, counts, b, i, sizes, C)
    total = tl.zeros([T.BM, T.BD], dtype=tl.float32)
    highest = tl.full([T.BM], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([T.BM], dtype=tl.float32)
    if C.SINKS:
        highest = tl.zeros([T.BM], dtype=tl.float32) + tl.load(sinks + h)
        sums += 1.0
    first, stop = _keys_for(m, ranges, sizes, T, C)
    for n in range(first, stop):
        j, key, seen = keys_of(n, b, h, i, query, hidden, sizes, T)
        k_tile = load_rows(k, b, g, j, sizes.keys, T)
        _z, logits = _logits(q_tile, k_tile, curve, counts, h, weight, query, key, seen, scale, cap, T, C)
        total, highest, sums = merge(total, highest, sums, logits, load_rows(v, b, g, j, sizes.keys, T), T)
    # A query that sees nothing gets zeros, and weights of zero in the backward pass.
    empty = sums == 0.0
    sums = tl.where(empty, 1.0, sums)
    store_rows(out, b, h, i, sizes.queries, total / sums[:, None], T)
    tl.store(lse + rows, tl.where(empty, float("inf"), highest + tl.log(sums)), mask=i < sizes.queries)


@triton.jit(do_not_specialize=("sizes", "counts"))
def _backward_of_queries(
    q, k, v, grad, dq, lse, inner, curve, of, ranges, hidden, sizes, counts, scale, cap,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    m, b, h, i, rows, query = start(hidden, sizes, T)
    g = h // sizes.group
    inside = i < sizes.queries
    q_tile = load_rows(q, b, h, i, sizes.queries, T)
    grad_tile = load_rows(grad, b, h, i, sizes.queries, T)
    weight = _weight_of(curve, counts, b, i, sizes, C)
    level = tl.load(lse + rows, mask=inside, other=float("inf"))
    mean = tl.load(inner + rows, mask=inside, other=0.0)
    total = tl.zeros([T.BM, T.BD], dtype=tl.float32)
    of_weight = tl.zeros([T.BM], dtype=tl.float32)
    first, stop = _keys_for(m, ranges, sizes, T, C)
    for n in range(first, stop):
        j, key, seen = keys_of(n, b, h, i, query, hidden, sizes, T)
        k_tile = load_rows(k, b, g, j, sizes.keys, T)
        v_tile = load_rows(v, b, g, j, sizes.keys, T)
        z, logits = _logits(q_tile, k_tile, curve, counts, h, weight, query, key, seen, scale, cap, T, C)
        of_logits = tl.exp(logits - level[:, None]) * (dot(grad_tile, tl.trans(v_tile), T) - mean[:, None])
        if C.LEARNS:
            of_weight += _learn(of, of_logits, curve, counts, h, weight, i, j, query, key, seen, sizes, T, C)
        total += dot(_of_products(of_logits, z, scale, cap, C).to(k_tile.dtype), k_tile, T)
    store_rows(dq, b, h, i, sizes.queries, total, T)
    if C.LEARNS and C.PIECES:
        tl.atomic_add(of.weight + b * counts.batch + i, of_weight, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=("sizes", "counts"))
def _backward_of_keys(
    q, k, v, grad, dk, dv, lse, inner, curve, ranges, hidden, sizes, counts, scale, cap,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    n, groups = tl.program_id(0), sizes.heads // sizes.group
    b = (tl.program_id(1) // groups).to(tl.int64)
    g = (tl.program_id(1) % groups).to(tl.int64)
    j = n * T.BN + tl.arange(0, T.BN)
    k_tile = load_rows(k, b, g, j, sizes.keys, T)
    v_tile = load_rows(v, b, g, j, sizes.keys, T)
    of_k = tl.zeros([T.BN, T.BD], dtype=tl.float32)
    of_v = tl.zeros([T.BN, T.BD], dtype=tl.float32)
    for h in range(g * sizes.group, (g + 1) * sizes.group):
        first, stop = _queries_for(n, b * sizes.heads + h, ranges, sizes, T, C)
        for m in range(first, stop):
            i, query = queries_of(m, b, hidden, sizes, T)
            rows = (b * sizes.heads + h) * sizes.queries + i
            _j, key, seen = keys_of(n, b, h, i, query, hidden, sizes, T)
            q_tile = load_rows(q, b, h, i, sizes.queries, T)
            grad_tile = load_rows(grad, b, h, i, sizes.queries, T)
            weight = _weight_of(curve, counts, b, i, sizes, C)
            level = tl.load(lse + rows, mask=i < sizes.queries, other=float("inf"))
            mean = tl.load(inner + rows, mask=i < sizes.queries, other=0.0)
            z, logits = _logits(q_tile, k_tile, curve, counts, h, weight, query, key, seen, scale, cap, T, C)
            weights = tl.exp(logits - level[:, None])
            of_v += dot(tl.trans(weights.to(grad_tile.dtype)), grad_tile, T)
            of_logits = weights * (dot(grad_tile, tl.trans(v_tile), T) - mean[:, None])
            of_k += dot(tl.trans(_of_products(of_logits, z, scale, cap, C).to(q_tile.dtype)), q_tile, T)
    store_rows(dk, b, g, j, sizes.keys, of_k, T)
    store_rows(dv, b, g, j, sizes.keys, of_v, T)


# -- on the host -----------------------------------------------------------------------------------------------------


def add_bias(added: DistanceTable | PiecewiseLinear, call: Call) -> Tensor:
    low = 0 if call.causal else -call.reach
    distance = torch.arange(low, call.reach + 1, device=call.device)
    if isinstance(added, PiecewiseLinear):
        ends, *lines = added.pieces(torch.float32)
        weight = added.weight(call.positions.query.to(call.device), torch.float32)
        parts = (added.feature(distance, torch.float32), weight, *(x.T for x in lines), ends)
    else:
        parts = (added.at(distance, torch.float32),)
    sinks = None if call.sinks is None else call.sinks.float()
    parts = tuple(x.to(call.device).contiguous() for x in parts)
    shape, scales = tiles.shape_of(call), {"shift": -low, "cap": call.softcap, "ranges": _ranges(call)}
    output: Tensor = _AddBias.apply(shape, scales, call.q, call.k, call.v, sinks, *parts)
    return output


def _ranges(call: Call) -> tuple[Tensor, Tensor] | None:
    """Return the first tile of keys and the one behind the last that any query of each tile may see, and for each tile
    of keys those of queries, int32 `[B, H, tiles, 2]`; `None` if the rule says so already.

    Some tile in a range may be hidden as a whole.
    """
    mask, (rows, columns) = call.mask, tiles.rows_and_columns(call.q)
    per_row = mask.keep is not None and mask.keep.shape[2] > 1
    if not (mask.windowed or mask.rule == "positions" or per_row):
        return None
    first_i, first_j = (
        torch.arange(0, count, step, device=call.device) for count, step in ((call.queries, rows), (call.keys, columns))
    )
    (low_i, high_i), (low_j, high_j) = (
        x.to(call.device)[:, _padded(x.shape[1], size, call.device)].aminmax(dim=-1)
        for x, size in ((call.positions.query, rows), (call.positions.key, columns))
    )
    low_i, high_i, low_j, high_j = low_i[:, :, None], high_i[:, :, None], low_j[:, None], high_j[:, None]
    there = torch.ones_like(low_i >= low_j)
    if mask.rule == "slots":
        there &= first_j <= first_i[:, None] + rows - 1 + mask.ahead
    if mask.rule == "positions":
        there &= low_j <= high_i
    if mask.window is not None:
        there &= (low_i - high_j < mask.window) & (low_j - high_i < mask.window)
    if mask.span is not None:
        there &= first_j + columns - 1 > first_i[:, None] + mask.ahead - mask.span
    there = there[:, None]
    if mask.keep is not None and per_row:
        keep = mask.keep.to(call.device)
        keep = pad(keep, (0, -call.keys % columns, 0, -call.queries % rows))
        there = there & keep.unflatten(3, (-1, columns)).any(-1).unflatten(2, (-1, rows)).any(3)
    there = there.expand(*call.q.shape[:2], -1, -1)
    return _ends(there), _ends(there.mT)


def _padded(count: int, size: int, device: torch.device) -> Tensor:
    """Return the indices of each tile, `[tiles, size]`; the last is filled up with the last index."""
    return torch.arange(triton.cdiv(count, size) * size, device=device).clamp_max(count - 1).view(-1, size)


def _ends(there: Tensor) -> Tensor:
    place = torch.arange(there.shape[-1], device=there.device)
    first = place.where(there, place.new_full((), len(place))).amin(-1)
    return torch.stack((first, (place + 1).where(there, place.new_zeros(())).amax(-1)), dim=-1).int().contiguous()


class _AddBias(torch.autograd.Function):
    """Takes the logits of the sinks, float32 `[H]`, and the tensors of a `Curve`."""

    @staticmethod
    def forward(
        ctx: Any, shape: Shape, given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
        *parts: Tensor,
    ) -> Tensor:  # fmt: skip
        q, k, v = (tiles.rowwise(x) for x in (q, k, v))
        learns, pieces = any(ctx.needs_input_grad[6:]), len(parts) > 1
        # Not rounded where the bias learns, whose gradient is a sum of differences from it.
        out = torch.empty(q.shape, dtype=torch.float32 if learns else q.dtype, device=q.device)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        ends = len(parts[4]) if pieces else 0
        batch = parts[1].shape[1] if pieces and len(parts[1]) > 1 else 0
        distances = parts[0].shape[-1]
        ranges, cap = given["ranges"], given["cap"]
        constants = (pieces, triton.next_power_of_2(max(1, ends)), cap is not None, sinks is not None,
                     ranges is not None, learns)  # fmt: skip
        ctx.arguments = {
            **shape.arguments,
            "counts": Counts(distances, ends, given["shift"], 0 if pieces else distances, batch),
            "cap": 1.0 if cap is None else cap,
            "num_warps": 8 if pieces or q.shape[-1] > 64 else 4,
            "C": Form(*map(tl.constexpr, constants)),
        }
        ctx.shape, ctx.ranges = shape, (lse, lse) if ranges is None else ranges
        _forward[shape.grid](
            *tiles.matrices(q, k, v, out), lse, _curve(parts), lse if sinks is None else sinks, ctx.ranges[0],
            **ctx.arguments,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, sinks, *parts)
        return out.to(q.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *parts = ctx.saved_tensors
        inner = (grad.float() * out).sum(-1)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        *given, of_q, of_k, of_v = tiles.matrices(q, k, v, tiles.rowwise(grad), dq, dk, dv)
        learns, curve = any(ctx.needs_input_grad[6:]), _curve(parts)
        found = [torch.zeros_like(x) for x in parts] if learns else []
        if learns and len(parts) > 1:
            found[0] = found[0].new_zeros(dq.shape[1], len(parts[0]))
        _backward_of_queries[ctx.shape.grid](
            *given, of_q, lse, inner, curve, _curve(found) if learns else curve, ctx.ranges[0], **ctx.arguments
        )
        columns = triton.cdiv(dk.shape[2], ctx.arguments["T"].BN.value)
        _backward_of_keys[(columns, dk.shape[0] * dk.shape[1])](
            *given, of_k, of_v, lse, inner, curve, ctx.ranges[1], **ctx.arguments
        )
        of_sinks = None if sinks is None else -((sinks[:, None] - lse).exp() * inner).sum((0, 2))
        if not learns:
            return None, None, dq, dk, dv, of_sinks, *(None for _ in parts)
        if len(parts) > 1:
            found[0] = found[0].sum(0)
        return None, None, dq, dk, dv, of_sinks, *found


def _curve(parts: Any) -> Curve:
    """Return a record of tensors, in which the table stands for those that it does not have."""
    return Curve(*parts, *(parts[0],) * (len(Curve._fields) - len(parts)))
