"""Rotations `exp(t A)` of blocks of channels by learned antisymmetric generators A, computed in their planes.

Letters in addition to those of `hf_posenc.operands`: m blocks of b channels, P planes (pairs of channels), W = 2 P
turned channels. Within a block, plane i is the pair (2i, 2i + 1).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from hf_posenc.derivatives import differentiable, first_order
from hf_posenc.equivalents import Rotation
from hf_posenc.errors import ExportError
from hf_posenc.facts import Facts
from hf_posenc.operands import Geometry, Projection, Tokens
from hf_posenc.ops import Layout, placed, rotate_halves, rotate_neighbours, transformed
from hf_posenc.schemes.families.rotary import Turning


def plane_generators(frequencies: Tensor, size: int) -> Tensor:
    """Return generators `[m, b, b]` that turn plane i by `frequencies[i]`, given frequencies `[m * b / 2]`."""
    one = frequencies.new_tensor([[0.0, -1.0], [1.0, 0.0]])
    planes = frequencies.view(-1, size // 2).diag_embed()  # [m, b / 2, b / 2]
    return torch.einsum("mst,uv->msutv", planes, one).reshape(-1, size, size)


@dataclass(frozen=True, eq=False)
class Planes:
    """The planes in which generators `[G, m, b, b]` turn; all float64.

    Attributes:
        axes: Orthonormal columns, two per plane, `[G, m, b, b]`: `A = axes @ blockdiag(w J) @ axes.T` with frequencies
            w and J = [[0, -1], [1, 0]].
        frequencies: Frequencies of the planes, `[G, m, b / 2]`, falling and, up to rounding, not negative.
        basis: The axes as one matrix for all W channels, `[G, W, W]`: rows are channels, columns all first axes, then
            all second axes. Channels outside of blocks are planes of their own, at the end.
        layout: Pairing of channels.
    """

    axes: Tensor
    frequencies: Tensor
    basis: Tensor
    layout: Layout


def find_planes(generators: Tensor, width: int, layout: Layout) -> Planes:
    """Decompose antisymmetric generators `[G, m, b, b]` into planes of W channels, without gradients.

    The layout pairs channels; a block is b / 2 consecutive pairs.
    """
    generators = generators.detach().double()
    size = generators.shape[-1]
    # Each plane gives the Hermitian matrix a pair of eigenvalues +w and -w; the eigenvector of +w suffices.
    vectors = torch.linalg.eigh(1j * generators).eigenvectors[..., size // 2 :].flip(-1)
    axes = torch.stack((vectors.real, vectors.imag), dim=-1).flatten(-2)
    # For frequencies near zero, real and imaginary parts are mixed or even dependent. These planes come last, where QR
    # may pick any axes orthogonal to the others.
    axes, sizes = torch.linalg.qr(axes)
    axes = torch.where(sizes.diagonal(dim1=-2, dim2=-1)[..., None, :] < 0, -axes, axes)
    turned = axes.mT @ generators @ axes
    frequencies = turned.diagonal(offset=-1, dim1=-2, dim2=-1)[..., ::2]
    return Planes(axes, frequencies, _basis(axes, width, layout), layout)


def _basis(axes: Tensor, width: int, layout: Layout) -> Tensor:
    groups, count, size, _ = axes.shape
    basis = torch.eye(width, dtype=axes.dtype, device=axes.device).expand(groups, -1, -1).clone()
    pairs = axes.reshape(groups, count, size // 2, 2, size // 2, 2)
    _blocks(basis, count, size).copy_(pairs.permute(0, 3, 2, 5, 4, 1))
    if layout == "interleaved":
        basis = basis.view(groups, 2, -1, width).transpose(1, 2).flatten(1, 2)
    return basis


def _blocks(matrix: Tensor, count: int, size: int) -> Tensor:
    """View the diagonal blocks of `[G, W, W]`, with first axes before second axes, as `[G, 2, b/2, 2, b/2, m]`."""
    half, planes = size // 2, count * size // 2
    groups, width, _ = matrix.shape
    halves = matrix.view(groups, 2, width // 2, 2, width // 2)[:, :, :planes, :, :planes]
    return halves.view(groups, 2, count, half, 2, count, half).diagonal(dim1=2, dim2=5)


def rotate(x: Tensor, generators: Tensor, times: Tensor, planes: Planes, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `exp(t A) x`, block by block, without the exponential: in its planes, a generator is a plain rotation.

    Gradients reach x, the generators and the times. They are the gradients of the exponential, finite also where planes
    have equal frequencies (such as a generator of zero); gradients of the decomposition would be infinite there.

    Args:
        x: Channels to turn, float32 or float64 `[B, G, R, S, W]`; R query heads share a generator.
        generators: Generators A, `[G, m, b, b]`.
        times: Time t of each token and block, `[B|1, S, m|1]`.
        planes: Planes of the generators.
        cos: Cosine of the angles `t w` of all planes, times any factor on the result, in the dtype of x,
            `[B|1, G, S, P]`.
        sin: Sine of the same angles, times the same factor.
    """
    cos, sin = cos[:, :, None], sin[:, :, None]
    plain = functools.partial(_exponential, planes.layout)
    if transformed():
        return plain(x, generators, times, cos, sin)[0]
    basis = planes.basis.to(x.dtype)[:, None]
    result: Tensor = _Rotate.apply(x, generators, times, planes, basis, cos, sin)  # type: ignore[no-untyped-call]
    return differentiable(result, plain, (x, generators, times, cos, sin), ())


def _exponential(
    layout: Layout, x: Tensor, generators: Tensor, times: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor]:
    """Return `exp(t A) x` by matrix exponentials, which have all derivatives; channels outside of blocks are turned."""
    rotations = torch.matrix_exp(times[:, :, None, :, None, None] * generators).to(x.dtype)
    split = generators.shape[1] * generators.shape[2] // 2
    still = torch.hypot(cos[..., :split], sin[..., :split])  # the factor on the result
    cos, sin = torch.cat((still, cos[..., split:]), dim=-1), torch.cat((still * 0, sin[..., split:]), dim=-1)
    turn = rotate_halves if layout == "half" else rotate_neighbours
    return (turn(rotate_blocks(x, rotations, layout), cos.detach(), sin.detach()),)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, generators: Tensor, times: Tensor, planes: Planes, basis: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        inner = x @ basis
        ctx.save_for_backward(inner, times, basis, cos, sin)
        ctx.planes = planes
        return rotate_halves(inner, cos, sin) @ basis.mT

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, times, basis, cos, sin = ctx.saved_tensors
        grad_inner = grad @ basis
        back = rotate_halves(grad_inner, cos, -sin)
        grad_x = back @ basis.mT if ctx.needs_input_grad[0] else None
        grad_generators = grad_times = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            turned = rotate_halves(inner, cos, sin)
        if ctx.needs_input_grad[1]:
            grad_generators = _to_generators(ctx.planes, times, inner, turned, back, grad_inner)
        if ctx.needs_input_grad[2]:
            grad_times = _to_times(ctx.planes, times, turned, grad_inner)
        return grad_x, grad_generators, grad_times, None, None, None, None


def _to_times(planes: Planes, times: Tensor, turned: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the times: that of each angle times its frequency, summed over a block's planes."""
    count, half = planes.frequencies.shape[1:]
    (u, w), (grad_u, grad_w) = turned.chunk(2, dim=-1), grad.chunk(2, dim=-1)
    angles = (grad_w * u - grad_u * w).sum(2)  # [B, G, S, P]; with times per block there are no other channels
    angles = angles.view(*angles.shape[:-1], count, half).to(times.dtype)
    return torch.einsum("bgsmh,gmh->bsm", angles, planes.frequencies.to(times.dtype)).sum_to_size(times.shape)


def _to_generators(planes: Planes, times: Tensor, inner: Tensor, turned: Tensor, back: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the generators `[G, m, b, b]`.

    In the eigenbasis, with eigenvalues `i l`, a change E of the generator changes entry (j, k) of its exponential by
    `E[j, k] (exp(i t l[j]) - exp(i t l[k])) / (i l[j] - i l[k])` (Daleckii and Krein). Summed over tokens, each of the
    two terms is one matrix product of vectors that are already turned. If two eigenvalues are so close that rounding
    dominates the difference, the quotient is `t` times the mean of both exponentials, up to second order.

    Inputs before (`inner`) and after the rotation (`turned`), and the gradient of the result (`grad`, turned back:
    `back`), are in their planes, `[B, G, R, S, W]`.
    """
    count, size = planes.axes.shape[1:3]
    weights = _per_channel(times, size // 2).to(inner.dtype)
    difference = _products(back, inner, count, size) - _products(grad, turned, count, size)
    mean = (_products(back, inner * weights, count, size) + _products(grad, turned * weights, count, size)) / 2
    eigenvalues = torch.stack((planes.frequencies, -planes.frequencies), dim=-1).flatten(-2)
    gap = eigenvalues[..., :, None] - eigenvalues[..., None, :]  # [G, m, b, b]
    # Below this, the error of the mean, (t gap)^2 / 12, is smaller than that of the difference, epsilon / (t gap).
    near = (12 * torch.finfo(inner.dtype).eps) ** (1 / 3)
    close = gap.abs() * times.abs().amax((0, 1)).to(gap)[:, None, None] < near
    # The change from the two axes of a plane to its two eigenvectors.
    both = torch.tensor([[1, 1], [-1j, 1j]], dtype=torch.complex128, device=inner.device) / 2**0.5
    vectors = torch.kron(torch.eye(size // 2, device=both.device), both)
    quotient = vectors.mT @ difference.to(vectors) @ vectors.conj() / (1j * gap.where(~close, 1))
    changes = torch.where(close, vectors.mT @ mean.to(vectors) @ vectors.conj(), quotient)
    return planes.axes @ (vectors.conj() @ changes @ vectors.mT).real @ planes.axes.mT


def _products(rows: Tensor, columns: Tensor, count: int, size: int) -> Tensor:
    """Return the blocks of `rows.T @ columns` over all tokens, `[G, m, b, b]`, given two `[B, G, R, S, W]`."""
    whole = torch.einsum("bgrsi,bgrsj->gij", rows, columns)
    return _blocks(whole, count, size).permute(0, 5, 2, 1, 4, 3).flatten(4, 5).flatten(2, 3)


def _per_channel(times: Tensor, half: int) -> Tensor:
    """Return the time of each channel, first axes before second axes, `[B|1, 1, 1, S, W|1]`."""
    if times.shape[-1] > 1:
        times = torch.cat((times, times), dim=-1).repeat_interleave(half, dim=-1)
    return times[:, None, None]


def rotate_blocks(x: Tensor, rotations: Tensor, layout: Layout) -> Tensor:
    """Multiply the first m * b channels of `[B, G, R, S, W]`, in blocks, by matrices `[B|1, S, G, m, b, b]`."""
    count, size = rotations.shape[3:5]
    shape = x.shape[:-1]
    pairs = x.reshape(*shape, 2, -1).transpose(-1, -2) if layout == "half" else x.reshape(*shape, -1, 2)
    split = count * size // 2
    blocks = pairs[..., :split, :].reshape(*shape, count, size)
    turned = torch.einsum("bsgmij,bgrsmj->bgrsmi", rotations.expand(x.shape[0], *[-1] * 5), blocks)
    pairs = torch.cat((turned.reshape(*shape, split, 2), pairs[..., split:, :]), dim=-2)
    return (pairs.transpose(-1, -2) if layout == "half" else pairs).flatten(-2)


# -- base classes -----------------------------------------------------------------------------------------------------

# Channels in a block, where a scheme is given no other number.
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

    def make_parameters(self) -> None:
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
        own = torch.zeros(size, device=device) if self._own is None else self._own[:size]
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
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
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

    def facts(self, *, native_kept: bool = False, element: int = 4) -> Facts:
        found = super().facts(native_kept=native_kept, element=element)
        if not native_kept:
            return replace(found, exact=self._native)
        cautions = list(found.cautions)
        if self._native:
            cautions.append(
                f"{self.name} holds the model's own rotation already, so that queries and keys turn twice. Pass "
                "init='zero' with a kept native encoding."
            )
        elif self.geometry.inv_freq is not None:
            cautions.append(
                f"With a kept rotation, {self.name} sees more than distances once it is trained: the two do not "
                "commute."
            )
        return replace(found, exact=not self._native and self.init != "official", cautions=tuple(cautions))


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
