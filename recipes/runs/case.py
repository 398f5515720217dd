"""The three records that the stages of a run get: its case, its context, and what they hand on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hf_posenc.recipes import loading, storage
from hf_posenc.recipes.data.windows import Prepared, load_data
from hf_posenc.recipes.evaluation.grid import Grid
from hf_posenc.recipes.evaluation.measure import Workers
from hf_posenc.recipes.evaluation.perplexity import ContextPerplexity, check_read
from hf_posenc.recipes.evaluation.recall import InductionCopy
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.reports import say
from hf_posenc.recipes.runs import files
from hf_posenc.recipes.runs.facts import Facts
from hf_posenc.recipes.runs.measurements import Measurements, measures_of
from hf_posenc.recipes.runs.progress import Pace
from hf_posenc.recipes.schema import checks
from hf_posenc.recipes.schema.recipe import Recipe, Training
from hf_posenc.recipes.storage import CHECKPOINTS, RUN
from hf_posenc.recipes.training.distillation import Teacher
from hf_posenc.recipes.training.trainer import AdaptationTrainer

# A function that gives the context in which a model computes as it was loaded.
Original = Callable[[Any], AbstractContextManager[None]]


@dataclass(frozen=True)
class Case:
    """A recipe with its text and the config of its model: enough to check it before any weight is loaded.

    The `own_length` of the model is that of the windows if its config states none. Unless the case `reads_all`, it
    reads only some of the text, to find errors.
    """

    recipe: Recipe
    config: Any
    length: int
    own_length: int
    reads_all: bool = True
    given: Mapping[int, Prepared] | None = None

    @classmethod
    def of(cls, recipe: Recipe, *, reads_all: bool = True, texts: Mapping[int, Prepared] | None = None) -> Case:
        """Return the case of a recipe; `texts` may have its text already, by the length of windows."""
        config = loading.load_config(recipe.model)
        return cls(recipe, config, *checks.lengths(recipe, config), reads_all=reads_all, given=texts)

    @cached_property
    def tokenizer(self) -> Any:
        return loading.load_tokenizer(loading.place(self.recipe.model))

    @cached_property
    def texts(self) -> Mapping[int, Prepared]:
        """Text of all stages, by the length of windows."""
        if self.given is not None:
            return self.given
        seed = self.recipe.training.seed
        return {
            length: load_data(
                self.recipe.data,
                self.tokenizer,
                length=length,
                seed=seed,
                config=self.config,
                checks=not self.reads_all,
            )
            for length in sorted({stage.length or self.length for stage in self.recipe.stages().values()})
        }

    def text(self, settings: Training) -> Prepared:
        return self.texts[settings.length or self.length]

    @cached_property
    def measures(self) -> tuple[dict[str, ContextPerplexity | InductionCopy], tuple[str, ...]]:
        """What is measured before, during and after the training, and why no more."""
        text, evaluation = self.text(self.recipe.training), self.recipe.evaluation
        return measures_of(evaluation, self.config, self.tokenizer, text, self.length, self.own_length)

    def precise(self) -> Any:
        """Return the context of a forward in the precision of the recipe."""
        precision = self.recipe.training.precision
        return torch.autocast(processes().device.type, getattr(torch, precision), enabled=precision != "float32")


@dataclass(frozen=True)
class Context:
    """A run: its case and its folder."""

    case: Case
    folder: Path
    measurements: Measurements
    console: Console | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @cached_property
    def checkpoint(self) -> Path | None:
        """Last checkpoint of the whole model when the run went on; with one, nothing needs the start."""
        return files.last(self.checkpoints / "lengthen") or files.last(self.checkpoints)

    def say(self, text: str) -> None:
        say(self.console, text)

    def judged(self, work: Work, key: str, found: Mapping[str, Any]) -> None:
        """Keep the verdict on a start in run.json, and in the facts if the start was not accepted."""
        self.say(found["sentence"])
        assert work.facts is not None
        work.facts = work.facts.with_verdict(found)
        self.record(work.facts, **{key: found})

    def record(self, facts: Facts, **entries: Any) -> None:
        """Write the facts of the run and other entries into run.json."""
        if processes().is_main_process:
            storage.save({**files.record_of(self.folder), **asdict(facts), **entries}, self.folder / RUN)

    def measure(self, model: Any) -> dict[str, Grid]:
        """Return the perplexity of a model, and how it copies and recalls, measured in each process alone."""
        with self.case.precise():
            found = {name: measure(model, Workers(alone=True))[0] for name, measure in self.case.measures[0].items()}
        check_read(model, found["perplexity"])
        return found


@dataclass
class Work:
    """What the stages hand on.

    `weights` is the magnitude of the weights as they were loaded, and `distance` the one before the transfer, see
    `rates`. `original` gives the context in which the model computes as it was loaded; trainer and pace are those of
    the last stage, the log is that of all. There are no facts while a run is only checked.
    """

    model: Any
    facts: Facts | None = None
    weights: float | None = None
    distance: float | None = None
    original: Original = lambda model: contextlib.nullcontext()
    teacher: Teacher | None = None
    trainer: AdaptationTrainer | None = None
    pace: Pace | None = None
    log: list[dict[str, Any]] = field(default_factory=list)
