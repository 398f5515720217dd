import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.equivalents import Equivalent
from hf_posenc.facts import Facts
from hf_posenc.operands import Geometry
from hf_posenc.ops import placed
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.rotary import Annealed, RotaryScheme


@register_scheme("fope", paper="2412.17739", family="rotary")
class FoPE(Annealed, RotaryScheme):
    """RoPE in which each channel pair turns by a Fourier series, not by one frequency (Hua et al. 2024).

    A pair of a head is multiplied, as a complex number, by `sum over w of cos(w p) C_w + i sin(w p) S_w`, where one
    term, the pair's dominant frequency, has weight 1 and the others are small. Queries and keys have the same series.
    With `clip`, frequencies too low for one turn within the trained length, `w < 2 pi / max_length`, become zero, and
    their pairs are unchanged. The result is neither a rotation nor relative, so positions of a sequence must begin at
    0. The scheme is defined for texts only (one coordinate).

    Parameters: `sin_coef` and `cos_coef` `[G, D, M]` per kv head, for D remaining frequencies and M pairs with a
    series; they are added to the weight 1 of the dominant frequency. (Official checkpoints hold the sum.) They start at
    zero, or at Xavier's normal distribution with gain `sigma`.

    Starts. `"native"`: each pair has its own frequency, which is RoPE; exact on models with rotary encoding if there is
    no clipping or noise. `"zero"`: a frequency of zero is the first of the D and dominant for all pairs: no rotation,
    an exact no-op if the native encoding is kept. With `anneal`, low frequencies are multiplied by `1 - progress` and
    coefficients by `progress`, which is saved with the model and starts at 0. Raise it to 1 while training, with
    `anneal_to`.

    Args:
        init: Start, see above.
        sigma: Gain of the start of the coefficients; the paper has 0.3 to 0.6.
        learnable: Train the coefficients; the official code only stores them.
        clip: Set frequencies below `2 pi / max_length` to zero.
        max_length: The trained length in tokens; `None` is the model's context (2,048 tokens if it names none).
        anneal: Start without clipping and coefficients; `anneal_to` phases both in.
        fourier_dim: Width of the frequency table of the official layout; `None` is the width of a head.
        official_layout: Use the layout of the official code: only `min(D, d / 4)` pairs have a series; the dominant
            frequency of pair i is number i * ceil(D / M), if it exists; other pairs are unchanged. Needs `clip`.
        official_sin_pad: Turn the unchanged pairs by 45 degrees and lengthen them by sqrt(2), as the official code
            does, contrary to the paper.
    """

    neutral_options = {"init": "zero"}
    sin_coef: Tensor
    cos_coef: Tensor

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float | None = None,
        init: Literal["native", "zero"] = "native",
        sigma: float = 0.0,
        learnable: bool = True,
        clip: bool = False,
        max_length: int | None = None,
        anneal: bool = False,
        fourier_dim: int | None = None,
        official_layout: bool = False,
        official_sin_pad: bool = False,
    ) -> None:
        super().__init__(geometry, theta=theta, rotary_dim=None, gate=False)
        self.set_annealing(anneal)
        self.init, self.sigma, self.learnable, self.clip = init, sigma, learnable, clip
        self.max_length = max_length or geometry.context
        self.fourier_dim, self.official_layout, self.official_sin_pad = fourier_dim, official_layout, official_sin_pad
        self.require(sigma >= 0, "sigma", sigma, "a number of at least 0")
        self.require(max_length is None or max_length >= 1, "max_length", max_length, "at least 1 token")
        if official_layout:
            allowed = clip and init == "native" and not anneal
            expected = "False, unless clip=True, init='native' and anneal=False"
        else:
            allowed = fourier_dim is None and not official_sin_pad
            expected = "True, since fourier_dim and official_sin_pad belong to that layout"
        self.require(allowed, "official_layout", official_layout, expected)
        fits = fourier_dim is None or (fourier_dim >= geometry.head_dim and fourier_dim % 2 == 0)
        expected = f"an even number of at least head_dim = {geometry.head_dim}"
        self.require(fits, "fourier_dim", fourier_dim, expected)
        table = self._table(torch.zeros((), device="cpu"))
        self._clipped = (table < 2 * math.pi / self.max_length) & clip
        self._loses = bool(table[self._clipped].any())
        self._kept = (~self._clipped).nonzero()[:, 0]
        kept = len(self._kept)
        self.require(kept >= 1, "max_length", self.max_length, "a length within which one frequency has a whole turn")
        inputs = kept + (init == "zero")
        pairs = min(kept, geometry.head_dim // 4) if official_layout else kept
        for name in ("sin_coef", "cos_coef"):
            coefficients = torch.empty(geometry.kv_heads, inputs, pairs)
            if learnable:
                setattr(self, name, nn.Parameter(coefficients))
            else:
                self.register_buffer(name, coefficients)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for coefficients in (self.sin_coef, self.cos_coef):
            if self.sigma:
                nn.init.xavier_normal_(coefficients, gain=self.sigma)
            else:
                nn.init.zeros_(coefficients)

    def factors(self, positions: Tensor, coords: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        place = positions.to(dtype)[:, None, :, None]
        cos, sin = self._official_series(place) if self.official_layout else self._own_series(place)
        length = self.length if self.init == "native" else 1.0
        return cos * length, sin * length

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        quiet = self.anneal or not (self.sigma or self._loses)
        own = self._native and self.init == "native" and not self.official_layout and quiet
        kept = self.init == "zero" and (self.anneal or not self.sigma)
        return replace(super().facts(native_kept=native_kept, element=element), exact=kept if native_kept else own)

    def stock_equivalent(self) -> Equivalent:
        coefficients = [self.annealed(c) for c in (self.sin_coef, self.cos_coef)]
        others = any(bool(c.any()) for c in coefficients)
        if self.official_layout or self.init == "zero" or self._loses or others:
            return super().stock_equivalent()
        return self.rotation()

    def _own_series(self, place: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = self._table(place)
        kept = placed(self._kept, place.device)
        frequencies = frequencies - self.annealed(frequencies) * placed(self._clipped, place.device, place.dtype)
        angles = place * frequencies  # [B|1, 1, S, M]
        cos, sin = angles.cos(), angles.sin()
        cos_inputs, sin_inputs = cos[..., kept], sin[..., kept]
        if self.init == "zero":
            cos_inputs, sin_inputs = F.pad(cos_inputs, (1, 0), value=1.0), F.pad(sin_inputs, (1, 0))
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        return self._with_others(cos, cos_inputs, self.cos_coef), self._with_others(sin, sin_inputs, self.sin_coef)

    def _with_others(self, dominant: Tensor, inputs: Tensor, coefficients: Tensor) -> Tensor:
        """Add the other terms, from inputs `[B|1, 1, S, D]`, to the pairs that keep their frequency."""
        # The dominant term is added separately: a matrix product may be rounded more coarsely (TF32).
        others = inputs @ self.annealed(coefficients.to(inputs))  # [B|1, G, S, M]
        if len(self._kept) == dominant.shape[-1]:
            # Besides needless work, onnxscript would lose the sum: it takes a scatter to all rows for a copy of them.
            return dominant + others
        return dominant.expand(*others.shape[:-1], -1).index_add(-1, placed(self._kept, others.device), others)

    def _official_series(self, place: Tensor) -> tuple[Tensor, Tensor]:
        angles = place * self._table(place)[placed(self._kept, place.device)]
        inputs, pairs = self.cos_coef.shape[1:]
        missing = self.rotary_dim // 2 - pairs
        step = -(-inputs // pairs)
        found = []
        for part, coefficients, padding in (
            (angles.cos(), self.cos_coef, 1.0),
            (angles.sin(), self.sin_coef, float(self.official_sin_pad)),
        ):
            dominant = part[..., ::step]
            dominant = F.pad(dominant, (0, pairs - dominant.shape[-1]))
            found.append(F.pad(dominant + part @ coefficients.to(part), (0, missing), value=padding))
        return found[0], found[1]

    def _table(self, like: Tensor) -> Tensor:
        if self._own is not None and self.fourier_dim is None:
            return placed(self._own, like.device, like.dtype)
        single = torch.zeros((), dtype=torch.float32, device=like.device)
        return self.geometric(self.fourier_dim or self.rotary_dim, single).to(like)
