"""The command that exports a converted checkpoint as a stock one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_posenc.cli.application import app, quiet
from hf_posenc.cli.checkpoints import copy_processor, copy_tokenizer, load_config, load_model
from hf_posenc.cli.directories import listing, whole_directory
from hf_posenc.errors import CheckpointError


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A converted checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    max_head_dim: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum head width for schemes whose layers or heads have different frequencies. Default: unchanged.",
        ),
    ] = None,
    max_positions: Annotated[
        int | None,
        typer.Option(
            min=1, help="Length of the table of positions or distances, for schemes without a maximum length."
        ),
    ] = None,
) -> None:
    """Write a converted checkpoint as a stock one that needs no hf-posenc, if a stock model computes the same."""
    from hf_posenc.patches import record
    from hf_posenc.patches.export.stock import stock_twin
    from hf_posenc.recipes.loading import place

    quiet()
    with whole_directory(out) as folder:
        config = load_config(place(str(directory)))
        if not record.from_config(config):
            raise CheckpointError(
                f"{directory} is not a converted checkpoint: its config.json names no scheme. It is a stock one "
                "already."
            )
        model = load_model(str(directory), config, "auto")
        stock, report = stock_twin(model, max_head_dim=max_head_dim, max_positions=max_positions)
        stock.save_pretrained(folder)
        has_tokenizer, has_processor = copy_tokenizer(str(directory), folder), copy_processor(str(directory), folder)
        written = listing(folder)
    typer.echo(f"{report}\n\nwrote {out}: {written}")
    if not has_tokenizer and not has_processor:
        typer.echo(f"{directory} has no tokenizer, so none was written.")
    typer.echo(
        f"\nTo load it:\n\n    from transformers import {report.model}\n"
        f'    model = {report.model}.from_pretrained("{out}")'
    )
