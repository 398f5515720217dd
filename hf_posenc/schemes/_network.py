"""The small network that FIRE and CAPE ask about every pair of a query and a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.hiding import worth_it
from hf_posenc.schemes._linear import ChannelLinear, channel_linear

# So many hidden numbers at once: those of a whole block of logits would fit into no cache, and be written to new memory each time.
_IN_CACHE = 2**18


class PairNetwork(nn.ModuleList):
    """Two linear layers with a ReLU between them, from the channels of `[B|1, C, N]` to others, for each of N pairs.

    Args:
        in_channels: Channels of all inputs together.
        width: Hidden channels.
        out_channels: Channels of the output.
        negative_slope: For a leaky ReLU.
    """

    def __init__(self, in_channels: int, width: int, out_channels: int, *, negative_slope: float = 0.0) -> None:
        activation = nn.LeakyReLU(negative_slope) if negative_slope else nn.ReLU()
        super().__init__([ChannelLinear(in_channels, width), activation, ChannelLinear(width, out_channels)])
        self.negative_slope = negative_slope

    @property
    def layers(self) -> tuple[ChannelLinear, ChannelLinear]:
        """The layers with weights."""
        first, _, second = self
        assert isinstance(first, ChannelLinear)
        assert isinstance(second, ChannelLinear)
        return first, second

    def reset_parameters(self) -> None:
        """Draw weights and biases as `nn.Linear` does."""
        for layer in self.layers:
            bound = layer.in_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.uniform_(layer.bias, -bound, bound)

    def silence(self) -> None:
        """Let the output be zero, whatever comes in."""
        nn.init.zeros_(self.layers[1].weight)
        nn.init.zeros_(self.layers[1].bias)

    def is_silent(self) -> bool:
        """Return whether it is."""
        return not (bool(self.layers[1].weight.any()) or bool(self.layers[1].bias.any()))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return `[B|1, out_channels, N]`, in the dtype of the inputs."""
        weights = [x.to(inputs[0]) for layer in self.layers for x in (layer.weight, layer.bias)]
        run = _InCache.apply if worth_it(inputs[0]) else _plain
        output: Tensor = run(self.negative_slope, *weights, *inputs)
        return output


def _plain(
    slope: float, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor, *inputs: Tensor
) -> Tensor:
    hidden = F.leaky_relu(channel_linear(first, first_bias, inputs), slope)
    return channel_linear(second, second_bias, [hidden])


class _InCache(torch.autograd.Function):
    """`_plain`, a few pairs after the other, of which nothing hidden is kept for the way back."""

    @staticmethod
    def forward(ctx: Any, slope: float, *tensors: Tensor) -> Tensor:
        ctx.slope = slope
        ctx.save_for_backward(*tensors)
        first, first_bias, second, second_bias, *inputs = tensors
        batch, pairs = max(map(len, inputs)), inputs[0].shape[-1]
        output = second.new_empty(batch, len(second), pairs)
        for here, hidden in _hidden(slope, first, first_bias, inputs):
            output[here] = torch.baddbmm(second_bias[:, None], second.expand(len(hidden), -1, -1), hidden)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            # For gradients of gradients, of what they flow into.
            targets = [x for x in tensors if x.requires_grad]
            found = iter(torch.autograd.grad(_plain(ctx.slope, *tensors), targets, grad, create_graph=True))
            return None, *(next(found) if x.requires_grad else None for x in tensors)
        first, first_bias, second, _, *inputs = tensors
        sums = [
            torch.zeros_like(x) if wanted else None for x, wanted in zip(tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        of_first, of_first_bias, of_second, of_second_bias, *of_inputs = sums
        for here, hidden in _hidden(ctx.slope, first, first_bias, inputs):
            grad_here = grad[here]
            back = second.mT.expand(len(hidden), -1, -1) @ grad_here
            back = torch.ops.aten.leaky_relu_backward(back, hidden, ctx.slope, True)
            if of_second is not None:
                of_second += (grad_here @ hidden.mT).sum(0)
            if of_second_bias is not None:
                of_second_bias += grad_here.sum((0, 2))
            if of_first_bias is not None:
                of_first_bias += back.sum((0, 2))
            start = 0
            for x, of_x in zip(inputs, of_inputs, strict=True):
                mine = slice(start, start + x.shape[1])
                start = mine.stop
                there = _within(here, x)
                theirs = back if len(x) > 1 or len(back) == 1 else back.sum(0, keepdim=True)
                if of_first is not None:
                    of_first[:, mine] += (theirs @ x[there].mT).sum(0)
                if of_x is not None:
                    of_x[there] += first[:, mine].mT.expand(len(theirs), -1, -1) @ theirs
        return None, *sums


# Rows of the batch, all channels, and pairs.
_Place = tuple[slice, slice, slice]


def _hidden(slope: float, weight: Tensor, bias: Tensor, inputs: Sequence[Tensor]) -> Iterator[tuple[_Place, Tensor]]:
    """Return the hidden numbers `[b, width, n]` of a few pairs after the other, which are gone with the next."""
    batch, pairs, width = max(map(len, inputs)), inputs[0].shape[-1], len(weight)
    columns = max(1, min(pairs, _IN_CACHE // width))
    rows = max(1, _IN_CACHE // (width * columns))
    memory = weight.new_empty(min(rows, batch) * width * columns)
    for start in range(0, pairs, columns):
        for row in range(0, batch, rows):
            here = (slice(row, min(row + rows, batch)), slice(None), slice(start, min(start + columns, pairs)))
            size = (here[0].stop - row, width, here[2].stop - start)
            hidden = memory[: size[0] * size[1] * size[2]].view(size)
            channel_linear(weight, bias, [x[_within(here, x)] for x in inputs], out=hidden)
            yield here, F.leaky_relu_(hidden, slope)


def _within(place: _Place, x: Tensor) -> _Place:
    """Return the place in an input, which may have one row for the whole batch."""
    return (slice(None), *place[1:]) if len(x) == 1 else place
