"""Commands in several processes, and the message of an interrupted run."""

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

# Environment variable of started processes: the command line of the user.
_COMMAND = "HF_POSENC_COMMAND"
# Environment variable of started processes: a file that the first failed one creates.
_FAILED = "HF_POSENC_FAILED"
_PROGRAM = "from hf_posenc.cli import app; app()"


def launch(config: str, count: int | None, arguments: Sequence[str], *, command: str) -> None:
    """Run a command of this package through `accelerate launch`, and exit with its status if it fails.

    Args:
        config: Name of a built-in config, or a file.
        count: Number of processes; `None` means the number in the config.
        arguments: Arguments of the command.
        command: Command line of the user.

    Raises:
        RecipeError: The config is unknown.
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
    # A session of their own lets all processes be stopped together.
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
    """Return the command line of the user, also in a process started by `launch`."""
    return os.environ.get(_COMMAND, typed)


def is_main() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"


def is_first_to_fail() -> bool:
    """Whether this process should report its error: only the first failed process of a `launch` does."""
    place = os.environ.get(_FAILED)
    if place is None:
        return True
    try:
        os.close(os.open(place, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        pass  # A repeated report is better than none.
    return True


@contextlib.contextmanager
def resumable(folder: Path, console: Console) -> Iterator[None]:
    """Print how to continue a run when a signal stops it: Ctrl-C, or the end of a job."""

    def stop(number: int, frame: FrameType | None) -> None:
        # Python swallows an exception raised while an object is deleted, and print may be what was interrupted. A run
        # can be killed at any moment, so no cleanup is needed.
        if console.is_terminal:
            os.write(1, b"\x1b[?25h\n")  # progress bars hide the cursor
        # If another process has failed, it has reported why all are stopped.
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
