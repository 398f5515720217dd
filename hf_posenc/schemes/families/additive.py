"""Base classes of the schemes that add a bias to the logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_posenc.operands import Block, Geometry, Positions
from hf_posenc.scheme import Scheme, set_start
from hf_posenc.structures import Bias, DistanceTable, Equivalent, Nothing, StockBias


class AdditiveBias(Scheme):
    """A bias `[B|1, H, q, K]` on the scaled logits; the softmax scale does not apply to it.

    Args:
        geometry: Shape of the layer.
        gate: Multiply the bias by a learned factor per head that starts at 0, an exact no-op.
        shared: Use one module for the whole stack.
        ahead: Bias of keys ahead of the query, in encoders; `None` uses the bias of keys behind it.
    """

    gate_weight: nn.Parameter | None

    def __init__(
        self, geometry: Geometry, *, gate: bool = False, shared: bool = False, ahead: AdditiveBias | None = None
    ) -> None:
        super().__init__(geometry)
        self.gate = gate
        self.shared = shared
        self.ahead = ahead
        self.gate_weight = nn.Parameter(torch.zeros(geometry.heads)) if gate else None

    def reset_parameters(self) -> None:
        if self.gate_weight is not None:
            nn.init.zeros_(self.gate_weight)

    def begin_fit(self) -> None:
        """Set parameters to a good start for a regression of the bias: an open gate."""
        if self.gate_weight is not None:
            nn.init.ones_(self.gate_weight)
        if self.ahead is not None:
            self.ahead.begin_fit()

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor:
        """Return the bias `[B|1, H, q, K]` in `dtype`, which is float32 or float64."""
        raise NotImplementedError

    def gated_bias(self, block: Block, like: Tensor) -> Tensor:
        """Return the bias times its gate, `[B|1, H, q, K]`, in the dtype and on the device of the logits `like`."""
        bias = self.bias(block, like.dtype).to(like.device)
        if self.gate_weight is not None:
            bias = bias * self.gate_weight.to(like)[:, None, None]
        if self.ahead is None:
            return bias
        return torch.where(block.distance()[:, None].to(like.device) < 0, self.ahead.gated_bias(block, like), bias)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return logits + self.gated_bias(block, logits)

    def added(self) -> Bias | None:
        return Bias(self.gated_bias)

    def stock_equivalent(self) -> Equivalent:
        return Nothing() if self.adds_nothing() else super().stock_equivalent()

    def adds_nothing(self) -> bool:
        """Whether the bias is zero everywhere, with the current parameters."""
        return self.is_zero() and (self.ahead is None or self.ahead.is_zero())

    def is_zero(self) -> bool:
        """Whether the bias is zero with the current parameters, apart from `ahead`."""
        return self.gate_weight is not None and not bool(self.gate_weight.any())

    def starts_exact(self, *, native_kept: bool) -> bool:
        return native_kept and self.gate


class DistanceBias(AdditiveBias):
    """A bias of the distance alone, gathered from a table `[H, distances]`; no matrix is stored."""

    def values(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias `[H, N]` at int64 distances `[N]` (query minus key; never negative in causal layers)."""
        raise NotImplementedError

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor:
        distance = block.distance()  # [B|1, q, K]
        low = -block.reach
        if self.geometry.causal:
            # Keys ahead of the query are masked; clamping keeps logarithms and powers of them finite.
            distance, low = distance.clamp_min(0), 0
        if block.reach - low + 1 < distance.numel():
            table = self.values(torch.arange(low, block.reach + 1, device=distance.device), dtype)
            flat = table.index_select(1, (distance - low).flatten())
        else:
            # There are no more pairs than distances: one new token, or positions with large gaps (position skipping).
            flat = self.values(distance.flatten(), dtype)
        return flat.view(-1, *distance.shape).transpose(0, 1)  # [B|1, H, q, K]

    def reach(self) -> int | None:
        """Return the distance from which the bias is constant; `None` if there is none."""
        return None

    def stock_equivalent(self) -> Equivalent:
        if self.axes or self.adds_nothing():
            return super().stock_equivalent()

        def at(distance: Tensor) -> Tensor:
            with torch.no_grad():
                return self.added_at(distance, torch.float64)

        return StockBias(at, self.reach())

    def added(self) -> Bias | None:
        return Bias(self.gated_bias) if self.axes else DistanceTable(self.gated_bias, self.added_at)

    def added_at(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias times its gate, `[H, N]`, at int64 distances `[N]`."""
        far = distance.abs().max()
        block = Block(Positions(far.view(1, 1), far - distance[None]), reach=int(far))
        return self.gated_bias(block, torch.empty(0, dtype=dtype, device=distance.device))[0, :, 0]


def learned_table_start(init: str, table: Tensor, native: Tensor | None, std: float) -> None:
    """Set a learned table to its start: the values of the model's own table, zeros, or normal noise.

    A table on the meta device has no values: the start is noise, as the model's own table would be.
    """
    if init == "native" and native is not None and not native.is_meta:
        set_start(table, native.detach())
    elif init == "zero":
        nn.init.zeros_(table)
    else:
        nn.init.normal_(table, std=std)
