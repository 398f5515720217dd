"""Adapt one checkpoint to many schemes under one budget, several seeds each, and compare with the native model.

    python benchmarks/adaptation.py schemes CHECKPOINT TRAIN HELD_OUT --runs DIR --output TABLE.md
    python benchmarks/adaptation.py levers CHECKPOINT TRAIN HELD_OUT --runs DIR --output TABLE.md
    python benchmarks/adaptation.py schemes tests/checkpoints/gpt2 builtin --runs DIR --length 128 --batch 16
    python benchmarks/adaptation.py schemes tests/checkpoints/t5 builtin --runs DIR --length 64 --batch 32

`schemes` takes the recipes of the architecture as they come with the package, one per scheme; `levers` takes a few schemes and
changes one lever of their recipe at a time. Every run is an ordinary run of `hf-posenc train`, in a folder of its own below
DIR: what is finished is not run again, and what was stopped goes on. The native model is trained on the same windows, for as
many steps, without a teacher; ratios are to it, seed by seed, on the same held-out tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

NATIVE = "native + training"
RECIPES = {
    "llama": (
        *("rope", "tape", "learned", "fire", "fire_s", "kerple", "cape", "t5", "t5_clipped", "alibi", "sandwich"),
        *("shaw", "disentangled", "transformer_xl", "fox", "fox_pro", "cope", "stick_breaking", "sinusoidal", "nope"),
    ),
    "gpt2": ("alibi", "rope", "fire", "kerple", "fox", "cope", "shaw", "sinusoidal", "nope"),
    "t5": ("kerple", "fire", "rope", "alibi", "fox", "cope", "disentangled", "sinusoidal", "stick_breaking"),
}
# Recipes of a Llama that do something else with its encoding than to remove it.
REMOVED = {
    "fox": ["conversion.native=remove", "conversion.options={}"],
    "cope": ["conversion.native=remove"],
    "cape": ["conversion.native=remove", "conversion.options={}"],
    "rope": ["conversion.options={}", "training.skip_to=null"],
}
# Schemes over the encoding that stays; all but FoX start as an exact no-op.
KEPT = {
    "fox": ["conversion.options={init: horizon}"],
    "fire": ["conversion.options={init: zero, threshold: 64.0}"],
    "cope": [],
    "kerple": ["conversion.options={gate: true, shared: false}"],
    "alibi": ["conversion.options={gate: true}"],
}
# Other forms of a scheme.
FORMS = {
    "alibi, learned slopes": (
        "alibi",
        ["conversion.options={learned_slopes: true, shared: false}", "conversion.fit=native"],
    ),
}
LEVERED = ("kerple", "fire", "fox", "alibi", "shaw", "nope")
LEVERS: dict[str, list[str]] = {
    "as shipped": [],
    "no teacher": ["distillation.share=0", "distillation.hidden=0"],
    "teacher to the end": ["distillation.until=0"],
    "teacher alone": ["distillation.share=1", "distillation.until=0"],
    "hidden states too": ["distillation.hidden=2"],
    "teacher alone at first, hidden states too": [
        "distillation.share=1",
        "distillation.hidden=2",
        "distillation.until=0.8",
    ],
    "no fit": ["conversion.fit=null"],
    "swapped at once": ["conversion.native=remove"],
    "handed over, no fit": ["conversion.native=handover", "conversion.fit=null"],
    "new parameters first": ["training.new_parameters_first=0.1"],
    "mixed lengths": ["training.mixed_lengths=[64, 128, 256]"],
    "positions skipped": ["training.skip_to=2048"],
    "half the learning rate": ["training.learning_rate=5e-4"],
    "twice the learning rate": ["training.learning_rate=2e-3"],
    "twice as many steps, half as large": ["training.steps={twice}", "training.batch_size={half}"],
    "LoRA": ["adapter.kind=lora", "adapter.rank=16", "training.learning_rate=5e-3"],
}


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        row: Of the table.
        recipe: Name of a recipe.
        changes: To it, as on the command line.
        seed: Of the training.
        folder: Where it is.
    """

    row: str
    recipe: str
    changes: tuple[str, ...]
    seed: int
    folder: Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["schemes", "levers"])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("train", help="text to train on, or builtin")
    parser.add_argument("held_out", nargs="?", help="text to measure on; none for builtin")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", help="these rows only")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", help="default: a quarter to eight times the trained length")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--set", dest="changes", nargs="*", default=[], help="changes to every recipe")
    arguments = parser.parse_args()

    arguments.runs.mkdir(parents=True, exist_ok=True)
    runs = list(planned(arguments))
    failed = complete(runs, arguments.jobs)
    text = table(runs, failed, arguments)
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


def planned(arguments: argparse.Namespace) -> Iterator[Run]:
    """Return the runs, the control of each seed first."""
    architecture = json.loads((arguments.checkpoint / "config.json").read_text())["model_type"]
    evaluation = f"evaluation.windows={arguments.windows}"
    common = [
        f"model={arguments.checkpoint}",
        f"data.source={arguments.train}",
        f"data.held_out={arguments.held_out or 'null'}",
        f"training.steps={arguments.steps}",
        f"training.batch_size={arguments.batch}",
        f"training.length={arguments.length}",
        evaluation,
        *([f"evaluation.contexts={arguments.contexts}"] if arguments.contexts else []),
        *arguments.changes,
    ]
    control = [
        "conversion={scheme: null}",
        "distillation={}",
    ]
    rows: dict[str, tuple[str, list[str]]] = {NATIVE: (f"{architecture}-{RECIPES[architecture][-1]}", control)}
    if arguments.what == "schemes":
        for scheme in RECIPES[architecture]:
            rows[scheme] = (f"{architecture}-{scheme}", REMOVED.get(scheme, []) if architecture == "llama" else [])
        for form, (scheme, changes) in FORMS.items() if architecture == "llama" else ():
            rows[form] = (f"{architecture}-{scheme}", changes)
        for scheme, changes in KEPT.items() if architecture == "llama" else ():
            kept = ["conversion.native=keep", "conversion.fit=null", *changes]
            rows[f"{scheme}, native kept"] = (f"{architecture}-{scheme}", kept)
    else:
        sizes = {"twice": 2 * arguments.steps, "half": arguments.batch // 2}
        for scheme in LEVERED:
            for lever, changes in LEVERS.items():
                rows[f"{scheme}, {lever}"] = (
                    f"{architecture}-{scheme}",
                    [
                        change.format(**sizes) if "{twice}" in change or "{half}" in change else change
                        for change in changes
                    ],
                )
    for seed in arguments.seeds:
        for row, (recipe, changes) in rows.items():
            if arguments.only is None or row in arguments.only or row == NATIVE:
                name = "".join(c if c.isalnum() or c == "_" else "-" for c in row.replace(", ", "--"))
                everything = (*common, *changes, f"training.seed={seed}")
                yield Run(row, recipe, everything, seed, arguments.runs / f"{name}.{seed}")


def complete(runs: list[Run], jobs: int) -> dict[str, str]:
    """Run what is not finished; return what went wrong, by folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    failed: dict[str, str] = {}

    def start(run: Run) -> None:
        if not (run.folder / "model").is_dir():
            command = [sys.executable, "-c", "from hf_posenc.cli import app; app()", "train", run.recipe, *run.changes]
            done = subprocess.run(
                [*command, "--out", str(run.folder)], env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                failed[str(run.folder)] = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
        bar.advance(task)

    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("", total=len(runs))
        list(pool.map(start, runs))
    return failed


def table(runs: list[Run], failed: dict[str, str], arguments: argparse.Namespace) -> str:
    """Return the table as Markdown: perplexities as ratios to the native model with the same training."""
    from memory import machine

    from hf_posenc.recipes.measurements import Measurements

    losses: dict[str, dict[int, dict[int, float]]] = {}
    untrained: dict[int, float] = {}
    for run in runs:
        if str(run.folder) in failed or not (run.folder / "model").is_dir():
            continue
        found = Measurements.load(run.folder / "measurements.json", writes=False)
        after, native = found.curve("after"), found.curve("native")
        if after is not None:
            losses.setdefault(run.row, {})[run.seed] = {c: math.log(after.perplexity(c).mean) for c in after.contexts}
        if native is not None:
            untrained = {c: native.perplexity(c).mean for c in native.contexts}
    controls = losses.get(NATIVE, {})
    # A learned table of positions ends somewhere, so the control may have fewer.
    contexts = sorted({context for row in losses.values() for at in row.values() for context in at})
    own = json.loads((arguments.checkpoint / "config.json").read_text())
    trained = next((own[key] for key in ("max_position_embeddings", "n_positions") if own.get(key)), arguments.length)

    def ratio(row: dict[int, dict[int, float]], context: int) -> str:
        ratios = [
            math.exp(losses[context] - controls[seed][trained])
            for seed, losses in row.items()
            if seed in controls and context in losses and trained in controls[seed]
        ]
        if not ratios:
            return "-"
        spread = f" ± {statistics.stdev(ratios):.3f}" if len(ratios) > 1 else ""
        return f"{statistics.mean(ratios):.3f}{spread}"

    def cliff(row: dict[int, dict[int, float]], context: int) -> str:
        found = [math.exp(at[context] - at[trained]) for at in row.values() if context in at and trained in at]
        return f"{statistics.mean(found):.3f}" if found else "-"

    far = [context for context in contexts if context in (4 * trained, 8 * trained)]
    header = ["", *(f"{context}" for context in contexts), *(f"{context} / {trained}" for context in far), "seeds"]
    lines = [
        f"Perplexity of the same 64 tokens in each of {arguments.windows} held-out windows by tokens read, as a ratio to that of the "
        f"native model at {trained} tokens, its trained length, after the same {arguments.steps} steps of {arguments.batch} x "
        f"{arguments.length} tokens; mean and standard deviation over seeds. The last columns compare a model with itself.",
        "",
        "| " + " | ".join(header) + " |",
        "|---|" + "---:|" * (len(header) - 1),
    ]
    first = [
        "native, untrained",
        *(ratio({seed: {c: math.log(p) for c, p in untrained.items()} for seed in controls}, c) for c in contexts),
        *(f"{untrained[c] / untrained[trained]:.3f}" if {c, trained} <= untrained.keys() else "-" for c in far),
        "",
    ]
    lines.append("| " + " | ".join(first) + " |")
    for name, row in losses.items():
        cells = [name, *(ratio(row, c) for c in contexts), *(cliff(row, c) for c in far), str(len(row))]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"Failed: {folder}: {reason}" for folder, reason in failed.items())]
    absolute = ", ".join(
        f"{c}: {math.exp(statistics.mean(at[c] for at in controls.values())):.2f}"
        for c in contexts
        if all(c in at for at in controls.values())
    )
    lines += [f"Perplexity of the native model with the training, mean over seeds: {absolute}.", ""]
    command = " ".join([Path(sys.executable).name, *sys.argv])
    lines += [f"{machine()}", "", f"{date.today()}: `{command}`", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
