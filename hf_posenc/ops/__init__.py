"""Functions of tensors that several schemes and executors use."""

import torch


def transformed() -> bool:
    """Whether a transform of `torch.func` (`grad`, `vmap`, ...) is active; none can use a backward pass of our own."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
