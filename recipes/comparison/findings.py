"""The measured figures of each trained model, stored with its run so that nothing is measured twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hf_posenc.errors import OptionError, RecipeError
from hf_posenc.recipes import storage
from hf_posenc.recipes.data.windows import Prepared
from hf_posenc.recipes.evaluation import evaluate
from hf_posenc.recipes.evaluation.generation import Generation
from hf_posenc.recipes.evaluation.grid import Grid
from hf_posenc.recipes.evaluation.perplexity import TARGETS, contexts_for
from hf_posenc.recipes.evaluation.report import Report
from hf_posenc.recipes.evaluation.verdict import CONTROL, ORIGINAL
from hf_posenc.recipes.layout import MODEL
from hf_posenc.recipes.loading import load, trained_length
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.runs.request import Request, Subject, check_measures
from hf_posenc.recipes.schema.recipe import Recipe
from hf_posenc.recipes.training.adapter import trained_dtype

FINDINGS = "results.json"


@dataclass(frozen=True, eq=False)
class Findings:
    """The results of all measures on one model."""

    name: str
    report: Report

    @property
    def perplexity(self) -> Grid:
        return self.results["perplexity"]

    @property
    def results(self) -> Mapping[str, Grid]:
        return self.report.results(self.name)

    @property
    def windows(self) -> int:
        return self.perplexity.samples.shape[-1]


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
        request = Request((CONTROL,), every, contexts=self.contexts, trained_length=self.trained, samples=samples)
        self._measures = request.made_for(tokenizer, data.held_out, data.corrupt)
        self._comparing = [measure for measure in self._measures if isinstance(measure, Generation)]
        self._model, self._console, self._device = control.model, console, processes().device
        self._dtype = trained_dtype(control.adapter)  # as all contestants

    def examine(self, name: str, folder: Path) -> Findings:
        """Return the findings of a finished run, or of the `ORIGINAL` model, which are kept in a folder."""
        path = folder / FINDINGS
        if not path.is_file():
            folder.mkdir(exist_ok=True)
            if name == ORIGINAL:
                model = self._original()
            else:
                # A process that goes on with a comparison has not measured what others are compared with.
                for measure in self._comparing:
                    measure(self._original())
                model = Subject(name, str(folder / MODEL)).load(self._device)
            self._comparing = []
            report = evaluate({name: model}, self._measures, console=self._console)
            storage.save(Findings(name, report), path)
        found: Findings = storage.load(Findings, path, "Remove it to measure again.")
        return found

    def _original(self) -> Any:
        return load(self._model, **self._dtype)[0].to(self._device)
