"""What kernels share: parts of operands and masks as tiles, and how operands are handed over. Imports Triton.

A program computes a tile of queries of one head. It goes through the keys from the last that it can see to the first,
so that what lies between a key and a query has been seen before the key is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_posenc.attention.call import Call

# Arguments that a kernel is not compiled again for.
SIZES = ("heads", "group", "queries", "keys", "ahead")
_RULES = {"all": 0, "slots": 1, "positions": 2}


# -- on the device ---------------------------------------------------------------------------------------------------


@triton.jit
def load_rows(base, index, count, stride, D: tl.constexpr, BD: tl.constexpr):
    """Return rows of a matrix `[count, D]` as a tile, with zeros beyond its ends."""
    d = tl.arange(0, BD)
    inside = (index < count)[:, None] & (d < D)[None, :]
    return tl.load(base + index.to(tl.int64)[:, None] * stride + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, index, count, stride, rows, D: tl.constexpr, BD: tl.constexpr):
    """Write a tile to rows of a matrix `[count, D]`."""
    d = tl.arange(0, BD)
    inside = (index < count)[:, None] & (d < D)[None, :]
    tl.store(base + index.to(tl.int64)[:, None] * stride + d[None, :], rows, mask=inside)


@triton.jit
def add_rows(base, index, count, stride, rows, D: tl.constexpr, BD: tl.constexpr):
    """Add a tile to rows of a matrix `[count, D]` that other programs add to as well."""
    d = tl.arange(0, BD)
    inside = (index < count)[:, None] & (d < D)[None, :]
    tl.atomic_add(base + index.to(tl.int64)[:, None] * stride + d[None, :], rows, mask=inside, sem="relaxed")


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Return a product in float32."""
    if PRECISION == "widened":
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product


@triton.jit
def visible(
    i, j, query, key, keep, keep_row, keep_column, queries, keys, ahead, RULE: tl.constexpr, KEEP: tl.constexpr
):
    """Return which keys j each query i may see, given their positions `query` and `key`."""
    seen = (i < queries)[:, None] & (j < keys)[None, :]
    if RULE == 1:
        seen = seen & (j[None, :] <= i[:, None] + ahead)
    if RULE == 2:
        seen = seen & (key[None, :] <= query[:, None])
    if KEEP:
        place = i.to(tl.int64)[:, None] * keep_row + j.to(tl.int64)[None, :] * keep_column
        seen = seen & (tl.load(keep + place, mask=seen, other=0) != 0)
    return seen


@triton.jit
def last_block(m, keys, ahead, BM: tl.constexpr, BN: tl.constexpr, RULE: tl.constexpr):
    """Return the last tile of keys that any query of tile m may see."""
    end = keys
    if RULE == 1:
        end = tl.minimum(keys, m * BM + BM + ahead)
    return tl.cdiv(end, BN) - 1


@triton.jit
def merge(total, highest, sums, logits, v, PRECISION: tl.constexpr):
    """Take more keys into a softmax: return the sum of values, the highest logit and the sum of exponentials."""
    higher = tl.maximum(highest, tl.max(logits, axis=1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(highest - level)
    weights = tl.exp(logits - level[:, None])
    sums = sums * shrink + tl.sum(weights, axis=1)
    total = total * shrink[:, None] + dot(weights.to(v.dtype), v, PRECISION)
    return total, higher, sums


@triton.jit
def two_sum(a, b):
    """Return a sum and what it lacks by rounding."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


# -- on the host -----------------------------------------------------------------------------------------------------


# Queries and keys of a tile: heads that are wide, and products in float32, leave room for fewer.
ROWS_AND_COLUMNS = {"usual": (64, 64), "wide": (64, 32), "float32": (32, 32)}


@dataclass(frozen=True, eq=False)
class Shape:
    """The shape of a call and of its tiles, and what hides keys. It holds no operand.

    Attributes:
        grid: Number of tiles of queries, and of heads of all sequences.
        arguments: Arguments that every kernel of the call gets.
    """

    grid: tuple[int, int]
    arguments: dict[str, Any]


def shape_of(call: Call) -> Shape:
    """Return the shape of a call, whose mask has no bias."""
    q, k, mask = call.q, call.k, call.mask
    batch, heads, length, width = q.shape
    keys = k.shape[2]
    channels = max(16, triton.next_power_of_2(width))
    kind = "float32" if q.dtype == torch.float32 else "wide" if channels > 64 else "usual"
    rows, columns = ROWS_AND_COLUMNS[kind]
    query, key = (rowwise(x.to(q.device).expand(batch, -1)) for x in (call.positions.query, call.positions.key))
    keep = query  # read by nobody, where nothing else is hidden
    steps: tuple[int, ...] = (0, 0, 0, 0)
    if mask.keep is not None:
        keep = mask.keep.to(q.device).expand(batch, heads, length, keys).view(torch.uint8)
        steps = keep.stride()
    arguments = {
        "query_positions": query,
        "key_positions": key,
        "query_batch": query.stride(0),
        "key_batch": key.stride(0),
        "keep": keep,
        **dict(zip(("keep_batch", "keep_head", "keep_row", "keep_column"), steps, strict=True)),
        "scale": call.scale,
        "heads": heads,
        "group": heads // k.shape[1],
        "queries": length,
        "keys": keys,
        "ahead": mask.ahead,
        "D": width,
        "BD": channels,
        "BM": rows,
        "BN": columns,
        "RULE": _RULES[mask.rule],
        "KEEP": mask.keep is not None,
        "PRECISION": _precision(q),
    }
    return Shape((triton.cdiv(length, rows), batch * heads), arguments)


def _precision(q: Tensor) -> str:
    """Return how operands are multiplied: those in float32 not in tensor cores, which would round them to 10 bits."""
    if q.dtype == torch.float32:
        return "ieee"
    # Triton's interpreter multiplies the bits of bfloat16 as integers.
    return "widened" if q.device.type == "cpu" and q.dtype == torch.bfloat16 else "tf32"


def rowwise(x: Tensor) -> Tensor:
    """Return a tensor whose rows are contiguous, as kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(**tensors: Tensor) -> dict[str, int]:
    """Return the strides of tensors `[B, H, S, D]` over batch, heads and rows, by name."""
    return {
        f"{name}_{axis}": tensor.stride(index)
        for name, tensor in tensors.items()
        for index, axis in enumerate(("batch", "head", "row"))
    }
