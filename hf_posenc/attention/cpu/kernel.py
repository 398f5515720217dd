"""Softmax attention with a bias on a CPU, by the kernel under torch's own attention function.

The public function gives no logarithm of the sum of exponentials, which merging parts and a backward pass of our own
need, and takes a slow path for a bias that learns. The kernel is private to torch, whose minor version is pinned.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Done(NamedTuple):
    """Operands of a softmax `[B, H, Q, D]`, its output, and the logarithm of its sums of exponentials `[B, H, Q]`.

    Both may be those of a larger softmax, of which these keys are a part.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    lse: Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the output and the logarithm of the sum of exponentials of every row.

    Args:
        q: `[B, H, Q, D]`.
        k: `[B, G, K, D]`.
        v: `[B, G, K, D]`.
        bias: Bias on the scaled logits, `[B|1, H|1, Q|1, K]` with any strides, float32 (float64 for float64 operands);
            -inf hides.
        scale: Factor on `q @ k.T`.
        causal: Hide from query i the keys after key i.

    Returns:
        `[B, H, Q, D]` in the dtype of the operands, and `[B, H, Q]`, float32 or float64. A row whose bias is -inf
        throughout has zeros for both: let the smallest number hide it.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = kernel(_rowwise(q), _rowwise(k), _rowwise(v), 0.0, causal, attn_mask=bias, scale=scale)
    return output, lse


def backward(
    grad: Tensor, done: Done, bias: Tensor | None, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, of a bias that has none."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    operands = (_rowwise(x) for x in (grad, *done[:4]))
    dq, dk, dv = kernel(*operands, done.lse, 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


def mark_empty_rows(lse: Tensor) -> Tensor:
    """Return logarithms of sums `[B, H, Q]` with +inf for rows that see no key: no weights and no gradients for them.

    Where all is hidden by the smallest number, that number swallows the logarithm: weights made from it would add up
    to as many as there are keys.
    """
    return lse.masked_fill(lse < torch.finfo(lse.dtype).min / 2, math.inf)


def _rowwise(x: Tensor) -> Tensor:
    """Return a tensor whose rows are contiguous, as the kernel wants them."""
    return x if x.stride(-1) == 1 else x.contiguous()
