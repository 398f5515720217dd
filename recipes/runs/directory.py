"""Directory of a run.

OUT/recipe.yaml          full recipe
OUT/run.json             command, versions, machine, counts, and the recipe again, to detect changes of recipe.yaml
OUT/measurements.json    measurements so far
OUT/checkpoints/         complete checkpoints to resume from
OUT/logs/                TensorBoard logs, if requested
OUT/table.md, OUT/perplexity.png, OUT/report.html
OUT/model/               final model or adapter, with tokenizer and card; it appears last, and marks the run as finished
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, Timeout

from hf_posenc.errors import RecipeError
from hf_posenc.patches.directories import reading

RECIPE, RUN, MEASUREMENTS = "recipe.yaml", "run.json", "measurements.json"
CHECKPOINTS, LOGS, MODEL = "checkpoints", "logs", "model"
# The file stays, but the lock ends with its process, even if that is killed.
LOCK = f"{CHECKPOINTS}/.lock"
# Result of the attention transfer, in its folder of checkpoints.
TRANSFERRED = "transferred.safetensors"
# Keys of the recipe, of the verdicts of the fit and the transfer, of the micro batches and of the text in run.json.
KEPT, FIT, TRANSFER, MICRO, TEXT = "recipe", "fit", "transfer", "micro_batch_sizes", "text"


def take(lock: BaseFileLock, folder: Path) -> None:
    """Lock a folder if the place of the lock exists and is not locked yet; raise if another process has the lock."""
    if lock.is_locked or not Path(lock.lock_file).parent.is_dir():
        return
    try:
        lock.acquire()
    except Timeout:
        raise RecipeError(
            f"{folder} is being written by another process. Wait until that ends, stop it, or choose another folder."
        ) from None
    except OSError:
        pass  # The file system has no locks, or is read-only.


def has_begun(folder: Path) -> bool:
    """Whether a folder holds a recipe and results of its run."""
    made = (
        (folder / MEASUREMENTS).exists()
        or (folder / MODEL).exists()
        or any((folder / CHECKPOINTS).glob("checkpoint-*"))
    )
    return (folder / RECIPE).is_file() and made


def record_of(folder: Path) -> dict[str, Any]:
    """Return the content of run.json."""
    path = folder / RUN
    if not path.is_file():
        return {}
    advice = " Remove the file to go on without it: what it records of the run so far is lost, and nothing else."
    with reading(str(path), advice=advice):
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(found, dict) and isinstance(found.get("starts", []), list)):
            raise ValueError("no record of a run")
    return found
