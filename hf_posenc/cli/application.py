"""The application that all commands belong to."""

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
    """Commands whose expected failures are one line on stderr."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; what was typed is kept for the record of a run."""
        ctx.obj = shlex.join(["hf-posenc", *args])
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except (PosencError, OSError) as error:
            if processes.is_first_to_fail():
                typer.echo(f"hf-posenc: {one_line(error)}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands,
    help="Replace the positional encoding of a Hugging Face model, and look at what that does.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def one_line(error: BaseException) -> str:
    """Return what an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


# Characters of a terminal below which a table of six columns has room for no sentence.
_WIDE = 120


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, whole: Container[str], short: Container[str]
) -> None:
    """Print a table.

    Args:
        headers: Of the columns.
        rows: Cells, one for each column.
        whole: Columns that are not wrapped.
        short: Those that are shown where the terminal is narrow.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    # Nothing is gained by wrapping what goes into a file or another program.
    width = console.width if console.is_terminal else 200
    shown = [index for index, header in enumerate(headers) if width >= _WIDE or header in short]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index in shown:
        table.add_column(headers[index], no_wrap=headers[index] in whole)
    for row in rows:
        table.add_row(*(Text(row[index]) for index in shown))
    Console(width=width).print(table)


def quiet() -> None:
    """Keep transformers from writing between our lines; what a user should know of a patch is in its plan."""
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
    """Replace the positional encoding of a Hugging Face model, and look at what that does."""
