"""What every executor can be asked: does it know a scheme, does it take a call, in which form, and to run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.scheme import Scheme

# Minimum number of queries for the fused paths: fewer are not worth their calls.
FEWEST_QUERIES = 32


class Executor(ABC):
    """One way to run attention. Every executor equals `Dense`, in outputs and in all gradients.

    Attributes:
        name: Name in `attend(executor=...)`, `plan` and `explain`.
        gives_weights: It returns weights as well as outputs.
        learns_masks: A float mask that requires a gradient gets one.
        reshapes: It applies softcaps and sinks.
        windows: It hides keys beyond a window.
        traces: It can be part of a graph that is compiled or exported, which has no numbers to choose a form by.
        refusal: Reasons not to compute a call, for an error; `None` leaves a call that was forced on it to the blocks.
    """

    name: ClassVar[str]
    gives_weights: ClassVar[bool] = False
    learns_masks: ClassVar[bool] = False
    reshapes: ClassVar[bool] = False
    windows: ClassVar[bool] = False
    traces: ClassVar[bool] = False
    refusal: ClassVar[str | None] = None

    def knows(self, scheme: Scheme, device: torch.device) -> bool:
        """Whether the scheme has the structure that the executor needs, on this kind of device."""
        return True

    def computes(self, call: Call) -> bool:
        """Whether the executor computes this call correctly, given a scheme that it knows."""
        return True

    def pays(self, call: Call) -> bool:
        """Whether the call is large enough for the executor."""
        return True

    def takes(self, call: Call) -> bool:
        """Whether the executor runs this call, unless one before it in `EXECUTORS` does."""
        if not self.pays(call) or (call.need_weights and not self.gives_weights):
            return False
        return (self.learns_masks or not call.mask.learns) and self.fits(call)

    def fits(self, call: Call) -> bool:
        """Whether the executor computes this call correctly, apart from softcap and sinks."""
        windowed = call.mask.window is not None or call.mask.span is not None
        able = (self.windows or not windowed) and (self.reshapes or not call.reshaped)
        return able and self.knows(call.scheme, call.device) and self.computes(call)

    def form(self, call: Call) -> str | None:
        """Return the form in which positions enter, where the executor has several."""
        return None

    @abstractmethod
    def run(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Return the output `[B, H, Q, D]`, and the weights `[B, H, Q, K]` if the executor gives any."""


@dataclass(frozen=True)
class Choice:
    """The name of a call's executor, and the form in which positions entered, where the executor has several."""

    executor: str
    form: str | None = None

    def __str__(self) -> str:
        return self.executor if self.form is None else f"{self.executor} ({self.form})"
