"""The command that draws the positional parts of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_posenc.cli.application import app, listing, quiet, whole_directory, words
from hf_posenc.cli.checkpoints import find_tokenizer, load_model


@app.command()
def plot(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help='A checkpoint, converted or not, an adapter, the folder of a run, or "tiny-llama".'
        ),
    ],
    what: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="overview, bias, decay, frequencies, planes, series, table, gates, slopes, strengths, positions, "
            "states, remainder, attention or reach; repeatable. Default: all that the model has.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Directory to write; must not exist.")] = Path("pictures"),
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text for pictures that need one.")] = None,
    query: Annotated[
        list[int] | None,
        typer.Option(
            metavar="POSITION",
            help="Query position in pictures by distance; repeatable. Default: chosen by the picture.",
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help='Layers, such as "0,5". Default: a selection.')
    ] = None,
    heads: Annotated[
        str | None, typer.Option(metavar="LIST", help='Heads, such as "0,5". Default: a selection.')
    ] = None,
    form: Annotated[Literal["png", "svg", "pdf"], typer.Option("--format", help="File format.")] = "png",
) -> None:
    """Draw what a model has learned: biases, rotations, tables, gates, attention, and an overview."""
    quiet()
    chosen_layers, chosen_heads = (
        None if text is None else words(option, text, int)
        for option, text in (("--layers", layers), ("--heads", heads))
    )
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
    typer.echo(f"wrote {out}: {listing(out)}")


def _load(directory: str) -> tuple[Any, Any]:
    """Return the model in a directory, with an adapter merged into it, and its tokenizer or `None`."""
    from hf_posenc.patches import adapters
    from hf_posenc.recipes.evaluation.subjects import Subject, model_in
    from hf_posenc.recipes.loading import load_config

    source = model_in(directory)
    base = Subject("", source).base
    model = load_model(base, load_config(base), "auto")
    if base == source:
        return model, find_tokenizer(source)
    return adapters.merged(model, source), find_tokenizer(source) or find_tokenizer(base)
