"""Shared by the schemes that rotate channel pairs: where the frequencies come from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_posenc.scheme import Geometry, Scheme
from hf_posenc.schemes._additive import require


class RotaryScheme(Scheme):
    """Rotations by angles proportional to positions, with the model's own frequencies where it has some.

    Args:
        geometry: Shape of the layer.
        name: Of the scheme, for messages.
        theta: Ratio of the wavelengths; `None` takes the model's own frequencies, else 10,000.
        rotary_dim: Rotate only the first channels of each head; `None` is all that the frequencies cover.
        gate: Multiply all angles by one learned factor, started at 0.
    """

    reproduces = "rotary"
    neutral_options = {"gate": True}

    def __init__(
        self, geometry: Geometry, *, name: str, theta: float | None, rotary_dim: int | None, gate: bool
    ) -> None:
        super().__init__(geometry)
        own = geometry.inv_freq if theta is None else None
        if rotary_dim is None:
            rotary_dim = geometry.head_dim if own is None else 2 * own.numel()
        require(theta is None or theta > 1, name, "theta", theta, "a number above 1")
        require(
            2 <= rotary_dim <= geometry.head_dim and rotary_dim % 2 == 0,
            name,
            "rotary_dim",
            rotary_dim,
            f"an even number from 2 to head_dim = {geometry.head_dim} (rotations act on pairs of channels)",
        )
        require(
            own is None or rotary_dim == 2 * own.numel(),
            name,
            "rotary_dim",
            rotary_dim,
            f"{2 * own.numel() if own is not None else 0}, what the model's own frequencies cover, unless theta is given too",
        )
        self.theta, self.rotary_dim, self.gate = theta, rotary_dim, gate
        self._native = own is not None and 2 * own.numel() == rotary_dim
        self._name = name
        self.gate_weight = nn.Parameter(torch.zeros(1)) if gate else None

    def reset_parameters(self) -> None:
        if self.gate_weight is not None:
            nn.init.zeros_(self.gate_weight)

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the angle per position of each channel pair, `[rotary_dim / 2]`, in the dtype of `like`."""
        if self._native:
            assert self.geometry.inv_freq is not None
            frequencies = self.geometry.inv_freq.to(like)
        else:
            step = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64, device=like.device).to(like)
            frequencies = 1.0 / (10000.0 if self.theta is None else self.theta) ** (step / self.rotary_dim)
        return frequencies if self.gate_weight is None else frequencies * self.gate_weight.to(like)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the angles at int64 positions `[B|1, S]`, each `[B|1, S, rotary_dim / 2]`.

        They carry the model's own factor on rotated queries and keys, if it has one (YaRN, longrope).

        Args:
            positions: Where the tokens stand.
            dtype: float32 or float64.
        """
        with torch.autocast(positions.device.type, enabled=False):
            place = positions.to(dtype)
            angles = place[..., None] * self.frequencies(place)
            scaling = self.geometry.rotary_scaling if self._native else 1.0
            return angles.cos() * scaling, angles.sin() * scaling

    def cautions(self, *, native_kept: bool) -> list[str]:
        limit = self.geometry.rotary_limit
        if limit is None or not self._native:
            return []
        return [
            f"The model changes its rotary frequencies beyond {limit} tokens; {self._name} keeps those used up to there, so that "
            f"keys in a cache stay right. The two are equal up to {limit} tokens only."
        ]


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Multiply the channel pairs (i, i + d / 2) of `[..., d]`, as complex numbers, by `cos + i sin`, each `[..., d / 2]`."""
    u, w = x.chunk(2, dim=-1)
    return torch.cat((u * cos - w * sin, w * cos + u * sin), dim=-1)
