"""Directories that commands write: there whole or not at all, also when the command is stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from hf_posenc.patches import directories
from hf_posenc.patches.directories import OutputError

__all__ = ["OutputError", "listing", "whole_directory"]


def whole_directory(
    out: Path, replaceable: Callable[[Path], bool] = lambda folder: False
) -> AbstractContextManager[Path]:
    """As `hf_posenc.patches.directories.whole_directory`; what was begun vanishes also when the process is terminated."""
    # A signal must find its handler from the moment the folder is there.
    return directories.whole_directory(out, replaceable, _removed_when_terminated)


@contextlib.contextmanager
def _removed_when_terminated(folder: Path) -> Iterator[None]:
    """Remove a folder when a termination signal comes, as job schedulers send it, and end the process."""

    def stop(number: int, frame: object) -> None:
        # Not by an exception: Python swallows one that is raised while an object is being deleted, and goes on.
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def listing(folder: Path) -> str:
    """Return the names of the files in a folder, with their size in all."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = sorted({path.relative_to(folder).parts[0] + "/" * (path.parent != folder) for path in files})
    return f"{', '.join(names)} ({sum(path.stat().st_size for path in files) / 1e6:.1f} MB)"
