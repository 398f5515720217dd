"""Directories that are there whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from hf_posenc.errors import PosencError


class OutputError(PosencError):
    """A directory cannot be written."""


@contextlib.contextmanager
def whole_directory(
    out: Path,
    replaceable: Callable[[Path], bool] = lambda folder: False,
    guard: Callable[[Path], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[Path]:
    """Give a directory to write to, which becomes `out` when the block ends, and vanishes if it fails.

    Args:
        out: The directory that is to be there whole, or not at all.
        replaceable: Whether an `out` that is there, and not empty, may be replaced.
        guard: Makes what is entered before the directory is made, given its path, and left when it is gone.

    Raises:
        OutputError: `out` exists and must be kept, or cannot be made.
    """
    parent = out.absolute().parent
    if not parent.is_dir():
        raise OutputError(f"There is no directory {out.parent} to write {out.name} in. Make it first.")
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} exists and is a file. Choose another name, or remove it first.")
    if out.is_dir() and any(out.iterdir()) and not replaceable(out):
        raise OutputError(f"{out} exists and is not empty. Choose another name, or remove it first.")
    # On the same file system, so that it can be renamed.
    folder = parent / f".{out.name}.{secrets.token_hex(4)}"
    with guard(folder):
        try:
            folder.mkdir()
            yield folder
            _make_readable(folder)
            if out.is_dir():
                shutil.rmtree(out)
            os.replace(folder, out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _make_readable(folder: Path) -> None:
    # safetensors makes its files private; a checkpoint is as readable as the user's other files.
    umask = os.umask(0)
    os.umask(umask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
