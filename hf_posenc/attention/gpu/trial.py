"""Kernels that are compiled on the spot must pass a trial before they are used.

No test can run on every GPU, driver and compiler. So the first call of each kind is computed a second time by the dense
reference, for its last rows, with gradients where there are any. A kernel that gives another result, or does not run,
is not used, and a warning says so.
"""

import functools
import importlib.util
import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hf_posenc.attention.call import FEWEST_QUERIES, Call, Executor
from hf_posenc.attention.dense import Dense
from hf_posenc.attention.once import Once
from hf_posenc.forms import Bias, KeyScan
from hf_posenc.scheme import Scheme

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The oldest GPUs whose matrix units multiply bfloat16.
_CAPABILITY = (8, 0)
# torch has another kernel for fewer queries than that.
_ROWS = 128
# Tolerance relative to the root mean square, by bytes of a number: half precision rounds operands, and GPUs may
# multiply float32 with 10 bits.
_TOLERANCE = {8: 1e-6, 4: 5e-3, 2: 5e-2}
_COMPARED = ("output", "gradient of q", "gradient of k", "gradient of v", "gradient of the parameters")
# Gradients of parameters are sums over all logits, many of which cancel.
_SUMMED = 4
_PASSED: Once[bool] = Once()


@functools.cache
def available(device: torch.device) -> bool:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _CAPABILITY


class CompiledExecutor(Executor):
    """An executor whose kernels are compiled, so that they must pass a trial."""

    @abstractmethod
    def structure(self, scheme: Scheme) -> KeyScan | Bias | None:
        """Return the structure of a scheme, if there is a kernel for it."""

    def knows(self, scheme: Scheme, device: torch.device) -> bool:
        return available(device) and self.structure(scheme) is not None

    def pays(self, call: Call) -> bool:
        return call.queries >= FEWEST_QUERIES

    def computes(self, call: Call) -> bool:
        plain = call.native_score is None and call.mask.bias is None and not (call.dropout or call.upcast)
        return plain and call.q.dtype == call.k.dtype == call.v.dtype and call.q.dtype in _DTYPES

    def takes(self, call: Call) -> bool:
        # Gradients are added up in no fixed order.
        return super().takes(call) and not torch.are_deterministic_algorithms_enabled() and self.passed(call)

    def passed(self, call: Call) -> bool:
        """Whether the executor equals the reference in the first call of this kind."""
        of_scheme = (type(call.scheme), repr(call.scheme.options()))
        masked = (call.mask.rule, call.mask.keep is None, call.mask.windowed, call.softcap is None, call.sinks is None)
        shape = (call.q.dtype, call.device, call.q.shape[-1], call.queries < _ROWS)
        learns = torch.is_grad_enabled()
        kind = (self.name, self.form(call), *of_scheme, *shape, *masked, learns)
        return _PASSED.get(kind, lambda: self._passes(call, learns), call.device)

    def _passes(self, call: Call, learns: bool) -> bool:
        problem = _difference(self, call, learns)
        if problem is not None:
            warnings.warn(
                f"The {self.name} kernel for {type(call.scheme).__name__} {problem} on {call.device}. Attention goes "
                "by blocks instead, which is slower. Please report this, and your torch and triton versions.",
                stacklevel=1,
            )
        return problem is None


def _difference(executor: Executor, call: Call, learns: bool) -> str | None:
    """Return what is wrong with an executor, as the rest of a sentence."""
    part = call.part(max(0, call.queries - _ROWS), call.queries, call.keys)
    # Copies have no part in the caller's graph.
    part = part.with_operands([x.detach().clone() for x in part.operands()])
    seen = part.mask.seen(part.positions)[0]
    rows = torch.ones((), device=call.device) if seen is None else seen.any(-1, keepdim=True)
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(part.q.shape, generator=random, device="cpu").to(part.q) * rows
    want = _results(Dense().run, part, weight, learns)
    try:
        got = _results(executor.run, part, weight, learns)
    except Exception as error:  # a compiler may raise anything
        return f"does not run ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    tolerance = _TOLERANCE[call.q.element_size()]
    for what, a, b in zip(_COMPARED, got, want, strict=False):
        off, size = (float(x.double().square().mean().sqrt()) for x in (a.double() - b.double(), b))
        slack = tolerance * (_SUMMED if what == _COMPARED[-1] else 1)
        if not off <= slack * (size + slack):
            return f"is off by {off / size:.1e} in its {what}"
    return None


def _results(
    run: Callable[[Call], tuple[Tensor, Tensor | None]], call: Call, weight: Tensor, learns: bool
) -> list[Tensor]:
    """Return the output and, where the caller wants any, the gradients."""
    leaves = [x.detach().requires_grad_(learns) for x in (call.q, call.k, call.v)]
    with torch.set_grad_enabled(learns):
        output, _ = run(replace(call, q=leaves[0], k=leaves[1], v=leaves[2]))
    found = [output.detach() * weight.ne(0)]
    if learns:
        own = [x for x in (*call.scheme.parameters(), *call.parameters) if x.requires_grad]
        grads = torch.autograd.grad(output, leaves + own, weight, allow_unused=True, materialize_grads=True)
        found += grads[:3]
        if own:
            found.append(torch.cat([x.flatten().float() for x in grads[3:]]))
    return found
