"""Base classes of the schemes that rotate channel pairs: frequencies, angles and annealing."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from hf_posenc.equivalents import Rotation
from hf_posenc.errors import OptionError
from hf_posenc.facts import Facts
from hf_posenc.operands import Geometry, Projection, Tokens
from hf_posenc.ops import Layout, placed, turn_pairs
from hf_posenc.scheme import Scheme


class Turning(Scheme):
    """A scheme that turns queries and keys, with the model's own frequencies if it takes them.

    Args:
        theta: Ratio of the wavelengths; `None` uses the model's own frequencies, else 10,000.
        own: The model's own frequencies `[M]`; `None` computes them from `theta`.
        gates: Number of learned factors for `gated`.
    """

    reproduces = ("rotary",)
    layout: Layout = "half"
    freeze: Literal["short", "long"] = "short"
    _usual_theta = 10000.0

    def __init__(self, geometry: Geometry, *, theta: float | None, own: Tensor | None, gates: int = 0) -> None:
        super().__init__(geometry, gates=gates)
        self.require(theta is None or theta > 1, "theta", theta, "a number above 1")
        self.theta = theta
        self._own = own
        # Whether the factor of the model's own rotation and the caution about frozen frequencies apply.
        self._native = own is not None

    def series(self, width: int, like: Tensor) -> Tensor:
        """Return the falling frequencies of the pairs, in the dtype of `like`: the model's own, else `geometric`."""
        return self.geometric(width, like) if self._own is None else placed(self._own, like.device, like.dtype)

    def geometric(self, width: int, like: Tensor) -> Tensor:
        """Return `theta^(-2i / width)` for each i below `width / 2`, in the dtype of `like`."""
        step = torch.arange(0, width, 2, dtype=torch.int64, device=like.device).to(like)
        return 1.0 / (self._usual_theta if self.theta is None else self.theta) ** (step / width)

    @property
    def length(self) -> float:
        """The model's own factor on rotated queries and keys (YaRN, longrope)."""
        return self.geometry.rotary_scaling if self._native else 1.0

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        found = super().facts(native_kept=native_kept, element=element)
        limit = self.geometry.rotary_limit
        if limit is None or not self._native:
            return found
        used, equal = ("up to there", "up to") if self.freeze == "short" else ("beyond", "beyond")
        caution = (
            f"The model changes its rotary frequencies beyond {limit} tokens; {self.name} keeps those used {used}, so "
            f"that keys in a cache stay right. The two are equal {equal} {limit} tokens only."
        )
        return replace(found, cautions=(caution,))


class PairRotation(Turning):
    """A product of channel pairs of queries and keys, as complex numbers, with factors that depend on their place."""

    def factors(self, positions: Tensor, coords: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return real and imaginary parts of the factors at positions `[B|1, S]`, or at coordinates if they are given.

        Each is `[B|1, G|1, S, M]` for M pairs, in a dtype of float32 or float64, and includes `length`.
        """
        raise NotImplementedError

    def alike(self) -> Hashable:
        """Return a value that is equal in layers with the same factors; `None` if they are of this layer alone."""
        return None

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        precise, places, alike = torch.promote_types(k.dtype, torch.float32), tokens.positions, self.alike()

        def factors() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
            with torch.autocast(k.device.type, enabled=False):
                return places.each(lambda at, coords: self.factors(at.to(k.device), coords, precise))

        made = factors() if alike is None else places.once(factors, type(self), alike, precise, k.device)
        of_queries, of_keys = made
        return Projection(turn_pairs(q, *of_queries, self.layout), turn_pairs(k, *of_keys, self.layout), v)


class ContentRotation(Turning):
    """A rotation by angles that depend on the hidden states of tokens: frequencies times places between positions.

    Args:
        init: Start: `"native"` adds a part of zero to the position, `"zero"` and `"official"` have no position.
    """

    neutral_options = {"init": "zero"}

    def __init__(self, geometry: Geometry, *, init: Literal["native", "zero", "official"], theta: float | None) -> None:
        own = geometry.inv_freq if theta is None else None
        # Layers of some models turn nothing. They start so, without the position, and learn to turn.
        still = own is not None and not bool(own.any())
        super().__init__(geometry, theta=theta, own=None if still else own)
        self._still = still
        self.init = init
        self._native = self._native and init == "native"
        self.pairs = geometry.head_dim // 2 if own is None else own.numel()
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
            angles = places * self.series(2 * self.pairs, places)
            cos, sin = ((part * self.length).to(precise) for part in (angles.cos(), angles.sin()))
        last = slice(cos.shape[2] - q.shape[2], None)
        of_q = turn_pairs(q, cos[:, :, last], sin[:, :, last], self.layout)
        return Projection(of_q, turn_pairs(k, cos, sin, self.layout), v, recent=recent)

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        exact = self.init == "zero" if native_kept else self._native or (self._still and self.init == "native")
        return replace(super().facts(native_kept=native_kept, element=element), exact=exact)


class RotaryScheme(PairRotation):
    """A rotation by angles proportional to positions, with the model's own frequencies if it has any.

    Args:
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
        own = geometry.inv_freq if theta is None else None
        super().__init__(geometry, theta=theta, own=own, gates=int(gate))
        if rotary_dim is None:
            rotary_dim = geometry.head_dim if own is None else 2 * own.numel()
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
            self._own = geometry.inv_freq_long
        self.rotary_dim, self.gate, self.freeze = rotary_dim, gate, freeze
        self.layout = geometry.layout if self._native else "half"

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the angle per position of each channel pair, `[rotary_dim / 2]`, in the dtype of `like`."""
        return self.gated(self.series(self.rotary_dim, like))

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the angles at int64 positions `[B|1, S]`, each `[B|1, S, rotary_dim / 2]`.

        They include `length`, to the degree that the gate is open, in float32 or float64.
        """
        with torch.autocast(positions.device.type, enabled=False):
            place = positions.to(dtype)
            angles = place[..., None] * self.frequencies(place)
            length = self._gated_length(place)
            return angles.cos() * length, angles.sin() * length

    def _gated_length(self, like: Tensor) -> Tensor | float:
        return self.length if self.gate_weight is None else 1.0 + (self.length - 1.0) * self.gate_weight.to(like)

    def factors(self, positions: Tensor, coords: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin(positions, dtype)
        return cos[:, None], sin[:, None]

    def rotation(self) -> Rotation:
        with torch.no_grad():
            like = torch.zeros(1, device="cpu")
            frequencies, factor = self.frequencies(like), float(self._gated_length(like))
        rows = frequencies.double().expand(self.geometry.kv_heads, -1)
        return Rotation.of_pairs(rows, self.geometry.head_dim, self.layout, factor)


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
