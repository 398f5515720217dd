"""Evaluation of several models, one after the other, with a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from hf_posenc.errors import OptionError
from hf_posenc.recipes.evaluation.measure import Measure, Workers
from hf_posenc.recipes.evaluation.report import Report, Section

# A function that loads a model when its turn comes.
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

    Under `accelerate launch` all processes must call this with the same arguments; they share the work, and each
    returns the whole report.

    Args:
        models: Models by their names in the report, or functions that load them. A function is called when the model's
            turn comes, so that only one model is in memory.
        measures: Measures, each at most once.
        batch_size: Windows or examples per forward.
        console: Console for the progress; `None` is silent.
        settings: Further facts for the report, as JSON values.

    Returns:
        The report.

    Raises:
        OptionError: Models or measures are empty, a measure is given twice, or one is undefined for a model.
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
            # Modules are callable, too, so callability cannot tell them from loaders.
            loaded = model if isinstance(model, nn.Module) else model()
            for measure in measures:
                measure.check(loaded)
            for measure in measures:
                bar.begin(f"{name}: {measure.name}")
                found[measure.name][name] = measure(loaded, workers)
                bar.end(measure.tokens)
            # Free its memory before the next one is loaded.
            del loaded
    sections = tuple(
        Section(measure.name, measure.title, measure.note, found[measure.name], measure.mark) for measure in measures
    )
    return Report(sections, dict(settings or {}))


class _Bar:
    """A progress bar with the remaining time; plain lines where the console is no terminal."""

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
        """Set the bar to the exact count after a measure: uneven batches of several processes make it drift."""
        self._reached += tokens
        self._progress.update(self._task, completed=self._reached)
        if self._console is not None and not self._console.is_terminal:
            share, seconds = self._reached / self._total, time.monotonic() - self._began
            self._console.print(f"{self._what} ({share:.0%} after {seconds:.0f} s)", highlight=False, markup=False)
