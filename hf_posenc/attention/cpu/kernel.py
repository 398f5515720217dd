"""Softmax attention with a bias on a CPU, by the kernel under torch's own attention function.

The public function gives no logarithm of the sum of exponentials, which merging parts and a backward pass of our own
need, and takes a slow path for a bias that learns. The kernel is private to torch, so it is tried on a small problem
before its first use; where it is missing or does something else, plain products take its place.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_posenc.ops.linear import grouped_matmul

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Done(NamedTuple):
    """Operands of a softmax `[B, H, Q, D]`, its output, and the logarithm of its sums of exponentials `[B, H, Q]`.

    Both may be those of a larger softmax, of which these keys are a part.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    lse: Tensor


def takes(*tensors: Tensor) -> bool:
    """Whether operands are of a kind that `forward` and `backward` compute."""
    return all(x.device.type == "cpu" and x.dtype in _DTYPES for x in tensors)


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
        throughout has zeros for both from the fused kernel, NaN and -inf from plain products: let the smallest number
        hide it.
    """
    run = _fused if _kernel_works() else _plain
    return run(_rowwise(q), _rowwise(k), _rowwise(v), bias, scale, causal)


def backward(
    grad: Tensor, done: Done, bias: Tensor | None, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, of a bias that has none."""
    run = _fused_backward if _kernel_works() else _plain_backward
    q, k, v, output = (_rowwise(x) for x in done[:4])
    return run(_rowwise(grad), Done(q, k, v, output, done.lse), bias, scale, causal)


def mark_empty_rows(lse: Tensor) -> Tensor:
    """Return logarithms of sums `[B, H, Q]` with +inf for rows that see no key: no weights and no gradients for them.

    Where all is hidden by the smallest number, that number swallows the logarithm: weights made from it would add up
    to as many as there are keys.
    """
    return lse.masked_fill(lse < torch.finfo(lse.dtype).min / 2, math.inf)


def _rowwise(x: Tensor) -> Tensor:
    """Return a tensor whose rows are contiguous, as the kernel wants them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = kernel(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return output, lse


def _fused_backward(
    grad: Tensor, done: Done, bias: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = kernel(grad, *done, 0.0, causal, attn_mask=bias, scale=scale)
    return dq, dk, dv


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    logits = _logits(q, k, bias, scale, causal)
    lse = logits.logsumexp(dim=-1)
    return grouped_matmul((logits - lse[..., None]).exp(), v.to(logits)).to(q.dtype), lse


def _plain_backward(
    grad: Tensor, done: Done, bias: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, output, lse = (x.to(done.lse) for x in done)
    weights, grad = (_logits(q, k, bias, scale, causal) - lse[..., None]).exp(), grad.to(lse)
    d_logits = weights * (grouped_matmul(grad, v.mT) - (grad * output).sum(-1, keepdim=True)) * scale

    def by_group(x: Tensor) -> Tensor:
        """Return `[B, H, Q, N]` as `[B, G, H / G * Q, N]`: heads that share keys give them a sum."""
        return x.reshape(*k.shape[:2], -1, x.shape[-1])

    found = (
        grouped_matmul(d_logits, k),
        by_group(d_logits).mT @ by_group(q),
        by_group(weights).mT @ by_group(grad),
    )
    dq, dk, dv = (d.to(x.dtype) for d, x in zip(found, done, strict=False))
    return dq, dk, dv


def _logits(q: Tensor, k: Tensor, bias: Tensor | None, scale: float, causal: bool) -> Tensor:
    precise = torch.promote_types(q.dtype, torch.float32)
    logits = grouped_matmul(q.to(precise), k.to(precise).mT) * scale
    if bias is not None:
        logits = logits + bias
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
    return logits


@functools.cache
def _kernel_works() -> bool:
    """Whether torch has the kernel, and it does what is expected of it, down to strides and shared keys."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)

    q, grad, k, v = draw(2, 4, 5, 3), draw(2, 4, 5, 3), draw(2, 2, 7, 3), draw(2, 2, 7, 3)
    bias = draw(4, 16).as_strided((1, 4, 5, 7), (0, 16, 1, 1))  # overlaps itself, as tables of distances do
    try:
        # Autocast would round the plain products.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for given, causal in ((bias, False), (bias[:, :, :1], True)):
                got, want = (run(q, k, v, given, 0.7, causal) for run in (_fused, _plain))
                done = Done(q, k, v, *want)
                back = [run(grad, done, given, 0.7, causal) for run in (_fused_backward, _plain_backward)]
                pairs = [*zip(got, want, strict=True), *zip(*back, strict=True)]
                if not all(torch.allclose(a, b, atol=1e-4) for a, b in pairs):
                    return False
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return True
