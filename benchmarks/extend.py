"""Extend a model to four times its trained length in several ways, and compare with the model itself and its control.

    python benchmarks/extend.py MODEL --train TRAIN --held-out HELD_OUT --runs DIR [KEY=VALUE ...]

Every way is an ordinary run of `hf-posenc train` in a folder of its own below `--runs`, so what was stopped goes on.
`--window 1024` is for models whose trained length takes too long: windows of so many tokens stand for longer texts,
with one gap in their positions. This tells how a model takes distances that it has not seen, and nothing of what it
finds in a text that is really that long. `--untrained` measures what each way starts from.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from memory import machine

from hf_posenc.patches.directories import write_text
from hf_posenc.patches.patch import patch
from hf_posenc.patches.rotary import set_rope
from hf_posenc.recipes.evaluation import context_curve
from hf_posenc.recipes.evaluation.grid import PERPLEXITY, Grid
from hf_posenc.recipes.evaluation.perplexity import TARGETS, spread_windows
from hf_posenc.recipes.evaluation.predictions import losses
from hf_posenc.recipes.evaluation.report import Report, Section, load, save
from hf_posenc.recipes.evaluation.text import read_text, token_ids
from hf_posenc.recipes.loading import load as load_model
from hf_posenc.recipes.loading import trained_length
from hf_posenc.recipes.plots.curves import trained_mark
from hf_posenc.recipes.schema.recipe import Recipe

RESULTS = Path(__file__).parent / "results"
# Recipe and keys of each way.
WAYS = {
    "control": ["control"],
    "yarn": ["extend", "factor=4", "by=yarn"],
    "base": ["extend", "factor=4", "by=base"],
    "fox": ["extend", "factor=4", "by=fox"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a causal model with a rotary encoding")
    parser.add_argument("--train", required=True, help="text to train on")
    parser.add_argument("--held-out", required=True, help="text to measure on")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--window", type=int, help="tokens that stand for a longer text, by a gap in their positions")
    parser.add_argument("--windows", type=int, default=16, help="windows to measure")
    parser.add_argument("--untrained", action="store_true", help="train nothing")
    parser.add_argument("changes", nargs="*", help="changes KEY=VALUE of every recipe")
    arguments = parser.parse_intermixed_args()
    arguments.runs.mkdir(parents=True, exist_ok=True)
    places = {"native": arguments.model}
    if arguments.untrained:
        places |= {name: arguments.model for name in WAYS if name != "control"}
    for name, recipe in () if arguments.untrained else WAYS.items():
        folder = arguments.runs / name
        places[name] = folder / "model"
        keys = [f"model={arguments.model}", f"data.source={arguments.train}", f"data.held_out={arguments.held_out}"]
        program = [sys.executable, "-c", "from hf_posenc.cli import app; app()", "train"]
        subprocess.run([*program, *recipe, *keys, *arguments.changes, "--out", str(folder)], check=True)
    section = measured(places, arguments)
    model = re.sub(r"\W+", "-", arguments.model.name)
    changes = "nothing was trained" if arguments.untrained else ", ".join(f"`{each}`" for each in arguments.changes)
    settings = {"changes of the recipes": changes or "none", "measured on": machine()}
    save(Report((section,), settings), RESULTS / f"extend_{model}.json")
    section.figure().savefig(RESULTS / f"extend_{model}.png")
    write_text(RESULTS / "extend.md", page())


def measured(places: dict[str, Path], arguments: argparse.Namespace) -> Section:
    """Return the perplexities of all models at one, two, four and eight times the trained length of the first."""
    models: dict[str, tuple[Grid, ...]] = {}
    own = 0
    for name, place in places.items():
        model, tokenizer = load_model(str(place), dtype=torch.float32)
        own = own or trained_length(model.config)
        if arguments.untrained and name in WAYS:
            convert(model, [f"model={place}", *WAYS[name][1:]])
        lengths, count = [own * factor for factor in (1, 2, 4, 8)], arguments.windows
        ids = token_ids(read_text(arguments.held_out), tokenizer)
        if arguments.window is None:
            models[name] = (context_curve(model, ids, lengths, windows=count, batch_size=1),)
        else:
            rows = spread_windows(ids, arguments.window + 1, count, targets=TARGETS)
            models[name] = (with_gap(model, rows, [arguments.window, *lengths]),)
        print(name, [f"{models[name][0].at(point).mean:.4g}" for point in models[name][0].points])  # noqa: T201
    read = f"Perplexity of the same {TARGETS} tokens in each of {arguments.windows} held-out windows"
    if arguments.window is None:
        note = f"{read}, after contexts of one, two, four and eight times the trained length, {own:,}."
    else:
        note = (
            f"{read} of {arguments.window:,} tokens. In the first column their positions have no gap. In the others "
            "the second half stands at the end of a text of so many positions, of one, two, four and eight times the "
            f"trained length, {own:,}; nothing stands between the halves. So this is about distances that a model has "
            "not seen. It does not say what a model finds in a text that is really that long."
        )
    title = f"{arguments.model.name}, extended to four times its trained length"
    if arguments.untrained:
        title += ", before any training"
    return Section("extend", title, note, models, trained_mark(own))


def convert(model: Any, changes: list[str]) -> None:
    """Change a model in place as `extend` does before its training."""
    conversion = Recipe.read("extend", changes).conversion
    if conversion.rope:
        set_rope(model, conversion.rope)
    if conversion.scheme is not None:
        patch(model, conversion.scheme, native=conversion.native, layers=conversion.layers, **conversion.options)


@torch.no_grad()
def with_gap(model: Any, rows: torch.Tensor, lengths: list[int]) -> Grid:
    """Return the perplexity of the last tokens of windows whose second half stands at the end of longer texts.

    Args:
        model: Causal model.
        rows: Token ids, int64 `[windows, n + 1]`.
        lengths: Positions of each text, at least `n`.
    """
    tokens = rows.shape[1] - 1
    found = torch.empty(len(lengths), len(rows), dtype=torch.float64)
    for line, length in enumerate(lengths):
        places = torch.arange(tokens)
        places[tokens // 2 :] += length - tokens
        for column, row in enumerate(rows):
            # Without a mask, transformers would take the gap for the start of another document.
            logits = model(
                row[None, :-1],
                position_ids=places[None],
                attention_mask=torch.ones(1, tokens, dtype=torch.long),
                use_cache=False,
                logits_to_keep=TARGETS,
            ).logits
            found[line, column] = losses(logits, row[None, -TARGETS:]).mean()
    return Grid(PERPLEXITY, {"positions": tuple(lengths)}, found)


def page() -> str:
    """Return the page of all models that were measured."""
    lines = ["# Four times the trained length", "", "Made by `benchmarks/extend.py`."]
    for file in sorted(RESULTS.glob("extend_*.json")):
        report = load(Report, file, "Measure again.")
        section = report["extend"]
        lines += ["", section.markdown().strip(), "", f"![{section.title}]({file.stem}.png)", ""]
        lines += [f"- {name}: {value}" for name, value in report.settings.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
