"""`compare`: adapt, examine, judge, report; what is done is not done again."""

from __future__ import annotations

import gc
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hf_posenc import __version__
from hf_posenc.errors import CheckpointError, OptionError, StorageError
from hf_posenc.patches.directories import OutputError
from hf_posenc.recipes.comparison import report
from hf_posenc.recipes.comparison.contestants import NATIVE, UNTRAINED, Contestant, contestants
from hf_posenc.recipes.comparison.examiner import PICTURE, Examiner
from hf_posenc.recipes.comparison.findings import Findings
from hf_posenc.recipes.comparison.verdict import Verdict, judge
from hf_posenc.recipes.data.windows import load_data
from hf_posenc.recipes.loading import load
from hf_posenc.recipes.processes import processes
from hf_posenc.recipes.runs import run
from hf_posenc.recipes.runs.files import check_writable, write_text

REQUEST, RUNS = "comparison.json", "runs"
_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True, eq=False)
class Comparison:
    """What a comparison came to.

    Attributes:
        folder: With the report and the runs.
        found: Figures of each model, the native one with the same training under `"native"`.
        failed: What went wrong, by scheme.
        verdict: What to take, and why.
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

    Stopped at any moment, the same call goes on; more schemes can be added to a folder by naming them, too.

    Args:
        model: A local directory, a name on the hub, or "tiny-llama", which comes with the package.
        folder: Where runs and report go.
        schemes: Names of schemes or recipes, or YAML files of recipes; `None` takes eight that fit the architecture.
        budget: Optimizer steps of each.
        overrides: `section.key=value` for the recipes of all, such as `"data.source=text.txt"`.
        measures: What is measured beside the perplexity, by the names of `hf-posenc eval`; `None` is induction, which is not
            defined for an encoder-decoder.
        samples: Windows or examples of each kind.
        console: Where progress is shown; `None` is silent.
        command: What was typed, for the report.

    Raises:
        OptionError: Something that was asked for does not exist or go together, or the folder holds another comparison.
        RecipeError: There is no recipe for a scheme, or the native model cannot be trained.
        UnknownSchemeError: There is no such scheme.
        OutputError: The folder holds something else.
        CheckpointError: What says what the folder holds is damaged.
    """
    folder = Path(folder)
    if processes().num_processes > 1:
        raise OptionError("compare runs in one process. Start it without accelerate launch.")
    asked = {
        "model": model,
        "budget": budget,
        # Each key is given once, so their order says nothing.
        "overrides": sorted(overrides),
        "measures": None if measures is None else [*measures],
        "samples": samples,
    }
    _check_folder(folder, asked)
    native, tokenizer = load(model)
    if measures is None:
        measures = () if native.config.is_encoder_decoder else ("induction",)
    entered = contestants(model, native.config, folder / RUNS, schemes=schemes, budget=budget, overrides=overrides)
    control = entered[0].recipe
    length = control.training.length
    assert length is not None
    data = load_data(
        control.data, tokenizer, length=length, seed=control.training.seed, denoising=native.config.is_encoder_decoder
    )
    examiner = Examiner(entered[0], native.config, tokenizer, data, measures=measures, samples=samples, console=console)
    del native
    _claim(folder, asked)
    found, failed = _complete(entered, examiner, folder, console)
    settings = {
        "model": model,
        "budget": budget,
        "tokens per step": control.training.batch_size * length,
        "text": control.data.source,
        "changes to all recipes": ", ".join(overrides) or "none",
        "windows": samples,
        "command": command or "hf_posenc.recipes.comparison.compare",
        "versions": ", ".join(
            [f"hf-posenc {__version__}", *(f"{name} {metadata.version(name)}" for name in _PACKAGES)]
        ),
    }
    judged = {name: each for name, each in found.items() if name != UNTRAINED}
    verdict = judge(judged, examiner.trained, max(examiner.contexts))
    report.write(
        folder,
        found,
        verdict if len(judged) > 1 else None,
        failed,
        trained=examiner.trained,
        settings=settings,
        overviews={
            each.name: each.folder / PICTURE
            for each in entered
            if each.name in found and (each.folder / PICTURE).is_file()
        },
    )
    return Comparison(folder, found, failed, verdict)


def _check_folder(folder: Path, asked: Mapping[str, Any]) -> None:
    """Raise unless a folder is new, empty, or of the same comparison."""
    path = folder / REQUEST
    if path.is_file():
        try:
            there = dict(json.loads(path.read_text(encoding="utf-8")))
            # Of earlier versions they are in the order that they were typed in.
            there["overrides"] = sorted(there["overrides"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{path}, which says what is compared in {folder}, cannot be read ({type(error).__name__}: {error}). Restore it, or "
                "choose another folder."
            ) from error
        differences = [
            f"{key} is {there.get(key)!r} there and {value!r} here"
            for key, value in asked.items()
            if there.get(key) != value
        ]
        if differences:
            raise OptionError(f"{folder} holds another comparison: {'; '.join(differences)}. Choose another folder.")
        return
    if not folder.absolute().parent.is_dir():
        raise OutputError(f"There is no directory {folder.parent} to make {folder.name} in. Make it first.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} exists, and holds no comparison. Choose another folder, or empty this one.")
    check_writable(folder)


def _claim(folder: Path, asked: Mapping[str, Any]) -> None:
    """Make the folder that of this comparison, now that nothing is wrong any more."""
    if (folder / REQUEST).is_file():
        return
    (folder / RUNS).mkdir(parents=True, exist_ok=True)
    write_text(folder / REQUEST, json.dumps(asked, indent=1) + "\n")


def _complete(
    entered: Sequence[Contestant], examiner: Examiner, folder: Path, console: Console | None
) -> tuple[dict[str, Findings], dict[str, str]]:
    """Train and examine all; without the native model there is nothing to compare with, any other may fail."""
    found: dict[str, Findings] = {UNTRAINED: examiner.untrained(folder / "untrained")}
    failed: dict[str, str] = {}
    began, done = time.monotonic(), 0
    for number, each in enumerate(entered):
        if console is not None:
            left = (time.monotonic() - began) / done * (len(entered) - number) if done else None
            console.rule(_heading(each, number, len(entered), left), align="left")
        is_new = not run.is_finished(each.folder)
        try:
            again = shlex.join(["hf-posenc", "train", str(each.folder / run.RECIPE), "--out", "FOLDER"])
            run.train(each.recipe, each.folder, console=console, command=again)
            found[each.name] = examiner.examine(each)
        # Whatever goes wrong with one scheme, the others are of interest.
        except Exception as error:
            if each.name == NATIVE or isinstance(error, StorageError):
                raise
            failed[each.name] = f"{type(error).__name__}: {' '.join(str(error).split())}".removeprefix("RuntimeError: ")
            if console is not None:
                console.print(f"{each.name} failed: {failed[each.name]}", style="red", markup=False)
        done += is_new
        _free()
    return found, failed


def _free() -> None:
    """Let go of the last model, which a trainer holds in a circle, before the next one is loaded."""
    gc.collect()
    torch.cuda.empty_cache()


def _heading(each: Contestant, number: int, count: int, left: float | None) -> str:
    estimate = "" if left is None else f", about {timedelta(seconds=round(left))} left for all"
    return f"[bold]{each.name}[/bold] ({number + 1} of {count}{estimate})"
