"""The small network that FIRE and CAPE run on every pair of a query and a key."""

from __future__ import annotations

from torch import Tensor, nn

from hf_posenc.ops.network import pair_network
from hf_posenc.schemes.families.linear import LentLinear


class PairNetwork(nn.ModuleList):
    """Two linear layers with a ReLU between them, from the channels of `[B|1, C, N]` to others, for each of N pairs.

    Args:
        in_channels: Channels of all inputs together.
        width: Hidden channels.
        out_channels: Channels of the output.
        negative_slope: For a leaky ReLU.
        residual: Add all inputs to the output; each has as many channels as that.
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
        """The layers with weights."""
        first, _, second = self
        assert isinstance(first, LentLinear)
        assert isinstance(second, LentLinear)
        return first, second

    def reset_parameters(self) -> None:
        """Draw weights and biases as `nn.Linear` does."""
        for layer in self.layers:
            bound = layer.in_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.uniform_(layer.bias, -bound, bound)

    def silence(self) -> None:
        """Make the output zero for every input."""
        nn.init.zeros_(self.layers[1].weight)
        nn.init.zeros_(self.layers[1].bias)

    def is_silent(self) -> bool:
        """Whether the output is zero for every input."""
        return not (bool(self.layers[1].weight.any()) or bool(self.layers[1].bias.any()))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return `[B|1, out_channels, N]`, in the dtype of the inputs."""
        weights = [x.to(inputs[0]) for layer in self.layers for x in layer()]
        return pair_network(weights, inputs, slope=self.negative_slope, residual=self.residual)
