"""Linear layers of schemes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _Weights(nn.Module):
    """Weight and bias of a linear layer that adapters and quantizers, which look for `nn.Linear`, do not replace.

    A scheme that reads weight and bias could not use the replacement. Names and start are those of `nn.Linear`.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        bias: Add a bias.
    """

    bias: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias as `nn.Linear` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -(self.in_features**-0.5), self.in_features**-0.5)


class Linear(_Weights):
    """A linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class LentLinear(_Weights):
    """A linear layer whose call returns its weight `[out, in]` and bias `[out]`.

    Callers must not read the attributes: offloading (accelerate) restores weights only for the time of a call.
    """

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias


class AnyDtypeLinear(Linear):
    """A linear layer with float32 weights that computes in the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), None if self.bias is None else self.bias.to(input.dtype))
