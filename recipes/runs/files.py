"""Files and folders that are there whole or not at all, also when the process is killed while it writes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

from hf_posenc.errors import OptionError, RecipeError
from hf_posenc.patches.directories import storing

try:
    import fcntl
except ImportError:  # Windows has none.
    fcntl = None  # type: ignore[assignment]

# What is still being written, or being removed, lies under a name that begins like this.
UNFINISHED = ".unfinished"
# Written last into a checkpoint: the sizes of its files.
MARKER = "complete.json"

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@contextlib.contextmanager
def published(path: Path) -> Iterator[Path]:
    """Give a name to write a file under, which is `path` when the block ends, and vanishes if it fails.

    Raises:
        StorageError: It does not fit on the disk.
    """
    beside = path.with_name(f"{UNFINISHED}-{path.name}")
    with storing(path):
        try:
            yield beside
            publish(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file, so that there is the old one or the new one at any time."""
    with published(path) as beside:
        beside.write_text(text, encoding="utf-8")


def publish(unfinished: Path, final: Path) -> None:
    """Bring a finished file or folder to the disk and under its name; a folder must not be there yet."""
    # safetensors makes its files private; these are as readable as the user's other files.
    umask = os.umask(0)
    os.umask(umask)
    for path in (*unfinished.rglob("*"), unfinished):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        _sync(path)
    os.replace(unfinished, final)
    _sync(final.parent)


def check_writable(folder: Path) -> None:
    """Raise unless a folder, which need not be there yet, can be written.

    Raises:
        RecipeError: It cannot.
    """
    try:
        # Only trying tells: what is allowed and what a file system does are two things.
        tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=folder if folder.is_dir() else folder.parent).cleanup()
    except OSError as error:
        raise RecipeError(
            f"{folder} cannot be written: {error.strerror or error}. Choose another folder, or make this one writable."
        ) from error


class Lock:
    """Keeps two processes from writing one folder; what is killed holds nothing any more.

    Args:
        folder: The folder, which need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor: int | None = None

    def take(self) -> None:
        """Lock the folder, if it is there and is not locked by this object already.

        Raises:
            RecipeError: Another process has it.
        """
        if fcntl is None or self._descriptor is not None or not self.folder.is_dir():
            return
        self._descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise RecipeError(
                f"{self.folder} is being written by another process. Wait until that ends, stop it, or choose another "
                "folder."
            ) from None
        except OSError:
            pass  # A file system without locks.

    def release(self) -> None:
        """Give the folder free."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def clear(folder: Path) -> None:
    """Remove what was left unfinished in a folder."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the last one last."""
    found = {int(match[1]): path for path in folder.glob("checkpoint-*") if (match := _CHECKPOINT.fullmatch(path.name))}
    return [path for _, path in sorted(found.items()) if _is_complete(path)]


class WholeCheckpoints(TrainerCallback):
    """Makes the checkpoints of any `Trainer` appear whole or not at all.

    The trainer writes into a folder of its own (`TrainingArguments(output_dir=str(callback.unfinished))`); when all processes
    have written their part, the checkpoint is marked as complete, brought to the disk and renamed. Of older ones, some are kept.
    All processes must see the same folder.

    Args:
        folder: Where the checkpoints are to be.
        keep: How many.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    @property
    def unfinished(self) -> Path:
        """Where the trainer writes."""
        return self.folder / UNFINISHED

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise if the trainer would look for the best checkpoint where it wrote it: it has moved by then."""
        if args.load_best_model_at_end:
            raise OptionError(
                "WholeCheckpoints with load_best_model_at_end=True: Trainer would not find the checkpoints, which "
                "move, and keep the last weights. Leave it out, and load one of checkpoints(folder)."
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the checkpoint that was written."""
        processes = PartialState()
        processes.wait_for_everyone()
        if state.is_world_process_zero:
            name = f"checkpoint-{state.global_step}"
            _mark(self.unfinished / name)
            # One without its marker may be in the way.
            self._remove(self.folder / name)
            publish(self.unfinished / name, self.folder / name)
            for old in checkpoints(self.folder)[: -self.keep]:
                self._remove(old)
        processes.wait_for_everyone()

    def _remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint, which is whole until it is gone."""
        if checkpoint.exists():
            waste = self.unfinished / f"old-{checkpoint.name}"
            os.replace(checkpoint, waste)
            shutil.rmtree(waste)


def _mark(checkpoint: Path) -> None:
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in sorted(_files(checkpoint))}
    (checkpoint / MARKER).write_text(json.dumps(sizes, indent=2), encoding="utf-8")


def _is_complete(checkpoint: Path) -> bool:
    try:
        sizes = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _sync(path: Path) -> None:
    # Windows cannot open folders, and keeps renamed ones without.
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
