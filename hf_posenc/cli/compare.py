"""The command that adapts a model to several schemes and recommends one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_posenc.cli.application import app, quiet
from hf_posenc.cli.checkpoints import load_config
from hf_posenc.cli.directories import listing


@app.command()
def compare(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help='A directory, a name on the hub, or "tiny-llama" (built in).')
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Override keys of all recipes, such as data.source=text.txt."),
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Comma-separated schemes, recipes or YAML files. Default: the usual ones."),
    ] = None,
    budget: Annotated[int, typer.Option(min=1, metavar="STEPS", help="Optimizer steps per model.")] = 300,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder. Finished runs there are reused.")] = Path(
        "posenc-comparison"
    ),
    measures: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Measures in addition to perplexity, as in eval. Default: induction, for causal models.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=2, help="Windows or examples of each kind.")] = 32,
) -> None:
    """Adapt a model to several schemes under one budget, compare the results, and recommend a scheme."""
    # Spinning threads make a small model ten times slower while other programs run.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    quiet()
    from rich.console import Console

    from hf_posenc.recipes.comparison.run import compare as run
    from hf_posenc.recipes.loading import place

    # A missing model is reported before anything else is read.
    load_config(place(model))
    try:
        found = run(
            model,
            out,
            schemes=None if schemes is None else _list(schemes),
            budget=budget,
            overrides=overrides or [],
            measures=None if measures is None else _list(measures),
            samples=samples,
            console=Console(),
            command=context.obj,
        )
    except KeyboardInterrupt:
        typer.echo("hf-posenc: stopped; run the same command again to continue.", err=True)
        raise typer.Exit(130) from None
    typer.echo("\n".join(("", *found.verdict.sentences, "")))
    typer.echo(f"wrote {out}: {listing(out)}\n\nTo read it: {out / 'report.html'}")
    for name, reason in found.failed.items():
        typer.echo(f"hf-posenc: {name} failed: {reason}", err=True)
    if found.failed:
        raise typer.Exit(1)


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
