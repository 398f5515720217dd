"""Sizes of the tensors that a computation makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Keeps how many elements the largest tensor has that any operation makes, in backward passes, too."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                # What is expanded takes no memory.
                self.size = max(self.size, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made
