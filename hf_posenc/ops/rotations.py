"""Rotation of channel pairs, in either of the two layouts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# The channels of a pair: (i, i + d / 2), as in transformers' Llama, or (2i, 2i + 1), as in GPT-J and Meta's Llama.
Layout = Literal["half", "interleaved"]


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Multiply the channel pairs (i, i + d / 2) of `[..., S, d]`, as complex numbers, by `cos + i sin`."""
    u, w = x.chunk(2, dim=-1)
    return torch.cat((u * cos - w * sin, w * cos + u * sin), dim=-1)


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
