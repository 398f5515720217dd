"""The cutoff: keys so far away that they get no weight, whatever queries and keys hold. Heads do without them.

A penalty on distance, like a steep slope of ALiBi's or the gates of FoX, leaves most heads with a part of the keys.
The lengths of queries and keys bound how much they may do against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# A weight of less than 2 to this, relative to the largest of a row, is taken for 0, also in double precision.
LEAST = -64.0
NATS = -LEAST * math.log(2)
# With fewer keys there is nothing to gain.
_KEYS = 256
# First keys are rounded down to multiples of this, so that neighbouring heads go together.
_STEP = 64


def slack(q: Tensor, k: Tensor, scale: float) -> Tensor | None:
    """Return how far below the bias of a query's own key that of another key must be for it to get no weight.

    Args:
        q: Queries `[B, H, Q, D]`.
        k: Keys `[B, G, K, D]`.
        scale: Factor on `q @ k.T`.

    Returns:
        The slack of each head, `[H]`, float32 or wider; NaN or infinite where queries or keys are. `None` if a cutoff
        does not pay.
    """
    if k.shape[2] < _KEYS or q.shape[2] == 1:
        return None
    precise = torch.promote_types(q.dtype, torch.float32)
    of_q, of_k = (torch.linalg.vector_norm(x, dim=-1, dtype=precise).amax(dim=(0, 2)) for x in (q, k))
    # The own key's product is not less than the negative of this bound, any other not more than the bound.
    bound = abs(scale) * of_q * of_k.repeat_interleave(len(of_q) // len(of_k))
    enough: Tensor = 2 * bound + NATS
    return enough


def runs(first: Tensor | None, heads: int, shared: int) -> Iterator[tuple[slice, int]]:
    """Return groups of neighbouring heads with the first key that they need, in order.

    Args:
        first: First key of each head, int64 `[H]`; `None` if all heads need all keys.
        heads: Number of heads.
        shared: Number of heads that share keys, which stay together.
    """
    if first is None:
        yield slice(0, heads), 0
        return
    starts = (first.view(-1, shared).amin(1) // _STEP * _STEP).tolist()
    begin = 0
    for group in range(1, len(starts) + 1):
        if group == len(starts) or starts[group] != starts[begin]:
            yield slice(begin * shared, group * shared), starts[begin]
            begin = group
