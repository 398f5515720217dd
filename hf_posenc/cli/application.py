"""The application with all commands."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hf_posenc import __version__
from hf_posenc.cli import processes
from hf_posenc.errors import PosencError


class Commands(TyperGroup):
    """A group of commands that reports expected errors as one line on stderr."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and keep the command line for the record of a run."""
        ctx.obj = shlex.join(["hf-posenc", *args])
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command, and report an expected error on one line."""
        try:
            return super().invoke(ctx)
        except (PosencError, OSError) as error:
            if processes.is_first_to_fail():
                typer.echo(f"hf-posenc: {one_line(error)}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands,
    help="Replace the positional encoding of a Hugging Face model, train it, and measure the effect.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__


# Width of a terminal, in characters, that is needed for all columns of a table.
_WIDE = 120


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, whole: Container[str], short: Container[str]
) -> None:
    """Print a table.

    Args:
        headers: Headers of the columns.
        rows: Cells, one per column.
        whole: Headers of columns that are not wrapped.
        short: Headers of columns for narrow terminals.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    # Output for a file or another program is not wrapped to the terminal.
    width = console.width if console.is_terminal else 200
    shown = [index for index, header in enumerate(headers) if width >= _WIDE or header in short]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index in shown:
        table.add_column(headers[index], no_wrap=headers[index] in whole)
    for row in rows:
        table.add_row(*(Text(row[index]) for index in shown))
    Console(width=width).print(table)


def quiet() -> None:
    """Silence transformers and our own log; the printed plan tells the user what matters."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("hf_posenc").setLevel(logging.ERROR)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf-posenc {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Replace the positional encoding of a Hugging Face model, train it, and measure the effect."""
