"""The executor of our own kernels. They need Triton."""

import torch
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.gpu.trial import CompiledExecutor
from hf_posenc.forms import GateCount, KeyScan, Stick
from hf_posenc.scheme import Scheme

# Tiles of wider heads do not fit.
_WIDEST = 128


class Triton(CompiledExecutor):
    """One kernel for each scan of the keys. No tensor of size Q x K exists, except a mask that is given as one.

    Queries that see no key get zeros. Gradients of keys and values may be added up in no fixed order.
    """

    name = "triton"

    def structure(self, scheme: Scheme) -> KeyScan | None:
        return scheme.key_scan()

    def computes(self, call: Call) -> bool:
        found = self.structure(call.scheme)
        to_own = isinstance(found, Stick) and found.rest_to_own
        narrow = call.q.shape[-1] == call.v.shape[-1] <= _WIDEST
        return super().computes(call) and call.causal and narrow and not (to_own and not _own_keys_are_last(call))

    def form(self, call: Call) -> str:
        return "stick" if isinstance(self.structure(call.scheme), Stick) else "gate count"

    def run(self, call: Call) -> tuple[Tensor, None]:
        from hf_posenc.attention.gpu import scans

        found = self.structure(call.scheme)
        # Triton launches on the current GPU.
        with torch.autocast(call.device.type, enabled=False), torch.cuda.device_of(call.q):
            if isinstance(found, Stick):
                return scans.break_stick(found, call), None
            assert isinstance(found, GateCount)
            return scans.count_gates(found, call), None


def _own_keys_are_last(call: Call) -> bool:
    """Whether the last keys are the queries' own."""
    missing = call.keys - call.queries
    if call.mask.rule == "slots":
        return call.mask.ahead == missing
    # In a cache there may be slots behind the queries.
    return missing >= 0 and bool((call.positions.key[:, missing:] == call.positions.query).all())
