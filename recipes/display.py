"""What a run shows: a header that says what will happen, and a bar that says how far it is."""

from __future__ import annotations

import contextlib
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib import metadata
from typing import Any

import torch
from accelerate import PartialState
from peft import PeftModel
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, TrainerCallback

from hf_posenc import __version__, record
from hf_posenc.patches.architecture import of_config
from hf_posenc.planning import Plan
from hf_posenc.recipes.recipe import Adapter, Conversion, Distillation, Recipe

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets")
# Of the running mean of the loss: it forgets half of what it saw after about seven entries.
_DECAY = 0.9


# -- what is known before the first step -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run before its first step; the header, the table and the model card tell it.

    Attributes:
        model: Its name, as in the recipe.
        architecture: Name of the architecture.
        native: The architecture's own encoding, in words.
        trained_length: Tokens per window in the model's own training.
        parameters: Of the model, with those of scheme and adapter.
        new_parameters: Of the scheme.
        trained_parameters: Those that the run changes.
        scheme: The scheme; `None` for a control that keeps its own encoding.
        options: Its options by stack, resolved.
        layers: How many layers it has in each stack.
        fate: What becomes of the native encoding, in words.
        start: How the converted model begins, in words.
        cautions: What to know before going on.
        steps: Optimizer steps.
        batch_size: Windows per step, over all processes.
        length: Tokens per window.
        source: Where the text comes from.
        data_tokens: How many tokens of it there are to train on; `None` if that is not known (streaming).
        processes: How many there are.
        device: What they compute on, in words.
        precision: Of the forward.
        teacher: What is learned from, in words; `None` without distillation.
        trained: What is trained, in words.
        command: That made the run.
        versions: Of the packages that computed it, by name.
        came_with: Schemes of a model that was converted before, where it is trained on as it is.
    """

    model: str
    architecture: str
    native: str
    trained_length: int
    parameters: int
    new_parameters: int
    trained_parameters: int
    scheme: str | None
    options: Mapping[str, Mapping[str, Any]]
    layers: Mapping[str, int]
    fate: str
    start: str
    cautions: tuple[str, ...]
    steps: int
    batch_size: int
    length: int
    source: str
    data_tokens: int | None
    processes: int
    device: str
    precision: str
    teacher: str | None
    trained: str
    command: str
    versions: Mapping[str, str]
    came_with: tuple[str, ...] = ()

    @property
    def tokens_per_step(self) -> int:
        """How many tokens an optimizer step sees, over all processes."""
        return self.batch_size * self.length

    @property
    def tokens(self) -> int:
        """How many tokens the model is trained on."""
        return self.steps * self.tokens_per_step

    @classmethod
    def of(
        cls,
        model: Any,
        recipe: Recipe,
        plan: Plan | None,
        *,
        trained_length: int,
        data_tokens: int | None,
        processes: int = 1,
        command: str = "",
    ) -> Facts:
        """Collect the facts of a run.

        Args:
            model: Converted, with its adapter, with `requires_grad` as it is trained; not yet sharded.
            recipe: What is run.
            plan: Of the conversion, made before it with `hf_posenc.plan`: with `native="keep"` for a handover; `None` if
                there is no scheme.
            trained_length: Tokens per window in the model's own training.
            data_tokens: How many tokens there are to train on; `None` if that is not known.
            processes: How many there are.
            command: What was typed.
        """
        inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
        architecture = of_config(inner.config)
        if isinstance(model, PeftModel):
            # PEFT counts weights that are packed into four bits.
            trained_parameters, parameters = model.get_nb_trainable_parameters()
        else:
            trained_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
            parameters = sum(p.numel() for p in model.parameters())
        training, distillation = recipe.training, recipe.distillation
        groups = record.from_config(inner.config) if recipe.conversion.scheme is None else ()
        came_with = tuple(group.scheme for group in groups)
        return cls(
            model=recipe.model,
            architecture=architecture.name,
            native=architecture.native,
            trained_length=trained_length,
            parameters=parameters,
            new_parameters=0 if plan is None else plan.parameters,
            trained_parameters=trained_parameters,
            scheme=recipe.conversion.scheme,
            options={} if plan is None else plan.options,
            layers={} if plan is None else {name: len(layers) for name, layers in plan.layers.items()},
            fate=_fate(recipe.conversion, came_with),
            came_with=came_with,
            start=_start(recipe.conversion, plan),
            cautions=() if plan is None else plan.warnings,
            steps=training.steps,
            batch_size=training.batch_size,
            length=training.length or trained_length,
            source=recipe.data.source,
            data_tokens=data_tokens,
            processes=processes,
            device=_device(PartialState().device),
            precision=training.precision,
            teacher=_teacher(distillation),
            trained=_trained(recipe.adapter),
            command=command,
            versions={
                "hf-posenc": __version__,
                "python": platform.python_version(),
                **{name: metadata.version(name) for name in _PACKAGES},
            },
        )


def _fate(conversion: Conversion, came_with: Sequence[str]) -> str:
    if came_with:
        return "as the converted model has it"
    if conversion.scheme is None or conversion.native == "keep":
        return "kept"
    if conversion.native == "handover":
        return f"handed over from during the first {conversion.handover:.0%} of the steps, then removed"
    return "removed"


def _start(conversion: Conversion, plan: Plan | None) -> str:
    if plan is None:
        return "exact: the model is not converted"
    if conversion.native == "handover":
        return "exact: the native encoding at full strength, the scheme at none"
    start = plan.start
    if plan.start_tolerance:
        start += f" (logits of attention within {plan.start_tolerance:g})"
    if conversion.fit is not None:
        known = {"native": "the native encoding", "attention": "what attention wrote"}
        start += f", after a fit to {known.get(conversion.fit, conversion.fit)}"
    return start


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type.upper()} with {threads} thread{'s' * (threads > 1)}"


def _teacher(wanted: Distillation) -> str | None:
    parts = [f"{wanted.share:.0%} of the loss"] * bool(wanted.share)
    parts += [f"its hidden states by {wanted.hidden:g}"] * bool(wanted.hidden)
    if not parts:
        return None
    fading = f", fading until {wanted.until:.0%} of the steps" if wanted.until else ""
    return f"{wanted.teacher or 'the model as it was'} ({' and '.join(parts)}{fading})"


def _trained(adapter: Adapter) -> str:
    bits = ", on a model in 4 bits" if adapter.four_bit else ""
    if adapter.kind == "lora":
        return f"LoRA of rank {adapter.rank} and the scheme's weights{bits}"
    return {"none": "all weights", "scheme": f"the scheme's weights alone{bits}"}[adapter.kind]


def print_header(console: Console | None, facts: Facts) -> None:
    """Print what will be run; nothing without a console."""
    if console is None:
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(facts):
        table.add_row(Text(name), Text(value))
    console.print(table)


def _rows(facts: Facts) -> list[tuple[str, str]]:
    trained_on = (
        f"{', '.join(facts.came_with)}, trained on as the model has it" if facts.came_with else "none (a control)"
    )
    scheme = trained_on if facts.scheme is None else facts.scheme
    if facts.layers:
        scheme += f" on {' and '.join(f'{count} {name} layers' for name, count in facts.layers.items())}"
    options = {
        name: ", ".join(f"{key}={value!r}" for key, value in given.items()) for name, given in facts.options.items()
    }
    if len(set(options.values())) == 1:
        # One line says it where all stacks have the same.
        options = {"": next(iter(options.values()))}
    epochs = ""
    if facts.data_tokens:
        epochs = (
            f", {facts.data_tokens:,} tokens to train on: {facts.tokens / facts.data_tokens:.2g} times through them"
        )
    return [
        (
            "model",
            f"{facts.model} ({facts.architecture}, {facts.parameters:,} parameters, trained on {facts.trained_length:,} "
            "tokens)",
        ),
        ("scheme", scheme),
        *((f"options {name}".rstrip(), given) for name, given in options.items() if given),
        ("native", f"{facts.native}: {facts.fate}"),
        ("start", facts.start),
        ("trained", f"{facts.trained}: {facts.trained_parameters:,} parameters, {facts.new_parameters:,} of them new"),
        (
            "tokens",
            f"{facts.tokens:,} ({facts.steps:,} steps x {facts.batch_size:,} windows x {facts.length:,} tokens)",
        ),
        ("data", f"{facts.source}{epochs}"),
        *([("teacher", facts.teacher)] if facts.teacher else []),
        ("compute", f"{facts.processes} x {facts.device}, {facts.precision}"),
        ("time", "unknown until the first steps are done"),
        *(("caution", caution) for caution in facts.cautions),
    ]


# -- while it runs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    """How fast a run was, on the machine it ran on.

    Attributes:
        seconds: Per optimizer step, without loading data, measuring and saving.
        tokens: Per second, over all processes.
        memory: Peak of this process in bytes: of the device's memory, or resident; `None` if that is not known.
        steps: Over how many steps this is.
    """

    seconds: float
    tokens: float
    memory: int | None
    steps: int


@contextlib.contextmanager
def counting(console: Console | None, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how far something of `total` steps is and what is left; where the console is not a terminal, one line at its end.

    Yields:
        What is called with the number of steps done.
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
    """A bar with the loss, the speed and what is left; plain lines now and then where the console is not a terminal.

    A context manager as well, which leaves the terminal in order when the training raises:
    `with Progress(...) as progress: Trainer(..., callbacks=[progress]).train()`. The trainer's own displays must be off
    (`disable_tqdm=True`, `remove_callback(PrinterCallback)`); the loss is the one it logs, so let it log often. With a
    teacher, that is no loss on text: the perplexity is then that of `text_loss` in the log, if there is one.

    Args:
        console: Where to show it; `None` is silent.
        facts: Of the run.
        strength: The scheme's strength, given the step and the number of steps (`Handover(...).progress`); `None` without a
            handover.
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
        """How fast the steps of this process were; `None` before the second. Known without a console, too."""
        if self._clock.steps == 0:
            return None
        seconds = self._clock.seconds / self._clock.steps
        return Pace(seconds, self._facts.tokens_per_step / seconds, _peak_memory(), self._clock.steps)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar, of a resumed run where it stopped."""
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
        """Take up the loss, and print a line if it is time and there is no bar."""
        logs = logs or {}
        self._note(logs)
        now = time.monotonic()
        if "loss" in logs and self._live is None and now - self._shown >= self._interval:
            self._shown = now
            self._line()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the bar, or a last line, where it ended."""
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
            # Far above any vocabulary; only a model that diverged gets there.
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
        if self._step < self._steps and left is not None:
            end = datetime.now().astimezone() + timedelta(seconds=left)
            day = "" if left < 12 * 3600 else f"{end:%Y-%m-%d} "
            parts.append(f"{_duration(left)} left, ends about {day}{end:%H:%M}")
        return parts


class _RunningMean:
    """A mean of numbers that forgets the older ones."""

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
    """Times the steps of this process but the first, which also allocates and compiles.

    Attributes:
        steps: How many were timed.
        seconds: What they took, without what lies between them.
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
        """Return how many seconds more steps will take, with what lies between them."""
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
    # In bytes on macOS, in KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
