"""The executor of our own kernels. They need Triton."""

import torch
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.gpu.trial import CompiledExecutor
from hf_posenc.forms import Bias, DistanceTable, GateCount, KeyScan, PiecewiseLinear, Stick
from hf_posenc.scheme import Scheme

# Tiles of wider heads do not fit.
_WIDEST, _WIDEST_SCAN = 256, 128
# A table of more distances takes more memory than most calls.
_FARTHEST = 2**20
_FORMS = {
    DistanceTable: "distance table",
    PiecewiseLinear: "straight pieces",
    Stick: "stick",
    GateCount: "gate count",
}


class Triton(CompiledExecutor):
    """A kernel for biases of the distance, and one for each scan of the keys.

    No tensor of size Q x K exists, except a mask that is given as one. Queries that see no key get zeros. Gradients may
    be added up in no fixed order.
    """

    name = "triton"

    def structure(self, scheme: Scheme) -> KeyScan | Bias | None:
        scan, added = scheme.key_scan(), scheme.added()
        return added if scan is None and isinstance(added, (DistanceTable, PiecewiseLinear)) else scan

    def computes(self, call: Call) -> bool:
        found, width = self.structure(call.scheme), call.q.shape[-1]
        if not super().computes(call) or call.k.shape != call.v.shape:
            return False
        if isinstance(found, Bias):
            near = call.reach < _FARTHEST
            return near and width <= _WIDEST and (call.causal or isinstance(found, DistanceTable))
        to_own = isinstance(found, Stick) and found.rest_to_own
        plain = call.causal and not (call.reshaped or call.mask.windowed) and width <= _WIDEST_SCAN
        return plain and not (to_own and not _own_keys_are_last(call))

    def form(self, call: Call) -> str:
        found = self.structure(call.scheme)
        return next(name for kind, name in _FORMS.items() if isinstance(found, kind))

    def run(self, call: Call) -> tuple[Tensor, None]:
        from hf_posenc.attention.gpu import distance, scans

        found = self.structure(call.scheme)
        # Triton launches on the current GPU.
        with torch.autocast(call.device.type, enabled=False), torch.cuda.device_of(call.q):
            if isinstance(found, (DistanceTable, PiecewiseLinear)):
                return distance.add_bias(found, call), None
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
