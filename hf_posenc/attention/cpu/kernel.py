"""Softmax attention with a bias on a CPU, by the kernel under torch's own attention function.

The public function gives no logarithm of the sum of exponentials, which merging parts and a backward pass of our own
need, and takes a slow path for a bias that learns. The kernel is private to torch, so it is tried on a small problem
before its first use; where it is missing or does something else, attention goes by blocks.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_posenc.attention.once import Once

_TRIED: Once[bool] = Once()


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
    grad: Tensor, done: Sequence[Tensor], bias: Tensor | None, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, of a bias that has none.

    `done` holds queries `[B, H, Q, D]`, keys and values `[B, G, K, D]`, the output `[B, H, Q, D]`, and the logarithm of
    each row's sum of exponentials `[B, H, Q]`. The last two may be those of a larger softmax, of which these keys are a
    part.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    *operands, lse = done
    dq, dk, dv = kernel(*map(_rowwise, (grad, *operands)), lse, 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


def mark_empty_rows(lse: Tensor) -> Tensor:
    """Return logarithms of sums `[B, H, Q]` with +inf for rows that see no key: no weights and no gradients for them.

    Where all is hidden by the smallest number, that number swallows the logarithm: weights made from it would add up
    to as many as there are keys.
    """
    return lse.masked_fill(lse < torch.finfo(lse.dtype).min / 2, math.inf)


def _rowwise(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def works() -> bool:
    """Whether torch has the kernel, and its results are those of autograd, also with views and grouped queries."""
    return _TRIED.get("kernel", _passes)


def _passes() -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    q, grad, k, v, table = (
        torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
        for shape in ((2, 4, 5, 3), (2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 3), (4, 16))
    )
    of_distance = table.as_strided((1, 4, 5, 7), (0, 16, 1, 1))  # overlaps itself, as tables of distances do
    for bias, causal in ((of_distance, False), (of_distance[:, :, :1], True)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        keys, values = (x.repeat_interleave(2, dim=1) for x in leaves[1:])
        logits = leaves[0] @ keys.mT * 0.7 + bias
        if causal:
            logits = logits.masked_fill(torch.ones(5, 7, dtype=torch.bool, device="cpu").triu(1), -math.inf)
        want = logits.softmax(dim=-1) @ values
        gradients = torch.autograd.grad(want, leaves, grad)
        try:
            output, lse = forward(q, k, v, bias, 0.7, causal=causal)
            found = backward(grad, (q, k, v, output, lse), bias, 0.7, causal=causal)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
        pairs = zip((output, *found), (want, *gradients), strict=True)
        if not all(torch.allclose(got, right, atol=1e-4) for got, right in pairs):
            return False
    return True
