"""Directories that are there whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from hf_posenc.errors import PosencError


class OutputError(PosencError):
    """A directory cannot be written."""


@contextlib.contextmanager
def whole_directory(out: Path, replaceable: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
    """Give a directory to write to, which becomes `out` when the block ends, and vanishes if it fails or is stopped.

    Args:
        out: The directory that is to be there whole, or not at all.
        replaceable: Whether an `out` that is there, and not empty, may be replaced.

    Raises:
        OutputError: `out` exists and must be kept, or cannot be made.
    """
    if not out.parent.is_dir():
        raise OutputError(f"There is no directory {out.parent} to write {out.name} in. Make it first.")
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} exists and is a file. Choose another name, or remove it first.")
    if out.is_dir() and any(out.iterdir()) and not replaceable(out):
        raise OutputError(f"{out} exists and is not empty. Choose another name, or remove it first.")
    # On the same file system, so that it can be renamed.
    folder = out.parent / f".{out.name}.{secrets.token_hex(4)}"
    # A signal must find its handler from the moment the folder is there.
    with _removed_when_terminated(folder):
        try:
            folder.mkdir()
            yield folder
            _make_readable(folder)
            if out.is_dir():
                shutil.rmtree(out)
            os.replace(folder, out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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


def _make_readable(folder: Path) -> None:
    # safetensors makes its files private; a checkpoint is as readable as the user's other files.
    umask = os.umask(0)
    os.umask(umask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def listing(folder: Path) -> str:
    """Return the names of the files in a folder, with their size in all."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = sorted({path.relative_to(folder).parts[0] + "/" * (path.parent != folder) for path in files})
    return f"{', '.join(names)} ({sum(path.stat().st_size for path in files) / 1e6:.1f} MB)"
