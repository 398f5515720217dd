"""The small network that FIRE and CAPE ask about every pair of a query and a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc.hiding import worth_it
from hf_posenc.schemes._linear import LentLinear, channel_linear

# So many hidden numbers at once: those of a whole block of logits would fit into no cache, and be written to new memory each time.
_IN_CACHE = 2**18


class PairNetwork(nn.ModuleList):
    """Two linear layers with a ReLU between them, from the channels of `[B|1, C, N]` to others, for each of N pairs.

    Args:
        in_channels: Channels of all inputs together.
        width: Hidden channels.
        out_channels: Channels of the output.
        negative_slope: For a leaky ReLU.
        residual: Add all inputs to the output, of which each has as many channels.
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
        """Let the output be zero, whatever comes in."""
        nn.init.zeros_(self.layers[1].weight)
        nn.init.zeros_(self.layers[1].bias)

    def is_silent(self) -> bool:
        """Return whether it is."""
        return not (bool(self.layers[1].weight.any()) or bool(self.layers[1].bias.any()))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return `[B|1, out_channels, N]`, in the dtype of the inputs."""
        weights = [x.to(inputs[0]) for layer in self.layers for x in layer()]
        run = _InCache.apply if worth_it(inputs[0]) else _plain
        output: Tensor = run(self.negative_slope, self.residual, *weights, *inputs)
        return output


def _plain(
    slope: float,
    residual: bool,
    first: Tensor,
    first_bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    *inputs: Tensor,
) -> Tensor:
    hidden = F.leaky_relu(channel_linear(first, first_bias, inputs), slope)
    output = channel_linear(second, second_bias, [hidden])
    return sum(inputs, output) if residual else output


class _InCache(torch.autograd.Function):
    """`_plain`, a few pairs after the other, of which nothing hidden is kept for the way back.

    Biases are weights of one more channel, which is 1: so every step is one product.
    """

    @staticmethod
    def forward(ctx: Any, slope: float, residual: bool, *tensors: Tensor) -> Tensor:
        ctx.slope, ctx.residual = slope, residual
        ctx.save_for_backward(*tensors)
        first, second, inputs = _with_biases(tensors)
        output = second.new_empty(max(map(len, inputs)), len(second), inputs[0].shape[-1])
        for here, _, hidden in _few_at_once(slope, first, inputs):
            made = second.expand(len(hidden), -1, -1) @ hidden
            for x in inputs if residual else ():
                made += x[_within(here, x)]
            output[here] = made
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            # For gradients of gradients, of what they flow into.
            targets = [x for x in tensors if x.requires_grad]
            found = iter(
                torch.autograd.grad(_plain(ctx.slope, ctx.residual, *tensors), targets, grad, create_graph=True)
            )
            return None, None, *(next(found) if x.requires_grad else None for x in tensors)
        first, second, inputs = _with_biases(tensors)
        wanted = ctx.needs_input_grad[2:]
        of_first, of_second = torch.zeros_like(first), torch.zeros_like(second)
        # Those with one row for the whole batch are sums over it.
        of_inputs = [
            (torch.empty_like if len(x) == len(grad) else torch.zeros_like)(x) if learns else None
            for x, learns in zip(inputs, wanted[4:], strict=True)
        ]
        for here, given, hidden in _few_at_once(ctx.slope, first, inputs):
            theirs = grad[here]
            back = second.mT.expand(len(hidden), -1, -1) @ theirs
            back = torch.ops.aten.leaky_relu_backward(back, hidden, ctx.slope, True)
            if any(wanted[:4]):
                of_second += (theirs @ hidden.mT).sum(0)
                of_first += (back @ given.mT).sum(0)
            if any(wanted[4:]):
                back = first[:, :-1].mT.expand(len(back), -1, -1) @ back
                for x, part in zip(of_inputs, back.split([x.shape[1] for x in inputs], dim=1), strict=True):
                    if x is None:
                        continue
                    if ctx.residual:
                        part += theirs
                    if len(x) == len(grad):
                        x[here] = part
                    else:
                        x[_within(here, x)] += part.sum(0, keepdim=True)
        of_weights = (of_first[:-1, :-1], of_first[:-1, -1], of_second[:, :-1], of_second[:, -1])
        return None, None, *(x if learns else None for x, learns in zip(of_weights, wanted, strict=False)), *of_inputs


# Rows of the batch, all channels, and pairs.
_Place = tuple[slice, slice, slice]


def _with_biases(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Return the weights of both layers with their biases in one more column, and the inputs.

    The first has one more row, which makes a hidden channel of 1.
    """
    first, first_bias, second, second_bias, *inputs = tensors
    one = first.new_zeros(1, first.shape[1] + 1)
    one[0, -1] = 1
    first = torch.cat((torch.cat((first, first_bias[:, None]), dim=1), one))
    return first, torch.cat((second, second_bias[:, None]), dim=1), inputs


def _few_at_once(slope: float, weight: Tensor, inputs: Sequence[Tensor]) -> Iterator[tuple[_Place, Tensor, Tensor]]:
    """Return where a few pairs are, their inputs with a channel of 1 and hidden numbers, each `[b, ..., n]`.

    They are gone when the next come.
    """
    batch, pairs, (width, channels) = max(map(len, inputs)), inputs[0].shape[-1], weight.shape
    columns = max(1, min(pairs, _IN_CACHE // width))
    rows = max(1, min(batch, _IN_CACHE // (width * columns)))
    all_given, all_hidden = (weight.new_empty(rows * count * columns) for count in (channels, width))
    for start in range(0, pairs, columns):
        for row in range(0, batch, rows):
            here = (slice(row, min(row + rows, batch)), slice(None), slice(start, min(start + columns, pairs)))
            many, few = here[0].stop - row, here[2].stop - start
            given = all_given[: many * channels * few].view(many, channels, few)
            parts = torch.split(given[:, :-1], [x.shape[1] for x in inputs], dim=1)
            for part, x in zip(parts, inputs, strict=True):
                part.copy_(x[_within(here, x)])
            given[:, -1] = 1
            hidden = all_hidden[: many * width * few].view(many, width, few)
            torch.bmm(weight.expand(many, -1, -1), given, out=hidden)
            yield here, given, F.leaky_relu_(hidden, slope)


def _within(place: _Place, x: Tensor) -> _Place:
    """Return the place in a tensor that may have one row for the whole batch."""
    return (slice(None), *place[1:]) if len(x) == 1 else place
