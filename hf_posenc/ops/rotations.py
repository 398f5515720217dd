"""Rotation of channel pairs, in either of the two layouts."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hf_posenc.ops import transformed

# The channels of a pair: (i, i + d / 2), as in transformers' Llama, or (2i, 2i + 1), as in GPT-J and Meta's Llama.
Layout = Literal["half", "interleaved"]

# Minimum number of numbers to turn halves piece by piece, and the tokens of a piece, whose products stay in a core's
# cache.
_WORTH_PIECES = 2**16
_TOKENS = 256


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Multiply the channel pairs (i, i + d / 2) of `[..., S, d]`, as complex numbers, by `cos + i sin`."""
    if x.numel() < _WORTH_PIECES or x.device.type != "cpu" or torch.compiler.is_compiling() or transformed():
        u, w = x.chunk(2, dim=-1)
        return torch.cat((u * cos - w * sin, w * cos + u * sin), dim=-1)
    turned: Tensor = _Halves.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return turned


class _Halves(torch.autograd.Function):
    """`rotate_halves` in one pass over memory; written out, each of its products is a pass, and rounded once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.shape = x.shape
        ctx.save_for_backward(x if cos.requires_grad or sin.requires_grad else None, cos, sin)
        turned = torch.empty_like(x, memory_format=torch.contiguous_format)
        both = torch.cat((cos, cos), dim=-1)
        pieces = (torch.split(part, _TOKENS, dim=-2) for part in (x, both, sin, turned))
        for piece, c, s, out in zip(*pieces, strict=True):
            torch.mul(piece, c, out=out)
            (u, w), (first, second) = piece.chunk(2, dim=-1), out.chunk(2, dim=-1)
            first.addcmul_(w, s, value=-1)
            second.addcmul_(u, s)
        return turned

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin = ctx.saved_tensors
        of_x = of_cos = of_sin = None
        if ctx.needs_input_grad[0]:
            of_x = rotate_halves(grad, cos, -sin).sum_to_size(ctx.shape)
        if x is not None:
            (u, w), (first, second) = x.chunk(2, dim=-1), grad.chunk(2, dim=-1)
            of_cos = (u * first + w * second).sum_to_size(cos.shape)
            of_sin = (u * second - w * first).sum_to_size(sin.shape)
        return of_x, of_cos, of_sin


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Multiply the channel pairs (2i, 2i + 1) of `[..., d]`, as complex numbers, by `cos + i sin` `[..., d / 2]`."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    if torch.compiler.is_compiling():  # a graph has no strides to look at
        u, w = pairs.unbind(-1)
        return torch.stack((u * cos - w * sin, u * sin + w * cos), dim=-1).flatten(-2)
    # One pass over memory where four products and their interleaving take six. Pairs must lie next to each other, and
    # an even number of numbers apart.
    if pairs.storage_offset() % 2 or any(step % 2 for step in pairs.stride()[:-1]) or pairs.stride(-1) != 1:
        pairs = pairs.contiguous()
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin)).flatten(-2)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Multiply channel pairs of `[B, H, S, D]`, as complex numbers, by `cos + i sin`, each `[B|1, G|1, S, M]`.

    The first 2 M channels are turned and the others pass. Each of G heads serves H / G. The product is taken in the
    dtype of `cos` and cast back.
    """
    width = 2 * cos.shape[-1]
    heads = x.view(x.shape[0], cos.shape[1], -1, *x.shape[2:])  # [B, G, H / G, S, D]
    rotate = rotate_halves if layout == "half" else rotate_neighbours
    turned = rotate(heads[..., :width].to(cos.dtype), cos[:, :, None], sin[:, :, None]).to(x.dtype).flatten(1, 2)
    return torch.cat((turned, x[..., width:]), dim=-1) if width < x.shape[-1] else turned
