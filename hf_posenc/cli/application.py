"""The application with all commands."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from pydantic_core import to_json
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from hf_posenc import __version__, plugins
from hf_posenc.errors import OptionError, PosencError, shown
from hf_posenc.patches import atomic_files

Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the scheme, as scheme.NAME=VALUE."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Commands(TyperGroup):
    """A group of commands that reports expected errors as one line on stderr."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and keep the command line for the record of a run."""
        ctx.obj = shlex.join(["hf-posenc", *args])
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command, and report an expected error on one line."""
        # PEFT asks transformers for a name that is deprecated there, which is no concern of a user.
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        try:
            with handled(_leave_nothing, signal.SIGTERM):
                return super().invoke(ctx)
        except (PosencError, OSError) as error:
            typer.echo(f"hf-posenc: {' '.join(str(error).split()) or type(error).__name__}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def show(result: Any, *, as_json: bool) -> None:
    """Print a result of `plan`, `verify` or `explain`."""
    if as_json:
        print_json(result.to_dict())
    else:
        typer.echo(str(result))


def print_json(found: Any) -> None:
    """Print JSON values; a number that JSON lacks, such as infinity, becomes null."""
    typer.echo(to_json(found, indent=1, inf_nan_mode="null").decode())


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[Any]], *, wide: Container[str] = (), as_json: bool = False
) -> None:
    """Print a table, without its `wide` columns in a narrow terminal, or a list of objects in JSON.

    Cells are text, numbers, or `None`, which is unknown.
    """
    if as_json:
        print_json([dict(zip(headers, row, strict=True)) for row in rows])
        return
    from rich import box
    from rich.table import Table

    console = Console()
    # Output for a file or another program is not wrapped to the terminal.
    width = console.width if console.is_terminal else 200
    shown = [index for index, header in enumerate(headers) if width >= 120 or header not in wide]
    table = Table(*(headers[index] for index in shown), box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_cell(row[index])) for index in shown))
    Console(width=width).print(table)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def quiet() -> None:
    """Silence transformers, datasets, the hub's client and our own log, and keep idle threads from spinning."""
    import logging

    if sys.stderr.isatty():
        typer.echo("loading torch and transformers ...", err=True)
    # Spinning threads make a small model ten times slower while other programs run. Torch reads this variable only when
    # it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # It would log what our errors say.
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("hf_posenc").setLevel(logging.ERROR)


def keys_of(overrides: list[str] | None, options: list[str] | None) -> list[str]:
    """Return `KEY=VALUE` pairs, in which `-o NAME=VALUE` is `scheme.NAME=VALUE`."""
    return [*(overrides or ()), *(f"scheme.{pair}" for pair in options or ())]


def scheme_options(scheme: str, overrides: list[str] | None, options: list[str] | None) -> dict[str, Any]:
    """Return the options of a scheme that a command other than `train` is given; raise for keys of other kinds.

    The names are checked here, because an option named like an argument of `patch` would be mistaken for it.
    """
    from hf_posenc import registry
    from hf_posenc.patches.rotary import check_scheme
    from hf_posenc.recipes.schema import fields
    from hf_posenc.recipes.schema.recipe import Recipe

    given: dict[str, Any] = {"conversion": {"options": {}}}
    for path, pair in fields.override(Recipe, given, keys_of(overrides, options)).items():
        if path[-1] in ("native", "layers", "stacks"):
            value = pair.partition("=")[2]
            raise OptionError(f"{shown(path[-1])} is no option of the scheme: give --{path[-1]} {value}.")
        if path[:-1] != ("conversion", "options"):
            raise OptionError(
                f"{shown(pair)}: expected scheme.NAME=VALUE or -o NAME=VALUE, such as scheme.width=64. Other keys "
                "belong to recipes: hf-posenc train."
            )
    found: dict[str, Any] = fields.typed(given["conversion"]["options"])
    check_scheme(scheme)
    registry.check_options(registry.get(scheme), found)
    return found


def is_main() -> bool:
    """Whether this process prints: the first of those that `accelerate launch` started."""
    return os.environ.get("RANK", "0") == "0"


def words(option: str, text: str | None, kind: Callable[[str], Any] = str) -> tuple[Any, ...] | None:
    """Return the comma-separated words or numbers in the value of an option; `None` if it is not given."""
    if text is None:
        return None
    try:
        found = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found:
        what = "one or more whole numbers, such as '0,2,5'" if kind is int else "one or more words, such as 'a,b'"
        raise OptionError(f"{option} {text!r}: expected {what}.")
    return found


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None], *signals: signal.Signals) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in signals]
    try:
        yield
    finally:
        for number, old in zip(signals, before, strict=True):
            signal.signal(number, old)


@contextlib.contextmanager
def resumable(console: Console, begun: Path, again: str) -> Iterator[None]:
    """Stop a run on a signal, Ctrl-C or the end of a job, and print how to continue it.

    A run that is being trained finishes its step and saves a checkpoint first; a second signal stops it at once. The
    command `again` continues a run as soon as the file `begun` is there.
    """
    from hf_posenc.recipes.runs.files import STOP

    def stop(number: int, frame: FrameType | None) -> None:
        # print may be what was interrupted
        if STOP.ask(lambda: end(number)):
            os.write(2, b"\nhf-posenc: saving after this step, then stopping. A second signal stops at once.\n")
        else:
            end(number)

    def end(number: int) -> None:
        # A run can be killed at any moment, so no cleanup is needed.
        if console.is_terminal:
            os.write(1, b"\x1b[?25h\n")  # progress bars hide the cursor
        if is_main():
            rest = f"; {again} goes on." if begun.is_file() else " before there was anything to go on with."
            os.write(2, f"hf-posenc: stopped{rest}\n".encode())
        os._exit(128 + number)

    with handled(stop, signal.SIGINT, signal.SIGTERM):
        yield


def _leave_nothing(number: int, frame: object) -> None:
    """Remove what is half written, and end the process on a termination signal, as job schedulers send it."""
    # Python swallows an exception raised while an object is deleted, so an exception is not enough.
    atomic_files.remove_unfinished()
    os._exit(128 + number)


def say_wrote(out: Path, report: str | None = None) -> None:
    """Print the names in a folder that was written, the total size of its files, and where its report is."""
    files = [path for path in out.rglob("*") if path.is_file()]
    names = sorted({path.relative_to(out).parts[0] + "/" * (path.parent != out) for path in files})
    typer.echo(f"wrote {out}: {', '.join(names)} ({sum(path.stat().st_size for path in files) / 1e6:.1f} MB)")
    if report is not None:
        typer.echo(f"\nTo read it: {out / report}")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-posenc {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Import a module with schemes or architectures of your own."),
    ] = None,
) -> None:
    """Replace the positional encoding of a Hugging Face model, train it, and measure the effect."""
    plugins.load(modules or (), here=True)
