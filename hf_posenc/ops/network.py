"""Two linear layers with a ReLU between them, for every pair of a query and a key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.ops import transformed

# Minimum number of inputs for a backward pass by hand.
_WORTH_IT = 2**16
# Hidden numbers at once: those of a whole block of logits would fit into no cache, and be written to new memory each
# time.
_IN_CACHE = 2**18


def pair_network(weights: Sequence[Tensor], inputs: Sequence[Tensor], *, slope: float, residual: bool) -> Tensor:
    """Return the output `[B|1, out, N]` of the network for N pairs.

    Args:
        weights: Weight `[hidden, C]` and bias `[hidden]` of the first layer, weight `[out, hidden]` and bias `[out]`
            of the second.
        inputs: Channels of the pairs, each `[B|1, c, N]`; together they have C channels.
        slope: Slope of the ReLU for negative numbers.
        residual: Add all inputs to the output; each has as many channels as that.
    """
    x = inputs[0]
    # A graph that is being compiled has no numbers.
    left_to_torch = torch.compiler.is_compiling() or transformed()
    by_hand = not left_to_torch and x.numel() >= _WORTH_IT and x.device.type == "cpu"
    run = _InCache.apply if by_hand else naive
    output: Tensor = run(slope, residual, *weights, *inputs)
    return output


def naive(
    slope: float,
    residual: bool,
    first: Tensor,
    first_bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    *inputs: Tensor,
) -> Tensor:
    hidden = F.leaky_relu(_channel_linear(first, first_bias, inputs), slope)
    output = _channel_linear(second, second_bias, [hidden])
    return sum(inputs, output) if residual else output


class _InCache(torch.autograd.Function):
    """The same, a few pairs at a time. No hidden number is kept for the backward pass.

    Biases are weights of one more channel, which is 1, so every step is one product.
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
            targets = [x for x in tensors if x.requires_grad]
            again = naive(ctx.slope, ctx.residual, *tensors)
            found = iter(torch.autograd.grad(again, targets, grad, create_graph=True))
            return None, None, *(next(found) if x.requires_grad else None for x in tensors)
        first, second, inputs = _with_biases(tensors)
        wanted = ctx.needs_input_grad[2:]
        of_first, of_second = torch.zeros_like(first), torch.zeros_like(second)
        # Inputs with one row for the whole batch get sums over it.
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
    """Return the place of a few pairs, their inputs with a channel of 1 and hidden numbers, each `[b, ..., n]`.

    The next pairs overwrite them.
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


def _within(place: _Place, x: Tensor) -> _Place:
    """Return the place in a tensor that may have one row for the whole batch."""
    return (slice(None), *place[1:]) if len(x) == 1 else place
