"""Functions of tensors that several schemes and executors use."""

import torch
from torch import Tensor


def transformed() -> bool:
    """Whether a transform of `torch.func` (`grad`, `vmap`, ...) is active; none can use a backward pass of our own."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def placed(constant: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a constant that is kept on the CPU on another device, without waiting for what is queued there."""
    return constant.to(device, dtype or constant.dtype, non_blocking=True)
