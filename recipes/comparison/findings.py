"""The measured figures of each trained model, stored with its run so that nothing is measured twice."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import default_data_collator

from hf_posenc.errors import OptionError, RecipeError
from hf_posenc.patches.plan import plan
from hf_posenc.recipes import intervals, storage
from hf_posenc.recipes.data.windows import Prepared
from hf_posenc.recipes.evaluation import evaluate
from hf_posenc.recipes.evaluation.generation import Generation
from hf_posenc.recipes.evaluation.grid import RATIO, Grid
from hf_posenc.recipes.evaluation.perplexity import TARGETS, contexts_for
from hf_posenc.recipes.evaluation.report import Report
from hf_posenc.recipes.intervals import Interval
from hf_posenc.recipes.layout import MEASUREMENTS, MODEL
from hf_posenc.recipes.loading import load, trained_length
from hf_posenc.recipes.processes import enough_threads, processes
from hf_posenc.recipes.runs.files import record_of
from hf_posenc.recipes.runs.measurements import Measurements
from hf_posenc.recipes.runs.request import Request, Subject, check_measures
from hf_posenc.recipes.schema.recipe import Recipe
from hf_posenc.recipes.training.adapter import trained_dtype

# The native model with the same training, which is the control, and the model as it was given.
NATIVE, ORIGINAL = "native", "original"
FINDINGS = "results.json"
# Timed pairs of training steps, after some that load kernels and allocate memory.
_ROUNDS, _UNTIMED = 9, 2


@dataclass(frozen=True)
class Cost:
    """Cost of a scheme, compared with the native encoding.

    `step_ratios` has a ratio of times for each pair of training steps; `memory_ratio` compares what a forward saves for
    its backward pass. Parameters are the new ones. Cache bytes are per token, over all layers, without keys and values.
    """

    step_ratios: tuple[float, ...] = (1.0,)
    memory_ratio: float = 1.0
    parameters: int = 0
    cache_bytes: int = 0

    @property
    def time(self) -> Interval:
        """Geometric mean of the ratios of step times, with its interval."""
        return intervals.of_exponential(self._logarithms)

    def is_slower_than(self, other: Cost) -> bool:
        """Whether a training step takes significantly longer than another scheme's; if timed once, longer at all."""
        found = intervals.of_mean(self._logarithms - other._logarithms)
        return found.mean > 0 if math.isnan(found.low) else found.low > 0

    @property
    def _logarithms(self) -> Tensor:
        return torch.tensor(self.step_ratios, dtype=torch.float64).log()


@dataclass(frozen=True, eq=False)
class Findings:
    """The measured figures of one model: all measures, its cost compared with the native model, its start in words.

    `start_ratio` is the perplexity at the trained length after conversion and before training, as a multiple of the
    original model's; `None` if not measured.
    """

    name: str
    report: Report
    cost: Cost
    start: str = ""
    start_ratio: float | None = None

    @property
    def perplexity(self) -> Grid:
        """Perplexity by context length."""
        return self.report["perplexity"].models[self.name][0]

    @property
    def windows(self) -> int:
        """Number of windows of text."""
        return self.perplexity.samples.shape[-1]

    def ratio(self, context: int, other: Findings) -> Interval:
        """Return the perplexity as a share of that of another model, paired by window."""
        return self.perplexity.relative_to(other.perplexity).at(context)

    def growth(self, context: int, trained: int) -> Interval:
        """Return the perplexity at a length as a share of the same model's at the trained length."""
        return RATIO.interval(self.perplexity.values(context) - self.perplexity.values(trained))


class Examiner:
    """Measurement of models by the same measures on the same text.

    The text, lengths and batches of the control are those of all; perplexity is measured, too. Raise `OptionError` if a
    measure is unknown, or the text is too short.
    """

    def __init__(
        self,
        control: Recipe,
        config: Any,
        tokenizer: Any,
        data: Prepared,
        *,
        measures: Sequence[str],
        samples: int,
        console: Console | None = None,
    ) -> None:
        check_measures(measures)
        assert control.training.length is not None
        self.trained = trained_length(config) or control.training.length
        try:
            self.contexts, _ = contexts_for(self.trained, len(data.held_out), windows=samples)
        except RecipeError:  # It names keys that all contestants share.
            self.contexts = ()
        if self.trained not in self.contexts:
            raise OptionError(
                f"The trained length is {self.trained} tokens, and the held-out text has {len(data.held_out):,}; "
                f"expected at least {TARGETS}, and a text for {samples} windows. Give more text, or fewer samples."
            )
        every = tuple(dict.fromkeys(("perplexity", *measures)))
        request = Request((NATIVE,), every, contexts=self.contexts, trained_length=self.trained, samples=samples)
        self._measures = request.made_for(tokenizer, data.held_out, data.corrupt)
        self._comparing = [measure for measure in self._measures if isinstance(measure, Generation)]
        self._native, self._console, self._device = control.model, console, processes().device
        self._dtype = trained_dtype(control.adapter)  # that of the contestants
        size = control.training.micro_batch_size or control.training.batch_size
        collate = data.collate or default_data_collator
        batch = collate([example for example, _ in zip(data.train, range(size), strict=False)])
        self._batch = {name: tensor.to(self._device) for name, tensor in batch.items()}

    def examine(self, name: str, recipe: Recipe, folder: Path) -> Findings:
        """Return the findings of a finished run, or of the `ORIGINAL` model, which are kept in a folder."""
        path = folder / FINDINGS
        if not path.is_file():
            folder.mkdir(exist_ok=True)
            known: dict[str, Any]
            if name == ORIGINAL:
                model, known = self._original(), {"start": "as it was given"}
            else:
                # A process that goes on with a comparison has not measured what others are compared with.
                for measure in self._comparing:
                    measure(self._original())
                model = Subject(name, str(folder / MODEL)).load(self._device)
                known = {"start": record_of(folder).get("start", ""), "start_ratio": _start_ratio(folder)}
            self._comparing = []
            report = evaluate({name: model}, self._measures, console=self._console)
            storage.save(Findings(name, report, self._cost(recipe, model), **known), path)
        found: Findings = storage.load(Findings, path, "Remove it to measure again.")
        return found

    def _original(self) -> Any:
        return load(self._native, **self._dtype)[0].to(self._device)

    def _cost(self, recipe: Recipe, model: Any) -> Cost:
        conversion = recipe.conversion
        if conversion.scheme is None:
            return Cost()
        if self._console is not None:
            self._console.print("timing steps of training ...", highlight=False)
        native = load(self._native, dtype=next(model.parameters()).dtype)[0].to(self._device)
        # At the end of training, a handover is over.
        ended = replace(conversion, native="keep" if conversion.native == "keep" else "remove")
        planned = plan(native, conversion.scheme, **ended.keywords)
        for each in (model, native):
            each.train().requires_grad_(True)
        with enough_threads(native, self._batch["input_ids"].numel()):
            ratios = step_ratios(model, native, self._batch)
        memory = kept_bytes(model, self._batch) / kept_bytes(native, self._batch)
        return Cost(tuple(ratios), memory, planned.parameters, planned.cache_bytes_per_token)


def _start_ratio(folder: Path) -> float | None:
    """Return the perplexity after the conversion as a multiple of the original model's."""
    found = Measurements.load(folder / MEASUREMENTS, writes=False)
    before, native = found.curve("before"), found.curve("native")
    if before is None or native is None:
        return None
    ratio = before.relative_to(native).at(before.points[0]).mean
    return None if math.isnan(ratio) else ratio


# -- cost of a training step -------------------------------------------------------------------------------------------


def step_ratios(model: nn.Module, native: nn.Module, batch: Mapping[str, Tensor], rounds: int = _ROUNDS) -> list[float]:
    """Return ratios of training-step times to the native model's, one for each pair of steps.

    A step is forward, backward and optimizer, without a teacher. Steps of the two models alternate, so that other load
    on the machine affects both. The weights do not change. Both models are in training mode.
    """
    runs = [(each, torch.optim.AdamW(each.parameters(), lr=0.0, weight_decay=0.0)) for each in (model, native)]
    seconds = [[_seconds(each, optimizer, batch) for each, optimizer in runs] for _ in range(_UNTIMED + rounds)]
    return [own / other for own, other in seconds[_UNTIMED:]]


def _seconds(model: Any, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]) -> float:
    before = _now()
    model(**batch, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return _now() - before


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def kept_bytes(model: Any, batch: Mapping[str, Tensor]) -> int:
    """Return the bytes that a forward saves for its backward pass, without weights; the same on every machine."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        # An operation that saves its own output would otherwise form a reference cycle.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # While the loss is alive, no storage is reused, so addresses identify storages.
        loss = model(**batch, use_cache=False).loss
    del loss
    return sum(kept.values())
