"""Measures of models: the forwards that they read, the processes that share them, and the evaluation of several."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from hf_posenc.errors import OptionError, PositionError, ShapeError
from hf_posenc.patches.inspection import table_end
from hf_posenc.patches.patch import evaluating
from hf_posenc.recipes import durations
from hf_posenc.recipes.evaluation.grid import Grid
from hf_posenc.recipes.evaluation.report import Report, Section
from hf_posenc.recipes.loading import auto_class, is_masked
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.reports import say
from hf_posenc.recipes.reports.curves import Mark

# The tensors of one sample, without a batch axis.
Row = tuple[Tensor, ...]
# A piece of a measurement: tokens of its rows, the rows, and the function of a model and of their stacked tensors.
Piece = tuple[int, Sequence[Row], Callable[..., Tensor]]
# A function from token ids `[B, n]` to corrupted token ids `[B, n]`.
Corruption = Callable[[Tensor], Tensor]
# A function that loads a model when its turn comes.
Loader = Callable[[], Any]
# Why a measure may be undefined for a kind of model.
_UNDEFINED = {
    AutoModelForCausalLM: "which has no encoder",
    AutoModelForMaskedLM: "a masked language model, which reads both sides of a token and writes no text",
    AutoModelForSeq2SeqLM: "whose encoder would read what is scored",
}
# Most tokens of a forward, unless one row has more. Eight rows of 4,096 tokens take a stock T5, whose bias is a matrix,
# 9 GiB, and run no faster than two.
_TOKENS = 2**13
# Positions per part: double-precision logits of all positions at once would take too much memory.
_PART = 256
# Seconds of a row that is too slow to read a longer one for an estimate.
_SLOW = 5.0
# Seconds between lines of progress where there is no bar.
_INTERVAL = 30.0


class Measure(ABC):
    """A measurement of language models, on the same inputs for all of them.

    The note defines the measured quantity, the mark is a labelled point on its axis. The quantity is defined for the
    kinds of models that it `takes`, as `Auto` classes. If it `hides` the tokens to predict, encoders read a corrupted
    text.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    note: str
    mark: Mark | None = None
    takes: ClassVar[Collection[Any]] = (AutoModelForCausalLM, AutoModelForSeq2SeqLM)
    hides: ClassVar[bool] = False
    _corrupt: Corruption | None = None

    def __call__(self, model: Any, workers: Workers | None = None) -> tuple[Grid, ...]:
        """Return the results for a model, one grid per quantity; the processes of accelerate are the usual workers."""
        self.check(model)
        with evaluating(model), torch.no_grad():
            return self._measure(model, Workers() if workers is None else workers)

    def check(self, model: Any) -> None:
        """Raise an `OptionError` if the measure is undefined for a model, before any work is done."""
        kind, own, its = auto_class(model.config), type(self).__name__, type(model).__name__
        if kind not in self.takes:
            raise OptionError(
                f"The measure {self.name!r} is not defined for {its}, {_UNDEFINED[kind]}. Leave it out; `perplexity` "
                "is defined."
            )
        if self.hides and kind is AutoModelForCausalLM and self._corrupt is not None:
            raise OptionError(f"{own}(corrupt=...): {its} has no encoder that reads a corrupted text; leave it out.")
        if self.hides and kind is not AutoModelForCausalLM and self._corrupt is None:
            raise OptionError(
                f"{own}(corrupt=None): the encoder of {its} must not read the tokens to predict; pass "
                "hf_posenc.recipes.data.collation.corruptor(model.config, tokenizer).corrupt."
            )

    @abstractmethod
    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        """Return the results for a model in evaluation mode; gradients are off."""

    @abstractmethod
    def pieces(self) -> Sequence[Piece]:
        """Return the pieces of the measurement, short rows first."""

    def _by_piece(self, model: Any, workers: Workers, ends: Callable[[Tensor], bool]) -> Tensor:
        """Return the samples of each piece, float64 `[pieces, samples]`; NaN after the first that `ends` it."""
        pieces = self.pieces()
        found = torch.full((len(pieces), len(pieces[0][1])), torch.nan, dtype=torch.float64)
        for samples, (_, rows, function) in zip(found, pieces, strict=True):
            samples[:] = workers.map(partial(function, model), rows, 1)[:, 0]
            if ends(samples):
                break
        return found

    def seconds(self, model: Any, batch_size: int = 8) -> float:
        """Estimate the time of a measurement from a few rows of each piece.

        The longest pieces are not read if that alone would take long; they follow from the one before.
        """
        total, last, each = 0.0, 1, 0.0
        with evaluating(model), torch.no_grad():
            for tokens, rows, function in self.pieces():
                if each > _SLOW:
                    each *= (tokens / last) ** 1.5  # between linear and quadratic
                else:
                    few = rows[: max(1, min(batch_size, _TOKENS // tokens, len(rows) // 4))]
                    stacked = [torch.stack(tensors) for tensors in zip(*few, strict=True)]
                    try:
                        each = durations.timed(partial(function, model, *stacked)) / len(few)
                    except PositionError:
                        break
                last = tokens
                total += each * len(rows)
        return total


def predictions(model: Any, read: Tensor, labels: Tensor, targets: int | None = None) -> Tensor:
    """Return the logits `[B, targets, vocabulary]` that predict the last labels, each given all tokens before it.

    A causal model reads `[B, n]` the text up to the last label but one; an encoder-decoder the encoder's input; a
    masked language model the labels with masked tokens. Labels `[B, m]` end the text, or are what the decoder writes;
    `targets` are all by default. Raise `PositionError` if the model has no encoding for positions that far, and
    `ShapeError` if a token is not in its vocabulary.
    """
    targets, end = labels.shape[1] if targets is None else targets, table_end(model)
    unreadable = PositionError(
        f"The {type(model).__name__} cannot read {read.shape[1]} tokens: its position table is shorter. "
        "Leave out the longer inputs."
    )
    if end is not None and max(read.shape[1], labels.shape[1]) > end:
        raise unreadable
    read, labels = read.to(model.device), labels.to(model.device)
    logits: Tensor
    try:
        if model.config.is_encoder_decoder:
            written = model.prepare_decoder_input_ids_from_labels(labels)
            logits = model(input_ids=read, decoder_input_ids=written, use_cache=False).logits
        elif is_masked(model):
            logits = model(input_ids=read).logits
        else:
            logits = model(input_ids=read, use_cache=False, logits_to_keep=targets).logits
    except IndexError as error:
        known, high = getattr(model.get_input_embeddings(), "num_embeddings", None), int(max(read.max(), labels.max()))
        if known is not None and high >= known:
            raise ShapeError(
                f"The text has the token {high}; the {type(model).__name__} knows 0 to {known - 1}. Tokenise it with "
                "the model's own tokenizer, or resize the embeddings of the model."
            ) from error
        raise unreadable from error
    return logits[:, -targets:]


def answer_predictions(model: Any, prompt: Tensor, answer: Tensor) -> Tensor:
    """Return the logits `[B, m, vocabulary]` of an answer `[B, m]`, given the prompt `[B, n]` and the answer so far.

    A causal model reads both. An encoder-decoder reads the prompt and writes the answer.
    """
    read = prompt if model.config.is_encoder_decoder else torch.cat([prompt, answer[:, :-1]], dim=1)
    return predictions(model, read, answer)


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each label in nats, float64 `[B, m]` on the CPU, given logits `[B, m, vocabulary]`.

    A loss that is not a number, of a model that diverged, counts as infinite.
    """
    parts = zip(*(torch.split(tensor, _PART, dim=1) for tensor in (logits, labels.to(logits.device))), strict=True)
    # cross_entropy expects the vocabulary second.
    found = [F.cross_entropy(part.double().transpose(1, 2), label, reduction="none") for part, label in parts]
    return torch.cat(found, dim=1).cpu().nan_to_num(nan=torch.inf, posinf=torch.inf)


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether each label is the most likely token, bool `[B, m]` on the CPU, given logits `[B, m, vocabulary]`.

    Where all labels are the most likely tokens, greedy decoding yields exactly these labels.
    """
    return (logits.argmax(dim=-1) == labels.to(logits.device)).cpu()


def different(name: str, places: Sequence[Any]) -> tuple[Any, ...]:
    """Return the points of an axis, ascending; raise `OptionError` if they are empty or repeated."""
    if not places or len(set(places)) < len(places):
        raise OptionError(f"{name}={tuple(places)}: expected one or more, each once.")
    return tuple(sorted(places))


class Workers:
    """Processes that share rows, in batches that do not depend on the number of processes.

    All processes must call `map` with the same rows in the same order; all of them get all results.

    Long rows go in smaller batches. With `alone`, each process does all the work, as forwards of a sharded model need.
    `progress` wraps the loop over batches, to show a bar.
    """

    def __init__(
        self, *, batch_size: int = 8, progress: Callable[[Any], Iterable[Any]] = iter, alone: bool = False
    ) -> None:
        self._batch_size, self._progress, self._alone = batch_size, progress, alone

    def map(self, function: Callable[..., Tensor], rows: Sequence[Row], width: int) -> Tensor:
        """Apply a function to all rows, each in one process; return its results, float64 `[rows, width]` on the CPU.

        The function gets the stacked tensors of rows of equal shapes, on the CPU, and returns `[batch, width]`. Results
        are NaN where it raised `PositionError`.
        """
        together, found = processes(), []
        for number, batch in enumerate(self._progress(self._batches(rows))):
            if self._alone or number % together.num_processes == together.process_index:
                parts = [torch.stack(tensors) for tensors in zip(*(rows[index] for index in batch), strict=True)]
                try:
                    found.append((batch, function(*parts).double().cpu()))
                except PositionError:
                    found.append((batch, torch.full((len(batch), width), torch.nan, dtype=torch.float64)))
        results = torch.full((len(rows), width), torch.nan, dtype=torch.float64)
        for batch, values in found if self._alone else gather_object(found):
            results[batch] = values
        return results

    def _batches(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return batches of row indices. Rows of a batch have equal shapes: nothing is padded. Long ones go alone."""
        alike: dict[tuple[torch.Size, ...], list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            alike[tuple(part.shape for part in row)].append(index)
        batches = []
        for shapes, group in alike.items():
            count = max(1, min(self._batch_size, _TOKENS // sum(shape.numel() for shape in shapes)))
            batches += [group[start : start + count] for start in range(0, len(group), count)]
        return batches


def evaluate(
    models: Mapping[str, nn.Module | Loader],
    measures: Sequence[Measure],
    *,
    batch_size: int = 8,
    console: Console | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Report:
    """Measure language models on the same inputs, and return the report.

    Under `accelerate launch` all processes must call this with the same arguments; they share the work.

    Args:
        models: Models by their names in the report, or functions that load them when their turn comes.
        measures: Measures, each at most once.
        batch_size: Windows or examples per forward.
        console: Console for the progress; `None` is silent.
        settings: Further facts for the report, as JSON values.

    Raises:
        OptionError: Models or measures are empty, a measure is given twice, or one is undefined for a model.
    """
    names = [measure.name for measure in measures]
    if not models or not measures:
        raise OptionError("evaluate() needs at least one model and one measure.")
    if len(set(names)) < len(names):
        raise OptionError(f"evaluate(measures=...): got {', '.join(names)}; each can be given once.")
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    started, total = time.monotonic(), len(models) * len(measures)
    for row, (name, model) in enumerate(models.items()):
        # Modules are callable, too, so callability cannot tell them from loaders.
        loaded = model if isinstance(model, nn.Module) else model()
        for measure in measures:
            measure.check(loaded)
        if console is not None:
            left = durations.words((len(models) - row) * sum(each.seconds(loaded, batch_size) for each in measures))
            others = f" for {len(models) - row} models as fast as {name}" if row < len(models) - 1 else ""
            say(console, f"time: {left}{others}, less where a model is no better than guessing")
        for done, measure in enumerate(measures, start=1 + row * len(measures)):
            what = f"{name}: {measure.name}"
            bar: Callable[[Any], Iterable[Any]] = iter
            if console is not None:
                show = partial(track, transient=True) if console.is_terminal else _lines
                bar = partial(show, description=what, console=console)
            found[measure.name][name] = measure(loaded, Workers(batch_size=batch_size, progress=bar))
            say(console, f"{what} ({done / total:.0%} after {time.monotonic() - started:.0f} s)")
        # Free its memory before the next one is loaded.
        del loaded
    sections = (Section(each.name, each.title, each.note, found[each.name], each.mark) for each in measures)
    return Report(tuple(sections), dict(settings or {}))


def _lines(batches: Sequence[Any], *, description: str, console: Console) -> Iterator[Any]:
    """Yield batches, and print lines on how many are done, as there is no bar in a file."""
    shown = time.monotonic()
    for done, batch in enumerate(batches):
        if time.monotonic() - shown >= _INTERVAL:
            shown = time.monotonic()
            say(console, f"{description}, {done} of {len(batches)} batches")
        yield batch
