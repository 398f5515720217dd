"""The positions of tokens against the slots that hold them."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.attention.mask import Mask
from hf_posenc.operands import Positions

# Rows of a mask that are compared at once.
_ROWS = 256


def slots_tell_distances(positions: Positions, mask: Mask, *, causal: bool = True) -> bool:
    """Whether every key that a query sees is as far from it in positions as in slots.

    This holds in a plain sequence, with padding, and in packed sequences that do not see each other. In causal layers
    queries that are padding may stand anywhere.
    """
    slots = torch.arange(positions.key.shape[1], device=positions.key.device)
    length, count = positions.query.shape[1], len(slots)
    # How far positions are ahead of slots.
    queries, keys = positions.query - slots[count - length :], positions.key - slots
    if bool((keys == keys[:, :1]).all()) and bool((queries == keys[:, :1]).all()):
        return True
    if mask.keep is None:
        return False
    keep = mask.keep.any(dim=1)  # [B|1, Q|1, K]
    if keep.shape[1] == 1:
        seen = keep[:, 0]
        first = seen.to(torch.uint8).argmax(dim=-1, keepdim=True)
        shift = keys.expand(len(seen), -1).gather(1, first)
        own = seen[:, count - length :] if causal else torch.ones_like(seen[:, :length])
        return bool(((keys == shift) | ~seen).all()) and bool(((queries == shift) | ~own).all())
    for start in range(0, length, _ROWS):
        rows = slice(start, start + _ROWS)
        if bool((keep[:, rows] & (queries[:, rows, None] != keys[:, None, :])).any()):
            return False
    return True


def is_plain(query: Tensor, key: Tensor) -> bool:
    """Whether queries at positions `[B|1, Q]` are the last of the keys at `[B|1, K]`, in sequences without a gap."""
    count = query.shape[1]
    if query.shape[0] != key.shape[0] or count > key.shape[1]:
        return False
    return bool((key.diff(dim=-1) == 1).all()) and bool((query == key[:, key.shape[1] - count :]).all())


def shows_ahead(positions: Positions, mask: Mask) -> bool:
    """Whether a query may see a key at a later position than its own: with a custom mask, or where positions fall."""
    if mask.rule == "positions":
        return False
    query, key = positions.query, positions.key
    length, count = query.shape[1], key.shape[1]
    rising = mask.rule == "slots" and bool((key.diff(dim=-1) >= 0).all())
    if rising and bool((query == key[:, count - length :]).all()):
        return False
    for start in range(0, length, _ROWS):
        stop = min(start + _ROWS, length)
        keep, _ = mask.rows(start, stop, count, positions)
        ahead = (key[:, None, :] > query[:, start:stop, None])[:, None]
        if bool((ahead if keep is None else ahead.to(keep.device) & keep).any()):
            return True
    return False
