"""The commands that look at models: eval, compare and plot."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer import Argument, Option

from hf_posenc.cli.application import AsJson, app, is_main, print_table, quiet, resumable, say_wrote, words
from hf_posenc.cli.checkpoints import find_tokenizer, load_model
from hf_posenc.cli.convert import Model
from hf_posenc.patches.atomic_files import whole_directory


@app.command("eval")
def evaluate(
    context: typer.Context,
    models: Annotated[
        list[str],
        Argument(
            metavar="MODEL",
            help="Directories of models, adapters or runs, or names on the hub; PATH:SCHEME converts first, untrained.",
        ),
    ],
    out: Annotated[Path, Option(help="Folder to write; an earlier report is replaced.")] = Path("posenc-eval"),
    # A list without spaces cannot be wrapped and would be cut off in a narrow terminal.
    measures: Annotated[
        str | None, Option(help="Some of perplexity, induction, mqar, generation. Default: the first three.")
    ] = None,
    text: Annotated[
        str | None,
        Option(
            help="A .txt, .jsonl or .parquet file or folder, or builtin. Default: what runs among the models held out."
        ),
    ] = None,
    column: Annotated[str, Option(help="Column of the text, in files with columns.")] = "text",
    contexts: Annotated[str | None, Option(help="Context lengths. Default: up to 8 times the trained length.")] = None,
    trained_length: Annotated[
        int | None, Option(min=1, help="Tokens per window in training. Default: from the config.")
    ] = None,
    samples: Annotated[int, Option(min=1, help="Windows, keys, sequences or examples of each kind.")] = 32,
    batch_size: Annotated[int, Option(min=1, help="Windows or examples per forward.")] = 8,
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Random seed of all samples.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure models on the same inputs, side by side, and write JSON, Markdown and pictures."""
    quiet()
    named = words("--measures", measures)  # before anything slow is imported

    from hf_posenc.recipes.evaluation.report import DATA, is_report
    from hf_posenc.recipes.runs.request import Request

    request = Request(
        models=tuple(models),
        measures=named,
        text=text,
        column=column,
        contexts=words("--contexts", contexts, int),
        trained_length=trained_length,
        samples=samples,
        batch_size=batch_size,
        seed=seed,
    )
    main = is_main()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(whole_directory(out, replaceable=is_report)) if main else None
        report = request.run(Console(stderr=as_json) if main else None, command=context.obj)
        if folder is not None:
            report.write(folder)
    if main and as_json:
        typer.echo((out / DATA).read_text(encoding="utf-8"), nl=False)
    elif main:
        # The first section is enough for the terminal; the report has the rest.
        for table in report.sections[0].tables():
            typer.echo(table.caption)
            print_table(table.header, table.rows)
        for verdict in report.verdicts():
            typer.echo(f"{verdict}\n")
        say_wrote(out, "report.md")


@app.command()
def compare(
    context: typer.Context,
    model: Model,
    overrides: Annotated[
        list[str] | None, Argument(metavar="KEY=VALUE", help="Keys of all recipes, above all data=text.txt.")
    ] = None,
    schemes: Annotated[
        str | None, Option(help="Schemes, recipes or YAML files, separated by commas. Default: the usual.")
    ] = None,
    budget: Annotated[int, Option(min=1, metavar="STEPS", help="Optimizer steps per model.")] = 300,
    out: Annotated[Path, Option(help="Output folder. Finished runs there are reused.")] = Path("posenc-comparison"),
    measures: Annotated[
        str | None, Option(help="Measures besides perplexity. Default: induction and mqar, if causal.")
    ] = None,
    samples: Annotated[int, Option(min=2, help="Windows or examples of each kind.")] = 32,
) -> None:
    """Adapt a model to several schemes under one budget, compare the results, and recommend a scheme."""
    quiet()
    from hf_posenc.recipes.comparison import REQUEST
    from hf_posenc.recipes.comparison import compare as run

    console = Console()
    with resumable(console, out / REQUEST, "the same command"):
        found = run(
            model,
            out,
            schemes=words("--schemes", schemes),
            budget=budget,
            overrides=overrides or [],
            measures=words("--measures", measures),
            samples=samples,
            console=console,
            command=context.obj,
        )
    typer.echo("\n".join(("", *found.recommendation.sentences, "")))
    say_wrote(out, "report.html")
    for name, reason in found.failed.items():
        typer.echo(f"hf-posenc: {name} failed: {reason}", err=True)
    if found.failed:
        raise typer.Exit(1)


@app.command()
def plot(
    directory: Annotated[str, Argument(metavar="DIR", help='A checkpoint, an adapter, a run, or "tiny-llama".')],
    what: Annotated[
        list[str] | None,
        Option(
            metavar="KIND",
            help="bias, decay, table, gates, slopes, strengths, positions or attention; repeatable. Default: all that "
            "the model has.",
        ),
    ] = None,
    out: Annotated[Path, Option(help="Folder to write; must not exist.")] = Path("pictures"),
    prompt: Annotated[str | None, Option(help="Text for pictures that need one.")] = None,
    query: Annotated[
        list[int] | None, Option(help="Query position in pictures by distance; repeatable. Default: a selection.")
    ] = None,
    layers: Annotated[str | None, Option(help='Layers, such as "0,5". Default: a selection.')] = None,
    heads: Annotated[str | None, Option(help='Heads, such as "0,5". Default: a selection.')] = None,
    form: Annotated[Literal["png", "svg", "pdf"], Option("--format", help="File format.")] = "png",
) -> None:
    """Draw what a model has learned: biases, tables, gates and attention."""
    quiet()
    chosen_layers, chosen_heads = words("--layers", layers, int), words("--heads", heads, int)
    from hf_posenc.recipes import plots

    with whole_directory(out) as folder:
        model, tokenizer = _load(directory)
        drawn = plots.figures(
            model,
            tokenizer,
            what=what or None,
            prompt=plots.PROMPT if prompt is None else prompt,
            layers=chosen_layers,
            heads=chosen_heads,
            queries=query or (),
            name=Path(directory).resolve().name,
        )
        for name, figure in drawn.items():
            figure.savefig(folder / f"{name}.{form}")
    say_wrote(out)


def _load(directory: str) -> tuple[Any, Any]:
    """Return the model in a directory, with an adapter merged into it, and its tokenizer or `None`."""
    from hf_posenc.patches import adapters
    from hf_posenc.recipes.runs.request import Subject, model_in

    source = model_in(directory)
    base = Subject("", source).base
    model = load_model(base)
    if base != source:
        model = adapters.merged(model, source)
    return model, find_tokenizer(source) or find_tokenizer(base)
