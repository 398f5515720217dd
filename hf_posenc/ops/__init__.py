"""Functions of tensors that several schemes and executors use."""

import torch


def transformed() -> bool:
    """Whether a transform of `torch.func` is active, such as `grad` or `vmap`: it takes no backward pass by hand."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
