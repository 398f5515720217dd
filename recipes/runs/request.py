"""A request for an evaluation: models by their names, measures and text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_posenc import registry
from hf_posenc.errors import OptionError, suggest
from hf_posenc.patches import adapters
from hf_posenc.patches.patch import patch
from hf_posenc.recipes import loading
from hf_posenc.recipes.data import sources
from hf_posenc.recipes.data.collation import corruptor
from hf_posenc.recipes.data.sources import read_text
from hf_posenc.recipes.data.windows import encode, start_token, token_ids
from hf_posenc.recipes.evaluation.generation import Generation
from hf_posenc.recipes.evaluation.measure import Corruption, Measure, evaluate
from hf_posenc.recipes.evaluation.perplexity import ContextPerplexity, contexts_for
from hf_posenc.recipes.evaluation.recall import AssociativeRecall, InductionCopy, ordinary_tokens
from hf_posenc.recipes.evaluation.report import Report
from hf_posenc.recipes.evaluation.verdict import LEAST
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.reports import say, versions
from hf_posenc.recipes.schema.recipe import Data
from hf_posenc.recipes.storage import MODEL, RECIPE

MEASURES = ("perplexity", "induction", "mqar", "generation")
# Measures by default, of causal models and of others.
_CAUSAL, _OTHER = ("perplexity", "induction", "mqar"), ("perplexity",)
# Assumed trained length where the config gives none.
_USUAL_LENGTH = 512
# Characters of text on which tokenizers are compared, and documents that they come from at most.
_SAMPLE, _DOCUMENTS = 10_000, 100


@dataclass(frozen=True)
class Subject:
    """A model to evaluate: a directory, also of an adapter, or a name on the hub, and a scheme to convert it to."""

    name: str
    source: str
    scheme: str | None = None

    @property
    def base(self) -> str:
        """The base model of an adapter; for any other model, its source."""
        return adapters.base_of(self.source) if Path(self.source, "adapter_config.json").is_file() else self.source

    @property
    def data(self) -> Data | None:
        """The text of the run that the model comes from; `None` if it comes from none."""
        folder = Path(self.source).absolute()  # "." has no name
        record = folder.parent / RECIPE
        return read_recipe(record).data if folder.name == MODEL and record.is_file() else None

    def has_trained_on(self, text: str) -> bool:
        """Whether the model comes from a run whose training text is in a file or folder, or around it."""
        # The built-in text is read in its held-out part.
        if self.data is None or text in (sources.BUILTIN, self.data.held_out):
            return False
        here, there = (sources.expanded(place).resolve() for place in (text, self.data.read_from))
        return here.is_relative_to(there) or there.is_relative_to(here)

    def tokenizer(self) -> Any:
        """Return the tokenizer of the model; an adapter without one uses that of its base."""
        own = Path(self.source, "tokenizer_config.json").is_file()
        return loading.load_tokenizer(self.source if own else self.base)

    def load(self, device: torch.device, seed: int = 0, dtype: torch.dtype | None = None) -> Any:
        """Return the model on a device, converted if requested, with the same weights in every process.

        The seed is that of an untrained scheme; without a dtype, it is that of the checkpoint.
        """
        with loading.seeded(seed):
            model, _ = loading.load(self.base, **({} if dtype is None else {"dtype": dtype}))
            if self.base != self.source:
                model = adapters.merged(model, self.source)
            if self.scheme is not None:
                patch(model, self.scheme)
        return model.to(device).eval()


def subjects(given: Sequence[str]) -> tuple[Subject, ...]:
    """Return the models for paths or names on the hub, each alone or as `PATH:SCHEME`.

    The folder of a run of `hf-posenc train` stands for its model. Raise `OptionError` if a model is given twice.
    """
    if len(set(given)) < len(given):
        raise OptionError(f"Got the models {', '.join(given)}; each can be given once.")
    found = []
    for text in given:
        source, colon, scheme = text.rpartition(":")
        # A path may contain a colon itself.
        if not colon or Path(text).exists():
            source, scheme = text, ""
        else:
            registry.get(scheme)
        name = Path(source).resolve().name if Path(source).exists() else source
        found.append(Subject(name + f", {scheme} untrained" * bool(scheme), model_in(source), scheme or None))
    names = [subject.name for subject in found]
    return tuple(
        subject if names.count(subject.name) == 1 else replace(subject, name=text)
        for subject, text in zip(found, given, strict=True)
    )


def model_in(source: str) -> str:
    """Return the folder of a built-in model or of the model in a run; other sources unchanged."""
    source = loading.place(source)
    return source if Path(source, "config.json").is_file() or not Path(source, MODEL).is_dir() else f"{source}/{MODEL}"


@dataclass(frozen=True)
class Request:
    """An evaluation of models by their names, with the options of `hf-posenc eval`.

    The models are as `subjects` reads them, the first is the reference. Without a text it is what the runs among the
    models held out if all have the same, or else "builtin" if one of the models is the built-in one. Contexts and
    trained length follow from the first model's config. Samples are windows, sequences or examples of each kind.
    """

    models: tuple[str, ...]
    measures: tuple[str, ...] | None = None
    text: str | None = None
    column: str = sources.TEXT
    contexts: tuple[int, ...] | None = None
    trained_length: int | None = None
    samples: int = LEAST
    batch_size: int = 8
    seed: int = 0

    def run(self, console: Console | None = None, *, command: str = "") -> Report:
        """Load the models one after the other and measure them.

        Raise `OptionError` if a measure is unknown, or undefined for a model, or no text is named.
        """
        check_measures(self.measures or ())
        found = subjects(self.models)
        # A model that is not there is noticed before anything else is read.
        first, configs = found[0], [loading.load_config(subject.base) for subject in found]
        for subject, config in zip(found, configs, strict=True):
            loading.language_class(subject.base, config)
        tokenizer, kind, device = first.tokenizer(), loading.auto_class(configs[0]), processes().device
        text, documents = self._documents(found)
        _check_alike(found, configs, documents)
        ids = token_ids(documents, tokenizer)
        own = self.trained_length or loading.trained_length(configs[0]) or _USUAL_LENGTH
        filled = replace(
            self,
            measures=self.measures or (_CAUSAL if kind is AutoModelForCausalLM else _OTHER),
            contexts=self.contexts or contexts_for(own, len(ids), windows=self.samples)[0],
            trained_length=own,
        )
        hiding = corruptor(configs[0], tokenizer, seed=self.seed)
        measures = filled.made_for(tokenizer, ids, None if hiding is None else hiding.corrupt)
        # Models in half precision would differ from trained ones by rounding alone.
        dtypes = {config.dtype or torch.float32 for config in configs}
        dtype = functools.reduce(torch.promote_types, dtypes) if len(dtypes) > 1 else None
        models = {subject.name: functools.partial(subject.load, device, self.seed, dtype) for subject in found}
        settings = {
            "models": ", ".join(self.models),
            "text": f"{text}, {len(ids):,} tokens",
            "processes": processes().num_processes,
            "seed": self.seed,
            "command": command,
            "device": str(device),
        }
        knowing = [subject.name for subject in found if subject.has_trained_on(self.text or sources.BUILTIN)]
        if knowing:
            caution = f"{text} is in the training text of {', '.join(knowing)}. Give a text that no model has seen."
            settings["caution"] = caution
            say(console, f"caution: {caution}", "yellow")
        what = [f"{each.name} at {', '.join(f'{tokens:,}' for tokens, _, _ in each.pieces())}" for each in measures]
        say(console, f"measuring {'; '.join(what)} tokens, {self.samples} samples each")
        settings["versions"] = ", ".join(f"{name} {version}" for name, version in versions().items())
        return evaluate(models, measures, batch_size=self.batch_size, console=console, settings=settings)

    def made_for(self, tokenizer: Any, ids: Tensor, corrupt: Corruption | None) -> list[Measure]:
        """Return the measures of a request in which nothing is left out, on token ids, int64 `[tokens]`."""
        contexts, symbols = self.contexts or (), ordinary_tokens(ids, tokenizer.all_special_ids)
        drawn: dict[str, Any] = {"samples": self.samples, "seed": self.seed}
        common: dict[str, Any] = {"start": start_token(tokenizer), "trained_length": self.trained_length}
        # Two copies make an even number of tokens.
        even = list(dict.fromkeys(context // 2 * 2 for context in contexts))
        known: dict[str, Callable[[], Measure]] = {
            "perplexity": lambda: ContextPerplexity(ids, contexts, windows=self.samples, corrupt=corrupt, **common),
            "induction": lambda: InductionCopy(symbols, even, **drawn, **common),
            "mqar": lambda: AssociativeRecall(symbols, contexts, **drawn, **common),
            "generation": lambda: Generation(ids, tokenizer, corrupt=corrupt, **drawn),
        }
        return [known[name]() for name in self.measures or ()]

    def _documents(self, found: tuple[Subject, ...]) -> tuple[str, sources.Documents]:
        """Return the text in words, and its documents."""
        if self.text is not None or self.column != sources.TEXT:
            return self.text or sources.BUILTIN, read_text(self.text or sources.BUILTIN, self.column)
        runs = [subject.data for subject in found if subject.data is not None]
        if not runs or any(data != runs[0] for data in runs):
            return sources.BUILTIN, read_text(text_for(*(subject.base for subject in found)))
        return f"held out by the runs from {runs[0].held_out or runs[0].read_from}", sources.read(runs[0])[1]


def _check_alike(found: Sequence[Subject], configs: Sequence[Any], documents: sources.Documents) -> None:
    """Raise an `OptionError` unless all models are of one kind and make the same tokens of a text."""
    sample = "".join(document["text"] or "" for document in itertools.islice(documents, _DOCUMENTS))[:_SAMPLE]
    kind, tokens = loading.auto_class(configs[0]), encode(found[0].tokenizer(), [sample])
    for other, config in zip(found[1:], configs[1:], strict=True):
        if loading.auto_class(config) is not kind:
            raise OptionError(
                f"{found[0].name} and {other.name} are of two kinds (causal, masked, encoder-decoder), so they are not "
                "measured by the same things. Evaluate them apart."
            )
        if encode(other.tokenizer(), [sample]) != tokens:
            raise OptionError(
                f"{other.name} makes other tokens of the text than {found[0].name}, so figures per token cannot be "
                "compared. Evaluate models with the same tokenizer."
            )


def text_for(*models: str, text: str | None = None) -> str:
    """Return the name of a text to measure on; raise `OptionError` if there is none, and no model is the built-in one.

    Models that are measured side by side have the same tokenizer, so one of them tells.
    """
    if text is None and loading.place(loading.TINY_LLAMA) not in map(loading.place, models):
        raise OptionError(
            f"No text is named for {', '.join(models)}. Give --text FILE (txt, jsonl or parquet) or a folder; --text "
            "builtin takes the documentation of Python."
        )
    return text or sources.BUILTIN


def check_measures(names: Iterable[str]) -> None:
    for name in names:
        if name not in MEASURES:
            raise OptionError(f"There is no measure {name!r}. {suggest(name, MEASURES)}")
