"""Attention with a scheme: one record of a call, executors that must agree, and the choice between them."""

from hf_posenc.attention.call import Call, Executor, reach
from hf_posenc.attention.engine import EXECUTORS, attend, choose, executors, recorded, run
from hf_posenc.attention.mask import Mask, from_tensor

__all__ = [
    "EXECUTORS",
    "Call",
    "Executor",
    "Mask",
    "attend",
    "choose",
    "executors",
    "from_tensor",
    "reach",
    "recorded",
    "run",
]
