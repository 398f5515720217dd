"""Demo: the built-in model trained with a new positional encoding, and without one as the control.

It needs no network: the model comes with the package, the text with Python.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from hf_posenc import __version__
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.reports import say
from hf_posenc.recipes.runs import run as runs

CONTROL, RUN, MARKER = "control", "run", ".posenc-demo"


def is_demo(folder: Path) -> bool:
    """Whether a folder holds the output of a demo and nothing else."""
    return (folder / MARKER).is_file() and {path.name for path in folder.iterdir()} <= {CONTROL, RUN, MARKER}


def run(folder: Path, console: Console, *, scheme: str, steps: int, windows: int = 32) -> runs.Outcome:
    """Train the control and the converted model, whose outcome is returned; end with a table of both."""
    keys = (f"steps={steps}", "batch_size=16", f"evaluation.windows={windows}")
    # The run finds its control in the next folder.
    recipes = {CONTROL: read_recipe("control", keys), RUN: read_recipe("swap", [f"scheme={scheme}", *keys])}
    parts = {
        CONTROL: "the control: the model as it is, trained on the same text",
        RUN: f"the model converted to {scheme}, trained likewise",
    }
    for number, (name, recipe) in enumerate(recipes.items(), start=1):
        console.rule(f"part {number} of {len(recipes)}: {parts[name]}", align="left")
        outcome = runs.train(recipe, folder / name, console=console, command=f"hf-posenc demo --scheme {scheme}")
    console.rule("the result: perplexity on held-out text (lower is better), and copying and recalling", align="left")
    if (found := outcome.results) is not None:
        for table in found.tables():
            say(console, f"{table.markdown()}\n")
        # Its advice names keys of recipes, which the demo does not take.
        say(console, f"\n{' '.join(found.verdict.sentences if found.verdict else ())}\n")
    (folder / MARKER).write_text(
        f"Written by hf-posenc {__version__} demo; the next demo may replace it.\n", encoding="utf-8"
    )
    return outcome
