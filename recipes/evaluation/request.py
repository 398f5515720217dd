"""A whole evaluation, as it is asked for: which models, what is measured, and on what."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hf_posenc import __version__
from hf_posenc.errors import OptionError, RecipeError, suggest
from hf_posenc.recipes.data.denoising import Denoising
from hf_posenc.recipes.evaluation.curve import Corruption
from hf_posenc.recipes.evaluation.generalisation import LengthGeneralisation
from hf_posenc.recipes.evaluation.induction import InductionCopy
from hf_posenc.recipes.evaluation.lengths import contexts_for
from hf_posenc.recipes.evaluation.measure import Measure
from hf_posenc.recipes.evaluation.needle import NeedleRetrieval, Passkey
from hf_posenc.recipes.evaluation.perplexity import ContextPerplexity, PositionPerplexity
from hf_posenc.recipes.evaluation.report import Report
from hf_posenc.recipes.evaluation.run import evaluate
from hf_posenc.recipes.evaluation.similarity import AttentionSimilarity
from hf_posenc.recipes.evaluation.subjects import Subject, subjects
from hf_posenc.recipes.evaluation.tasks import TASKS
from hf_posenc.recipes.evaluation.text import ordinary_tokens, read_text, token_ids
from hf_posenc.recipes.evaluation.workers import Workers
from hf_posenc.recipes.loading import trained_length

# What says something of any language model, without training for it: causal, and encoder-decoder.
_USUAL = ("perplexity", "position", "needle", "induction")
_USUAL_WITH_ENCODER = ("perplexity", "position")
# Where the config says nothing, as T5's.
_USUAL_LENGTH = 512
# Parts of the longest context, in the perplexity by position.
_BINS = 16
# Characters by which tokenizers are told apart.
_SAMPLE = 10_000
_PACKAGES = ("torch", "transformers", "accelerate")


@dataclass(frozen=True)
class Request:
    """An evaluation of models by their names.

    Attributes:
        models: As `hf_posenc.recipes.evaluation.subjects.subjects` reads them; others are compared with the first.
        measures: Names in `MEASURES`; `None` takes those that need no training for them.
        text: A local file or folder, or "builtin".
        column: Of the text, in files that have columns.
        contexts: How many tokens are read; `None` is a quarter of the trained length up to eight times it.
        trained_length: Tokens per window in training; `None` is what the config of the first model says.
        samples: Windows, keys, sequences or examples of each kind.
        cue: What stands before a passkey; `None` takes random tokens.
        tasks: Names of tasks.
        lengths: Of tasks.
        trained: The longest length of tasks in training.
        shots: Solved examples before each task.
        batch_size: Windows or examples per forward.
        seed: Of what is drawn.
    """

    models: tuple[str, ...]
    measures: tuple[str, ...] | None = None
    text: str = "builtin"
    column: str = "text"
    contexts: tuple[int, ...] | None = None
    trained_length: int | None = None
    samples: int = 16
    cue: str | None = None
    tasks: tuple[str, ...] = tuple(TASKS)
    lengths: tuple[int, ...] = (5, 10, 15, 20, 25, 30, 35, 40)
    trained: int = 20
    shots: int = 0
    batch_size: int = 8
    seed: int = 0

    def run(self, console: Console | None = None, *, command: str = "") -> Report:
        """Load the models one after the other and measure them.

        Args:
            console: Where progress is shown; `None` is silent.
            command: What was typed, for the report.

        Raises:
            OptionError: There is no such measure, or one that is not defined for the models.
            RecipeError: A model or the text cannot be read.
        """
        for name in self.measures or ():
            if name not in MEASURES:
                raise OptionError(f"There is no measure {name!r}. {suggest(name, MEASURES)}")
        found = subjects(self.models)
        inputs = self._inputs(found)
        measures = [MEASURES[name](inputs) for name in inputs.request.measures or ()]
        models = {subject.name: partial(inputs.load, subject) for subject in found}
        settings = {
            "models": ", ".join(self.models),
            "text": f"{self.text}, {len(inputs.ids):,} tokens",
            "processes": Workers().count,
            "seed": self.seed,
            "command": command,
            "device": str(inputs.device),
            "versions": ", ".join(f"{name} {version}" for name, version in _versions().items()),
        }
        return evaluate(models, measures, batch_size=self.batch_size, console=console, settings=settings)

    def _inputs(self, found: tuple[Subject, ...]) -> Inputs:
        """Read the text, and fill in what was left open."""
        first, config = found[0], found[0].config()
        tokenizer, has_encoder = first.tokenizer(), bool(config.is_encoder_decoder)
        documents = read_text(self.text, self.column)
        sample = next(iter(documents))["text"][:_SAMPLE]
        for other in found[1:]:
            if bool(other.config().is_encoder_decoder) != has_encoder:
                raise OptionError(
                    f"One of {first.name} and {other.name} is an encoder-decoder and the other is not, so they are not measured by "
                    "the same things. Evaluate them apart."
                )
            if _ids(other.tokenizer(), sample) != _ids(tokenizer, sample):
                raise OptionError(
                    f"{other.name} makes other tokens of the text than {first.name}, so figures per token cannot be compared. "
                    "Evaluate models with the same tokenizer."
                )
        ids = token_ids(documents, tokenizer)
        own = self.trained_length or trained_length(config) or _USUAL_LENGTH
        filled = replace(
            self,
            measures=self.measures or (_USUAL_WITH_ENCODER if has_encoder else _USUAL),
            contexts=self.contexts or self._usual_contexts(own, len(ids)),
            trained_length=own,
        )
        corrupt = Denoising(tokenizer, seed=self.seed).corrupt if has_encoder else None
        return Inputs(filled, first, tokenizer, ids, corrupt, Workers().device)

    def _usual_contexts(self, length: int, tokens: int) -> tuple[int, ...]:
        """Return the context lengths that the text is long enough for."""
        try:
            return contexts_for(length, tokens, windows=self.samples)[0]
        except RecipeError as error:
            raise OptionError(
                f"{self.text} has {tokens:,} tokens, too few for {self.samples} windows. Give more text, fewer samples or shorter "
                "contexts."
            ) from error


@dataclass(eq=False)
class Inputs:
    """What measures are made of.

    Attributes:
        request: What was asked for, with everything filled in.
        first: The model that others are compared with.
        tokenizer: Of all models.
        ids: The text, int64 `[tokens]`.
        corrupt: What an encoder reads; `None` of causal models.
        device: Where this process computes.
    """

    request: Request
    first: Subject
    tokenizer: Any
    ids: Tensor
    corrupt: Corruption | None
    device: torch.device
    _reference: Any = field(default=None, init=False, repr=False)

    @property
    def contexts(self) -> tuple[int, ...]:
        """How many tokens are read."""
        return self.request.contexts or ()

    @property
    def symbols(self) -> Tensor:
        """The ordinary tokens of the text, the most frequent first, int64 `[n]`."""
        return ordinary_tokens(self.ids, self.tokenizer.all_special_ids)

    def load(self, subject: Subject) -> Any:
        """Return a model on the device; the first one is kept where the attention of others is compared with it."""
        if subject is self.first and self._reference is not None:
            return self._reference
        return subject.load(self.device, self.request.seed)

    def reference(self) -> Any:
        """Return the first model, and keep it."""
        if self._reference is None:
            self._reference = self.load(self.first)
        return self._reference


def _perplexity(inputs: Inputs) -> Measure:
    return ContextPerplexity(
        inputs.ids,
        inputs.contexts,
        windows=inputs.request.samples,
        corrupt=inputs.corrupt,
        trained_length=inputs.request.trained_length,
    )


def _position(inputs: Inputs) -> Measure:
    return PositionPerplexity(
        inputs.ids,
        # One that has no parts is refused as it was given.
        max(inputs.contexts) // _BINS * _BINS or max(inputs.contexts),
        windows=inputs.request.samples,
        bins=_BINS,
        corrupt=inputs.corrupt,
        trained_length=inputs.request.trained_length,
    )


def _needle(inputs: Inputs) -> Measure:
    asked = inputs.request
    passkey = (
        Passkey.from_vocabulary(inputs.symbols) if asked.cue is None else Passkey.from_text(inputs.tokenizer, asked.cue)
    )
    return NeedleRetrieval(inputs.ids, inputs.contexts, samples=asked.samples, passkey=passkey, seed=asked.seed)


def _induction(inputs: Inputs) -> Measure:
    # Two copies are an even number of tokens.
    lengths = [*dict.fromkeys(context // 2 * 2 for context in inputs.contexts)]
    asked = inputs.request
    return InductionCopy(
        inputs.symbols, lengths, samples=asked.samples, seed=asked.seed, trained_length=asked.trained_length
    )


def _tasks(inputs: Inputs) -> Measure:
    asked = inputs.request
    return LengthGeneralisation(
        inputs.tokenizer,
        asked.tasks,
        lengths=asked.lengths,
        trained=asked.trained,
        samples=asked.samples,
        shots=asked.shots,
        seed=asked.seed,
    )


def _attention(inputs: Inputs) -> Measure:
    return AttentionSimilarity(
        inputs.reference(),
        inputs.ids,
        # Its matrices are kept; at the trained length both models do what they were trained for.
        min(max(inputs.contexts), inputs.request.trained_length or _USUAL_LENGTH),
        windows=inputs.request.samples,
        corrupt=inputs.corrupt,
        reference_name=inputs.first.name,
    )


MEASURES: Mapping[str, Callable[[Inputs], Measure]] = {
    "perplexity": _perplexity,
    "position": _position,
    "needle": _needle,
    "induction": _induction,
    "tasks": _tasks,
    "attention": _attention,
}


def _versions() -> dict[str, str]:
    own = {"hf-posenc": __version__, "python": platform.python_version()}
    return own | {name: metadata.version(name) for name in _PACKAGES}


def _ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return found
