"""Runs in several processes, and what a run says when it is stopped."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

# In the processes that are started, what the user typed.
_COMMAND = "HF_POSENC_COMMAND"
# Likewise: a file that the first of them to fail makes.
_FAILED = "HF_POSENC_FAILED"
_PROGRAM = "from hf_posenc.cli import app; app()"


def launch(config: str, count: int | None, arguments: Sequence[str], *, command: str) -> None:
    """Run a command of this package through `accelerate launch`, and end with its exit status.

    Args:
        config: Name of a config that comes with the package, or a file.
        count: How many processes; `None` is what the config says.
        arguments: Of the command.
        command: What the user typed.

    Raises:
        RecipeError: There is no such config.
    """
    from hf_posenc.recipes import library

    given = [] if count is None else ["--num_processes", str(count)]
    launcher = [
        "-m",
        "hf_posenc.cli.launcher",
        "--quiet",
        "--config_file",
        str(library.find_config(config)),
        *given,
    ]
    line = [sys.executable, *launcher, "--no_python", sys.executable, "-c", _PROGRAM, *arguments]
    sys.stdout.flush()
    # In a session of their own, so that all of them can be stopped together, however they were started.
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            line,
            env=os.environ | {_COMMAND: command, _FAILED: os.path.join(folder, "failed")},
            start_new_session=True,
        ) as process,
        _handled(lambda number, frame: os.killpg(process.pid, signal.SIGTERM)),
    ):
        status = process.wait()
    if status:
        raise typer.Exit(128 - status if status < 0 else status)


def command(typed: str) -> str:
    """Return what the user typed, also in a process that was started by `launch`."""
    return os.environ.get(_COMMAND, typed)


def is_main() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def is_first_to_fail() -> bool:
    """Whether this process is to say what went wrong: of those that `launch` started, the first; they make the same mistake."""
    place = os.environ.get(_FAILED)
    if place is None:
        return True
    try:
        os.close(os.open(place, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        pass  # Better twice than not at all.
    return True


@contextlib.contextmanager
def resumable(folder: Path, console: Console) -> Iterator[None]:
    """Say how to go on with a run when a signal stops it: Ctrl-C, or the end of a job."""

    def stop(number: int, frame: FrameType | None) -> None:
        # Not by an exception: Python swallows one that is raised while an object is being deleted, and goes on. And not by
        # print: it may be what was interrupted. Nothing has to be tidied: a run can be killed at any moment.
        if console.is_terminal:
            os.write(1, b"\x1b[?25h\n")  # progress bars hide the cursor
        # Where another process failed, this one is stopped for that, which was said.
        if is_main() and not os.path.exists(os.environ.get(_FAILED, "")):
            os.write(2, f"hf-posenc: {_how_to_go_on(folder)}\n".encode())
        os._exit(128 + number)

    with _handled(stop):
        yield


def _how_to_go_on(folder: Path) -> str:
    if (folder / "recipe.yaml").is_file():
        return f"stopped; hf-posenc resume {shlex.quote(str(folder))} goes on."
    return "stopped before there was anything to go on with."


@contextlib.contextmanager
def _handled(handler: object) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
