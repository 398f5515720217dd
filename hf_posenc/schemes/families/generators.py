"""Rotations `exp(t A)` of blocks of channels by antisymmetric generators A, computed in their planes.

Letters in addition to those of `hf_posenc.operands`: m blocks of b channels, P planes (pairs of channels), W = 2 P
turned channels. Within a block, plane i is the pair (2i, 2i + 1).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.errors import OptionError
from hf_posenc.ops import Layout, rotate_halves, transformed


def upper_skew(raw: Tensor) -> Tensor:
    """Return the antisymmetric matrices `[..., b, b]` with the upper triangle of `raw`."""
    upper = raw.triu(1)
    return upper - upper.mT


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
    """

    axes: Tensor
    frequencies: Tensor
    basis: Tensor


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
    return Planes(axes, frequencies, _basis(axes, width, layout))


def _basis(axes: Tensor, width: int, layout: Layout) -> Tensor:
    groups, count, size, _ = axes.shape
    basis = torch.eye(width).to(axes).expand(groups, -1, -1).clone()
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
    if transformed():
        raise OptionError(
            "Rotations of blocks have a backward pass of their own, which torch.func cannot transform (grad, vmap, "
            "jacrev, ...). Take gradients with backward() or torch.autograd.grad."
        )
    result: Tensor = _Rotate.apply(  # type: ignore[no-untyped-call]
        x, generators, times, planes, planes.basis.to(x.dtype)[:, None], cos[:, :, None], sin[:, :, None]
    )
    return result


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
    @once_differentiable
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
