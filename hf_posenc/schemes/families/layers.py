"""Linear layers of schemes, and the small network that some run on every pair of a query and a key."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.operands import Tokens

# Hidden numbers at once on a CPU: those of a whole block of logits would fit into no cache.
_IN_CACHE = 2**18


class _Weights(nn.Module):
    """Weight and bias of a linear layer that adapters and quantizers, which look for `nn.Linear`, do not replace.

    A scheme that reads weight and bias could not use the replacement. Names and start are those of `nn.Linear`.
    """

    bias: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -(self.in_features**-0.5), self.in_features**-0.5)


class LentLinear(_Weights):
    """A linear layer whose call returns its weight `[out, in]` and bias `[out]`.

    Callers must not read the attributes: offloading (accelerate) restores weights only for the time of a call.
    """

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias


class AnyDtypeLinear(_Weights):
    """A linear layer with float32 weights that computes in the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), None if self.bias is None else self.bias.to(input.dtype))


class LowRank(nn.ModuleList):
    """Two linear layers without bias, from `in_features` through `rank` channels to `out_features`."""

    def __init__(self, in_features: int, rank: int, out_features: int) -> None:
        super().__init__(AnyDtypeLinear(*sizes, bias=False) for sizes in ((in_features, rank), (rank, out_features)))

    def reset_parameters(self) -> None:
        for layer in self.children():
            assert isinstance(layer, AnyDtypeLinear)
            layer.reset_parameters()


def convolved(
    tokens: Tokens, x: Tensor, projections: LowRank, taps: Tensor, name: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `[B, S, C]` after two linear layers and a causal convolution over tokens, and `Projection.recent`.

    Convolution and projection commute, so that few channels are kept of the tokens before.
    """
    narrow, wide = projections
    shifted: Tensor = narrow(x)  # [B, S, rank]
    steps = taps.to(shifted).unbind(-1)
    mixed = wide(shifted) * steps[-1]
    recent: dict[str, Tensor] = {}
    for back in range(1, len(steps)):
        shifted, needed = tokens.previous(shifted, f"{name}_{back}")
        recent |= needed
        mixed = mixed + wide(shifted) * steps[-1 - back]
    return mixed, recent


class PairNetwork(nn.ModuleList):
    """Two linear layers with a ReLU between them, from the channels of `[B|1, C, N]` to others, for each of N pairs.

    `in_channels` are those of all inputs together, `width` the hidden ones; `negative_slope` is that of the ReLU. If
    `residual`, all inputs are added to the output; each has as many channels as that.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        out_channels: int,
        *,
        negative_slope: float = 0.0,
        residual: bool = False,
    ) -> None:
        activation = nn.LeakyReLU(negative_slope) if negative_slope else nn.ReLU()
        super().__init__([LentLinear(in_channels, width), activation, LentLinear(width, out_channels)])
        self.negative_slope, self.residual = negative_slope, residual

    @property
    def layers(self) -> tuple[LentLinear, LentLinear]:
        first, _, second = self
        assert isinstance(first, LentLinear)
        assert isinstance(second, LentLinear)
        return first, second

    def reset_parameters(self) -> None:
        for layer in self.layers:
            layer.reset_parameters()

    def silence(self) -> None:
        """Make the output zero for every input."""
        nn.init.zeros_(self.layers[1].weight)
        nn.init.zeros_(self.layers[1].bias)

    def is_silent(self) -> bool:
        return not (bool(self.layers[1].weight.any()) or bool(self.layers[1].bias.any()))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return `[B|1, out_channels, N]`, in the dtype of the inputs."""
        weights = [x.to(inputs[0]) for layer in self.layers for x in layer()]
        # A graph that is being compiled has no numbers.
        if torch.compiler.is_compiling() or inputs[0].device.type != "cpu":
            return self._at_once(weights, inputs)
        few = max(1, _IN_CACHE // (len(weights[0]) * max(map(len, inputs))))
        parts = zip(*(torch.split(x, few, dim=-1) for x in inputs), strict=True)
        return torch.cat([self._at_once(weights, part) for part in parts], dim=-1)

    def _at_once(self, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
        first, first_bias, second, second_bias = weights
        hidden = F.leaky_relu_(_channel_linear(first, first_bias, inputs), self.negative_slope)
        output = _channel_linear(second, second_bias, [hidden])
        return sum(inputs, output) if self.residual else output


def _channel_linear(weight: Tensor, bias: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Return a linear layer along the second dimension, `[B|1, out, N]`, of inputs `[B|1, C, N]` that lie side by side.

    Logits have heads there, so the result needs no transpose. Inputs of one row for the whole batch come last, and are
    multiplied once for all rows.
    """
    total, stop = bias[:, None], weight.shape[1]
    for x in reversed(inputs):
        start = stop - x.shape[1]
        # An exporter binds a graph to what `len` returns.
        total = torch.baddbmm(total, weight[:, start:stop].expand(x.shape[0], -1, -1), x)
        stop = start
    return total
