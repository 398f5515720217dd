"""Files of a run: checkpoints that are complete or absent even after a kill, and the stop by a signal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from accelerate import PartialState
from annotated_types import Ge
from filelock import BaseFileLock, Timeout
from pydantic import ConfigDict, with_config
from transformers import TrainerCallback
from typing_extensions import TypedDict

from hf_posenc.errors import OptionError, PosencError, RecipeError
from hf_posenc.patches.atomic_files import UNFINISHED, publish
from hf_posenc.recipes import storage
from hf_posenc.recipes.storage import CHECKPOINTS, MEASUREMENTS, MODEL, RECIPE, RUN

# The file stays, but the lock ends with its process, even if that is killed.
LOCK = f"{CHECKPOINTS}/.lock"
# Result of the attention transfer, in its folder of checkpoints.
TRANSFERRED = "transferred.safetensors"
# Keys of the recipe, of the verdicts of the fit and the transfer, of the micro batches, of layers that were measured,
# and of the fingerprints of the text and of the models in run.json.
KEPT, FIT, TRANSFER, MICRO, LAYERS = "recipe", "fit", "transfer", "micro_batch_sizes", "measured_layers"
TEXT, BASE = "text", "base"

# Last file written into a checkpoint; it holds sizes and checksums of the others.
MARKER = "complete.json"
# Seconds within which a signal is the same one: some programs send it to a process and to its group.
_ONCE = 1.0
# Bytes that are read at once.
_PIECE = 2**24


@with_config(ConfigDict(extra="allow"))
class Fitted(TypedDict):
    """Verdict on a fit, or on the attention transfer."""

    accepted: bool
    sentence: str


@with_config(ConfigDict(extra="allow"))
class Measured(TypedDict):
    """Layers that a recipe asked for, such as "auto:7", and what they were found to be."""

    asked: str
    layers: list[int]


@with_config(ConfigDict(extra="allow"))
class Record(TypedDict, total=False):
    """What is read of run.json."""

    command: str
    start: str
    recipe: dict[str, Any]
    fit: Fitted | None
    transfer: Fitted | None
    measured_layers: Measured
    # Windows per forward by the number of processes and the stage; null is the whole share of a process.
    micro_batch_sizes: dict[str, dict[str, Annotated[int, Ge(1)] | None]]
    text: str
    base: dict[str, dict[str, Any]]
    starts: list[Any]


_Marks = dict[str, tuple[int, int]]


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
    made = (folder / MEASUREMENTS, folder / MODEL, *(folder / CHECKPOINTS).glob("checkpoint-*"))
    return (folder / RECIPE).is_file() and any(path.exists() for path in made)


def record_of(folder: Path) -> dict[str, Any]:
    path = folder / RUN
    if not path.is_file():
        return {}
    remedy = "Remove the file to go on without it: what it records of the run so far is lost, and nothing else."
    return dict(storage.load(Record, path, remedy))


def check_writable(folder: Path) -> None:
    """Raise `RecipeError` unless a folder, which need not exist yet, can be written."""
    try:
        # Permissions alone do not tell: a file system may be read-only.
        tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder if folder.is_dir() else folder.parent).cleanup()
    except OSError as error:
        raise RecipeError(
            f"{folder} cannot be written: {error.strerror or error}. Choose another folder, or make this one writable."
        ) from error


def clear(folder: Path) -> None:
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_transfer(folder: Path) -> None:
    """Remove what an attention transfer left, as large as the model, from the folder of a finished run."""
    shutil.rmtree(folder / CHECKPOINTS / "transfer", ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that were written to their end, by step."""
    found = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return [path for path in sorted(found, key=step_of) if (path / MARKER).is_file()]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def last(folder: Path) -> Path | None:
    """Return the last checkpoint in a folder of which every file is as it was written; `None` if there is none."""
    return next(filter(_is_unchanged, reversed(checkpoints(folder))), None)


class WholeCheckpoints(TrainerCallback):
    """Callback that makes the checkpoints of a `Trainer` atomic, and keeps the last few.

    The trainer writes into a folder of its own (`TrainingArguments(output_dir=str(callback.unfinished))`). When all
    processes have written their part, the checkpoint is marked as complete, synced to the disk and renamed. All
    processes must see the same folder.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    @property
    def unfinished(self) -> Path:
        return self.folder / UNFINISHED

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise for `load_best_model_at_end`: the trainer would not find the best checkpoint, which has moved."""
        if args.load_best_model_at_end:
            raise OptionError(
                "WholeCheckpoints with load_best_model_at_end=True: Trainer would not find the checkpoints, which "
                "move, and keep the last weights. Leave it out, and load one of checkpoints(folder)."
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        processes = PartialState()
        processes.wait_for_everyone()
        if state.is_world_process_zero:
            name = f"checkpoint-{state.global_step}"
            storage.save(_marks(self.unfinished / name), self.unfinished / name / MARKER)
            # An incomplete checkpoint may have this name.
            self._remove(self.folder / name)
            publish(self.unfinished / name, self.folder / name)
            for old in checkpoints(self.folder)[: -self.keep]:
                self._remove(old)
        processes.wait_for_everyone()

    def _remove(self, checkpoint: Path) -> None:
        if checkpoint.exists():
            waste = self.unfinished / f"old-{checkpoint.name}"
            os.replace(checkpoint, waste)
            shutil.rmtree(waste)


class Stop(TrainerCallback):
    """Callback that saves a checkpoint at the end of the step in which the process is asked to stop.

    It comes after the callback that completes checkpoints. With several processes it does nothing: they may be asked in
    different steps, and would wait for each other.
    """

    def __init__(self) -> None:
        self._training, self._asked = False, 0.0
        self._then: Callable[[], Any] | None = None

    def ask(self, then: Callable[[], Any]) -> bool:
        """Call a function, which must not return, as soon as a checkpoint is saved.

        Return False if that will not be: nothing is being trained, or it was asked some time before.
        """
        if not self._training:
            return False
        if self._then is None:
            self._then, self._asked = then, time.monotonic()
        return time.monotonic() - self._asked < _ONCE

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training, self._then = PartialState().num_processes == 1, None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._then is not None:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._then is not None:
            self._then()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.over()

    def over(self) -> None:
        """Say that nothing is being trained, also after a failure: from now on, `ask` would wait for nothing."""
        self._training, self._then = False, None


# Signals are for a process, too.
STOP = Stop()


def _marks(checkpoint: Path) -> _Marks:
    """Return size and checksum of each file of a checkpoint, by its path there."""
    files = (path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path != checkpoint / MARKER)
    return {path.relative_to(checkpoint).as_posix(): (path.stat().st_size, _checksum(path)) for path in files}


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found = zlib.crc32(piece, found)
    return found


def _is_unchanged(checkpoint: Path) -> bool:
    """Whether a checkpoint has all files that it was written with, as they were, and no others."""
    with contextlib.suppress(PosencError, OSError):
        wanted = storage.load(_Marks, checkpoint / MARKER, "")
        return bool(_marks(checkpoint) == wanted)
    return False
