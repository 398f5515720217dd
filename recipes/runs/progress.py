"""Progress of a training: a bar, or plain lines if the console is not a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from transformers import TrainerCallback

from hf_posenc.recipes.reports import say


@dataclass(frozen=True)
class Pace:
    """Speed and memory of a run: seconds per optimizer step, without loading data, measuring and saving.

    Tokens are those per second, over all processes. Memory is the peak of this process in bytes, on the GPU or else
    resident.
    """

    seconds: float
    tokens: float
    memory: int | None
    steps: int


class Progress(TrainerCallback):
    """Callback that shows loss, speed and time left: a bar, or plain lines if the console is not a terminal.

    As a context manager it restores the terminal if the training raises. The shown loss is the logged one.

    Tokens are those of a step, over all processes. `text` is the key of the loss on the text in the log, which gives
    the perplexity; empty if there is none.
    """

    def __init__(self, console: Console | None, tokens: int, *, text: str = "loss", interval: float = 30.0) -> None:
        self._console, self._tokens, self._text, self._interval = console, tokens, text, interval
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}"))
        self._bar = Bar(*columns, console=console, disable=console is None or not console.is_terminal, expand=True)
        # The last of each number that was logged.
        self._logs: dict[str, float] = {}
        self._steps, self._seconds, self._has_estimated = 0, 0.0, False
        self._began = self._shown = time.monotonic()
        self._step_began = self._first_ended = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    @property
    def pace(self) -> Pace | None:
        """Speed of this process, also without a console; `None` before the second step."""
        if self._steps == 0:
            return None
        seconds = self._seconds / self._steps
        return Pace(seconds, self._tokens / seconds, _peak_memory(), self._steps)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for logs in state.log_history:
            self._logs.update(logs)
        self._steps, self._seconds, self._first_ended = 0, 0.0, 0.0
        self._began = self._shown = time.monotonic()
        self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step)
        self._bar.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step_began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock, which leaves out the first step, since that also allocates and compiles."""
        now = time.monotonic()
        if self._first_ended:
            self._steps += 1
            self._seconds += now - self._step_began
        else:
            self._first_ended = now
        if not self._bar.disable:
            self._bar.update(self._task, completed=state.global_step, description=", ".join(self._parts(state)))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the loss, and print a line if it is time and there is no bar."""
        self._logs.update(logs)
        # The first line with an estimate does not wait. `on_train_end` prints the last line.
        is_first = self._steps > 1 and not self._has_estimated
        is_due = (is_first or time.monotonic() - self._shown >= self._interval) and state.global_step < state.max_steps
        if "loss" in logs and is_due:
            self._shown, self._has_estimated = time.monotonic(), self._steps > 1
            self._line(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._line(state)
        self._bar.stop()

    def _line(self, state: Any) -> None:
        if self._bar.disable:
            say(self._console, ", ".join([f"step {state.global_step:,}/{state.max_steps:,}", *self._parts(state)]))

    def _parts(self, state: Any) -> Iterator[str]:
        if "loss" in self._logs:
            text = self._logs.get(self._text) if self._text != "loss" else None
            # While a teacher fades, the whole rises and that on the text falls.
            on_text = "" if text is None else f" ({text:.3f} on the text)"
            yield f"loss {self._logs['loss']:.3f}{on_text}"
        if self._text in self._logs:
            # Without a limit, exp would overflow for a model that diverged.
            yield f"perplexity {math.exp(min(self._logs[self._text], 700.0)):.4g}"
        if (pace := self.pace) is not None:
            yield f"{pace.tokens:,.0f} tokens/s"
        yield f"{_duration(time.monotonic() - self._began)} elapsed"
        if pace is not None and state.global_step < state.max_steps:
            # With the time between steps.
            mean = (time.monotonic() - self._first_ended) / pace.steps
            yield f"{_duration(mean * (state.max_steps - state.global_step))} left"


def _peak_memory() -> int | None:
    if torch.cuda.is_available() and (allocated := torch.cuda.max_memory_allocated()):
        return allocated
    try:
        import resource
    except ImportError:  # Windows
        return None
    # macOS reports bytes, others KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _duration(seconds: float) -> str:
    # Spans of time have a limit.
    return str(timedelta(seconds=round(min(seconds, 1e9))))
