"""The command that draws what a model has learned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_posenc.cli.application import app, quiet
from hf_posenc.cli.checkpoints import load_config, load_model
from hf_posenc.cli.directories import listing, whole_directory
from hf_posenc.errors import OptionError

# Of an adapter, and of what a training run puts its result in.
_ADAPTER, _RUN, _MODEL = "adapter_config.json", "recipe.yaml", "model"
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


@app.command()
def plot(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help='A checkpoint, converted or not, or "tiny-llama"; an adapter; or the folder of a run.'
        ),
    ],
    what: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="overview, bias, decay, frequencies, planes, series, table, gates, positions, states, remainder or "
            "attention; may be given several times. All that fit the model if left out.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Directory to write; must not exist.")] = Path("pictures"),
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The text for pictures of what the model does on one.")
    ] = None,
    query: Annotated[
        list[int] | None,
        typer.Option(
            metavar="POSITION",
            help="Of the query in pictures by distance; may be given several times. Else what suits.",
        ),
    ] = None,
    layers: Annotated[str | None, typer.Option(metavar="LIST", help='Such as "0,5"; some of many if left out.')] = None,
    heads: Annotated[str | None, typer.Option(metavar="LIST", help='Such as "0,5"; likewise.')] = None,
    form: Annotated[Literal["png", "svg", "pdf"], typer.Option("--format", help="Of the files.")] = "png",
) -> None:
    """Draw what a model has learned: biases, rotations, tables, gates, attention; and all of it on one page."""
    quiet()
    chosen_layers, chosen_heads = _numbers("--layers", layers), _numbers("--heads", heads)
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
        )
        _write(drawn, folder, form)
    typer.echo(f"wrote {out}: {listing(out)}")


def _numbers(option: str, text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"{option} {text!r}: expected indices like '0,2,5'.") from None


def _load(directory: str) -> tuple[Any, Any]:
    """Return the model in a directory, with the adapter merged if it holds one, and its tokenizer if there is one."""
    from hf_posenc.recipes.loading import place

    directory = place(directory)
    run = Path(directory, _MODEL)
    if Path(directory, _RUN).is_file() and run.is_dir():
        directory = str(run)
    if not Path(directory, _ADAPTER).is_file():
        return load_model(directory, load_config(directory), "auto"), _tokenizer(directory)
    from hf_posenc.patches import adapters

    base = adapters.base_of(directory)
    model = adapters.merged(load_model(base, load_config(base), "auto"), directory)
    return model, _tokenizer(directory) or _tokenizer(base)


def _tokenizer(directory: str) -> Any:
    from transformers.utils import cached_file

    from hf_posenc.recipes.loading import load_tokenizer

    for name in _TOKENIZER_FILES:
        if cached_file(directory, name, _raise_exceptions_for_missing_entries=False):
            return load_tokenizer(directory)
    return None


def _write(drawn: dict[str, Any], folder: Path, form: str) -> None:
    """Save figures, with a bar where somebody watches: large ones take seconds."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    for name, figure in track(
        drawn.items(), "drawing", console=console, disable=not console.is_terminal, transient=True
    ):
        figure.savefig(folder / f"{name}.{form}")
