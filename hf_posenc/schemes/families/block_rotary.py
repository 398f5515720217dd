"""Base classes of the schemes that rotate blocks of channels by learned generators."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hf_posenc.errors import ExportError
from hf_posenc.operands import Geometry, Projection, Tokens
from hf_posenc.ops import placed
from hf_posenc.schemes.families.generators import Planes, find_planes, plane_generators, rotate
from hf_posenc.schemes.families.rotary import Turning
from hf_posenc.structures import Rotation

# The block size that LieRE's authors found best.
_BLOCK = 8

# A rotation of queries or keys `[B, G, R, S, W]`, float32 or wider, where R query heads share a kv head.
Turn: TypeAlias = Callable[[Tensor], Tensor]


class BlockRotary(Turning):
    """A rotation of queries and keys, block by block, by `exp(t A)` with a generator A per kv head and block.

    A subclass makes the parameters; its `flow` returns the generators, and the time t of each token and block.

    Args:
        axes: Number of coordinates of a token; `None` is that of the model, 1 for texts.
        block_size: Channels in a block, an even number; `None` is the largest allowed one up to 8.
        init: Start, see above.
        unit: Divisor of coordinates where they meet parameters, so that learning rates suit any length; `None` is the
            trained extent: the length of a text, or the side of a square of patches.
    """

    neutral_options = {"init": "zero"}

    def __init__(
        self,
        geometry: Geometry,
        *,
        axes: int | None = None,
        block_size: int | None = None,
        init: Literal["native", "zero", "official"] = "native",
        unit: float | None = None,
    ) -> None:
        own = geometry.inv_freq if init == "native" else None
        super().__init__(geometry, theta=None, own=own)
        width = geometry.head_dim if own is None else 2 * own.numel()
        self.axes = geometry.axes if axes is None else axes
        # Images have a class token too; rounding drops it.
        extent = round((geometry.max_positions or 1) ** (1 / geometry.axes))
        self.unit = float(extent if unit is None else unit)
        self.require(self.axes >= 1, "axes", axes, "at least 1")
        sizes, allowed = self.block_sizes(width)
        fitting = [size for size in sizes if size <= _BLOCK] if block_size is None else {block_size} & {*sizes}
        self.require(bool(fitting), "block_size", block_size, allowed)
        self.block_size, self.init = max(fitting), init
        self.require(self.unit > 0, "unit", unit, "a number above 0")
        self.layout = "interleaved" if own is None else geometry.layout
        self._count = width // self.block_size
        self._width = self._count * self.block_size if own is None else width
        # Generators and their planes, kept from the last call without gradients.
        self._known: tuple[Tensor, Planes] | None = None
        self.make_parameters()
        self.reset_parameters()

    def make_parameters(self) -> None:
        """Create the parameters, without values."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": None}

    def block_sizes(self, width: int) -> tuple[list[int], str]:
        """Return the block sizes allowed for a head of `width` channels, and the same in words."""
        return [*range(2, width + 1, 2)], f"an even number from 2 to {width}, the channels of a head that can turn"

    def flow(self, coords: Tensor) -> tuple[Tensor, Tensor]:
        """Return generators `[G, m, b, b]` and times `[B|1, S, m|1]` at coordinates `[B|1, S, axes]`; all float64."""
        raise NotImplementedError

    def native_generators(self, device: torch.device) -> Tensor:
        """Return the generators `[m, b, b]` of the model's own rotation, float64; zero without a base."""
        size = self._count * self.block_size // 2
        own = torch.zeros(size) if self._own is None else self._own[:size]
        return plane_generators(own.to(device, torch.float64), self.block_size)

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        with torch.autocast(q.device.type, enabled=False):
            turn_q, turn_k = tokens.positions.each(
                lambda positions, coords: self.rotation(positions.to(k.device), coords, k)
            )
            return Projection(self._turned(q, turn_q), self._turned(k, turn_k), v)

    def _turned(self, x: Tensor, turn: Turn) -> Tensor:
        """Turn the first W channels of `[B, H, S, D]`."""
        wide = x[..., : self._width].to(torch.promote_types(x.dtype, torch.float32))
        turned = turn(torch.unflatten(wide, 1, (self.geometry.kv_heads, -1))).flatten(1, 2).to(x.dtype)
        return torch.cat((turned, x[..., self._width :]), dim=-1) if self._width < x.shape[-1] else turned

    def rotation(self, positions: Tensor, coords: Tensor | None, like: Tensor) -> Turn:
        """Return the rotation of queries or keys at positions `[B|1, S]` or, if given, coordinates `[B|1, S, axes]`."""
        if coords is None:
            coords = positions[..., None].expand(*positions.shape, self.axes)
        coords = coords.to(positions.device, torch.float64)
        generators, times = self.flow(coords)
        planes = self.planes(generators)
        angles = times.detach()[:, None, :, :, None] * planes.frequencies[:, None]  # [B|1, G, S, m, b / 2]
        # The coordinates on the first axis turn the channels outside of blocks.
        cos, sin = self.cos_sin(angles.flatten(3), coords[..., 0], like)
        return lambda x: rotate(x, generators, times, planes, cos, sin)

    def cos_sin(self, angles: Tensor, first: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of angles, then of channels outside of blocks, times the model's own factor."""
        if self._own is not None:
            rest = first[:, None, :, None] * placed(self._own[angles.shape[-1] :], first.device, first.dtype)
            angles = torch.cat((angles, rest.expand(*rest.shape[:1], *angles.shape[1:3], -1)), dim=-1)
        precise = torch.promote_types(like.dtype, torch.float32)
        return (angles.cos() * self.length).to(precise), (angles.sin() * self.length).to(precise)

    def planes(self, generators: Tensor) -> Planes:
        """Return the planes of generators; without gradients, equal generators reuse the planes of the last call.

        A traced graph cannot compare, and finds them each time.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return find_planes(generators, self._width, self.layout)
        known = self._known
        if known is None or known[0].device != generators.device or not torch.equal(known[0], generators):
            known = self._known = (generators, find_planes(generators, self._width, self.layout))
        return known[1]

    def stock_equivalent(self) -> Rotation:
        # Tokens of a text have their position on every axis. There all these schemes are `V turn(p) V.T`, with an
        # orthogonal V per kv head that does not depend on the position p.
        width = self.geometry.head_dim
        if width % 2:
            raise ExportError(f"leaves one of {width} channels without a partner, and stock models rotate pairs")
        device = next(self.parameters()).device
        with torch.no_grad():
            generators, times = self.flow(torch.ones(1, 1, self.axes, dtype=torch.float64, device=device))
            planes = find_planes(generators, self._width, self.layout)
            turned = (times[0, 0, :, None] * planes.frequencies).flatten(1)
        groups, pairs = len(turned), self._width // 2
        frequencies = turned.new_zeros(groups, width // 2)
        frequencies[:, : turned.shape[1]] = turned
        if self._own is not None:
            frequencies[:, turned.shape[1] : pairs] = self._own[turned.shape[1] :].to(turned)
        basis = turned.new_zeros(groups, width, 2, width // 2)
        basis[:, : self._width, :, :pairs] = planes.basis.view(groups, self._width, 2, pairs)
        rest = width - self._width
        basis[:, self._width :, :, pairs:] = torch.eye(rest).to(basis).view(rest, rest // 2, 2).transpose(-1, -2)
        basis[:, : self._width] *= self.length
        return Rotation(frequencies.cpu(), basis.flatten(2).mT.contiguous().cpu())

    def starts_exact(self, *, native_kept: bool) -> bool:
        return not self._native and self.init != "official" if native_kept else self._native

    def cautions(self, *, native_kept: bool) -> list[str]:
        found = super().cautions(native_kept=native_kept)
        if self._native and native_kept:
            found.append(
                f"{self.name} holds the model's own rotation already, so that queries and keys turn twice. Pass "
                "init='zero' with a kept native encoding."
            )
        elif native_kept and self.geometry.inv_freq is not None:
            found.append(
                f"With a kept rotation, {self.name} sees more than distances once it is trained: the two do not "
                "commute."
            )
        return found


class ComRoPE(BlockRotary):
    """A rotation with one learned generator per kv head and block, so that generators of different axes commute.

    The axes only set the time for which it acts.
    """

    def make_parameters(self) -> None:
        self.freqs = nn.Parameter(torch.empty(self.geometry.kv_heads, 1, self._count, *[self.block_size] * 2))

    def block_sizes(self, width: int) -> tuple[list[int], str]:
        parts = self.parts()
        sizes = [size for size in range(2, width + 1, 2) if width % (parts * size) == 0]
        cut = f" cut into {parts}, one part per axis" if parts > 1 else ""
        return sizes, f"an even divisor of the {width} channels of a head{cut}"

    def parts(self) -> int:
        """Return the number of equal parts, each of whole blocks, into which a head is cut."""
        return 1

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            if self.init == "official":
                nn.init.normal_(parameter)
            else:
                nn.init.zeros_(parameter)

    def generators(self) -> Tensor:
        """Return the generators, float64 `[G, m, b, b]`."""
        learned = self.freqs.double().squeeze(1)
        return self.native_generators(learned.device) + (learned - learned.mT) / self.unit
