"""Any scheme in O(S x block) memory: query blocks one after the other, each computed again in the backward pass."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import get_device_states, set_device_states

from hf_posenc.attention.call import Call, Executor, Index, Rows
from hf_posenc.attention.dense import all_rows
from hf_posenc.derivatives import first_order
from hf_posenc.scheme import Scheme

Result = TypeVar("Result")

# Number of logits up to which most schemes are faster in the dense form, and what it keeps for the backward pass is
# small. At four times as many they are as fast by blocks, and schemes with several numbers per logit more than half
# as fast again.
_DENSE_LOGITS = 2**19
# The logits of a block should stay in cache, with what a scheme makes of them, unless a block then has a few rows
# only. They must never weigh on memory.
_LOGITS_IN_CACHE, _LOGITS_AT_MOST = 2**19, 2**22
_FEW_ROWS = 64
# On a GPU each block costs launches of kernels, so blocks are large: 128 MiB of float32. Other sizes were not tried.
_LOGITS_ON_DEVICE = 2**25


class Blocks(Executor):
    """Blocks of query rows. The forward pass keeps the operands only, and no tensor of size Q x K."""

    name = "blocks"

    def pays(self, call: Call) -> bool:
        return len(call.q) * call.q.shape[1] * call.queries * call.keys > _DENSE_LOGITS

    def run(self, call: Call) -> tuple[Tensor, None]:
        rows = rows_per_block(len(call.q), call.q.shape[1], call.keys, call.device)
        return by_blocks(BlockPlan(call, rows), call), None


def rows_per_block(batch: int, heads: int, keys: int, device: torch.device) -> int:
    logits = max(1, batch * heads * keys)
    if device.type != "cpu":
        return max(16, _LOGITS_ON_DEVICE // logits)
    wanted = max(_LOGITS_IN_CACHE // logits, min(_FEW_ROWS, _LOGITS_AT_MOST // logits))
    return max(16, min(128, wanted))


class BlockPlan:
    """The plan of a call by blocks of `step` rows. It holds no operands; `found` has the blocks of the forward pass."""

    def __init__(self, call: Call, step: int) -> None:
        self.call, self.step = call.outline(), step
        self.parameters = tuple(call.scheme.parameters())
        self.leaves = (*self.parameters, *call.parameters)
        self.found: list[Rows] = []

    def outputs(self, call: Call) -> Iterator[tuple[Rows, Tensor]]:
        """Return the output of each block, given the call with its operands."""
        for rows in self.call.blocks(self.step):
            yield rows, all_rows(call.part(*rows))[0]

    def kept(self, output: Tensor) -> tuple[Tensor, ...]:
        """Return tensors of the forward pass that `gradients` needs, operands aside."""
        return ()

    def gradients(
        self, part: Call, rows: Rows, targets: list[Tensor], grad: Tensor, kept: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of a block's output with respect to targets: tensors of `part`, or parameters.

        `grad` is the gradient of the whole output; `kept` are the tensors that `kept` returned.
        """
        with torch.enable_grad():
            output = all_rows(part)[0]
        return torch.autograd.grad(output, targets, grad[:, :, rows.start : rows.stop], allow_unused=True)

    def beyond(self, call: Call, rows: Rows, grad: Tensor, kept: Sequence[Tensor]) -> Sequence[tuple[Index, Tensor]]:
        """Return further gradients of queries, keys and values, with their places, for keys before `rows.first`."""
        return ()


def by_blocks(plan: BlockPlan, call: Call) -> Tensor:
    output: Tensor = _ByBlocks.apply(plan, *call.operands(), *plan.leaves)  # type: ignore[no-untyped-call]
    return output


class _ByBlocks(torch.autograd.Function):
    """Runs blocks without autograd, and once more with it, one block at a time, in the backward pass.

    `torch.utils.checkpoint` around each block would do the same on paper. But the graph it leaves behind for each
    block sits between the freed buffers of neighbouring blocks, and the process grows by S x S all the same
    (measured: 1.6 GB at S = 4096 against 0.1 GB here).
    """

    @staticmethod
    def forward(ctx: Any, plan: BlockPlan, *tensors: Tensor) -> Tensor:
        call = plan.call.with_operands(tensors[: len(tensors) - len(plan.leaves)])
        ctx.plan, ctx.device = plan, call.device.type
        ctx.autocast = (torch.is_autocast_enabled(ctx.device), torch.get_autocast_dtype(ctx.device))
        ctx.random = (torch.get_rng_state(), *get_device_states(call.q)) if call.dropout > 0 else None
        plan.found = []
        output: Tensor | None = None
        for rows, part in plan.outputs(call):
            plan.found.append(rows)
            if output is None:
                # Once for all: a small tensor kept between two large freed ones keeps their memory from being reused.
                output = part.new_empty(*part.shape[:2], call.queries, part.shape[3])
            output[:, :, rows.start : rows.stop] = part
        assert output is not None
        # The parameters are kept too: torch then notices if one was changed in between.
        kept = plan.kept(output)
        ctx.count = len(kept)
        ctx.save_for_backward(*kept, *tensors)
        return output

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        return with_parameters(plan.call.scheme, plan.parameters, lambda: _ByBlocks.gradients(ctx, grad))

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        tensors = ctx.saved_tensors  # gradient checkpointing gives them once
        kept, tensors = tensors[: ctx.count], tensors[ctx.count :]
        call = plan.call.with_operands(tensors[: len(tensors) - len(plan.leaves)])
        sums = PartSums((*call.operands(), *plan.leaves), ctx.needs_input_grad[1:])
        enabled, dtype = ctx.autocast
        with _replayed(ctx.random), torch.autocast(ctx.device, dtype=dtype, enabled=enabled):
            for rows in plan.found:
                part = sums.take(call, rows)
                sums.add(plan.gradients(part, rows, sums.targets, grad, kept))
                sums.add_at(plan.beyond(call, rows, grad, kept))
        return (None, *sums.result())


class PartSums:
    """Sums of the gradients of operands, of which each block reads a part, and of leaves, which it reads as a whole.

    `targets` are what a block's gradients are taken for, in order: parts of operands, and leaves.
    """

    def __init__(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self.tensors, self.wanted = tensors, wanted
        self.totals = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if learns else None
            for x, learns in zip(tensors, wanted, strict=True)
        ]

    def take(self, call: Call, rows: Rows) -> Call:
        """Return a block of a call, on operands of its own: no gradient is padded to the size of the whole."""
        part, places = call.part(*rows), call.places(*rows)
        own = [x.detach().requires_grad_(learns) for x, learns in zip(part.operands(), self.wanted, strict=False)]
        leaves = self.tensors[len(own) :]
        self.places = (*places, *[()] * len(leaves))
        self.targets = [x for x, learns in zip((*own, *leaves), self.wanted, strict=True) if learns]
        return part.with_operands(own)

    def add(self, found: Iterable[Tensor | None]) -> None:
        given = iter(found)
        for total, place in zip(self.totals, self.places, strict=True):
            part = None if total is None else next(given)
            if total is not None and part is not None:
                total[place] += part

    def add_at(self, found: Sequence[tuple[Index, Tensor]]) -> None:
        """Take gradients of the first operands at other places."""
        for total, (place, part) in zip(self.totals, found, strict=False):
            if total is not None:
                total[place] += part

    def result(self) -> list[Tensor | None]:
        return [None if y is None else y.to(x.dtype) for x, y in zip(self.tensors, self.totals, strict=True)]


# -- what the forward pass has read ----------------------------------------------------------------------------------


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


@contextlib.contextmanager
def _replayed(random: tuple[Tensor, list[int], list[Tensor]] | None) -> Iterator[None]:
    """Replay the random numbers of the forward pass, if it drew any (dropout)."""
    if random is None:
        yield
        return
    on_cpu, devices, on_devices = random
    with torch.random.fork_rng(devices):
        torch.set_rng_state(on_cpu)
        set_device_states(devices, on_devices)
        yield
