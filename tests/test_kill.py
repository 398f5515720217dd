"""Runs that are killed by SIGKILL at random moments, and end as one that was not; at no time is a file unreadable.

The short version is in the normal suite; the ten kills take two minutes: pytest -m slow tests/test_kill.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from models import text_file
from safetensors.torch import load_file

from hf_posenc.recipes.goals import read_recipe

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")

RECIPE = """
model: tiny-llama
conversion: {{scheme: fire, options: {{threshold: 64.0}}, native: handover, handover: 0.7}}
data: {{source: {text}}}
training: {{steps: {steps}, length: 32, batch_size: 4}}
distillation: {{share: 0.5, until: 0.8}}
evaluation: {{contexts: [64], windows: 2, every: 10}}
saving: {{every: 3}}
"""


def work(recipe: str, folder: str, done: str) -> None:
    """What is killed: a run of a recipe, which tells its last loss when it ends."""
    from transformers.utils import logging

    from hf_posenc.recipes.runs import run

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    outcome = run.train(read_recipe(recipe), Path(folder))
    Path(done).write_text(json.dumps(outcome.loss), encoding="utf-8")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> BaseContext:
    """Processes that begin with everything imported."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hf_posenc.recipes.runs.run", "transformers.models.llama.modeling_llama"])
    return context


def write_recipe(folder: Path, steps: int) -> Path:
    path = folder / "killed.yaml"
    path.write_text(RECIPE.format(text=text_file(), steps=steps), encoding="utf-8")
    return path


READERS: dict[str, Callable[[Path], object]] = {
    ".safetensors": load_file,
    ".pt": lambda path: torch.load(path, weights_only=False),
    ".pth": lambda path: torch.load(path, weights_only=False),
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    ".yaml": lambda path: yaml.safe_load(path.read_text(encoding="utf-8")),
}


def check_readable(folder: Path) -> int:
    """Read every file that has its final name; return how many there are."""
    files = [path for path in folder.rglob("*") if path.is_file() and "/.unfinished" not in str(path)]
    for path in files:
        READERS.get(path.suffix, Path.read_bytes)(path)
    return len(files)


def run_once(processes: BaseContext, recipe: Path, folder: Path, done: Path) -> Any:
    process = processes.Process(target=work, args=(str(recipe), str(folder), str(done)))
    process.start()
    return process


def checkpoints(folder: Path) -> set[str]:
    """Return the names of the checkpoints in a folder that another process may remove at any time."""
    try:
        return {name for name in os.listdir(folder) if name.startswith("checkpoint-")}
    except FileNotFoundError:
        return set()


def kill_during_a_save(process: Any, folder: Path, draw: random.Random) -> None:
    """Wait until a checkpoint is being written, and a random moment more."""
    staging = folder / "checkpoints" / ".unfinished"
    # What an earlier process left there is not being written.
    before = checkpoints(staging)
    while process.is_alive() and not (now := checkpoints(staging)) - before:
        before &= now
    time.sleep(draw.uniform(0, 0.02))
    process.kill()


def kill_during_a_step(process: Any, folder: Path, draw: random.Random) -> None:
    """Wait until there is another checkpoint, and a random moment more."""
    before = checkpoints(folder / "checkpoints")
    while process.is_alive() and checkpoints(folder / "checkpoints") <= before:
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.1))
    process.kill()


SOME = [kill_during_a_save, kill_during_a_step]


@pytest.mark.parametrize(
    ("kills", "steps"),
    [pytest.param(SOME, 30, marks=pytest.mark.grid), pytest.param(5 * SOME, 90, marks=pytest.mark.slow)],
    ids=["two", "ten"],
)
def test_a_killed_run_ends_with_the_same_weights(
    kills: list[Any], steps: int, processes: BaseContext, tmp_path: Path
) -> None:
    draw, done, recipe = random.Random(0), tmp_path / "done", write_recipe(tmp_path, steps)
    whole = run_once(processes, recipe, tmp_path / "whole", tmp_path / "loss")
    whole.join()
    assert whole.exitcode == 0

    folder = tmp_path / "killed"
    for kill in kills:
        process = run_once(processes, recipe, folder, done)
        kill(process, folder, draw)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        check_readable(folder)
    last = run_once(processes, recipe, folder, done)
    last.join()
    assert last.exitcode == 0
    assert check_readable(folder) == check_readable(tmp_path / "whole")
    assert len(json.loads((folder / "run.json").read_text(encoding="utf-8"))["starts"]) > len(kills) // 2

    assert done.read_text(encoding="utf-8") == (tmp_path / "loss").read_text(encoding="utf-8")
    one, other = (load_file(out / "model" / "model.safetensors") for out in (tmp_path / "whole", folder))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert (folder / "measurements.json").read_bytes() == (tmp_path / "whole" / "measurements.json").read_bytes()
