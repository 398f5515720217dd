"""The commands that look at schemes and convert checkpoints."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_posenc.cli.application import app, print_table, quiet
from hf_posenc.cli.checkpoints import copy_processor, copy_tokenizer, how_to_load, load_config, load_model
from hf_posenc.cli.directories import listing, whole_directory
from hf_posenc.errors import CheckpointError, LayerSelectionError, OptionError

if TYPE_CHECKING:
    from hf_posenc.patches.selection import Layers

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help='A directory, a name on the hub, or "tiny-llama", which comes along.')
]
SchemeName = Annotated[str, typer.Argument(metavar="SCHEME", help="See `hf-posenc schemes`.")]
NativeSetting = Annotated[Literal["remove", "keep"], typer.Option(help="What becomes of the model's own encoding.")]
LayerChoice = Annotated[
    str | None, typer.Option("--layers", metavar="TEXT", help='"0,2,5", "0:8" or "every:4"; all if left out.')
]
StackChoice = Annotated[
    str | None, typer.Option("--stacks", metavar="TEXT", help='"encoder" or "decoder"; all if left out.')
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the scheme; may be given several times."),
]


@app.command()
def schemes() -> None:
    """List the positional schemes."""
    from hf_posenc import registry

    rows = []
    for info in registry.schemes().values():
        # The full stop of "et al. 2024" ends no sentence.
        sentence = re.split(r"(?<=[.])\s(?=[A-Z`])", info.summary, maxsplit=1)[0]
        directions = "both" if len(info.directions) == 2 else info.directions[0]
        rows.append((info.name, info.family, directions, info.start, info.paper, sentence))
    headers = ("name", "family", "directions", "start", "paper", "what it is")
    print_table(headers, rows, whole=("name", "family", "paper"), short=("name", "family", "what it is"))


@app.command()
def info(scheme: SchemeName) -> None:
    """Describe a scheme and its options."""
    from hf_posenc.registry import describe

    typer.echo(str(describe(scheme)))


@app.command()
def plan(
    model: Model,
    scheme: SchemeName,
    native: NativeSetting = "remove",
    layers: LayerChoice = None,
    stacks: StackChoice = None,
    option: Options = None,
) -> None:
    """Say what a conversion would do. Only the model's config is read."""
    from hf_posenc.patches import plan as planning
    from hf_posenc.recipes.loading import place

    quiet()
    options = _scheme_options(scheme, option)
    config = load_config(place(model))
    typer.echo(
        str(planning.plan(config, scheme, native=native, layers=_layers(layers), stacks=_stacks(stacks), **options))
    )


@app.command()
def convert(
    model: Model,
    scheme: SchemeName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    native: NativeSetting = "remove",
    layers: LayerChoice = None,
    stacks: StackChoice = None,
    option: Options = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the weights; auto is as stored.")
    ] = "auto",
) -> None:
    """Convert a checkpoint and save it. It usually has to be adapted after that: the plan says so."""
    from hf_posenc.patches import patch as patching
    from hf_posenc.patches import plan as planning
    from hf_posenc.recipes.loading import place

    quiet()
    model = place(model)
    options = _scheme_options(scheme, option)
    selection: dict[str, Any] = {"native": native, "layers": _layers(layers), "stacks": _stacks(stacks), **options}
    with whole_directory(out) as folder:
        config = load_config(model)
        typer.echo(str(planning.plan(config, scheme, **selection)))
        loaded = load_model(model, config, dtype)
        patching.patch(loaded, scheme, **selection)
        verification = planning.verify(loaded)
        loaded.save_pretrained(folder)
        has_tokenizer, has_processor = copy_tokenizer(model, folder), copy_processor(model, folder)
        written = listing(folder)
    typer.echo(f"\n{verification}")
    typer.echo(f"\nwrote {out}: {written}")
    if not has_tokenizer and not has_processor:
        typer.echo(f"{model} has no tokenizer, so none was written.")
    typer.echo(f"\nTo load it:\n\n{how_to_load(loaded, out, has_tokenizer)}")


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A converted checkpoint.")],
) -> None:
    """Load a converted checkpoint and prove that its scheme is active."""
    from hf_posenc.patches import plan as planning
    from hf_posenc.patches import record
    from hf_posenc.recipes.loading import place

    quiet()
    config = load_config(place(str(directory)))
    if not record.from_config(config):
        raise CheckpointError(
            f"{directory} is not a converted checkpoint: its config.json names no scheme. "
            "Convert it first: hf-posenc convert."
        )
    typer.echo(str(planning.verify(load_model(str(directory), config, "auto"))))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory to write; an earlier demo there is replaced.")] = Path(
        "posenc-demo"
    ),
    scheme: Annotated[str, typer.Option(help="The scheme to convert to.")] = "fire",
    steps: Annotated[int, typer.Option(min=1, help="Training steps; fewer are faster and worse.")] = 200,
) -> None:
    """Convert and adapt a tiny model that comes with the package, in about two minutes and without any network."""
    # Threads that wait by spinning make so small a model ten times slower wherever something else runs beside it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from rich.console import Console

    from hf_posenc import registry
    from hf_posenc.recipes import demo as recipe

    quiet()
    registry.get(scheme)
    with whole_directory(out, replaceable=recipe.is_demo) as folder:
        recipe.run(folder, Console(), scheme=scheme, steps=steps)
    typer.echo(f"wrote {out}: {listing(out)}")


# -- what was asked for ------------------------------------------------------------------------------------------------


def _layers(text: str | None) -> Layers:
    """Read a selection of layers: `"0,2,5"`, `"0:8"` or `"every:4"`."""
    if text is None or text.startswith("every:"):
        return text
    try:
        if ":" in text:
            return slice(*(int(part) if part else None for part in text.split(":")))
        return [int(part) for part in text.split(",")]
    except (TypeError, ValueError):
        raise LayerSelectionError(
            f"--layers {text!r}: expected indices like '0,2,5', a slice like '0:8', or 'every:4'."
        ) from None


def _stacks(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _scheme_options(scheme: str, pairs: list[str] | None) -> dict[str, Any]:
    """Read `NAME=VALUE` pairs; values are JSON, or strings where they are not.

    Checked here because an option named like an argument of `patch` would otherwise be taken for that.
    """
    from hf_posenc import registry

    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise OptionError(f"--option {pair!r}: expected NAME=VALUE, for instance width=64.")
        if name in options:
            raise OptionError(f"--option {pair!r}: {name} is given twice.")
        options[name] = _value(value)
    registry.check_options(registry.get(scheme), options)
    return options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
