"""Counting gates: CoPE's logits of keys at fractional counts, between those of whole counts."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def values_at_counts(gate_logits: Tensor, at_whole: Tensor, keep: Tensor | None) -> Tensor:
    """Return the value of each key `[B, H, q, K]` at the number of keys that the query counts from it to the last.

    Args:
        gate_logits: Logits of the gates, `[B, H, q, K]`; a key counts by the sigmoid of its logit.
        at_whole: Values at the counts 0 to N - 1, `[B, H, q, N]`; beyond stands the last, and in between a line.
        keep: Keys that are counted, bool `[B|1, H|1, q|1, K]`; `None` means all.
    """
    return between(at_whole, counts(gate_logits, keep, at_whole.shape[-1] - 1))


def counts(gate_logits: Tensor, keep: Tensor | None, most: int) -> Tensor:
    """Return the number of keys that are counted from each key to the last, `[B, H, q, K]`, up to `most`."""
    gates = gate_logits.sigmoid()
    if keep is not None:
        gates = gates.where(keep, 0.0)
    return to_the_end(gates).clamp_max(most)


def to_the_end(gates: Tensor) -> Tensor:
    """Return the sum from each key to the last."""
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
