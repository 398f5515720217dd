"""Adapt one checkpoint to many schemes under one budget, several seeds each, and compare with the native model.

    python benchmarks/adaptation.py schemes CHECKPOINT TRAIN HELD_OUT --runs DIR --output TABLE.md
    python benchmarks/adaptation.py levers CHECKPOINT TRAIN HELD_OUT --runs DIR --output TABLE.md
    python benchmarks/adaptation.py schemes tests/checkpoints/gpt2 builtin --runs DIR --length 128 --batch 16
    python benchmarks/adaptation.py schemes tests/checkpoints/t5 builtin --runs DIR --length 64 --batch 32

`schemes` takes the recipes of the architecture as they come with the package, one per scheme; `levers` takes a few
schemes and changes one lever of their recipe at a time. Every run is an ordinary run of `hf-posenc train`, in a
folder of its own below
DIR: what is finished is not run again, and what was stopped goes on. The native model is trained on the same windows,
    for as
many steps, without a teacher; ratios are to it, seed by seed, on the same held-out tokens. Long contexts, which take
as long to measure as a tiny model takes to train, are measured once, at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from threading import Lock

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

NATIVE = "native + training"
UNTRAINED = "native, untrained"
# What is measured beyond the trained length, and at how many times it.
FAR = "far.json"
TIMES = (1, 2, 4, 8)
RECIPES = {
    "llama": (
        *("rope", "tape", "learned", "fire", "fire_s", "kerple", "cape", "t5", "t5_clipped", "alibi", "sandwich"),
        *("rope2d", "liere", "comrope_ap", "comrope_ld", "fope", "xpos"),
        *("shaw", "disentangled", "transformer_xl", "fox", "fox_pro", "cope", "stick_breaking", "sinusoidal", "nope"),
    ),
    "gpt2": ("alibi", "rope", "fire", "kerple", "fox", "cope", "shaw", "sinusoidal", "nope"),
    "t5": ("kerple", "fire", "rope", "alibi", "fox", "cope", "disentangled", "sinusoidal", "stick_breaking"),
}
# Recipes of a Llama that do something else with its encoding than to remove it; and how far positions are skipped to.
REMOVED = {
    # The published form; the recipe's is below.
    "alibi": ["conversion.options={}", "conversion.fit=null"],
    # A table has rows for the positions only that training has shown.
    "learned": ["training.skip_to={trained}"],
    "fire": ["training.skip_to={far}"],
    "fire_s": ["training.skip_to={far}"],
    "fox": ["conversion.native=remove", "conversion.options={}"],
    "cope": ["conversion.native=remove"],
    "cape": ["conversion.native=remove", "conversion.options={}"],
    "rope": ["conversion.scheme=rope", "conversion.rope={}", "conversion.options={}", "training.skip_to=null"],
}
# Schemes over the encoding that stays; all but FoX start as an exact no-op.
KEPT = {
    "fox": ["conversion.options={init: horizon}"],
    "fire": ["conversion.options={init: zero, threshold: 64.0}", "training.skip_to=null"],
    "cope": [],
    "kerple": ["conversion.options={gate: true, shared: false}"],
    "alibi": ["conversion.options={gate: true}"],
}
# As many tokens in a step, in fewer and longer windows.
LONGER = ["training.length={longer}", "training.batch_size={fewer}", "training.micro_batch_size=1"]
LONGEST = ["training.length={longest}", "training.batch_size={fewest}", "training.micro_batch_size=1"]
# Texts of eight times the trained length whole, in as many steps as give as many tokens in all.
WHOLE = ["training.length={far}", "training.batch_size=1", "training.micro_batch_size=1", "training.steps={far_steps}"]
# A stack of encoder and decoder finds its way in long texts as well as in short ones only where it has seen them.
FARTHEST = ["training.length={far}", "training.batch_size={few}", "training.micro_batch_size={few}"]
CONTROL = ["conversion={scheme: null}", "distillation={}"]
# Turns the slowest pairs of a small head so slowly that they go less than half round within such texts.
BASE = 100_000
# A count that long texts do not exceed at once, and a start by what attention wrote.
COUNTED = ["conversion.options={npos: 256}", "conversion.fit=attention"]
SKIPPED = ("rope", "rope2d", "liere", "comrope_ap", "comrope_ld", "fope", "xpos", "tape", "sandwich", "cope")
# Other forms of a scheme, by architecture.
FORMS: dict[str, dict[str, tuple[str, list[str]]]] = {
    "llama": {
        "alibi, learned slopes": (
            "alibi",
            ["conversion.options={learned_slopes: true, shared: false}", "conversion.fit=native"],
        ),
        **{
            f"{scheme}, windows of {{longer}}": (scheme, ["training.skip_to={far}", *LONGER])
            for scheme in ("fire", "fire_s")
        },
        **{f"{scheme}, windows of {{longer}}": (scheme, LONGER) for scheme in ("sandwich", "sinusoidal", "nope")},
        **{f"{scheme}, windows of {{longest}}": (scheme, LONGEST) for scheme in ("shaw", "sinusoidal", "nope")},
        "cope, windows of {longest}": ("cope", [*COUNTED, *LONGEST]),
        "xpos, blockwise": ("xpos", ["conversion.options={anneal: true, block_length: {half}}"]),
        "fope, windows of {longest}": ("fope", ["training.skip_to={far}", *LONGEST]),
        **{
            f"{scheme}, base {BASE}, windows of {{far}}": (
                scheme,
                [f"conversion.options={{theta: {BASE}}}", "training.skip_to=null", *WHOLE],
            )
            for scheme in ("rope", "fope")
        },
        "fope, clipped": ("fope", ["conversion.options={clip: true, anneal: true}"]),
        **{f"{scheme}, positions skipped": (scheme, ["training.skip_to={far}"]) for scheme in SKIPPED},
        "fox, native kept, positions skipped": (
            "fox",
            ["conversion.native=keep", "conversion.fit=null", *KEPT["fox"], "training.skip_to={far}"],
        ),
    },
    # A table of positions could not be handed over from in windows that it has no rows for.
    "gpt2": {
        f"fire, windows of {length}": ("fire", ["conversion.native=remove", *windows])
        for length, windows in (("{longer}", LONGER), ("{longest}", LONGEST))
    },
    "t5": {
        "native, windows of {far}": ("stick_breaking", [*CONTROL, *FARTHEST]),
        **{f"{scheme}, windows of {{far}}": (scheme, FARTHEST) for scheme in ("kerple", "fire")},
    },
}
# Default rate of the model's own weights for models of up to half a million of them.
RATE = 1e-3
LEVERED = ("kerple", "fire", "fox", "alibi", "shaw", "nope")
LEVERS: dict[str, list[str]] = {
    "as shipped": [],
    "no teacher": ["distillation={}"],
    "teacher to the end": ["distillation.until=0"],
    "teacher and text": ["distillation.share=0.7"],
    "no hidden states": ["distillation.hidden=0"],
    "no fit": ["conversion.fit=null"],
    "swapped at once": ["conversion.native=remove"],
    "handed over, no fit": ["conversion.native=handover", "conversion.fit=null"],
    "positions skipped": ["training.skip_to={skip_to}"],
    "half the learning rate": ["training.learning_rate={half_rate}"],
    "twice the learning rate": ["training.learning_rate={twice_rate}"],
    "twice as many steps, half as large": ["training.steps={twice}", "training.batch_size={half}"],
    "LoRA": ["adapter.kind=lora", "adapter.rank=16", "training.learning_rate=5e-3"],
}


# By budget, row, seed and context; keys are strings, as in the file.
Losses = dict[str, dict[str, dict[str, dict[str, float]]]]


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        row: Row of the table.
        changes: To it, as on the command line.
        seed: Random seed of the training.
        folder: Where it is.
    """

    row: str
    changes: tuple[str, ...]
    seed: int
    folder: Path


def main() -> None:
    arguments = parser().parse_args()
    if arguments.what == "measure":
        measure(arguments.checkpoint, arguments.far_windows)
        return

    arguments.runs.mkdir(parents=True, exist_ok=True)
    from hf_posenc.recipes.schema.recipe import Recipe

    record, runs = Record.load(arguments.record), list(planned(arguments))
    # A recipe that does not read must not come out hours into a table.
    for run in runs:
        Recipe.read("swap", run.changes)
    failed = complete(runs, record, arguments)
    text = table(record, failed, arguments)
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["schemes", "levers", "measure"])
    parser.add_argument("checkpoint", type=Path, help="to measure: the folder of a run")
    parser.add_argument("train", nargs="?", help="text to train on, or builtin")
    parser.add_argument("held_out", nargs="?", help="text to measure on; none for builtin")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--record", type=Path, help="what was found, by budget, row and seed")
    parser.add_argument("--output", type=Path, help="the table")
    parser.add_argument("--only", nargs="+", help="these rows only")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--windows", type=int, default=64, help="held-out windows at and below the trained length")
    parser.add_argument(
        "--far-windows", type=int, default=16, help="and beyond it, for comparisons of a model with itself"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each with one thread")
    parser.add_argument("--set", dest="changes", nargs="*", default=[], help="changes to every recipe")
    return parser


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
        f"evaluation.contexts={sorted({max(64, trained_length(arguments) // 4), trained_length(arguments)})}",
        *arguments.changes,
    ]
    rows = {NATIVE: CONTROL}
    if arguments.what == "schemes":
        trained = trained_length(arguments)
        numbers = {"{half}": trained // 2, "{trained}": trained, "{longer}": 2 * trained, "{far}": 8 * trained}
        numbers["{longest}"] = 2 * numbers["{longer}"]
        for windows, length in (("{fewer}", "{longer}"), ("{fewest}", "{longest}"), ("{few}", "{far}")):
            numbers[windows] = max(1, arguments.batch * arguments.length // numbers[length])
        numbers["{far_steps}"] = max(1, arguments.steps * arguments.batch * arguments.length // numbers["{far}"])
        for scheme in RECIPES[architecture]:
            changes = REMOVED.get(scheme, []) if architecture == "llama" else []
            rows[scheme] = swapped(scheme, [filled(change, numbers) for change in changes])
        for form, (scheme, changes) in FORMS[architecture].items():
            whole = [*(REMOVED.get(scheme, []) if architecture == "llama" else []), *changes]
            rows[filled(form, numbers)] = swapped(scheme, [filled(change, numbers) for change in whole])
        for scheme, changes in KEPT.items() if architecture == "llama" else ():
            kept = ["conversion.native=keep", "conversion.fit=null", *changes]
            rows[f"{scheme}, native kept"] = swapped(scheme, kept)
    else:
        for scheme in LEVERED:
            for lever, changes in levers_of(scheme, common) if scheme in RECIPES[architecture] else ():
                rows[f"{scheme}, {lever}"] = swapped(scheme, changes)
    for seed in arguments.seeds:
        for row, changes in rows.items():
            if arguments.only is None or row in arguments.only or row == NATIVE:
                name = "".join(c if c.isalnum() or c == "_" else "-" for c in row.replace(", ", "--"))
                everything = merged(*common, *changes, f"training.seed={seed}")
                yield Run(row, everything, seed, arguments.runs / f"{name}.{seed}")


def swapped(scheme: str, changes: list[str]) -> list[str]:
    """Return changes to the recipe `swap` that begin with the scheme, unless they are those of a control."""
    return changes if CONTROL[0] in changes else [f"conversion.scheme={scheme}", *changes]


def levers_of(scheme: str, common: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Return the levers of a swap with the changes they stand for; those that change nothing in it are left out."""
    from hf_posenc.recipes.schema.recipe import Recipe

    shipped = Recipe.read("swap", merged(*common, *swapped(scheme, [])))
    training = shipped.training
    assert training.length is not None
    numbers = {
        "{length}": training.length,
        "{skip_to}": 8 * training.length,
        "{twice}": 2 * training.steps,
        "{half}": training.batch_size // 2,
        "{half_rate}": (training.learning_rate or RATE) / 2,
        "{twice_rate}": (training.learning_rate or RATE) * 2,
    }
    for lever, changes in LEVERS.items():
        mine = [filled(change, numbers) for change in changes]
        if not changes or Recipe.read("swap", merged(*common, *swapped(scheme, mine))) != shipped:
            yield lever, mine


def merged(*changes: str) -> tuple[str, ...]:
    """Return changes of which those of the same key are one, the last."""
    return tuple({change.split("=")[0]: change for change in changes}.values())


def filled(change: str, numbers: Mapping[str, float]) -> str:
    """Return a change with numbers instead of their names."""
    for name, number in numbers.items():
        change = change.replace(name, str(number))
    return change


def trained_length(arguments: argparse.Namespace) -> int:
    """Return the length that the checkpoint was trained for."""
    own = json.loads((arguments.checkpoint / "config.json").read_text())
    length: int = next(
        (own[key] for key in ("max_position_embeddings", "n_positions") if own.get(key)), arguments.length
    )
    return length


def measure(folder: Path, windows: int) -> None:
    """Measure the model of a finished run beyond its trained length; with the control, also the native one."""
    import torch

    from hf_posenc.recipes.data.windows import load_data
    from hf_posenc.recipes.evaluation import context_curve
    from hf_posenc.recipes.evaluation.request import Subject
    from hf_posenc.recipes.runs.measurements import NATIVE, Measurements
    from hf_posenc.recipes.schema.recipe import Recipe

    recipe = Recipe.read(folder / "recipe.yaml")
    assert recipe.training.length is not None
    assert recipe.evaluation.contexts is not None
    trained = max(recipe.evaluation.contexts)
    models: list[tuple[str, str | int]] = [(str(folder / "model"), recipe.training.steps)]
    if recipe.conversion.scheme is None:
        models.append((recipe.model, NATIVE))
    # Recorded together: the file is there when all is measured.
    found = Measurements(folder / FAR)
    curves = []
    for path, key in models:
        subject = Subject(str(key), path)
        model, tokenizer = subject.load(torch.device("cpu")), subject.tokenizer()
        data = load_data(recipe.data, tokenizer, length=recipe.training.length, config=model.config)
        contexts = [times * trained for times in TIMES]
        curves.append((key, context_curve(model, data.held_out, contexts, windows=windows, corrupt=data.corrupt)))
    for key, curve in curves:
        found.record(key, curve)


def complete(runs: list[Run], record: Record, arguments: argparse.Namespace) -> dict[str, str]:
    """Run what is not on record, and record it; return what went wrong, by folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    failed: dict[str, str] = {}
    budget = f"{arguments.steps} x {arguments.batch} x {arguments.length}"

    def succeeds(run: Run, command: list[str]) -> bool:
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            failed[str(run.folder)] = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
        return not done.returncode

    def start(run: Run) -> None:
        if not record.has(budget, run):
            program = ["-c", "from hf_posenc.cli import app; app()"]
            done = (run.folder / "model").is_dir() or succeeds(
                run, [*program, "train", "swap", *run.changes, "--out", str(run.folder)]
            )
            measuring = [__file__, "measure", str(run.folder), "--far-windows", str(arguments.far_windows)]
            if done and ((run.folder / FAR).exists() or succeeds(run, measuring)):
                record.add(budget, run)
        bar.advance(task)

    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar, ThreadPoolExecutor(arguments.jobs) as pool:
        task = bar.add_task("", total=len(runs))
        list(pool.map(start, runs))
    return failed


class Record:
    """What was found: natural logarithms of perplexities, by budget, row, seed, and number of tokens read.

    Attributes:
        near: Up to the trained length.
        far: At and beyond it, on other windows.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.near: Losses = {}
        self.far: Losses = {}
        self._lock = Lock()

    @classmethod
    def load(cls, path: Path | None) -> Record:
        """Return the record in a file, an empty one where there is none yet."""
        record = cls(path)
        if path is not None and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            record.near, record.far = found["near"], found["far"]
        return record

    def has(self, budget: str, run: Run) -> bool:
        """Return whether a run is on record."""
        return str(run.seed) in self.far.get(budget, {}).get(run.row, {})

    def add(self, budget: str, run: Run) -> None:
        """Add what is in the folder of a finished run, and write the record to a new file that then replaces it."""
        from hf_posenc.recipes.runs.measurements import Measurements

        with self._lock:
            for name, losses in (("measurements.json", self.near), (FAR, self.far)):
                measured = Measurements.load(run.folder / name, writes=False)
                for row, which in ((run.row, "after"), (UNTRAINED, "native")):
                    curve = measured.curve(which) if run.row == NATIVE or which == "after" else None
                    if curve is not None:
                        found = {str(c): round(math.log(curve.at(c).mean), 6) for c in curve.points if curve.reads(c)}
                        losses.setdefault(budget, {}).setdefault(row, {})[str(run.seed)] = found
            if self.path is not None:
                new = self.path.with_name(self.path.name + ".new")
                new.write_text(json.dumps({"near": self.near, "far": self.far}, indent=1) + "\n", encoding="utf-8")
                new.replace(self.path)


def table(record: Record, failed: dict[str, str], arguments: argparse.Namespace) -> str:
    """Return what is on record as Markdown, a table for each budget.

    At and below the trained length, perplexities are ratios to that of the native model with the same training;
    beyond it, ratios to that of the same model at the trained length.
    """
    from memory import machine

    trained = trained_length(arguments)
    lines = [
        f"Perplexity of the same 64 tokens in each held-out window by tokens read. The columns up to {trained}, the "
        "trained length, "
        f"are ratios to the native model at {trained} tokens after the same training ({arguments.windows} windows); "
        "the others "
        f"compare a model with itself ({arguments.far_windows} windows). Mean and standard deviation over seeds.",
        "",
    ]
    for budget in sorted(record.near, key=lambda budget: int(budget.split()[0])):
        lines += table_of(budget, record, trained)
    lines += [f"Failed: {folder}: {reason}" for folder, reason in failed.items()]
    command = " ".join([Path(sys.executable).name, *sys.argv])
    lines += [f"{machine()}", "", f"{date.today()}: `{command}`", ""]
    return "\n".join(lines)


def table_of(budget: str, record: Record, trained: int) -> list[str]:
    """Return the lines of the table of one budget."""
    near, far = record.near[budget], record.far[budget]
    controls = near.get(NATIVE, {})
    closer = sorted({int(context) for row in near.values() for at in row.values() for context in at})
    further = [times * trained for times in TIMES[1:]]
    at_trained = str(trained)

    def cell(ratios: list[float]) -> str:
        if not ratios:
            return "-"
        spread = f" ± {statistics.stdev(ratios):.3f}" if len(ratios) > 1 else ""
        return f"{statistics.mean(ratios):.3f}{spread}"

    def to_the_control(row: str, context: str) -> str:
        pairs = ((at, controls.get(seed, {})) for seed, at in near[row].items())
        return cell([math.exp(at[context] - to[at_trained]) for at, to in pairs if context in at and at_trained in to])

    def to_itself(row: str, context: str) -> str:
        found = far.get(row, {}).values()
        return cell([math.exp(at[context] - at[at_trained]) for at in found if context in at and at_trained in at])

    header = ["", *map(str, closer), *(f"{context} / {trained}" for context in further), "seeds"]
    lines = [f"### {budget} tokens", "", "| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    order = [UNTRAINED, NATIVE, "native", *RECIPES["llama"]]
    for row in sorted(near, key=lambda row: (order.index(row.split(", ")[0] if row not in order else row), row)):
        seeds = "" if row == UNTRAINED else str(len(near[row]))
        cells = [*(to_the_control(row, str(c)) for c in closer), *(to_itself(row, str(c)) for c in further)]
        lines.append("| " + " | ".join([row, *cells, seeds]) + " |")
    if controls:
        mean = math.exp(statistics.mean(at[at_trained] for at in controls.values()))
        lines += ["", f"Perplexity of the native model with the training, at {trained} tokens: {mean:.3f}."]
    return [*lines, ""]


if __name__ == "__main__":
    main()
