"""A request for an evaluation: models, measures and text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from hf_posenc.errors import OptionError, suggest
from hf_posenc.recipes.data import sources
from hf_posenc.recipes.data.collation import corruptor
from hf_posenc.recipes.data.windows import encode
from hf_posenc.recipes.evaluation.generation import Generation
from hf_posenc.recipes.evaluation.measure import Measure, evaluate
from hf_posenc.recipes.evaluation.perplexity import ContextPerplexity, Corruption, contexts_for
from hf_posenc.recipes.evaluation.recall import AssociativeRecall, InductionCopy, NeedleRetrieval
from hf_posenc.recipes.evaluation.report import Report
from hf_posenc.recipes.evaluation.subjects import Subject, subjects
from hf_posenc.recipes.evaluation.text import ordinary_tokens, read_text, token_ids
from hf_posenc.recipes.loading import auto_class, load_config, trained_length
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.reports import versions

MEASURES = ("perplexity", "needle", "induction", "mqar", "generation")
# Default measures by the kind of model.
_USUAL: dict[Any, tuple[str, ...]] = {
    AutoModelForCausalLM: ("perplexity", "needle", "induction", "mqar"),
    AutoModelForSeq2SeqLM: ("perplexity",),
    AutoModelForMaskedLM: ("perplexity",),
}
# Assumed trained length where the config gives none.
_USUAL_LENGTH = 512
# Characters of text on which tokenizers are compared, and documents that they come from at most.
_SAMPLE, _DOCUMENTS = 10_000, 100


@dataclass(frozen=True)
class Request:
    """An evaluation of models by their names, with the options of `hf-posenc eval`.

    Attributes:
        models: Models as `hf_posenc.recipes.evaluation.subjects.subjects` reads them; the first is the reference.
        measures: Names in `MEASURES`; `None` means those that need no special training.
        text: A local file or folder, or "builtin"; `None` means the held-out text of the runs among the models if all
            have the same, else "builtin".
        column: Column of the text, in files with columns.
        contexts: Context lengths in tokens; `None` means a quarter to eight times the trained length.
        trained_length: Tokens per window in training; `None` means the length in the first model's config.
        samples: Windows, keys, sequences or examples of each kind.
        batch_size: Windows or examples per forward.
        seed: Random seed of all samples.
    """

    models: tuple[str, ...]
    measures: tuple[str, ...] | None = None
    text: str | None = None
    column: str = "text"
    contexts: tuple[int, ...] | None = None
    trained_length: int | None = None
    samples: int = 16
    batch_size: int = 8
    seed: int = 0

    def run(self, console: Console | None = None, *, command: str = "") -> Report:
        """Load the models one after the other and measure them.

        Raises:
            OptionError: A measure is unknown, or undefined for a model.
            RecipeError: A model or the text cannot be read.
        """
        check_measures(self.measures or ())
        found = subjects(self.models)
        # A model that is not there is noticed before anything else is read.
        first, configs = found[0], [load_config(subject.base) for subject in found]
        tokenizer, kind, device = first.tokenizer(), auto_class(configs[0]), processes().device
        text, documents = self._documents(found)
        sample = "".join(document["text"] for document in itertools.islice(documents, _DOCUMENTS))[:_SAMPLE]
        for other, config in zip(found[1:], configs[1:], strict=True):
            if auto_class(config) is not kind:
                raise OptionError(
                    f"{first.name} and {other.name} are of two kinds (causal, masked, encoder-decoder), so they are "
                    "not measured by the same things. Evaluate them apart."
                )
            if encode(other.tokenizer(), [sample]) != encode(tokenizer, [sample]):
                raise OptionError(
                    f"{other.name} makes other tokens of the text than {first.name}, so figures per token cannot be "
                    "compared. Evaluate models with the same tokenizer."
                )
        ids = token_ids(documents, tokenizer)
        own = self.trained_length or trained_length(configs[0]) or _USUAL_LENGTH
        filled = replace(
            self,
            measures=self.measures or _USUAL[kind],
            contexts=self.contexts or contexts_for(own, len(ids), windows=self.samples)[0],
            trained_length=own,
        )
        hiding = corruptor(configs[0], tokenizer, seed=self.seed)
        measures = filled.made_for(tokenizer, ids, None if hiding is None else hiding.corrupt)
        # Models in half precision would differ from trained ones by rounding alone.
        dtypes = {config.dtype or torch.float32 for config in configs}
        dtype = functools.reduce(torch.promote_types, dtypes) if len(dtypes) > 1 else None
        models = {subject.name: functools.partial(subject.load, device, self.seed, dtype) for subject in found}
        caution = "" if self.text is None else _caution(found, self.text)
        if caution and console is not None:
            console.print(f"caution: {caution}", style="yellow", highlight=False, markup=False, soft_wrap=True)
        settings = {
            "models": ", ".join(self.models),
            "text": f"{text}, {len(ids):,} tokens",
            "processes": processes().num_processes,
            "seed": self.seed,
            "command": command,
            "device": str(device),
            **({"caution": caution} if caution else {}),
            "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        }
        return evaluate(models, measures, batch_size=self.batch_size, console=console, settings=settings)

    def made_for(self, tokenizer: Any, ids: Tensor, corrupt: Corruption | None) -> list[Measure]:
        """Return the measures of a request in which nothing is left out, on token ids, int64 `[tokens]`."""
        contexts, symbols = self.contexts or (), ordinary_tokens(ids, tokenizer.all_special_ids)
        drawn: dict[str, Any] = {"samples": self.samples, "seed": self.seed}
        length = self.trained_length

        # Two copies make an even number of tokens.
        even = list(dict.fromkeys(context // 2 * 2 for context in contexts))
        known: dict[str, Callable[[], Measure]] = {
            "perplexity": lambda: ContextPerplexity(
                ids, contexts, windows=self.samples, corrupt=corrupt, trained_length=length
            ),
            "needle": lambda: NeedleRetrieval(ids, contexts, symbols=symbols, **drawn),
            "induction": lambda: InductionCopy(symbols, even, trained_length=length, **drawn),
            "mqar": lambda: AssociativeRecall(symbols, contexts, trained_length=length, **drawn),
            "generation": lambda: Generation(ids, tokenizer, corrupt=corrupt, **drawn),
        }
        return [known[name]() for name in self.measures or ()]

    def _documents(self, found: tuple[Subject, ...]) -> tuple[str, sources.Documents]:
        """Return the text in words, and its documents."""
        if self.text is not None or self.column != sources.TEXT:
            return self.text or sources.BUILTIN, read_text(self.text or sources.BUILTIN, self.column)
        runs = [subject.data for subject in found if subject.data is not None]
        if not runs or any(data != runs[0] for data in runs):
            return sources.BUILTIN, read_text(sources.BUILTIN)
        return f"held out by the runs from {runs[0].held_out or runs[0].source}", sources.read(runs[0])[1]


def check_measures(names: Iterable[str]) -> None:
    """Raise an `OptionError` unless all measures are known."""
    for name in names:
        if name not in MEASURES:
            raise OptionError(f"There is no measure {name!r}. {suggest(name, MEASURES)}")


def _caution(found: Iterable[Subject], text: str) -> str:
    """Return a caution about models that know the text, or nothing."""
    knowing = [subject.name for subject in found if subject.has_trained_on(text)]
    names = ", ".join(knowing)
    return f"{text} is in the training text of {names}. Give a text that no model has seen." if names else ""
