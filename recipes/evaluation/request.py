"""A request for an evaluation: models, measures and text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from hf_posenc.errors import OptionError, RecipeError, suggest
from hf_posenc.recipes.data import sources
from hf_posenc.recipes.data.collation import corruptor
from hf_posenc.recipes.data.windows import encode
from hf_posenc.recipes.evaluation.generation import Generation
from hf_posenc.recipes.evaluation.induction import AssociativeRecall, InductionCopy
from hf_posenc.recipes.evaluation.measure import Measure, evaluate
from hf_posenc.recipes.evaluation.needle import NeedleRetrieval, Passkey
from hf_posenc.recipes.evaluation.perplexity import ContextPerplexity, Corruption, contexts_for
from hf_posenc.recipes.evaluation.report import Report
from hf_posenc.recipes.evaluation.subjects import Subject, subjects
from hf_posenc.recipes.evaluation.text import ordinary_tokens, read_text, token_ids
from hf_posenc.recipes.loading import auto_class, trained_length
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.reports import versions

# Default measures by the kind of model: none needs training for it.
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
        cue: Text before a passkey; `None` means random tokens.
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
    cue: str | None = None
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
        inputs = self._inputs(found)
        measures = [MEASURES[name](inputs) for name in inputs.request.measures or ()]
        models = {subject.name: partial(subject.load, inputs.device, self.seed, inputs.dtype) for subject in found}
        caution = "" if self.text is None else _caution(found, self.text)
        if caution and console is not None:
            console.print(f"caution: {caution}", style="yellow", highlight=False, markup=False, soft_wrap=True)
        settings = {
            "models": ", ".join(self.models),
            "text": f"{inputs.request.text}, {len(inputs.ids):,} tokens",
            "processes": processes().num_processes,
            "seed": self.seed,
            "command": command,
            "device": str(inputs.device),
            **({"caution": caution} if caution else {}),
            "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        }
        return evaluate(models, measures, batch_size=self.batch_size, console=console, settings=settings)

    def _inputs(self, found: tuple[Subject, ...]) -> Inputs:
        """Return the inputs of the measures, with defaults filled in."""
        first, config = found[0], found[0].config()
        tokenizer, kind = first.tokenizer(), auto_class(config)
        text, documents = self._documents(found)
        sample = "".join(document["text"] for document in itertools.islice(documents, _DOCUMENTS))[:_SAMPLE]
        for other in found[1:]:
            if auto_class(other.config()) is not kind:
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
        own = self.trained_length or trained_length(config) or _USUAL_LENGTH
        filled = replace(
            self,
            measures=self.measures or _USUAL[kind],
            text=text,
            contexts=self.contexts or self._usual_contexts(own, len(ids), text),
            trained_length=own,
        )
        hiding = corruptor(config, tokenizer, seed=self.seed)
        corrupt = None if hiding is None else hiding.corrupt
        # Models in half precision would differ from trained ones by rounding alone.
        dtypes = {each.config().dtype or torch.float32 for each in found}
        dtype = functools.reduce(torch.promote_types, dtypes) if len(dtypes) > 1 else None
        return Inputs(filled, tokenizer, ids, corrupt, processes().device, dtype)

    def _documents(self, found: tuple[Subject, ...]) -> tuple[str, sources.Documents]:
        """Return the text in words, and its documents."""
        if self.text is not None or self.column != sources.TEXT:
            return self.text or sources.BUILTIN, read_text(self.text or sources.BUILTIN, self.column)
        runs = [subject.data for subject in found if subject.data is not None]
        if not runs or any(data != runs[0] for data in runs):
            return sources.BUILTIN, read_text(sources.BUILTIN)
        return f"held out by the runs from {runs[0].held_out or runs[0].source}", sources.read(runs[0])[1]

    def _usual_contexts(self, length: int, tokens: int, text: str) -> tuple[int, ...]:
        """Return the default context lengths for which the text is long enough."""
        try:
            return contexts_for(length, tokens, windows=self.samples)[0]
        except RecipeError as error:
            raise OptionError(
                f"{text} has {tokens:,} tokens, too few for {self.samples} windows. Give more text, fewer "
                "samples or shorter contexts."
            ) from error


@dataclass(eq=False)
class Inputs:
    """The inputs of all measures.

    Attributes:
        request: The request, with defaults filled in.
        tokenizer: The tokenizer of all models.
        ids: Token ids of the text, int64 `[tokens]`.
        corrupt: Function that corrupts the input of an encoder; `None` for causal models.
        device: The device of this process.
        dtype: The dtype of all models; `None` is that of their checkpoints.
    """

    request: Request
    tokenizer: Any
    ids: Tensor
    corrupt: Corruption | None
    device: torch.device
    dtype: torch.dtype | None = None

    @property
    def contexts(self) -> tuple[int, ...]:
        """Context lengths in tokens."""
        return self.request.contexts or ()

    @property
    def symbols(self) -> Tensor:
        """Ordinary tokens of the text, the most frequent first, int64 `[n]`."""
        return ordinary_tokens(self.ids, self.tokenizer.all_special_ids)

    def options(self, *names: str) -> dict[str, Any]:
        """Return options of a measure, which the request has by the same names."""
        return {name: getattr(self.request, name) for name in names}


def _perplexity(inputs: Inputs) -> Measure:
    windows, options = inputs.request.samples, inputs.options("trained_length")
    return ContextPerplexity(inputs.ids, inputs.contexts, windows=windows, corrupt=inputs.corrupt, **options)


def _needle(inputs: Inputs) -> Measure:
    cue = inputs.request.cue
    passkey = Passkey.from_vocabulary(inputs.symbols) if cue is None else Passkey.from_text(inputs.tokenizer, cue)
    return NeedleRetrieval(inputs.ids, inputs.contexts, passkey=passkey, **inputs.options("samples", "seed"))


def _induction(inputs: Inputs) -> Measure:
    # Two copies make an even number of tokens.
    return _copying(inputs, InductionCopy, [*dict.fromkeys(context // 2 * 2 for context in inputs.contexts)])


def _copying(inputs: Inputs, kind: type[InductionCopy], lengths: Sequence[int]) -> Measure:
    return kind(inputs.symbols, lengths, **inputs.options("samples", "seed", "trained_length"))


MEASURES: Mapping[str, Callable[[Inputs], Measure]] = {
    "perplexity": _perplexity,
    "needle": _needle,
    "induction": _induction,
    "mqar": lambda inputs: _copying(inputs, AssociativeRecall, inputs.contexts),
    "generation": lambda inputs: Generation(
        inputs.ids, inputs.tokenizer, corrupt=inputs.corrupt, **inputs.options("samples", "seed")
    ),
}


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
