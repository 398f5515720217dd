"""Measurements of a run, kept in a file: the original, and the converted model before, during and after training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback

from hf_posenc.patches.atomic_files import reading
from hf_posenc.recipes.data.windows import Prepared, start_token
from hf_posenc.recipes.evaluation.grid import Grid
from hf_posenc.recipes.evaluation.perplexity import ContextPerplexity, contexts_for, windows_for
from hf_posenc.recipes.evaluation.recall import RECALLS, InductionCopy, ordinary_tokens, recalls_for
from hf_posenc.recipes.evaluation.report import Report, Section
from hf_posenc.recipes.evaluation.verdict import ORIGINAL
from hf_posenc.recipes.reports import say
from hf_posenc.recipes.schema.recipe import Evaluation
from hf_posenc.recipes.storage import load, save

_PERPLEXITY = ContextPerplexity.name
_NOTE = "The same held-out windows and sequences, by model or optimizer step of the converted one."

# A function that measures a model, and returns the results by name: perplexity, and `RECALLS` of causal models.
Measure = Callable[[Any], Mapping[str, Grid]]


def measures_of(
    evaluation: Evaluation, config: Any, tokenizer: Any, data: Prepared, length: int, own: int
) -> tuple[dict[str, ContextPerplexity | InductionCopy], tuple[str, ...]]:
    """Return the measures of a run by name, perplexity first, and why some contexts are left out.

    They are those of a model of a trained length `own`, after a training in windows of `length`. Raise `RecipeError` if
    the text is too short, or a context.
    """
    tokens, longest = len(data.held_out), max(evaluation.contexts or [min(own, length)])
    windows = windows_for(longest, tokens, most=evaluation.windows)
    contexts, notes = contexts_for(own, tokens, windows=windows, contexts=evaluation.contexts)
    if windows < evaluation.windows:
        notes = (f"measured in {windows} windows: the held-out text has {tokens:,} tokens", *notes)
    symbols = ordinary_tokens(data.held_out, tokenizer.all_special_ids)
    start = start_token(tokenizer)
    perplexity = ContextPerplexity(data.held_out, contexts, windows=windows, corrupt=data.corrupt, start=start)
    recalls = recalls_for(config, symbols, min(own, length), samples=evaluation.windows, start=start)
    return {_PERPLEXITY: perplexity, **recalls}, notes


class Measurements:
    """Perplexity by context length of the original, and of the converted model by step; a file has every record.

    Causal models come with the shares of tokens that they copy and recall.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._grids: dict[str | int, dict[str, Grid]] = {}

    @classmethod
    def load(cls, path: Path, *, writes: bool = True) -> Measurements:
        """Return the measurements in a file, or none if there is no file; of several processes, the main one `writes`.

        Raises:
            CheckpointError: The file is damaged, or was written by another version of this package.
        """
        measurements = cls(path if writes else None)
        if path.exists():
            remedy = "Remove the file to measure again what can still be measured."
            report = load(Report, path, remedy)
            with reading(str(path), f" {remedy}"):
                for section in report.sections:
                    for name, (grid,) in section.models.items():
                        key = name if name == ORIGINAL else int(name.removeprefix("step "))
                        measurements._grids.setdefault(key, {})[section.name] = grid
        return measurements

    def record(self, key: str | int, results: Mapping[str, Grid]) -> None:
        """Keep the results of the `ORIGINAL`, or of the converted model after some steps; write the file."""
        self._grids[key] = dict(results)
        if self._path is not None:
            titles = {_PERPLEXITY: ContextPerplexity.title, **{name: each.title for name, each in RECALLS.items()}}
            models = {str(key) if key == ORIGINAL else f"step {key}": grids for key, grids in self._grids.items()}
            found = {each: {name: (own[each],) for name, own in models.items() if each in own} for each in titles}
            sections = (Section(each, titles[each], _NOTE, own) for each, own in found.items() if own)
            save(Report(tuple(sections)), self._path)

    @property
    def count(self) -> int:
        return len(self._grids)

    def course(self) -> list[tuple[int, Grid]]:
        """Return steps and perplexities of the converted model, by step."""
        steps = sorted(key for key in self._grids if isinstance(key, int))
        return [(step, self._grids[step][_PERPLEXITY]) for step in steps]

    def curve(self, name: str | int) -> Grid | None:
        """Return the perplexity in `results`; `None` if not measured."""
        return self.results(name).get(_PERPLEXITY)

    def results(self, name: str | int) -> dict[str, Grid]:
        """Return all that was measured of the "original", "before", "after" or after some steps, by measure."""
        if name in ("before", "after"):
            last = max((key for key in self._grids if isinstance(key, int)), default=0)
            name = 0 if name == "before" else last or -1
        return self._grids.get(name, {})


class Measuring(TrainerCallback):
    """Callback that measures the model before the first step, at intervals and after the last step.

    A step that was measured before is not measured again. All processes measure, since the forward of a sharded model
    needs all of them. Add the callback after `Handover`, which sets the strengths of a step. Measuring leaves the
    random state of the training unchanged.

    `every` is the interval in steps, 0 for none; `begins` counts the steps of the stages before this one. `original`
    gives the context in which a model computes as it was loaded, to measure that first.
    """

    def __init__(
        self,
        measurements: Measurements,
        measure: Measure,
        *,
        every: int = 0,
        begins: int = 0,
        original: Callable[[Any], AbstractContextManager[None]] | None = None,
        console: Console | None = None,
    ) -> None:
        self._measurements, self._measure, self._console = measurements, measure, console
        self._every, self._begins, self._original, self._has_heading = every, begins, original, False

    def take(self, key: str | int, model: Any) -> Grid:
        """Measure a model unless it was measured before; print and return its perplexity."""
        if self._measurements.curve(key) is None:
            if not self._has_heading:
                say(self._console, "measuring on held-out text ...")  # It may take minutes, before the first step.
            devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
            with torch.random.fork_rng(devices=devices):
                self._measurements.record(key, self._measure(model))
        self._print(key)
        return self._measurements.results(key)[_PERPLEXITY]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Measure before the first step; in a resumed run, print the earlier measurements."""
        if state.global_step == 0:
            self.begin(model)
        else:
            for step, _ in self._measurements.course():
                if step <= self._begins + state.global_step:
                    self._print(step)

    def begin(self, model: Any) -> None:
        if self._original is not None:
            with self._original(model):
                self.take(ORIGINAL, model)
        self.take(self._begins, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self._every and state.global_step % self._every == 0 and state.global_step < state.max_steps:
            self.take(self._begins + state.global_step, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.take(self._begins + state.global_step, model)

    def _print(self, key: str | int) -> None:
        results = self._measurements.results(key)
        perplexity, recalls = results[_PERPLEXITY], {name: results[name] for name in RECALLS if name in results}
        cells = [f"{perplexity.at(context).mean:.4g}" for context in perplexity.points]
        cells += [f"{100 * each.at(each.points[0]).mean:.3g} %" for each in recalls.values()]
        names = ["tokens read", *(f"{context:,}" for context in perplexity.points), *recalls]
        row = [key if isinstance(key, str) else f"step {key}", *("-" if "nan" in cell else cell for cell in cells)]
        for line, style in ((names, "bold"), (row, None))[self._has_heading :]:
            say(self._console, f"{line[0]:<16}" + "".join(f"{cell:>9}" for cell in line[1:]), style)
        self._has_heading = True
