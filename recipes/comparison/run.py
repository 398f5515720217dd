"""`compare`: adapt, examine, judge and report; finished steps are reused."""

from __future__ import annotations

import gc
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from rich.console import Console
from transformers import AutoModelForCausalLM

from hf_posenc.errors import OptionError, StorageError
from hf_posenc.patches.directories import OutputError, reading, write_text
from hf_posenc.recipes.comparison import contestants as contesting
from hf_posenc.recipes.comparison import report
from hf_posenc.recipes.comparison.contestants import NATIVE, ORIGINAL, Contestant, contestants
from hf_posenc.recipes.comparison.examiner import Examiner, Findings
from hf_posenc.recipes.comparison.verdict import SHORT, Verdict, judge
from hf_posenc.recipes.data.windows import load_data
from hf_posenc.recipes.loading import auto_class, load
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.reports import versions
from hf_posenc.recipes.runs import run
from hf_posenc.recipes.runs.directory import MODEL, RECIPE, take
from hf_posenc.recipes.runs.files import check_writable

REQUEST, RUNS = "comparison.json", "runs"


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of a comparison: findings by name, and error messages by scheme.

    The equally trained native model is under `"native"`.
    """

    folder: Path
    found: Mapping[str, Findings]
    failed: Mapping[str, str]
    verdict: Verdict


def compare(
    model: str,
    folder: str | Path,
    *,
    schemes: Sequence[str] | None = None,
    budget: int = 300,
    overrides: Sequence[str] = (),
    measures: Sequence[str] | None = None,
    samples: int = 32,
    console: Console | None = None,
    command: str = "",
) -> Comparison:
    """Adapt a model to several schemes under one budget, measure all side by side, and write a report.

    After an interruption, the same call continues. More schemes can be added to a folder by a call that names them.

    Args:
        model: A local directory, a name on the hub, or "tiny-llama", which comes with the package.
        folder: Output folder. Finished runs there are reused.
        schemes: Names of schemes or recipes, or YAML files of recipes; `None` means the usual ones.
        budget: Optimizer steps per model.
        overrides: `section.key=value` for all recipes, such as `"data.source=text.txt"`.
        measures: Measures in addition to perplexity, by their names in `hf-posenc eval`; `None` means induction for
            causal models and no other for those with an encoder.
        samples: Windows or examples of each kind.
        console: Console for the progress; `None` is silent.
        command: The command line, for the report.

    Raises:
        OptionError: An argument is unknown or conflicts with another, or the folder holds another comparison.
        RecipeError: A scheme has no recipe, or the native model cannot be trained.
        UnknownSchemeError: A scheme is unknown.
        OutputError: The folder holds something else.
        CheckpointError: The record of the comparison in the folder is damaged.
    """
    folder = Path(folder)
    if processes().num_processes > 1:
        raise OptionError("compare runs in one process. Start it without accelerate launch.")
    asked = {
        "model": model,
        "budget": budget,
        # Each key is given once, so the order does not matter.
        "overrides": sorted(overrides),
        "measures": None if measures is None else [*measures],
        "samples": samples,
    }
    _check_folder(folder, asked)
    native, tokenizer = load(model)
    if measures is None:
        measures = ("induction",) if auto_class(native.config) is AutoModelForCausalLM else ()
    entered = contestants(
        model, native.config, folder / RUNS, schemes=schemes, budget=budget, overrides=overrides, samples=samples
    )
    control = entered[0].recipe
    length = control.training.length
    assert length is not None
    data = load_data(control.data, tokenizer, length=length, seed=control.training.seed, config=native.config)
    examiner = Examiner(entered[0], native.config, tokenizer, data, measures=measures, samples=samples, console=console)
    parameters = native.num_parameters()
    del native
    if not (folder / REQUEST).is_file():
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
        write_text(folder / REQUEST, json.dumps(asked, indent=1) + "\n")
    lock = FileLock(folder / RUNS / ".lock", blocking=False)
    # Of two at once, each would report as failed what the other trains.
    take(lock, folder)
    try:
        found, failed = _complete(entered, examiner, folder, console)
    finally:
        lock.release()
    settings = {
        "model": model,
        "budget": budget,
        "tokens per step": control.training.batch_size * length,
        "text": control.data.source,
        "changes to all recipes": ", ".join(overrides) or "none",
        "windows": samples,
        "differences": contesting.settings(entered),
        "command": command or "hf_posenc.recipes.comparison.compare",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    judged = {name: each for name, each in found.items() if name != ORIGINAL}
    is_short = budget * control.training.batch_size * length < SHORT * parameters
    verdict = judge(judged, examiner.trained, max(examiner.contexts), is_short=is_short)
    report.write(
        folder,
        found,
        verdict if len(judged) > 1 else None,
        failed,
        trained=examiner.trained,
        settings=settings,
    )
    return Comparison(folder, found, failed, verdict)


def _check_folder(folder: Path, asked: Mapping[str, Any]) -> None:
    """Raise unless a folder is new, empty, or holds the same comparison."""
    path = folder / REQUEST
    if path.is_file():
        what = f"{path}, which says what is compared in {folder},"
        with reading(what, advice=" Restore it, or choose another folder."):
            there = dict(json.loads(path.read_text(encoding="utf-8")))
        changed = (key for key, value in asked.items() if there.get(key) != value)
        differences = [f"{key} is {there.get(key)!r} there and {asked[key]!r} here" for key in changed]
        if differences:
            raise OptionError(f"{folder} holds another comparison: {'; '.join(differences)}. Choose another folder.")
        return
    if not folder.absolute().parent.is_dir():
        raise OutputError(f"There is no directory {folder.parent} to make {folder.name} in. Make it first.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} exists, and holds no comparison. Choose another folder, or empty this one.")
    check_writable(folder)


def _complete(
    entered: Sequence[Contestant], examiner: Examiner, folder: Path, console: Console | None
) -> tuple[dict[str, Findings], dict[str, str]]:
    """Train and examine all models. A scheme may fail; the native model, the reference, must not."""
    found: dict[str, Findings] = {ORIGINAL: examiner.untrained(folder / "untrained")}
    failed: dict[str, str] = {}
    began, done = time.monotonic(), 0
    for number, each in enumerate(entered):
        if console is not None:
            left = (time.monotonic() - began) / max(done, 1) * (len(entered) - number)
            estimate = f", about {timedelta(seconds=round(left))} left for all" if done else ""
            console.rule(f"[bold]{each.name}[/bold] ({number + 1} of {len(entered)}{estimate})", align="left")
        is_new = not (each.folder / MODEL).is_dir()
        try:
            again = shlex.join(["hf-posenc", "train", str(each.folder / RECIPE), "--out", "FOLDER"])
            run.train(each.recipe, each.folder, console=console, command=again)
            found[each.name] = examiner.examine(each)
        # The failure of one scheme must not stop the others.
        except Exception as error:
            if each.name == NATIVE or isinstance(error, StorageError):
                raise
            failed[each.name] = f"{type(error).__name__}: {' '.join(str(error).split())}".removeprefix("RuntimeError: ")
            if console is not None:
                console.print(f"{each.name} failed: {failed[each.name]}", style="red", markup=False)
        done += is_new
        # A trainer holds its model in a reference cycle. Free it before the next one is loaded.
        gc.collect()
        torch.cuda.empty_cache()
    return found, failed
