"""Stop of a run that a signal asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

# Seconds within which a signal is the same one: some programs send it to a process and to its group.
_ONCE = 1.0


class Stop(TrainerCallback):
    """Callback that saves a checkpoint at the end of the step in which the process is asked to stop.

    It comes after the callback that completes checkpoints. With several processes it does nothing: they may be asked in
    different steps, and would wait for each other.
    """

    def __init__(self) -> None:
        self._training = False
        self._then: Callable[[], Any] | None = None
        self._asked = 0.0

    def ask(self, then: Callable[[], Any]) -> bool:
        """Call a function, which must not return, as soon as a checkpoint is saved.

        Returns:
            Whether that will be: not where nothing is being trained, and not where it was asked some time before.
        """
        if not self._training:
            return False
        if self._then is None:
            self._then, self._asked = then, time.monotonic()
        return time.monotonic() - self._asked < _ONCE

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training, self._then = PartialState().num_processes == 1, None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._then is not None:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._then is not None:
            self._then()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.over()

    def over(self) -> None:
        """Say that nothing is being trained, also after a failure: from now on, `ask` would wait for nothing."""
        self._training, self._then = False, None


# Signals are for a process, too.
STOP = Stop()
