import math
from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.equivalents import Equivalent, Nothing, PositionTable
from hf_posenc.errors import ExportError
from hf_posenc.facts import Adaptation
from hf_posenc.operands import Geometry, coordinates_of
from hf_posenc.registry import register_scheme
from hf_posenc.scheme import Scheme


@register_scheme("sinusoidal", paper="1706.03762", family="absolute", usual=True)
class Sinusoidal(Scheme):
    """Sines and cosines of the position, added to the token embeddings (Vaswani et al. 2017, section 3.5).

    `PE[p, 2t] = sin(p / base^(2t / E))`, `PE[p, 2t + 1] = cos(same)`. Angles are computed in float64.

    In images the first half of the channels encodes the column of a patch in this way and the second half its row (MAE,
    arXiv 2111.06377); the class token has no encoding.

    Args:
        layout: Order of channels: `"interleaved"` (the paper) or `"concat"`, all sines first (tensor2tensor, Marian).
        freq: Frequencies: `"paper"`, exponent `2t / E`, or `"t2t"`, exponent `t / (E / 2 - 1)` (tensor2tensor,
            fairseq).
        base: Ratio between the longest and the shortest wavelength.
        scale: Factor on the encoding; `None` scales its root mean square (0.707) to that of the model's token
            embeddings, if these are known, and is 1 otherwise.
        gate: Multiply by one learned factor that starts at 0, an exact no-op.
    """

    neutral_options = {"gate": True}
    adaptation = Adaptation(native="handover")
    shared = True

    def __init__(
        self,
        geometry: Geometry,
        *,
        layout: Literal["interleaved", "concat"] = "interleaved",
        freq: Literal["paper", "t2t"] = "paper",
        base: float = 10000.0,
        scale: float | None = None,
        gate: bool = False,
    ) -> None:
        super().__init__(geometry, gates=int(gate))
        self.require(base > 1, "base", base, "a number above 1")
        if scale is None:
            rms = geometry.embedding_rms
            expected = "a number, as the model's token embeddings hold NaN or infinity; better, load its weights again"
            self.require(rms is None or math.isfinite(rms), "scale", scale, expected)
            scale = None if rms is None else rms / math.sqrt(0.5)
        self.layout, self.freq, self.base, self.scale, self.gate = layout, freq, base, scale, gate
        self.axes = 2 if geometry.axes == 2 else 0

    def embed(self, inputs: Tensor, positions: Tensor, coords: Tensor | None = None) -> Tensor:
        width = self.geometry.hidden_size
        if self.axes:
            row, column = coordinates_of(positions, coords, 2, torch.float64).unbind(-1)
            table = torch.cat((self._waves(column, width // 2), self._waves(row, width - width // 2)), dim=-1)
            table = table.masked_fill((positions == 0)[..., None], 0)
        else:
            table = self._waves(positions.double(), width)
        scale = 1.0 if self.scale is None else self.scale
        return inputs + self.gated(table * scale).to(inputs)

    def _waves(self, places: Tensor, width: int) -> Tensor:
        """Return sines and cosines `[B|1, S, width]` of float64 places `[B|1, S]`."""
        half = width // 2
        step = torch.arange(half, dtype=torch.float64, device=places.device)
        exponent = 2 * step / width if self.freq == "paper" else step / max(half - 1, 1)
        angles = places[..., None] * self.base**-exponent  # [B|1, S, width / 2]
        pair = (angles.sin(), angles.cos())
        table = torch.stack(pair, -1).flatten(-2) if self.layout == "interleaved" else torch.cat(pair, -1)
        return nn.functional.pad(table, (0, width % 2))

    def stock_equivalent(self) -> Equivalent:
        if self.is_silent():
            return Nothing()
        if self.axes:
            raise ExportError("is computed for images of any size, and stock models have a table for one size")
        return PositionTable(self._rows, None)

    def _rows(self, count: int) -> Tensor:
        """Return the encodings of the first positions, float64 `[count, E]`."""
        with torch.no_grad():
            none = torch.zeros(1, count, self.geometry.hidden_size, dtype=torch.float64)
            return self.embed(none, torch.arange(count)[None])[0]
