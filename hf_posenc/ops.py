"""Functions of tensors that several schemes and executors use: rotations, products, hidden keys, distances."""

from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The channels of a pair: (i, i + d / 2), as in transformers' Llama, or (2i, 2i + 1), as in GPT-J and Meta's Llama.
Layout = Literal["half", "interleaved"]


def transformed() -> bool:
    """Whether a transform of `torch.func` (`grad`, `vmap`, ...) or a derivative in forward mode is active.

    None of these can use a backward pass of our own.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def placed(constant: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a constant that is kept on the CPU on another device, without waiting for what is queued there."""
    return constant.to(device, dtype or constant.dtype, non_blocking=True)


# -- rotations of channel pairs ------------------------------------------------------------------------------------


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
    width, groups = 2 * cos.shape[-1], cos.shape[1]
    rotate = rotate_halves if layout == "half" else rotate_neighbours
    part = (x if width == x.shape[-1] else x[..., :width]).to(cos.dtype)
    if groups == 1:
        turned = rotate(part, cos, sin)
    else:
        turned = rotate(part.view(len(x), groups, -1, *part.shape[2:]), cos[:, :, None], sin[:, :, None]).flatten(1, 2)
    turned = turned.to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


# -- steps of softmax attention -------------------------------------------------------------------------------------


def grouped_matmul(rows: Tensor, shared: Tensor) -> Tensor:
    """Multiply `[B, H, q, x]` by `[B, G, x, y]` with each kv head serving H / G query heads, without repeating it."""
    batch, heads, length, width = rows.shape
    groups = shared.shape[1]
    if groups == heads:
        return rows @ shared
    if torch.compiler.is_exporting():
        # The fold would bind the graph to one length.
        return rows @ shared.repeat_interleave(heads // groups, dim=1)
    folded = rows.reshape(batch * groups, -1, width)  # [B * G, H/G * q, x]
    folded = torch.bmm(folded, shared.expand(batch, *shared.shape[1:]).flatten(0, 1))
    return folded.view(batch, heads, length, shared.shape[-1])


def fill_hidden_(x: Tensor, keep: Tensor | None, value: float) -> Tensor:
    """Overwrite the numbers `[B, H, q, K]` of hidden keys in place, whatever they are, NaN included, and return them.

    `keep` marks the keys that may be seen, bool `[B|1, H|1, q|1, K]`; `None` means all. Autograd does not notice.
    """
    return x if keep is None else x.masked_fill_(~keep, value)


def softmax_of_seen(logits: Tensor, keep: Tensor | None) -> Tensor:
    """Return the softmax `[B, H, q, K]` in which hidden keys get nothing; a row of hidden keys only is even.

    `keep` marks the keys that may be seen, bool `[B|1, H|1, q|1, K]`; `None` means all.
    """
    if keep is not None:
        logits = logits.masked_fill(~keep, torch.finfo(logits.dtype).min)
    return logits.softmax(dim=-1)


# -- numbers per query and distance ---------------------------------------------------------------------------------
#
# Distances are int64 `[B|1, q, K]`. Numbers are those of N distances, from `last` down; others have those of the end.


def by_distance(values: Tensor, distance: Tensor, last: int) -> Tensor:
    """Return for each query and key the value `[B, H, q, N]` that the query has for their distance, `[B, H, q, K]`."""
    index = (last - distance).clamp(0, values.shape[-1] - 1)[:, None]
    return values.gather(-1, index.expand(*values.shape[:3], -1))


def sums_by_distance(weights: Tensor, distance: Tensor, last: int, count: int) -> Tensor:
    """Return for each query and distance the sum of the keys' weights `[B, H, q, K]`, `[B, H, q, count]`."""
    index = (last - distance).clamp(0, count - 1)[:, None].expand(weights.shape)
    return weights.new_zeros(*weights.shape[:3], count).scatter_add(-1, index, weights)
