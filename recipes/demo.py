"""Demo: the built-in model trained with a new positional encoding, and without one as the control.

It needs no network: the model comes with the package, the text with Python.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from hf_posenc import __version__
from hf_posenc.recipes.runs import run as runs
from hf_posenc.recipes.schema.recipe import Recipe

CONTROL, RUN, MARKER = "control", "run", ".posenc-demo"


def is_demo(folder: Path) -> bool:
    """Whether a folder holds the output of a demo and nothing else."""
    return (folder / MARKER).is_file() and {path.name for path in folder.iterdir()} <= {CONTROL, RUN, MARKER}


def run(folder: Path, console: Console, *, scheme: str, steps: int, windows: int = 32) -> runs.Outcome:
    """Train the control and the converted model, whose outcome is returned."""
    keys = (f"steps={steps}", "batch_size=16", f"evaluation.windows={windows}")
    # The run finds its control in the next folder.
    recipes = {CONTROL: Recipe.read("control", keys), RUN: Recipe.read("swap", [f"scheme={scheme}", *keys])}
    for name, recipe in recipes.items():
        console.rule(recipe.conversion.scheme or "the native encoding", align="left")
        outcome = runs.train(recipe, folder / name, console=console, command=f"hf-posenc demo --scheme {scheme}")
    # Its advice names keys of recipes, which the demo does not take.
    sentences = () if outcome.verdict is None else outcome.verdict.sentences
    console.print(f"\n{' '.join(sentences)}\n", highlight=False, markup=False)
    (folder / MARKER).write_text(
        f"Written by hf-posenc {__version__} demo; the next demo may replace it.\n", encoding="utf-8"
    )
    return outcome
