from __future__ import annotations

from typing import Literal

from torch import Tensor

from hf_posenc.operands import Geometry, Projection, Tokens
from hf_posenc.registry import register_scheme
from hf_posenc.schemes.families.rotary import RotaryScheme
from hf_posenc.structures import Rotation


@register_scheme("rope", paper="2104.09864", family="rotary")
class RoPE(RotaryScheme):
    """Rotate channel pairs of queries and keys by angles proportional to their positions (Su et al. 2021).

    Pair (u, w) at position p becomes `(u cos - w sin, w cos + u sin)` with the angle `p * frequency`. Values are not
    touched. Angles are computed in float32 (float64 for float64 inputs), applied there, and the result is cast; applied in
    bfloat16, logits would be off by 0.2.

    On a model with rotary encoding the frequencies are the model's own, rebuilt from its config, and the start is exact for
    all rope types of transformers. The types "dynamic" and "longrope" change theirs as a sequence grows, which keys in a
    cache cannot follow: here they are frozen at what they are up to the original length, or, for "longrope", at what they
    are beyond. On GPT-2 and T5 they are `theta^(-2i / rotary_dim)`.

    Args:
        geometry: Shape of the layer.
        theta: Ratio of the wavelengths; `None` takes the model's own frequencies, else 10,000.
        layout: Which channels form a pair: `"half"` (i, i + d/2), as in transformers' Llama, or `"interleaved"`
            (2i, 2i + 1), as in GPT-J and Meta's Llama.
        rotary_dim: Rotate only the first channels of each head; `None` is all that the frequencies cover.
        gate: Multiply all angles by one learned factor, started at 0, which makes the start an exact no-op where the
            model has no rotary encoding.
        freeze: Which frequencies of "longrope" to keep: those of the `"short"` inputs or of the `"long"` ones. With the
            latter, short inputs are computed in another way than before, so the start counts as a break.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float | None = None,
        layout: Literal["half", "interleaved"] = "half",
        rotary_dim: int | None = None,
        gate: bool = False,
        freeze: Literal["short", "long"] = "short",
    ) -> None:
        super().__init__(geometry, name="rope", theta=theta, rotary_dim=rotary_dim, gate=gate, freeze=freeze)
        self.layout = layout

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        return Projection(*self.rotated(tokens.positions, q, k, self.layout), v)

    def stock_equivalent(self) -> Rotation:
        return self.rotation(self.layout)

    def starts_exact(self, *, native_kept: bool) -> bool:
        if native_kept:
            return self.gate
        return self._native and self.layout == "half" and not self.gate and self.freeze == "short"
