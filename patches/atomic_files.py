"""Atomic files and directories: complete or absent, even if the process is killed while it writes."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock

from hf_posenc.errors import CheckpointError, PosencError, StorageError


class OutputError(PosencError):
    """A directory cannot be written."""


# Prefix of files and folders that are being written or removed.
UNFINISHED = ".unfinished"
# Files and folders that a process that ends without unwinding must remove.
BEING_WRITTEN: set[Path] = set()
# Files without which nothing is loaded from a folder.
_KEYS = ("config.json", "adapter_config.json")

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
    """Turn any error of a reader into one line, which ends with advice."""
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
            unfinished.touch()
            mode = unfinished.stat().st_mode
            yield unfinished
            unfinished.chmod(mode)  # safetensors makes its files private
            publish(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with published(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def remove_unfinished() -> None:
    """Remove what this process was writing, before it ends without unwinding."""
    for path in list(BEING_WRITTEN):
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()


def publish(unfinished: Path, final: Path) -> None:
    """Sync a finished file or folder to the disk and rename it; a folder must not exist yet."""
    _make_readable(unfinished)
    for path in (*unfinished.rglob("*"), unfinished):
        _sync(path)
    os.replace(unfinished, final)
    _sync(final.parent)


@contextlib.contextmanager
def in_place(out: Path) -> Iterator[Path]:
    """Give the directory itself, with the errors of `whole_files`."""
    with _writing(out):
        if out.is_file():
            raise OutputError(f"{out} is a file, and a model is saved to a directory. Choose another name.")
        yield out


def saving(
    out: Path, part_of: Callable[[str], object] = lambda name: None, *, exposed: bool = False
) -> contextlib.AbstractContextManager[Path]:
    """Give the directory of `whole_files`; or `out` itself, if it is uploaded or other processes write to it, too."""
    torch = sys.modules.get("torch")  # which commands need not import for a directory
    is_shared = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
    return in_place(out) if exposed or is_shared else whole_files(out, part_of)


@contextlib.contextmanager
def whole_files(out: Path, part_of: Callable[[str], object] = lambda name: None) -> Iterator[Path]:
    """Give a directory to write files to, which go into `out` when the block ends, and vanish if it fails.

    Files with other names stay. `part_of(name)` groups files that belong together, such as the shards of a checkpoint;
    writing one of a group removes its old rest. Others who write the same directory wait.
    """
    with in_place(out), contextlib.ExitStack() as undo:
        for folder in reversed([folder for folder in (out, *out.parents) if not folder.is_dir()]):
            folder.mkdir(exist_ok=True)
            undo.callback(_remove_empty, folder)
        # In `out`, which may be all that can be written, so on the same file system.
        with _temporary(out, "", out) as folder:
            yield folder
            _move(folder, out, part_of)
        undo.pop_all()


@contextlib.contextmanager
def whole_directory(out: Path, replaceable: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
    """Give a directory to write to, which becomes `out` when the block ends, and vanishes if it fails.

    `replaceable` says whether an `out` that is there, and not empty, may be replaced.
    """
    given = out
    with _writing(given):
        out = given.resolve()
        if not out.parent.is_dir():
            raise OutputError(f"There is no directory {given.parent} to write {given.name} in. Make it first.")
        # What a killed process left does not count.
        is_empty = out.is_dir() and all(path.name.startswith(UNFINISHED) for path in out.iterdir())
        if out.exists() and not is_empty and not (out.is_dir() and replaceable(out)):
            what = "is not empty" if out.is_dir() else "is a file"
            raise OutputError(f"{given} exists and {what}. Choose another name, or remove it first.")
        # On the same file system, so that it can be renamed. An empty directory may be the current or a mounted one.
        with _temporary(*((out, "") if is_empty else (out.parent, out.name)), given) as folder:
            yield folder
            _make_readable(folder)
            if is_empty:
                _move(folder, out)
                return
            _replace(folder, out)


@contextlib.contextmanager
def _writing(final: Path) -> Iterator[None]:
    """Raise `StorageError` or `OutputError` where a file or folder of a directory cannot be written."""
    try:
        with storing(final):
            yield
    except PosencError:
        raise
    except (OSError, ValueError) as error:
        words = _unwritable(error, final)
        if words is None:
            raise
        name = str(final) if str(final).isprintable() else repr(str(final))
        raise OutputError(f"{name:.200} cannot be written: {words}. Choose another folder.") from error


def _unwritable(error: OSError | ValueError, final: Path) -> str | None:
    """Return why a directory cannot be written, if that is why something was raised."""
    if not isinstance(error, OSError):
        return "a name cannot have the character NUL" if "\0" in str(final) else None
    if error.filename is None:  # that of a network, for instance
        return None
    near, place = Path(os.fsdecode(error.filename)).absolute(), final.absolute()
    is_ours = place.is_relative_to(near) or near.is_relative_to(place)
    if not (is_ours or any(part.startswith(UNFINISHED) for part in near.parts)):
        return None
    return "it is a link to nothing" if os.path.islink(final) and not os.path.exists(final) else error.strerror


@contextlib.contextmanager
def _temporary(base: Path, name: str, final: Path) -> Iterator[Path]:
    """Make a directory in `base` for a while, and remove those of this name that killed processes left there.

    Errors about its files name the final directory.
    """
    stem = f"{UNFINISHED}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"
    folder, lock = base / f"{stem}-{secrets.token_hex(4)}", base / f"{stem}.lock"
    # A lock would be waited for where nothing can be made.
    folder.mkdir()
    _remove_empty(folder)
    with _alone(lock) as is_alone:
        if is_alone:
            for left in base.iterdir():
                if re.fullmatch(rf"{re.escape(stem)}-[0-9a-f]{{8}}", left.name):
                    shutil.rmtree(left, ignore_errors=True)
        BEING_WRITTEN.add(folder)
        try:
            folder.mkdir()
            yield folder
        except StorageError as error:
            raise StorageError(str(error).replace(str(folder), str(final))) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            BEING_WRITTEN.discard(folder)


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[bool]:
    """Lock a file for a while, and yield whether that was possible; the lock of a killed process has ended with it."""
    lock = FileLock(place)
    BEING_WRITTEN.add(place)
    try:
        with contextlib.suppress(OSError, NotImplementedError):  # The file system has no locks, or cannot be written.
            lock.acquire()
        yield lock.is_locked
    finally:
        with contextlib.suppress(OSError):  # Windows removes no open file.
            place.unlink()
        lock.release()
        BEING_WRITTEN.discard(place)


def _move(folder: Path, out: Path, part_of: Callable[[str], object] = lambda name: None) -> None:
    """Move the files of a directory into another; a kill leaves the old ones, the new ones, or none that is loaded.

    One changed file is renamed. Before several are, the file without which nothing is loaded goes; it comes back last.
    """
    names = [path.relative_to(folder) for path in folder.rglob("*")]
    fresh = [name for name in names if not (folder / name).is_dir()]
    for name in names:
        if (name in fresh) == (out / name).is_dir() and (out / name).exists():
            raise OutputError(f"{out / name} is in the way of what is to be written. Move or remove it.")
    renewed = {part_of(name.name) for name in fresh} - {None}
    old = [path.relative_to(out) for path in out.iterdir() if part_of(path.name) in renewed]
    gone = [name for name in old if name not in fresh]
    changed = [name for name in fresh if not _same(folder / name, out / name)]
    if len(changed) + len(gone) > 1:
        changed += [name for name in fresh if name.name in _KEYS and name not in changed]
    for name in names:
        if name not in fresh:
            (out / name).mkdir(exist_ok=True)
    BEING_WRITTEN.discard(folder)  # It holds the old files now, which may come back.
    with contextlib.ExitStack() as undo:

        def rename(one: Path, other: Path) -> None:
            os.replace(one, other)
            undo.callback(os.replace, other, one)

        if len(changed) + len(gone) > 1:
            for number, name in enumerate(sorted((*changed, *gone), key=lambda name: name.name not in _KEYS)):
                if os.path.lexists(out / name):
                    rename(out / name, folder / f"{UNFINISHED}-{number}")
        for name in sorted(changed, key=lambda name: name.name in _KEYS):
            if os.path.lexists(out / name):
                os.replace(folder / name, out / name)
            else:
                rename(folder / name, out / name)
        undo.pop_all()


def _replace(folder: Path, out: Path) -> None:
    """Rename a directory; one of its new name goes aside until then, and comes back on an error."""
    old = folder.with_name(folder.name[:-8] + secrets.token_hex(4))
    if not out.is_dir():
        os.replace(folder, out)
        return
    os.replace(out, old)
    try:
        os.replace(folder, out)
    except BaseException:
        os.replace(old, out)
        raise
    shutil.rmtree(old)


def _same(one: Path, other: Path) -> bool:
    """Whether two files are equal. Weights are taken to differ, since reading them takes as long as writing them."""
    return one.suffix != ".safetensors" and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # Others may have written to it.
        folder.rmdir()


def _make_readable(place: Path) -> None:
    # safetensors makes its files private; the umask decides here, as for the user's other files.
    mode = place.stat().st_mode & 0o777
    for path in place.rglob("*"):
        path.chmod(mode if path.is_dir() else mode & 0o666)


def _sync(path: Path) -> None:
    # Windows cannot open folders, and keeps renamed ones without.
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
