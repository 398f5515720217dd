"""The operands of one attention call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from hf_posenc.scheme import Block, Positions


@dataclass(frozen=True, eq=False)
class Task:
    """Projected operands, ready for an executor.

    Attributes:
        q: `[B, H, Q, D]`.
        k: `[B, G, K, D]`.
        v: `[B, G, K, D]`.
        positions: Of the queries and of the keys.
        reach: A bound on every distance, see `Block`.
        scale: Factor on `q @ k.T`.
        hidden: Hidden states of the queries' tokens `[B, Q, E]`, if known.
        state: Per-token state of the keys.
        native_score: Adds the model's own additive encoding to the logits of a block, where that is kept.
        parameters: Trained tensors that `native_score` reads.
        dropout: Probability with which weights are dropped; 0 outside training.
        upcast: Multiply queries and keys in float32 whatever their dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Positions
    reach: int
    scale: float
    hidden: Tensor | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    native_score: Callable[[Tensor, Block], Tensor] | None = None
    parameters: tuple[Tensor, ...] = ()
    dropout: float = 0.0
    upcast: bool = False
