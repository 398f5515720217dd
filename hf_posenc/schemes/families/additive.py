"""Base classes of the schemes that add a bias to the logits, and the logarithmic distance buckets of T5."""

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_posenc.equivalents import Equivalent
from hf_posenc.facts import Adaptation, Facts
from hf_posenc.forms import Bias, DistanceTable
from hf_posenc.operands import Block, Geometry, NativeTable, Positions, coordinates_of
from hf_posenc.ops import placed
from hf_posenc.scheme import Scheme, draw_start, set_start


class AdditiveBias(Scheme):
    """A bias `[B|1, H, q, K]` on the scaled logits; the softmax scale does not apply to it.

    Args:
        gate: Multiply the bias by a learned factor per head that starts at 0, an exact no-op.
        shared: Use one module for the whole stack.
    """

    neutral_options = {"gate": True}

    def __init__(self, geometry: Geometry, *, gate: bool = False, shared: bool = False) -> None:
        super().__init__(geometry, gates=geometry.heads if gate else 0)
        self.gate = gate
        self.shared = shared
        # The bias of keys ahead of the query, in encoders; `None` is that of keys behind it.
        self.ahead: AdditiveBias | None = None

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
        bias = self.gated(self.bias(block, like.dtype).to(like.device), 2)
        if self.ahead is None:
            return bias
        return torch.where(block.distance()[:, None].to(like.device) < 0, self.ahead.gated_bias(block, like), bias)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return logits + self.gated_bias(block, logits)

    def added(self) -> Bias | None:
        return Bias(self.gated_bias)

    def is_silent(self) -> bool:
        return self.is_zero() and (self.ahead is None or self.ahead.is_silent())

    def is_zero(self) -> bool:
        """Whether the bias is zero with the current parameters, apart from `ahead`."""
        return super().is_silent()


class DistanceBias(AdditiveBias):
    """A bias of the distance alone, gathered from a table `[H, distances]`; no matrix is stored.

    In decoders a key ahead of the query, which a mask may show, is as far as one behind it.
    """

    def values(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias `[H, N]` at int64 distances `[N]` (query minus key; never negative in causal layers)."""
        raise NotImplementedError

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor:
        distance = block.distance()  # [B|1, q, K]
        low = -block.reach
        if self.geometry.causal:
            distance, low = self.one_sided(distance), 0
        if not torch.compiler.is_compiling() and block.reach - low + 1 < distance.numel():
            table = self.values(torch.arange(low, block.reach + 1, device=distance.device), dtype)
            flat = table.index_select(1, (distance - low).flatten())
        else:
            # There are no more pairs than distances: one new token, or positions with large gaps (position skipping).
            # Or a graph is traced, which does not know the largest distance.
            flat = self.values(distance.flatten(), dtype)
        return flat.view(-1, *distance.shape).transpose(0, 1)  # [B|1, H, q, K]

    def one_sided(self, distance: Tensor) -> Tensor:
        """Return the distances that decoders count, none of them negative."""
        return distance.abs()

    def reach(self) -> int | None:
        """Return the distance from which the bias is constant; `None` if there is none."""
        return None

    def stock_equivalent(self) -> Equivalent:
        added = self.added()
        return added if isinstance(added, DistanceTable) and not self.is_silent() else super().stock_equivalent()

    def added(self) -> Bias | None:
        return Bias(self.gated_bias) if self.axes else DistanceTable(self.gated_bias, self.added_at, self.reach())

    def added_at(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the bias times its gate, `[H, N]`, at int64 distances `[N]`."""
        far = distance.abs().max()
        block = Block(Positions(far.view(1, 1), far - distance[None]), reach=int(far))
        return self.gated_bias(block, torch.empty(0, dtype=dtype, device=distance.device))[0, :, 0]


class GridBias(DistanceBias):
    """A bias of the distance in texts, and of the offset between patches in images (`Geometry(axes=2)`).

    In an image the token at position 0 is the class token; it has no place and no bias, neither as a query nor as a
    key.
    """

    def __init__(self, geometry: Geometry, *, gate: bool = False, shared: bool = False) -> None:
        super().__init__(geometry, gate=gate, shared=shared)
        self.axes = 2 if geometry.axes == 2 else 0

    def grid_values(self, offset: Tensor) -> Tensor:
        """Return the bias `[H, N]` at offsets `[N, 2]`: row and column of the query minus those of the key."""
        raise NotImplementedError

    def bias(self, block: Block, dtype: torch.dtype) -> Tensor:
        if not self.axes:
            return super().bias(block, dtype)
        places = block.positions
        query, key = places.each(lambda at, coords: coordinates_of(at, coords, 2, dtype))
        offset = query[:, :, None] - key[:, None]  # [B|1, q, K, 2]
        values = self.grid_values(offset.flatten(0, 2)).view(-1, *offset.shape[:-1]).transpose(0, 1)
        patches = (places.query != 0)[:, :, None] & (places.key != 0)[:, None]  # [B|1, q, K]
        return values.where(patches[:, None].to(values.device), values.new_zeros(()))


class LearnedTable(DistanceBias):
    """A learned number per head and place in a table, which may start as the model's own T5 table.

    Args:
        shared: Use one table for the whole stack, not one per layer; `None` is as in the model, else one.
    """

    reproduces: ClassVar[tuple[str, ...]] = ("t5",)
    neutral_options = {"init": "zero"}
    adaptation = Adaptation(fit="native", options={"shared": False}, elsewhere="handover", rate=8)
    init: str
    max_distance: int

    def __init__(self, geometry: Geometry, *, gate: bool, shared: bool | None) -> None:
        native = self.own_table(geometry)
        super().__init__(geometry, gate=gate, shared=(native is None or native.shared) if shared is None else shared)

    @classmethod
    def own_table(cls, geometry: Geometry) -> NativeTable | None:
        """Return the model's own table if the scheme can reproduce it."""
        found = (geometry.native_table(kind) for kind in cls.reproduces)
        return next((table for table in found if table is not None), None)

    def one_sided(self, distance: Tensor) -> Tensor:
        # A model with such a table of its own has keys ahead of the query at distance 0.
        return super().one_sided(distance) if self.geometry.native_table("t5") is None else distance.clamp_min(0)

    def reach(self) -> int:
        return self.max_distance

    def is_zero(self) -> bool:
        return super().is_zero() or not any(bool(x.any()) for x in self.parameters() if x is not self.gate_weight)

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        kept, own = self.init == "zero" or self.gate, self.init == "native" and not self.gate
        return replace(super().facts(native_kept=native_kept, element=element), exact=kept if native_kept else own)


class Buckets:
    """A map from distances to T5's buckets.

    Args:
        num_buckets: Number of buckets.
        max_distance: Distance from which all keys share the last bucket.
        causal: Count keys ahead of the query as distance 0; otherwise they have the upper half of the buckets.
    """

    def __init__(self, *, num_buckets: int, max_distance: int, causal: bool) -> None:
        self.causal = causal
        self.max_distance = max_distance
        self.per_side = num_buckets if causal else num_buckets // 2
        # A table from the CPU: a GPU's logarithm may round a boundary to the other side. float32 as in T5.
        exact = self.per_side // 2
        distance = torch.arange(max_distance + 1, device="cpu")
        log = torch.log(distance.clamp_min(1).float() / exact)
        large = exact + (log / math.log(max_distance / exact) * (self.per_side - exact)).long()
        self.lookup = torch.where(distance < exact, distance, large.clamp_max(self.per_side - 1))

    def __call__(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance (query minus key), int64 of the same shape."""
        lookup = placed(self.lookup, distance.device)
        if self.causal:
            return lookup[distance.clamp(0, self.max_distance)]
        return lookup[distance.abs().clamp_max(self.max_distance)] + (distance < 0) * self.per_side


def learned_table_start(init: str, table: Tensor, native: NativeTable | None, std: float) -> None:
    """Set a learned table to its start: the values of the model's own table, zeros, or normal noise.

    A table on the meta device has no values: the start is noise, as the model's own table would be.
    """
    if init == "native" and native is not None and not native.weight.is_meta:
        set_start(table, native.weight.detach())
    else:
        draw_start(table, init, std)


def slopes(heads: int) -> Tensor:
    """Return the slopes of heads, float64 `[H]`: a geometric series, then odd terms of that for twice as many (ALiBi).

    Imported weights of ALiBi models depend on this order: slopes are sorted only if the number of heads is a power of
    two.
    """
    power = 2 ** int(math.log2(heads))
    first = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    rest = [2.0 ** (-4.0 * (head + 1) / power) for head in range(0, 2 * power, 2)]
    # Constants stay on the CPU, so a model built on the meta device has their values.
    return torch.tensor((first + rest)[:heads], dtype=torch.float64, device="cpu")
