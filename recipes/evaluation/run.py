"""Evaluation of several models, one after the other, with a progress bar."""

from __future__ import annotations

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
    total, done = len(models) * sum(measure.tokens for measure in measures), 0
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    shown = console is not None and console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not shown) as bar:
        task = bar.add_task("", total=total)
        workers = Workers(batch_size=batch_size, advance=lambda tokens: bar.advance(task, tokens))
        for name, model in models.items():
            bar.update(task, description=f"loading {name}")
            # Modules are callable, too, so callability cannot tell them from loaders.
            loaded = model if isinstance(model, nn.Module) else model()
            for measure in measures:
                measure.check(loaded)
            for measure in measures:
                what = f"{name}: {measure.name}"
                bar.update(task, description=what)
                found[measure.name][name] = measure(loaded, workers)
                done += measure.tokens
                # Uneven batches of several processes make the bar drift.
                bar.update(task, completed=done)
                if console is not None and not shown:
                    text = f"{what} ({done / total:.0%} after {bar.tasks[0].elapsed or 0:.0f} s)"
                    console.print(text, highlight=False, markup=False)
            # Free its memory before the next one is loaded.
            del loaded
    sections = (Section(each.name, each.title, each.note, found[each.name], each.mark) for each in measures)
    return Report(tuple(sections), dict(settings or {}))
