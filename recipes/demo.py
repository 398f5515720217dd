"""Demo: replace the positional encoding of a tiny trained model, train it, and compare the results.

It needs no network: the model comes with the package, the text with Python.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from hf_posenc import __version__, registry
from hf_posenc.errors import CheckpointError
from hf_posenc.patches.patch import patch
from hf_posenc.patches.plan import plan
from hf_posenc.recipes.data.windows import load_data
from hf_posenc.recipes.evaluation.grid import Grid
from hf_posenc.recipes.evaluation.grid import table as grid_table
from hf_posenc.recipes.evaluation.perplexity import TARGETS, context_curve
from hf_posenc.recipes.loading import TINY_LLAMA, load
from hf_posenc.recipes.plots.curves import Panel, plot_panels, trained_mark
from hf_posenc.recipes.reports import render
from hf_posenc.recipes.runs.progress import counting
from hf_posenc.recipes.schema.recipe import Conversion, Distillation, Recipe, Training
from hf_posenc.recipes.training.distillation import Teacher
from hf_posenc.recipes.training.trainer import adapt

TABLE, PICTURE, MODEL, MARKER = "table.md", "perplexity.png", "model", ".posenc-demo"
CONTEXTS = (64, 128, 256, 512, 1024)
SEED = 0

# Options of schemes that have them. Below a threshold the position of the query makes no difference; its default is for
# thousands of tokens, not for windows of 128. Tables have a row for each position up to the
# longest context.
_OPTIONS = {"threshold": 64.0, "num_positions": max(CONTEXTS)}

# The prompt is longer than the training window, so the continuation is at unseen positions.
_PROMPT, _CONTINUATION = 256, 48
# Offset of the prompt in the held-out text, where it is prose rather than lists.
_PROSE = 2000

_FRESH_PROCESS = """
import sys
import torch
import hf_posenc
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

model, ids, logits, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = AutoModelForCausalLM.from_pretrained(model)
with torch.no_grad():
    save_file({"logits": model(**load_file(ids)).logits}, logits)
"""


@dataclass(frozen=True, eq=False)
class Subject:
    """One of the compared models.

    Attributes:
        name: Name in table and picture.
        model: Model.
        curve: Measured perplexities.
    """

    name: str
    model: Any
    curve: Grid


@dataclass(frozen=True, eq=False)
class Outcome:
    """Outcome of the demo.

    Attributes:
        subjects: Compared models: original, original with the same training, converted, converted and trained.
        difference: Largest difference between the logits here and in a fresh process that loaded the saved model.
    """

    subjects: tuple[Subject, ...]
    difference: float


def is_demo(folder: Path) -> bool:
    """Whether a folder holds the output of a demo and nothing else."""
    return (folder / MARKER).is_file() and {path.name for path in folder.iterdir()} <= {TABLE, PICTURE, MODEL, MARKER}


def run(
    folder: Path,
    console: Console,
    *,
    scheme: str,
    steps: int,
    contexts: Sequence[int] = CONTEXTS,
    windows: int = 32,
) -> Outcome:
    """Run the demo and write its table, picture and model.

    Args:
        folder: Output folder, which must exist.
        console: Console to print to.
        scheme: Scheme to convert to.
        steps: Training steps.
        contexts: Context lengths to measure.
        windows: Number of held-out windows.

    Raises:
        CheckpointError: The saved model computes other logits in a fresh process.
    """
    torch.manual_seed(SEED)
    with console.status("reading the model and Python's documentation"):
        original, tokenizer = load(TINY_LLAMA)
        length = original.config.max_position_embeddings
        recipe = _recipe(scheme, steps, length)
        data = load_data(recipe.data, tokenizer, length=length, seed=SEED)
    console.print(f"{TINY_LLAMA}: {original.num_parameters():,} parameters, trained on windows of {length} tokens.")

    converted = copy.deepcopy(original)
    options = recipe.conversion.options
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    console.print(f"\n[bold]hf_posenc.patch(model, {scheme!r}{given})[/bold]")
    console.print(f"{escape(str(plan(original, scheme, **options)))}\n", soft_wrap=True)
    patch(converted, scheme, **options)
    adapted, control = copy.deepcopy(converted), copy.deepcopy(original)

    def measure(name: str, model: Any) -> Subject:
        with console.status(f"measuring {name}"):
            return Subject(name, model, context_curve(model, data.held_out, contexts, windows=windows))

    before = [measure("original", original), measure(f"{scheme}, untrained", converted)]
    for name, model in (("the original", control), (scheme, adapted)):
        with counting(console, f"training {name}", steps) as advance:
            adapt(model, recipe, data.train, teacher=Teacher(original), callbacks=[_Steps(advance)], use_cpu=True)
    after = [measure("original + training", control), measure(f"{scheme} + training", adapted)]
    subjects = [before[0], after[0], before[1], after[1]]

    note = _what_was_measured(recipe.training, windows)
    title = f"{TINY_LLAMA}, positional encoding replaced by {scheme}: perplexity on held-out text"
    lines = {s.name: [(context, s.curve.at(context)) for context in contexts] for s in subjects}
    plot_panels(folder / PICTURE, title, [Panel(lines=lines, mark=trained_mark(length))])
    (folder / TABLE).write_text(_markdown(title, subjects, note), encoding="utf-8")
    for part in (_table(subjects), note, f"{_verdict(subjects[-1], subjects[0], length)}\n"):
        console.print(part)
    prompt = data.held_out[_PROSE : _PROSE + _PROMPT]
    _print_samples(console, subjects, tokenizer, prompt)

    adapted.save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
    with console.status("loading the saved model in a fresh process"):
        difference = difference_in_fresh_process(adapted, folder / MODEL, prompt[None])
    if difference != 0.0:
        raise CheckpointError(
            f"The saved model computes other logits in a fresh process; they differ by {difference:.3g}."
        )
    console.print(
        f"Saved, and loaded in a fresh process with AutoModelForCausalLM.from_pretrained: logits bit-equal, largest "
        f"difference {difference:g}."
    )
    (folder / MARKER).write_text(
        f"Written by hf-posenc {__version__} demo; the next demo may replace it.\n", encoding="utf-8"
    )
    return Outcome(tuple(subjects), difference)


def _recipe(scheme: str, steps: int, length: int) -> Recipe:
    """Return the recipe for both trained models; the control uses its training only."""
    return Recipe(
        model=TINY_LLAMA,
        conversion=Conversion(scheme=scheme, options=options_of(scheme)),
        training=Training(
            steps=steps,
            length=length,
            batch_size=16,
            learning_rate=3e-3,
            scheme_learning_rate=2e-2,
            weight_decay=0.1,
            seed=SEED,
        ),
        distillation=Distillation(share=0.5),
    )


def options_of(scheme: str) -> dict[str, Any]:
    """Return the options with which the demo builds a scheme."""
    known = registry.get(scheme).option_defaults()
    return {name: value for name, value in _OPTIONS.items() if name in known}


def difference_in_fresh_process(model: Any, folder: Path, ids: Tensor) -> float:
    """Return the largest difference between a model's logits and those of its saved copy in a fresh process.

    Args:
        model: Saved model, on the CPU.
        folder: Folder of the saved copy.
        ids: Token ids, int64 `[B, S]`.

    Raises:
        CheckpointError: The fresh process failed.
    """
    with torch.no_grad():
        here = model(input_ids=ids).logits
    with tempfile.TemporaryDirectory() as exchange:
        given, taken = Path(exchange, "ids.safetensors"), Path(exchange, "logits.safetensors")
        save_file({"input_ids": ids.contiguous()}, given)
        # Bit-equal sums need the same number of threads.
        arguments = [str(each) for each in (folder, given, taken, torch.get_num_threads())]
        command = [sys.executable, "-c", _FRESH_PROCESS, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CheckpointError(f"A fresh process could not run the saved model: {last}")
        there = load_file(taken)["logits"]
    return 0.0 if torch.equal(here, there) else float((here - there).abs().max())


# -- output ------------------------------------------------------------------------------------------------------------


def _what_was_measured(training: Training, windows: int) -> str:
    return (
        f"Perplexity of the same {TARGETS} tokens in each of {windows} held-out windows (with 95 % interval), "
        "by number of tokens read. Both trained models (one is the original, as a control) saw the same "
        f"{training.steps} batches of {training.batch_size} windows of {training.length} tokens, at the same learning "
        "rates, with distillation from the original. One seed."
    )


def _table(subjects: Sequence[Subject]) -> Table:
    contexts = map(str, subjects[0].curve.points)
    table = Table("tokens read", *contexts, title="Perplexity by context length", box=box.SIMPLE_HEAD, padding=0)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for subject in subjects:
        # Intervals would make the table wider than a terminal; they are in the report.
        means = (subject.curve.at(context).mean for context in subject.curve.points)
        table.add_row(subject.name, *(f"{mean:.1f}" for mean in means))
    return table


def _verdict(subject: Subject, reference: Subject, length: int) -> str:
    """Return the paired difference of two models at the trained and at the longest measured length."""
    difference, contexts = subject.curve.minus(reference.curve), subject.curve.points
    found = [
        f"{difference.write(context)} nats per token at {context} tokens"
        for context in (length, contexts[-1])
        if context in contexts
    ]
    return f"{subject.name} against {reference.name}, window by window: {'; '.join(dict.fromkeys(found))}."


def _markdown(title: str, subjects: Sequence[Subject], note: str) -> str:
    first, *others = subjects
    differences = {other.name: other.curve.minus(first.curve) for other in others}
    caption = "Difference from the original in nats per token, window by window (with 95 % interval):"
    tables = [grid_table({subject.name: subject.curve for subject in subjects}), grid_table(differences, caption)]
    return render("demo", title=title, tables=tables, note=note, picture=PICTURE)


def _print_samples(console: Console, subjects: Sequence[Subject], tokenizer: Any, prompt: Tensor) -> None:
    """Print each model's continuation of a held-out text, all with the same random seed."""
    end = " ".join(tokenizer.decode(prompt[-_CONTINUATION:]).split())
    console.print(f"{len(prompt)} held-out tokens that end [italic]... {escape(end)}[/italic] are continued with")
    for subject in subjects:
        torch.manual_seed(SEED)
        output = subject.model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=_CONTINUATION,
            do_sample=True,
            temperature=0.7,
            top_k=20,
        )
        text = " ".join(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True).split())
        console.print(f"  [bold]{subject.name}:[/bold] {escape(text)}")
    console.print()


class _Steps(TrainerCallback):
    """Callback that reports the number of steps done."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._advance(state.global_step)
