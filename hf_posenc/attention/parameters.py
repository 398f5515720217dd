"""The parameters that a forward pass has read, for backward passes that compute parts of it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.func import functional_call

from hf_posenc.scheme import Scheme

Result = TypeVar("Result")


class _Holder(nn.Module):
    """Holds a scheme and calls another function: wrappers act on the scheme's own forward."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme

    def forward(self, function: Callable[[], Result]) -> Result:
        return function()


def with_parameters(scheme: Scheme, parameters: Sequence[Tensor], function: Callable[[], Result]) -> Result:
    """Call a function while a scheme has these parameters, in its own order: those of its forward pass.

    They are the scheme's own, except after a forward pass within `torch.func.functional_call`, which gives them back
    before any backward pass begins.
    """
    own = dict(scheme.named_parameters())
    if all(now is then for now, then in zip(own.values(), parameters, strict=True)):
        return function()
    given = {f"scheme.{name}": tensor for name, tensor in zip(own, parameters, strict=True)}
    result: Result = functional_call(_Holder(scheme), given, (function,))
    return result
