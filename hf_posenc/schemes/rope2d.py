import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.equivalents import Rotation
from hf_posenc.facts import Facts
from hf_posenc.operands import Geometry, coordinates_of
from hf_posenc.ops import Layout
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import set_start
from hf_posenc.schemes.families.rotary import PairRotation


@register_scheme("rope2d", paper="2403.13298", family="rotary")
class RoPE2D(PairRotation):
    """Rotate channel pairs by angles that depend on n coordinates of a token (Heo et al. 2024).

    `"mixed"`: the angle of a pair is `sum over axes of coordinate * frequency`, with a learned frequency per axis, head
    and pair. `"axial"`: each pair reads one axis, with a fixed frequency that all heads share. Both depend on
    differences of coordinates only, exactly. Text tokens have their position on every axis, unless `position_coords` is
    given. Angles are computed and applied in float32 (float64 for float64 inputs), and the result is cast.

    Parameters: none for `"axial"`, apart from its gate; for `"mixed"` `freqs` `[axes, G, M]`, per kv head G and pair M,
    in angles per `unit`, added to the base. They should have no weight decay.

    Starts. `"native"`: the frequencies of the model are the base. A mixed pair starts with its frequency on the first
    axis and 0 on the others; axial pairs keep their frequencies and cycle through the axes. Both are exact for texts. A
    model without rotary encoding has the official start. `"official"`: no base; axial pairs are split among the axes in
    equal parts, with `theta^(-2 axes k / d)` in each; mixed ones have these lengths and, per head, random orthogonal
    directions. `"zero"`: no rotation, an exact no-op if the native encoding is kept: mixed frequencies are 0 without
    base, axial angles are multiplied by one learned factor `gate_weight`, which is 0.

    Args:
        kind: Kind: `"mixed"` or `"axial"`.
        axes: Number of coordinates of a token; `None` is 2, or that of the model if it has more.
        init: Start, see above.
        theta: Ratio of the wavelengths of the official start; `None` is 100 (axial) or 10 (mixed).
        layout: Pairing of channels: `"half"` (i, i + d/2) or `"interleaved"` (2i, 2i + 1). `None` is that of
            the model's own rotation, if it has one, else `"interleaved"`, the official one.
        unit: Divisor of coordinates where they meet a parameter; `None` is the trained length for texts, else 1.
        section: Number of axial pairs that each axis but the first reads; pairs take the axes in turn, and those that
            are left, the slowest, read the first. With 3 axes (time, row, column), 64 pairs and `section=20` it is the
            interleaved M-RoPE of Qwen3-VL, whose `mrope_section` is then [24, 20, 20]. `None` lets pairs take turns to
            the end.
    """

    neutral_options = {"init": "zero"}
    freqs: nn.Parameter | None

    def __init__(
        self,
        geometry: Geometry,
        *,
        kind: Literal["mixed", "axial"] = "mixed",
        axes: int | None = None,
        init: Literal["native", "official", "zero"] = "native",
        theta: float | None = None,
        layout: Literal["half", "interleaved"] | None = None,
        unit: float | None = None,
        section: int | None = None,
    ) -> None:
        own = geometry.inv_freq
        # Axial pairs need frequencies even if the start is zero.
        taken = init == "native" or (init == "zero" and kind == "axial" and theta is None)
        gates = int(kind == "axial" and init == "zero")
        super().__init__(geometry, theta=theta, own=own if taken else None, gates=gates)
        self._native = self._native and init == "native"
        self.axes = max(2, geometry.axes) if axes is None else axes
        self.kind, self.init = kind, init
        self._usual_theta = {"axial": 100.0, "mixed": 10.0}[kind]  # those of the official code
        length = geometry.max_positions if geometry.axes == 1 else None
        self.unit = float(length or 1) if unit is None else float(unit)
        self.require(self.unit > 0, "unit", unit, "a number above 0")
        self.layout: Layout = layout or ("interleaved" if own is None else geometry.layout)
        self._pairs = geometry.head_dim // 2 if own is None or init == "official" else own.numel()
        self.require(self.axes >= 1, "axes", axes, "at least 1")
        self._pairs_per_axis = -(-self._pairs // self.axes)
        expected = "None where the frequencies are the model's own; init='official' has a table of its own"
        self.require(theta is None or not self._native, "theta", theta, expected)
        self.section, most = section, self._pairs // self.axes
        fits = section is None or (kind == "axial" and 1 <= section <= most)
        self.require(fits, "section", section, f"None, or for kind='axial' a number from 1 to {most}")
        self.require(self._pairs >= self.axes, "axes", self.axes, f"at most the {self._pairs} channel pairs of a head")
        self.freqs = None
        if kind == "mixed":
            self.freqs = nn.Parameter(torch.empty(self.axes, geometry.kv_heads, self._pairs))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.freqs is None:
            return
        if self._native or self.init == "zero":
            nn.init.zeros_(self.freqs)
        else:
            set_start(self.freqs, self._random_directions(self.freqs) * self.unit)

    def factors(self, positions: Tensor, coords: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = self._angles(coordinates_of(positions, coords, self.axes, dtype).to(positions.device))
        return angles.cos() * self.length, angles.sin() * self.length

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        exact = self.init == "zero" if native_kept else self._native and self.layout == self.geometry.layout
        return replace(super().facts(native_kept=native_kept, element=element), exact=exact)

    def stock_equivalent(self) -> Rotation:
        # In a text, a token at 1 has 1 on every axis.
        with torch.no_grad():
            frequencies = self._angles(torch.ones(1, 1, self.axes))[0, :, 0].double()  # [G|1, M]
        rows = frequencies.expand(self.geometry.kv_heads, -1)
        return Rotation.of_pairs(rows, self.geometry.head_dim, self.layout, self.length)

    def _angles(self, coords: Tensor) -> Tensor:
        if self.freqs is None:
            read = torch.arange(self._pairs, device=coords.device)
            # The model's own frequencies fall from pair to pair, so pairs cycle through the axes; the official table
            # restarts per axis.
            if self._own is None and self.section is None:
                axis, frequencies = read // self._pairs_per_axis, self._lengths(coords)
            else:
                axis, frequencies = read % self.axes, self.series(2 * self._pairs, coords)
            if self.section is not None:
                axis = axis.where(read < self.axes * self.section, 0)
            return (coords[..., axis] * self.gated(frequencies))[:, None]
        # The sum over axes is written out: a matrix product may be rounded more coarsely (TF32).
        rows = self.freqs.to(coords) / self.unit
        learned = sum(coords[:, None, :, axis, None] * row[:, None] for axis, row in enumerate(rows))
        assert isinstance(learned, Tensor)
        return learned if self._own is None else learned + coords[:, None, :, :1] * self.series(2 * self._pairs, coords)

    def _lengths(self, like: Tensor) -> Tensor:
        """Return the official length of each pair's frequencies, `[M]`: the same series for each axis in turn."""
        return self.geometric(2 * self._pairs_per_axis, like).repeat(self.axes)[: self._pairs]

    def _random_directions(self, like: Tensor) -> Tensor:
        """Return the official start of mixed frequencies, `[axes, G, M]`."""
        groups = self.geometry.kv_heads
        if self.axes == 2:
            turn = 2 * math.pi * torch.rand(groups, device=like.device)
            directions = torch.stack((turn.cos(), -turn.sin(), turn.sin(), turn.cos()), dim=-1).view(groups, 2, 2)
        else:
            directions = torch.linalg.qr(torch.randn(groups, self.axes, self.axes, device=like.device)).Q
        # Column j is the direction of the pairs of part j.
        spread = directions.repeat_interleave(self._pairs_per_axis, dim=-1)[..., : self._pairs]  # [G, axes, M]
        return spread.transpose(0, 1) * self._lengths(like)
