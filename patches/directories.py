"""Atomic files and directories: complete or absent, even if the process is killed while it writes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from hf_posenc.errors import CheckpointError, PosencError, StorageError


class OutputError(PosencError):
    """A directory cannot be written."""


# Prefix of files and folders that are being written or removed.
UNFINISHED = ".unfinished"
# Directories that are being written, which a process that ends without unwinding must remove.
BEING_WRITTEN: set[Path] = set()

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "a file would be larger than the limit on files (ulimit -f)",
}
# safetensors puts the number into its message; torch.save says only that it could not write.
_WORDS = re.compile(r"os error (\d+)|PytorchStreamWriter failed writing|inline_container\.cc:\d+\] \. unexpected pos")


@contextlib.contextmanager
def storing(place: Path) -> Iterator[None]:
    """Raise `StorageError` where what is written to a file or directory does not fit: on the disk, quota or limit."""
    try:
        yield
    except PosencError:
        raise
    except Exception as error:
        reason = _full(error)
        if reason is None:
            raise
        near = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.is_dir())
        raise StorageError(
            f"{place} cannot be written: {reason} ({shutil.disk_usage(near).free / 1e6:,.1f} MB free). Make room, "
            "raise the limit, or choose another disk, and try again."
        ) from error


@contextlib.contextmanager
def reading(what: str, advice: str = "", kind: type[PosencError] = CheckpointError) -> Iterator[None]:
    """Raise an error of one line, which ends with advice, where something to read is damaged or out of reach."""
    try:
        yield
    except PosencError:
        raise
    # Damaged files fail in as many ways as there are readers, and libraries raise bare exceptions.
    except Exception as error:
        words = " ".join(str(error).split())
        raise kind(f"{what} cannot be read ({type(error).__name__}: {words}).{advice}") from error


def _full(error: BaseException | None) -> str | None:
    """Return what is full, if that is why something was raised."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return _FULL[error.errno]
        if not isinstance(error, OSError) and (words := _WORDS.search(str(error))):
            return _FULL.get(int(words[1])) if words[1] else _FULL[errno.ENOSPC]
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def published(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file to; it becomes `path` when the block ends, and is removed on an error."""
    unfinished = path.with_name(f"{UNFINISHED}-{secrets.token_hex(4)}-{path.name}")
    with storing(path):
        try:
            yield unfinished
            publish(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with published(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def publish(unfinished: Path, final: Path) -> None:
    """Sync a finished file or folder to the disk and rename it; a folder must not exist yet."""
    _make_readable(unfinished)
    for path in (*unfinished.rglob("*"), unfinished):
        _sync(path)
    os.replace(unfinished, final)
    _sync(final.parent)


@contextlib.contextmanager
def whole_files(out: Path, part_of: Callable[[str], object]) -> Iterator[Path]:
    """Give a directory to write files to, which go into `out` when the block ends, and vanish if it fails.

    What `out` holds of other names stays. But `part_of` says of a name what its file is a part of, if of anything: if a
    part of it is written, its other old parts are removed.
    """
    with storing(out), contextlib.ExitStack() as undo:
        if not out.is_dir():
            out.mkdir(parents=True)
            undo.callback(shutil.rmtree, out, ignore_errors=True)
        # In `out`, which may be all that can be written, so on the same file system.
        with _temporary(out / f".{secrets.token_hex(4)}", out) as folder:
            yield folder
            written = _move(folder, out)
            renewed = {part_of(name) for name in written} - {None}
            for path in out.iterdir():
                if path.name not in written and part_of(path.name) in renewed:
                    path.unlink()
        undo.pop_all()


@contextlib.contextmanager
def whole_directory(out: Path, replaceable: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
    """Give a directory to write to, which becomes `out` when the block ends, and vanishes if it fails.

    `replaceable` says whether an `out` that is there, and not empty, may be replaced.

    Raises:
        OutputError: `out` exists and must be kept, or cannot be made.
    """
    given, out = out, out.resolve()
    if not out.parent.is_dir():
        raise OutputError(f"There is no directory {given.parent} to write {given.name} in. Make it first.")
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty and not (out.is_dir() and replaceable(out)):
        what = "is not empty" if out.is_dir() else "is a file"
        raise OutputError(f"{given} exists and {what}. Choose another name, or remove it first.")
    # On the same file system, so that it can be renamed. An empty directory may be the current one, or a mounted one.
    with _temporary((out if is_empty else out.parent) / f".{out.name}.{secrets.token_hex(4)}", out) as folder:
        yield folder
        _make_readable(folder)
        if is_empty:
            _move(folder, out)
            return
        if out.is_dir():
            shutil.rmtree(out)
        os.replace(folder, out)


@contextlib.contextmanager
def _temporary(folder: Path, final: Path) -> Iterator[Path]:
    """Make a directory for a while; errors about its files name the final one."""
    BEING_WRITTEN.add(folder)
    try:
        with storing(final):
            try:
                folder.mkdir()
            except OSError as error:
                raise OutputError(
                    f"{final} cannot be written: {error.strerror or error}. Choose another folder."
                ) from error
            yield folder
    except StorageError as error:
        raise StorageError(str(error).replace(str(folder), str(final))) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        BEING_WRITTEN.discard(folder)


def _move(folder: Path, out: Path) -> list[str]:
    """Move all that is in a directory into another, and return the names."""
    names = [path.name for path in folder.iterdir()]
    for name in names:
        os.replace(folder / name, out / name)
    return names


def _make_readable(place: Path) -> None:
    # safetensors makes its files private; the umask decides here, as for the user's other files.
    umask = os.umask(0)
    os.umask(umask)
    for path in (place, *place.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def _sync(path: Path) -> None:
    # Windows cannot open folders, and keeps renamed ones without.
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
