"""Measure several models, one after the other, with a bar that says how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from hf_posenc.errors import OptionError
from hf_posenc.recipes.evaluation.measure import Measure
from hf_posenc.recipes.evaluation.report import Report, Section
from hf_posenc.recipes.evaluation.workers import Workers

# A model, or what loads one when it is its turn.
Loader = Callable[[], Any]


def evaluate(
    models: Mapping[str, nn.Module | Loader],
    measures: Sequence[Measure],
    *,
    batch_size: int = 8,
    console: Console | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Report:
    """Measure language models on the same inputs.

    Under `accelerate launch` all processes must call this with the same arguments; they share the work, and each returns the
    whole report.

    Args:
        models: By the name that they have in the report. A function is called when it is the model's turn, so that only one
            model is in memory.
        measures: What is measured, each at most once.
        batch_size: Windows or examples per forward.
        console: Where progress is shown; `None` is silent.
        settings: What the report is to remember besides, in terms of JSON.

    Returns:
        What was found, to be written or read.

    Raises:
        OptionError: There is nothing to measure, a measure is given twice, or one is not defined for a model.
    """
    names = [measure.name for measure in measures]
    if not models or not measures:
        raise OptionError("evaluate() needs at least one model and one measure.")
    if len(set(names)) < len(names):
        raise OptionError(f"evaluate(measures=...): got {', '.join(names)}; each can be given once.")
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    with _Bar(console, len(models) * sum(measure.tokens for measure in measures)) as bar:
        workers = Workers(batch_size=batch_size, advance=bar.advance)
        for name, model in models.items():
            bar.begin(f"loading {name}")
            # A module is a function, too, of something else.
            loaded = model if isinstance(model, nn.Module) else model()
            for measure in measures:
                measure.check(loaded)
            for measure in measures:
                bar.begin(f"{name}: {measure.name}")
                found[measure.name][name] = measure(loaded, workers)
                bar.end(measure.tokens)
            # Before the next one is loaded.
            del loaded
    sections = tuple(
        Section(measure.name, measure.title, measure.note, found[measure.name], measure.mark) for measure in measures
    )
    return Report(sections, dict(settings or {}))


class _Bar:
    """Shows what is measured and how long it will take; plain lines where the console is no terminal."""

    def __init__(self, console: Console | None, total: int) -> None:
        self._console = console
        shown = console is not None and console.is_terminal
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not shown)
        self._task = self._progress.add_task("", total=total)
        self._total, self._reached, self._what = total, 0, ""
        self._began = time.monotonic()

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, what: str) -> None:
        self._what = what
        self._progress.update(self._task, description=what)

    def advance(self, tokens: int) -> None:
        self._progress.update(self._task, advance=tokens)

    def end(self, tokens: int) -> None:
        """Take up what a measure has read: with several processes, its batches need not divide evenly."""
        self._reached += tokens
        self._progress.update(self._task, completed=self._reached)
        if self._console is not None and not self._console.is_terminal:
            share, seconds = self._reached / self._total, time.monotonic() - self._began
            self._console.print(f"{self._what} ({share:.0%} after {seconds:.0f} s)", highlight=False, markup=False)
