"""The command that measures models side by side."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from hf_posenc.cli import processes
from hf_posenc.cli.application import app, quiet
from hf_posenc.cli.checkpoints import load_config
from hf_posenc.cli.directories import listing, whole_directory
from hf_posenc.errors import OptionError

Word = TypeVar("Word")

# Options that belong to a single measure.
_OPTIONS_OF = {"cue": "needle", "tasks": "tasks", "lengths": "tasks", "trained": "tasks", "shots": "tasks"}


@app.command("eval")
def evaluate(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Directories of models, adapters or runs, or names on the hub; PATH:SCHEME converts first, untrained.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write; an earlier report is replaced.")] = Path(
        "posenc-eval"
    ),
    measures: Annotated[
        str | None,
        typer.Option(
            # A list without spaces cannot be wrapped and would be cut off in a narrow terminal.
            metavar="NAMES",
            help="Some of perplexity, position, needle, induction, tasks, attention. Default: the first four.",
        ),
    ] = None,
    text: Annotated[
        str, typer.Option(metavar="PATH", help="A .txt, .jsonl or .parquet file or folder, or builtin.")
    ] = "builtin",
    column: Annotated[str, typer.Option(help="Column of the text, in files with columns.")] = "text",
    contexts: Annotated[
        str | None,
        typer.Option(metavar="NUMBERS", help="Context lengths. Default: up to eight times the trained length."),
    ] = None,
    trained_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per window in training. Default: from the first model's config.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Windows, keys, sequences or examples of each kind.")] = 16,
    cue: Annotated[
        str | None, typer.Option(help='Text before the passkey, like "The pass key is". Default: random tokens.')
    ] = None,
    tasks: Annotated[
        str, typer.Option(metavar="NAMES", help="Tasks of the measure tasks.")
    ] = "copy, reverse, addition, polynomial, sort, summation, parity, lego",
    lengths: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Lengths of task examples.")
    ] = "5, 10, 15, 20, 25, 30, 35, 40",
    trained: Annotated[int, typer.Option(min=1, help="Longest task examples in training.")] = 20,
    shots: Annotated[int, typer.Option(min=0, help="Solved examples before each question.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows or examples per forward.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed of all samples.")] = 0,
    launch: Annotated[
        str | None,
        typer.Option(metavar="CONFIG", help="Config for `accelerate launch`: ddp (built in) or a file."),
    ] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, help="Number of processes, with --launch.")] = None,
) -> None:
    """Measure models on the same inputs, side by side, and write JSON, Markdown and pictures."""
    # Spinning threads make a small model ten times slower while other programs run.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    quiet()
    if launch is not None:
        arguments = list(_without(shlex.split(context.obj)[1:], "--launch", "--num-processes"))
        processes.launch(launch, num_processes, arguments, command=context.obj)
        return
    if num_processes is not None:
        raise typer.BadParameter("--num-processes does nothing without --launch, for instance --launch ddp.")

    named = None if measures is None else _list(measures, str, "--measures")
    _check_used(context, named)

    from rich.console import Console

    from hf_posenc.recipes.evaluation.report import is_report
    from hf_posenc.recipes.evaluation.request import Request
    from hf_posenc.recipes.evaluation.subjects import subjects

    request = Request(
        models=tuple(models),
        measures=named,
        text=text,
        column=column,
        contexts=None if contexts is None else _list(contexts, int, "--contexts"),
        trained_length=trained_length,
        samples=samples,
        cue=cue,
        tasks=_list(tasks, str, "--tasks"),
        lengths=_list(lengths, int, "--lengths"),
        trained=trained,
        shots=shots,
        batch_size=batch_size,
        seed=seed,
    )
    for subject in subjects(request.models):
        # A missing model is reported before anything else is read.
        load_config(subject.base)
    main = processes.is_main()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(whole_directory(out, replaceable=is_report)) if main else None
        report = request.run(Console() if main else None, command=processes.command(context.obj))
        if folder is not None:
            report.write(folder)
    if main:
        # The first section is enough for the terminal; the report has the rest.
        typer.echo(report.sections[0].markdown())
        typer.echo(f"wrote {out}: {listing(out)}\n\nTo read it: {out / 'report.md'}")


def _check_used(context: typer.Context, measures: Sequence[str] | None) -> None:
    """Refuse an option of a measure that is not used, because it would have no effect."""
    for option, measure in _OPTIONS_OF.items():
        given = context.get_parameter_source(option)
        # By default the needle is measured, except for encoder-decoders.
        taken = measure == "needle" if measures is None else measure in measures
        if given is not None and given.name == "COMMANDLINE" and not taken:
            raise typer.BadParameter(f"--{option} does nothing without the measure {measure}. Name it in --measures.")


def _list(text: str, kind: Callable[[str], Word], option: str) -> tuple[Word, ...]:
    """Return the comma-separated words or numbers of a text."""
    try:
        found = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found:
        what = "one or more whole numbers" if kind is int else "one or more"
        raise OptionError(f"{option} {text!r}: expected {what}, with commas between them.")
    return found


def _without(arguments: Sequence[str], *options: str) -> Iterator[str]:
    """Return arguments without some options and their values."""
    rest = iter(arguments)
    for argument in rest:
        if argument in options:
            next(rest, None)
        elif argument.partition("=")[0] not in options:
            yield argument
