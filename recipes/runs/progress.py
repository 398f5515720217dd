"""Progress displays: a bar with loss and speed for the training, and plain bars for the steps before it."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from hf_posenc.recipes.runs.facts import Facts

# Decay of the running mean of the loss; its half-life is about seven entries.
_DECAY = 0.9
# Maximum number of seconds left for which an end time is shown: dates have a limit.
_FORESEEABLE = 100 * 365 * 24 * 3600


@dataclass(frozen=True)
class Pace:
    """Speed and memory of a run, on its machine.

    Attributes:
        seconds: Seconds per optimizer step, without loading data, measuring and saving.
        tokens: Tokens per second, over all processes.
        memory: Peak memory of this process in bytes, on the GPU or else resident; `None` if unknown.
        steps: Number of timed steps.
    """

    seconds: float
    tokens: float
    memory: int | None
    steps: int


@contextlib.contextmanager
def counting(console: Console | None, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar for `total` steps with the time left, or one line at the end if the console is not a terminal.

    Yields:
        A function to call with the number of steps done.
    """
    shown = console is not None and console.is_terminal
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    began = time.monotonic()
    with Bar(*columns, console=console, disable=not shown, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)
    if console is not None:
        console.print(f"{what}: {total} steps in {time.monotonic() - began:.0f} s", highlight=False)


class Progress(TrainerCallback):
    """Callback that shows a bar with loss, speed and time left, or plain lines if the console is not a terminal.

    Use it as a context manager, which restores the terminal if the training raises:
    `with Progress(...) as progress: Trainer(..., callbacks=[progress]).train()`. Turn the trainer's own displays off
    (`disable_tqdm=True`, `remove_callback(PrinterCallback)`), and let it log often, since the shown loss is the logged
    one. With a teacher, perplexity comes from `text_loss` in the log, if present.

    Args:
        console: Console; `None` is silent.
        facts: Facts of the run.
        strength: Function from step and number of steps to the scheme's strength (`Handover(...).progress`); `None`
            without a handover.
        interval: Seconds between plain lines.
    """

    def __init__(
        self,
        console: Console | None,
        facts: Facts,
        *,
        strength: Callable[[int, int], float] | None = None,
        interval: float = 30.0,
    ) -> None:
        self._console, self._facts, self._strength, self._interval = console, facts, strength, interval
        self._live: Live | None = None
        self._step = self._steps = 0
        self._loss, self._text_loss = _RunningMean(), _RunningMean()
        self._clock = _Clock()
        self._began = self._shown = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def pace(self) -> Pace | None:
        """Speed of this process, also without a console; `None` before the second step."""
        if self._clock.steps == 0:
            return None
        seconds = self._clock.seconds / self._clock.steps
        return Pace(seconds, self._facts.tokens_per_step / seconds, _peak_memory(), self._clock.steps)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar; in a resumed run, at the step where it stopped."""
        self._step, self._steps = state.global_step, state.max_steps
        for logs in state.log_history:
            self._note(logs)
        self._clock = _Clock()
        self._began = self._shown = time.monotonic()
        if self._console is not None and self._console.is_terminal:
            self._live = Live(get_renderable=self._bar, console=self._console, refresh_per_second=4)
            self._live.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self._clock.stop()
        self._step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the loss, and print a line if it is time and there is no bar."""
        logs = logs or {}
        self._note(logs)
        now = time.monotonic()
        if "loss" in logs and self._live is None and now - self._shown >= self._interval:
            self._shown = now
            self._line()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the bar, or print a last line."""
        if self._live is None:
            self._line()
        self.__exit__()

    def _note(self, logs: Mapping[str, Any]) -> None:
        self._loss.add(logs.get("loss"))
        self._text_loss.add(logs.get("text_loss" if self._facts.teacher else "loss"))

    def _line(self) -> None:
        if self._console is not None:
            parts = [self._position(), *self._numbers(), *self._times()]
            self._console.print(", ".join(parts), highlight=False, markup=False, soft_wrap=True)

    def _bar(self) -> Group:
        line = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None):
            line.add_column(no_wrap=True, ratio=ratio)
        line.add_row(
            Text(self._position()),
            ProgressBar(total=max(1, self._steps), completed=self._step),
            Text(", ".join(self._times())),
        )
        return Group(line, Text(", ".join(self._numbers()), style="dim"))

    def _position(self) -> str:
        return f"step {self._step:,}/{self._steps:,}"

    def _numbers(self) -> list[str]:
        parts = []
        if self._loss.value is not None:
            parts.append(f"loss {self._loss.value:.3f}")
        if self._text_loss.value is not None:
            # Without a limit, exp would overflow for a model that diverged.
            parts.append(f"perplexity {math.exp(min(self._text_loss.value, 700.0)):.4g}")
        pace = self.pace
        if pace is not None:
            parts.append(f"{pace.tokens:,.0f} tokens/s")
            if pace.memory is not None:
                parts.append(f"{pace.memory / 2**20:,.0f} MiB at most")
        if self._strength is not None:
            parts.append(f"scheme at {self._strength(self._step, self._steps):.0%}")
        return parts

    def _times(self) -> list[str]:
        parts = [f"{_duration(time.monotonic() - self._began)} gone"]
        left = self._clock.left(self._steps - self._step)
        if self._step < self._steps and left is not None and left < _FORESEEABLE:
            end = datetime.now().astimezone() + timedelta(seconds=left)
            day = "" if left < 12 * 3600 else f"{end:%Y-%m-%d} "
            parts.append(f"{_duration(left)} left, ends about {day}{end:%H:%M}")
        return parts


class _RunningMean:
    """Exponential moving average."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None

    def add(self, number: float | None) -> None:
        if number is not None:
            self._sum = _DECAY * self._sum + (1 - _DECAY) * number
            self._weight = _DECAY * self._weight + (1 - _DECAY)


class _Clock:
    """Clock of the steps of this process, except the first, which also allocates and compiles.

    Attributes:
        steps: Number of timed steps.
        seconds: Their total time, without the time between steps.
    """

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0
        self._began = 0.0
        self._first: float | None = None

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = now
        else:
            self.steps += 1
            self.seconds += now - self._began

    def left(self, steps: int) -> float | None:
        """Return the expected seconds for more steps, with the time between them."""
        if self._first is None or self.steps == 0:
            return None
        return (time.perf_counter() - self._first) / self.steps * steps


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
    return str(timedelta(seconds=round(seconds)))
