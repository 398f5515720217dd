"""Base classes of the schemes that rotate channel pairs: frequencies, angles and annealing."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.errors import OptionError
from hf_posenc.operands import Geometry, Projection, Tokens
from hf_posenc.ops import placed
from hf_posenc.ops.rotations import Layout, turn_pairs
from hf_posenc.scheme import Scheme
from hf_posenc.structures import Rotation


class PairRotation(Scheme):
    """A product of channel pairs of queries and keys, as complex numbers, with factors that depend on their place."""

    reproduces = "rotary"
    layout: Layout = "half"

    def factors(self, positions: Tensor, coords: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return real and imaginary parts of the factors at positions `[B|1, S]`, or at coordinates if they are given.

        Each is `[B|1, G|1, S, M]` for M pairs, in a dtype of float32 or float64, and includes the model's own factor on
        rotated queries and keys (YaRN, longrope).
        """
        raise NotImplementedError

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        precise = torch.promote_types(k.dtype, torch.float32)
        with torch.autocast(k.device.type, enabled=False):
            of_queries, of_keys = tokens.positions.each(
                lambda positions, coords: self.factors(positions.to(k.device), coords, precise)
            )
        return Projection(turn_pairs(q, *of_queries, self.layout), turn_pairs(k, *of_keys, self.layout), v)


class ContentRotation(Scheme):
    """A rotation by angles that depend on the hidden states of tokens: frequencies times places between positions.

    Args:
        init: Start: `"native"` adds a part of zero to the position, `"zero"` and `"official"` have no position.
        theta: Ratio of the wavelengths; `None` uses the model's own frequencies, else 10,000.
    """

    reproduces = "rotary"
    neutral_options = {"init": "zero"}

    def __init__(self, geometry: Geometry, *, init: Literal["native", "zero", "official"], theta: float | None) -> None:
        super().__init__(geometry)
        self.require(theta is None or theta > 1, "theta", theta, "a number above 1")
        self.init, self.theta = init, theta
        own = geometry.inv_freq if theta is None else None
        self.pairs = geometry.head_dim // 2 if own is None else own.numel()
        # Layers of some models turn nothing. They start so, without the position, and learn to turn.
        self._still = own is not None and not bool(own.any())
        self._own = None if self._still else own
        self.layout = geometry.layout
        self.require(self.pairs >= 1, "init", init, f"heads of at least 2 channels, not {geometry.head_dim}")

    def places(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Return places of the keys' tokens without their position, float64 `[B, G, S, M|1]`; and state, see
        `Projection.recent`."""
        raise NotImplementedError

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        precise = torch.promote_types(k.dtype, torch.float32)
        with torch.autocast(k.device.type, enabled=False):
            places, recent = self.places(tokens)
            if self.init == "native" and not self._still:
                places = places + tokens.positions.key.to(places)[:, None, :, None]
            if self._own is not None:
                frequencies = placed(self._own, places.device, places.dtype)
            else:
                frequencies = geometric_frequencies(2 * self.pairs, self.theta or 10000.0, places)
            length = self.geometry.rotary_scaling if self._own is not None and self.init == "native" else 1.0
            angles = places * frequencies
            cos, sin = ((part * length).to(precise) for part in (angles.cos(), angles.sin()))
        last = slice(cos.shape[2] - q.shape[2], None)
        of_q = turn_pairs(q, cos[:, :, last], sin[:, :, last], self.layout)
        return Projection(of_q, turn_pairs(k, cos, sin, self.layout), v, recent=recent)

    def starts_exact(self, *, native_kept: bool) -> bool:
        return self.init == "zero" if native_kept else self.init == "native" and (self._own is not None or self._still)

    def cautions(self, *, native_kept: bool) -> list[str]:
        own = self._own is not None and self.init == "native"
        return frozen_cautions(self.geometry, self.name) if own else []


class RotaryScheme(PairRotation):
    """A rotation by angles proportional to positions, with the model's own frequencies if it has any.

    Args:
        theta: Ratio of the wavelengths; `None` uses the model's own frequencies, else 10,000.
        rotary_dim: Number of rotated channels, the first of each head; `None` is all that the frequencies cover.
        gate: Multiply all angles by one learned factor that starts at 0: an exact no-op if the native encoding is kept.
        freeze: Choice of the model's own frequencies, if it has two sets of them.
    """

    neutral_options = {"gate": True}

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float | None,
        rotary_dim: int | None,
        gate: bool,
        freeze: Literal["short", "long"] = "short",
    ) -> None:
        super().__init__(geometry)
        own = geometry.inv_freq if theta is None else None
        if rotary_dim is None:
            rotary_dim = geometry.head_dim if own is None else 2 * own.numel()
        self.require(theta is None or theta > 1, "theta", theta, "a number above 1")
        in_pairs = 2 <= rotary_dim <= geometry.head_dim and rotary_dim % 2 == 0
        expected = f"an even number from 2 to head_dim = {geometry.head_dim} (rotations act on pairs of channels)"
        self.require(in_pairs, "rotary_dim", rotary_dim, expected)
        if own is not None:
            expected = f"{2 * own.numel()}, what the model's own frequencies cover, unless theta is given too"
            self.require(rotary_dim == 2 * own.numel(), "rotary_dim", rotary_dim, expected)
        if freeze == "long":
            two = own is not None and geometry.inv_freq_long is not None
            expected = "'short', unless the model has a second set of frequencies (longrope) and theta is not given"
            self.require(two, "freeze", freeze, expected)
            own = geometry.inv_freq_long
        self.theta, self.rotary_dim, self.gate, self.freeze = theta, rotary_dim, gate, freeze
        self._own = own
        self._native = own is not None
        self.layout = geometry.layout if self._native else "half"
        if gate:
            self.gate_weight = nn.Parameter(torch.zeros(1))

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the angle per position of each channel pair, `[rotary_dim / 2]`, in the dtype of `like`."""
        if self._own is not None:
            frequencies = placed(self._own, like.device, like.dtype)
        else:
            frequencies = geometric_frequencies(self.rotary_dim, 10000.0 if self.theta is None else self.theta, like)
        return self.gated(frequencies)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the angles at int64 positions `[B|1, S]`, each `[B|1, S, rotary_dim / 2]`.

        They include the model's own factor on rotated queries and keys (YaRN, longrope), in float32 or float64.
        """
        with torch.autocast(positions.device.type, enabled=False):
            place = positions.to(dtype)
            angles = place[..., None] * self.frequencies(place)
            length = self._length(place)
            return angles.cos() * length, angles.sin() * length

    def _length(self, like: Tensor) -> Tensor | float:
        """Return the factor on rotated queries and keys: the model's own, to the degree that the gate is open."""
        whole = self.geometry.rotary_scaling if self._native else 1.0
        return whole if self.gate_weight is None else 1.0 + (whole - 1.0) * self.gate_weight.to(like)

    def factors(self, positions: Tensor, coords: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin(positions, dtype)
        return cos[:, None], sin[:, None]

    def rotation(self) -> Rotation:
        """Return the rotation of queries and keys in a text, with the current parameters."""
        with torch.no_grad():
            like = torch.zeros(1, device="cpu")
            frequencies, factor = self.frequencies(like), float(self._length(like))
        rows = frequencies.double().expand(self.geometry.kv_heads, -1)
        return Rotation.of_pairs(rows, self.geometry.head_dim, self.layout, factor)

    def cautions(self, *, native_kept: bool) -> list[str]:
        return frozen_cautions(self.geometry, self.name, self.freeze) if self._native else []


class Annealed(Scheme):
    """A scheme that phases a part in, by one number from 0 to 1 that is saved with the model."""

    anneal: bool
    progress: Tensor | None

    def set_annealing(self, anneal: bool) -> None:
        """Start the number at 0, or, without annealing, fix it at 1."""
        self.anneal = anneal
        self.register_buffer("progress", torch.zeros(1) if anneal else None)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.progress is not None:
            nn.init.zeros_(self.progress)

    def annealed(self, values: Tensor) -> Tensor:
        """Return values times the number."""
        return values if self.progress is None else values * self.progress.to(values)

    def anneal_to(self, progress: float) -> None:
        """Set the share of the part that is in effect, from 0 to 1.

        Raises:
            OptionError: The number is out of range, or the scheme was built without `anneal=True`.
        """
        if self.progress is None:
            raise OptionError("anneal_to: the scheme was built with anneal=False. Build it with anneal=True.")
        if not 0 <= progress <= 1:
            raise OptionError(f"anneal_to({progress!r}): expected a number from 0 to 1.")
        with torch.no_grad():
            self.progress.fill_(progress)


def frozen_cautions(geometry: Geometry, name: str, freeze: Literal["short", "long"] = "short") -> list[str]:
    """Return warnings about frozen frequencies that the model itself would change as a sequence grows."""
    limit = geometry.rotary_limit
    if limit is None:
        return []
    used, equal = (
        ("up to there", f"up to {limit} tokens") if freeze == "short" else ("beyond", f"beyond {limit} tokens")
    )
    return [
        f"The model changes its rotary frequencies beyond {limit} tokens; {name} keeps those used {used}, so that keys "
        f"in a cache stay right. The two are equal {equal} only."
    ]


def geometric_frequencies(width: int, theta: float, like: Tensor) -> Tensor:
    """Return `theta^(-2i / width)` for each i below `width / 2`, in the dtype of `like`."""
    step = torch.arange(0, width, 2, dtype=torch.int64, device=like.device).to(like)
    return 1.0 / theta ** (step / width)
