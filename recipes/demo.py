"""Demo: the built-in model trained with a new positional encoding, and without one as the control.

It needs no network: the model comes with the package, the text with Python.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from hf_posenc import __version__, registry
from hf_posenc.recipes.data.windows import load_data
from hf_posenc.recipes.loading import TINY_LLAMA, load
from hf_posenc.recipes.runs import run as runs
from hf_posenc.recipes.runs.directory import MODEL
from hf_posenc.recipes.schema.recipe import Conversion, Distillation, Evaluation, Recipe, Training

CONTROL, RUN, MARKER = "control", "run", ".posenc-demo"
SEED = 0

# Options of schemes that have them. Below a threshold the position of the query makes no difference; its default is for
# thousands of tokens, not for windows of 128. Tables have a row for each position up to the longest context.
_OPTIONS = {"threshold": 64.0, "num_positions": 1024}

# The prompt is longer than the training window, so the continuation is at unseen positions.
_PROMPT, _CONTINUATION = 256, 48
# Offset of the prompt in the held-out text, where it is prose rather than lists.
_PROSE = 2000


def is_demo(folder: Path) -> bool:
    """Whether a folder holds the output of a demo and nothing else."""
    return (folder / MARKER).is_file() and {path.name for path in folder.iterdir()} <= {CONTROL, RUN, MARKER}


def run(folder: Path, console: Console, *, scheme: str, steps: int, windows: int = 32) -> runs.Outcome:
    """Train the control and the converted model, whose outcome is returned, and let them continue a text."""
    recipe = _recipe(scheme, steps, windows)
    # The run finds its control in the next folder.
    control = replace(recipe, conversion=Conversion(scheme=None), distillation=Distillation())
    for name, each in ((CONTROL, control), (RUN, recipe)):
        console.rule(f"{each.conversion.scheme or 'the native encoding'}", align="left")
        outcome = runs.train(each, folder / name, console=console, command=f"hf-posenc demo --scheme {scheme}")
    # Its advice names keys of recipes, which the demo does not take.
    sentences = () if outcome.verdict is None else outcome.verdict.sentences
    console.print(f"\n{' '.join(sentences)}\n", highlight=False, markup=False)
    original, tokenizer = load(TINY_LLAMA)
    length = original.config.max_position_embeddings
    text = load_data(recipe.data, tokenizer, length=length, seed=SEED).held_out
    models = {"original": original}
    models |= {name: load(str(folder / place / MODEL))[0] for name, place in ((CONTROL, CONTROL), (scheme, RUN))}
    _print_samples(console, models, tokenizer, text[_PROSE : _PROSE + _PROMPT])
    (folder / MARKER).write_text(
        f"Written by hf-posenc {__version__} demo; the next demo may replace it.\n", encoding="utf-8"
    )
    return outcome


def _recipe(scheme: str, steps: int, windows: int) -> Recipe:
    return Recipe(
        model=TINY_LLAMA,
        conversion=Conversion(scheme=scheme, options=options_of(scheme)),
        training=Training(
            steps=steps, batch_size=16, learning_rate=3e-3, scheme_learning_rate=2e-2, weight_decay=0.1, seed=SEED
        ),
        distillation=Distillation(share=0.5),
        evaluation=Evaluation(windows=windows),
    )


def options_of(scheme: str) -> dict[str, Any]:
    """Return the options with which the demo builds a scheme."""
    known = registry.get(scheme).option_defaults()
    return {name: value for name, value in _OPTIONS.items() if name in known}


def _print_samples(console: Console, models: dict[str, Any], tokenizer: Any, prompt: Tensor) -> None:
    """Print each model's continuation of a held-out text, all with the same random seed."""
    end = " ".join(tokenizer.decode(prompt[-_CONTINUATION:]).split())
    console.print(f"{len(prompt)} held-out tokens that end [italic]... {escape(end)}[/italic] are continued with")
    for name, model in models.items():
        torch.manual_seed(SEED)
        output = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            max_new_tokens=_CONTINUATION,
            do_sample=True,
            temperature=0.7,
            top_k=20,
        )
        text = " ".join(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True).split())
        console.print(f"  [bold]{name}:[/bold] {escape(text)}")
    console.print()
