"""Output directories of commands: written whole or not at all, even if the command is stopped."""

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
    """Write a directory whole or not at all, and remove a partial one on a termination signal, too."""
    # The handler must be installed as soon as the folder exists.
    return directories.whole_directory(out, replaceable, _removed_when_terminated)


@contextlib.contextmanager
def _removed_when_terminated(folder: Path) -> Iterator[None]:
    """Remove a folder and end the process on a termination signal, as job schedulers send it."""

    def stop(number: int, frame: object) -> None:
        # Python swallows an exception raised while an object is deleted, so an exception is not enough.
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def listing(folder: Path) -> str:
    """Return the top-level names in a folder and the total size of its files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = sorted({path.relative_to(folder).parts[0] + "/" * (path.parent != folder) for path in files})
    return f"{', '.join(names)} ({sum(path.stat().st_size for path in files) / 1e6:.1f} MB)"
