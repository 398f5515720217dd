"""Records of operands, tiles of them, and the mask, for all kernels. Imports Triton.

A program computes a tile of queries of one head. It goes through the keys from the last that it can see to the first,
so that what lies between a key and a query has been seen before the key is.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_posenc.attention.call import Call

_RULES = {"all": 0, "slots": 1, "positions": 2}
# A window that hides nothing.
_ALL = 2**30
# Queries and keys of a tile: heads that are wide, and products in float32, leave room for fewer.
ROWS_AND_COLUMNS = {"usual": (64, 64), "wide": (64, 32), "float32": (32, 32)}


# -- records ---------------------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """A tensor `[B, H, S, D]` whose rows are contiguous, and its strides."""

    at: Any
    batch: Any
    head: Any
    row: Any


class Hidden(NamedTuple):
    """Operands of the mask: positions `[B, Q]` and `[B, K]`, and a mask `[B, H, Q, K]`, with strides."""

    query: Any
    query_batch: Any
    key: Any
    key_batch: Any
    keep: Any
    keep_batch: Any
    keep_head: Any
    keep_row: Any
    keep_column: Any


class Sizes(NamedTuple):
    """Numbers that a kernel is not compiled again for; `group` heads share keys. See `Mask` for the last three."""

    heads: Any
    group: Any
    queries: Any
    keys: Any
    ahead: Any
    window: Any
    span: Any


class Tile(NamedTuple):
    """Constants: channels, those of a tile, its queries and keys, what the mask hides by, and how to multiply."""

    D: int
    BD: int
    BM: int
    BN: int
    RULE: int
    WINDOWED: bool
    KEEP: bool
    PRECISION: str


@dataclass(frozen=True, eq=False)
class Shape:
    """The shape of a call and of its tiles, and what hides keys. It holds no operand.

    Attributes:
        grid: Number of tiles of queries, and of heads of all sequences.
        arguments: Arguments that every kernel of the call gets.
    """

    grid: tuple[int, int]
    arguments: dict[str, Any]


# -- on the device ---------------------------------------------------------------------------------------------------


@triton.jit
def start(hidden, sizes, T: tl.constexpr):
    """Return a program's tile, its sequence and head, its queries, their places in `[B, H, Q]`, and their positions."""
    # The last queries have most to do, and start first.
    m = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // sizes.heads).to(tl.int64)
    h = (tl.program_id(1) % sizes.heads).to(tl.int64)
    i, query = queries_of(m, b, hidden, sizes, T)
    return m, b, h, i, tl.program_id(1).to(tl.int64) * sizes.queries + i, query


@triton.jit
def queries_of(m, b, hidden, sizes, T: tl.constexpr):
    """Return the queries of tile m, and their positions."""
    i = m * T.BM + tl.arange(0, T.BM)
    return i, tl.load(hidden.query + b * hidden.query_batch + i, mask=i < sizes.queries, other=0)


@triton.jit
def keys_of(n, b, h, i, query, hidden, sizes, T: tl.constexpr):
    """Return the keys of tile n, their positions, and which of them each query may see."""
    j = n * T.BN + tl.arange(0, T.BN)
    key = tl.load(hidden.key + b * hidden.key_batch + j, mask=j < sizes.keys, other=0)
    seen = (i < sizes.queries)[:, None] & (j < sizes.keys)[None, :]
    if T.RULE == 1:
        seen = seen & (j[None, :] <= i[:, None] + sizes.ahead)
    if T.RULE == 2:
        seen = seen & (key[None, :] <= query[:, None])
    if T.WINDOWED:
        seen = seen & (tl.abs(query[:, None] - key[None, :]) < sizes.window)
        seen = seen & (j[None, :] > i[:, None] + sizes.ahead - sizes.span)
    if T.KEEP:
        place = i.to(tl.int64)[:, None] * hidden.keep_row + j.to(tl.int64)[None, :] * hidden.keep_column
        place += b * hidden.keep_batch + h * hidden.keep_head
        seen = seen & (tl.load(hidden.keep + place, mask=seen, other=0) != 0)
    return j, key, seen


@triton.jit
def last_block(m, sizes, T: tl.constexpr):
    """Return the last tile of keys that any query of tile m may see."""
    end = sizes.keys
    if T.RULE == 1:
        end = tl.minimum(end, m * T.BM + T.BM + sizes.ahead)
    return tl.cdiv(end, T.BN) - 1


@triton.jit
def _places(x, b, h, index, count, T: tl.constexpr):
    d = tl.arange(0, T.BD)
    place = b * x.batch + h * x.head + index.to(tl.int64)[:, None] * x.row + d[None, :]
    return x.at + place, (index < count)[:, None] & (d < T.D)[None, :]


@triton.jit
def load_rows(x, b, h, index, count, T: tl.constexpr):
    """Return rows of a matrix as a tile, with zeros beyond its ends."""
    place, inside = _places(x, b, h, index, count, T)
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def store_rows(x, b, h, index, count, rows, T: tl.constexpr):
    place, inside = _places(x, b, h, index, count, T)
    tl.store(place, rows, mask=inside)


@triton.jit
def add_rows(x, b, h, index, count, rows, T: tl.constexpr):
    """Add a tile to rows of a matrix that other programs add to as well."""
    place, inside = _places(x, b, h, index, count, T)
    tl.atomic_add(place, rows, mask=inside, sem="relaxed")


@triton.jit
def dot(a, b, T: tl.constexpr):
    if T.PRECISION == "widened":
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision=T.PRECISION)
    return product


@triton.jit
def merge(total, highest, sums, logits, v, T: tl.constexpr):
    """Take more keys into a softmax: return the sum of values, the highest logit and the sum of exponentials."""
    higher = tl.maximum(highest, tl.max(logits, axis=1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(highest - level)
    weights = tl.exp(logits - level[:, None])
    sums = sums * shrink + tl.sum(weights, axis=1)
    total = total * shrink[:, None] + dot(weights.to(v.dtype), v, T)
    return total, higher, sums


@triton.jit
def two_sum(a, b):
    """Return a sum and what it lacks by rounding."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


# -- on the host -----------------------------------------------------------------------------------------------------


def shape_of(call: Call) -> Shape:
    """Return the shape of a call, whose mask has no bias."""
    q, mask = call.q, call.mask
    batch, heads, length, width = q.shape
    channels = max(16, triton.next_power_of_2(width))
    rows, columns = rows_and_columns(q)
    places = (call.positions.query, call.positions.key)
    query, key = (rowwise(x.to(q.device, torch.int32).expand(batch, -1)) for x in places)
    steps: tuple[int, ...] = (0, 0, 0, 0)
    keep = query  # read by nobody, where nothing else is hidden
    if mask.keep is not None:
        keep = mask.keep.to(q.device).expand(batch, heads, length, call.keys).view(torch.uint8)
        steps = keep.stride()
    # Products in float32 not in tensor cores, which would round to 10 bits; Triton's interpreter multiplies the bits of
    # bfloat16 as integers.
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        precision = "widened"
    constants = (width, channels, rows, columns, _RULES[mask.rule], mask.windowed, mask.keep is not None, precision)
    arguments = {
        "hidden": Hidden(query, query.stride(0), key, key.stride(0), keep, *steps),
        "sizes": Sizes(
            heads, heads // call.k.shape[1], length, call.keys, mask.ahead, mask.window or _ALL, mask.span or _ALL
        ),
        "scale": call.scale,
        # Triton 3.6 takes the fields of a constant for numbers of the run, unless they are constants themselves.
        "T": Tile(*map(tl.constexpr, constants)),
    }
    return Shape((triton.cdiv(length, rows), batch * heads), arguments)


def rows_and_columns(q: Tensor) -> tuple[int, int]:
    """Return the numbers of queries and keys of a tile."""
    kind = "float32" if q.dtype == torch.float32 else "wide" if q.shape[-1] > 64 else "usual"
    return ROWS_AND_COLUMNS[kind]


def rowwise(x: Tensor) -> Tensor:
    """Return a tensor whose rows are contiguous, as kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def matrices(*tensors: Tensor) -> list[Matrix]:
    """Return records of tensors `[B, H, S, D]` whose rows are contiguous."""
    return [Matrix(x, *x.stride()[:3]) for x in tensors]
