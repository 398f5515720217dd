"""The commands that describe schemes, and convert, verify and export checkpoints."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_posenc.cli.application import AsJson, app, listing, print_table, quiet, show, whole_directory, words
from hf_posenc.cli.checkpoints import copy_companions, how_to_load, load_converted, load_model
from hf_posenc.errors import LayerSelectionError, OptionError

if TYPE_CHECKING:
    from hf_posenc.patches.patch import Layers

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help='A directory, a name on the hub, or "tiny-llama" (built in).')
]


def _scheme_names(incomplete: str) -> list[str]:
    """Return the schemes for the completion of a shell."""
    from hf_posenc import registry

    return [name for name in registry.schemes() if name.startswith(incomplete)]


SchemeName = Annotated[
    str,
    typer.Argument(metavar="SCHEME", help="A scheme; `hf-posenc schemes` lists them.", autocompletion=_scheme_names),
]
Converted = Annotated[Path, typer.Argument(metavar="DIR", help="A converted checkpoint.")]
NativeSetting = Annotated[Literal["remove", "keep"], typer.Option(help="Remove or keep the model's own encoding.")]
LayerChoice = Annotated[
    str | None, typer.Option("--layers", metavar="TEXT", help='"0,2,5", "0:8" or "every:4". Default: all layers.')
]
StackChoice = Annotated[
    str | None, typer.Option("--stacks", metavar="TEXT", help='"encoder" or "decoder". Default: both.')
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the scheme; repeatable."),
]


@app.command()
def schemes(as_json: AsJson = False) -> None:
    """List the positional schemes."""
    from hf_posenc import registry

    rows = []
    for info in registry.schemes().values():
        # The full stop of "et al. 2024" does not end a sentence.
        sentence = re.split(r"(?<=[.])\s(?=[A-Z`])", info.summary, maxsplit=1)[0]
        directions = "both" if len(info.directions) == 2 else info.directions[0]
        rows.append((info.name, info.family, directions, info.start, info.paper, sentence))
    headers = ("name", "family", "directions", "start", "paper", "what it is")
    print_table(headers, rows, wide=("directions", "start", "paper"), as_json=as_json)


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
    as_json: AsJson = False,
) -> None:
    """Print what a conversion would do. Only the model's config is read."""
    from hf_posenc.patches import plan as planning
    from hf_posenc.recipes.loading import load_config

    quiet()
    options = _scheme_options(scheme, option)
    config = load_config(model)
    found = planning.plan(config, scheme, native=native, layers=_layers(layers), stacks=_stacks(stacks), **options)
    show(found, as_json=as_json)


@app.command()
def layers(
    model: Model,
    scheme: SchemeName,
    option: Options = None,
    text: Annotated[str, typer.Option(metavar="FILE", help='A text file, jsonl or parquet; or "builtin".')] = "builtin",
    steps: Annotated[int, typer.Option(min=1, help="Steps of the attention transfer of all layers.")] = 60,
    length: Annotated[int | None, typer.Option(min=2, help="Tokens per window, by default 512 or fewer.")] = None,
    spare: Annotated[int | None, typer.Option(min=0, help="Layers to leave as they are; default: a quarter.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what it costs to convert each layer alone, and name the cheapest hybrid."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from hf_posenc.patches.architecture import of_model
    from hf_posenc.recipes.data.collation import corruptor
    from hf_posenc.recipes.evaluation.text import read_text, token_ids
    from hf_posenc.recipes.loading import load, trained_length
    from hf_posenc.recipes.processes import processes
    from hf_posenc.recipes.training.layers import layer_costs

    quiet()
    options = _scheme_options(scheme, option)
    loaded, tokenizer = load(model, dtype=torch.float32)
    loaded.to(processes().device)
    size = length or min(512, trained_length(loaded.config) or 512)
    batch = max(1, 2048 // size)
    ids = token_ids(read_text(text), tokenizer, most=size * batch * (steps + 1))
    windows = ids[: len(ids) // size * size].view(-1, size)
    architecture = of_model(loaded)
    count = sum(len(architecture.attentions(body)) for body in architecture.stacks(loaded).values())
    if spare is not None and spare >= count:
        raise OptionError(f"--spare is {spare}, and the model has {count} layers. Give a number from 0 to {count - 1}.")
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("steps and layers", total=steps + count)
        found = layer_costs(
            loaded,
            scheme,
            windows,
            options=options,
            hides=corruptor(loaded.config, tokenizer),
            steps=steps,
            batch_size=batch,
            progress=lambda done: bar.update(task, completed=done),
        )
    rows = [(each.stack, str(each.layer), f"{each.distance:.3f}", f"{each.cost:+.4f}") for each in found.layers]
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
        return
    headers = ("stack", "layer", "distance", "cost (nats per token)")
    print_table(headers, rows)
    spared = len(found.layers) // 4 if spare is None else spare
    if not spared:
        return
    cheapest = found.cheapest(spared)
    typer.echo(f"\nWithout the {spared} most expensive:\n")
    for stack, picked in cheapest.items():
        which = f"--stacks {stack} " * (len(cheapest) > 1)
        if picked:
            typer.echo(f"    {which}--layers {','.join(map(str, picked))}")


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
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Data type of the weights; auto keeps the stored one."),
    ] = "auto",
) -> None:
    """Convert a checkpoint and save it. The printed plan says whether it needs training afterwards."""
    from hf_posenc.patches import patch as patching
    from hf_posenc.patches import plan as planning
    from hf_posenc.recipes.loading import load_config, place

    quiet()
    model = place(model)
    options = _scheme_options(scheme, option)
    selection: dict[str, Any] = {"native": native, "layers": _layers(layers), "stacks": _stacks(stacks), **options}
    with whole_directory(out) as folder:
        config = load_config(model)
        show(planning.plan(config, scheme, **selection), as_json=False)
        loaded = load_model(model, config, dtype)
        patching.patch(loaded, scheme, **selection)
        verification = planning.verify(loaded)
        loaded.save_pretrained(folder)
        has_tokenizer, note = copy_companions(model, folder)
    typer.echo(f"\n{verification}\n\nwrote {out}: {listing(out)}\n{note}")
    typer.echo(f"To load it:\n\n{how_to_load(loaded, out, has_tokenizer)}")


@app.command()
def verify(directory: Converted, as_json: AsJson = False) -> None:
    """Load a converted checkpoint and check that its scheme is active."""
    from hf_posenc.patches import plan as planning

    quiet()
    show(planning.verify(load_converted(directory, "Convert it first: hf-posenc convert.")), as_json=as_json)


@app.command()
def explain(
    directory: Converted,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the sequence to run: by default 256 or fewer.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which executor computes the attention of each layer of a converted checkpoint."""
    from hf_posenc.patches import plan as planning

    quiet()
    model = load_converted(directory, "Convert it first: hf-posenc convert.")
    show(planning.explain(model, length=length), as_json=as_json)


@app.command()
def export(
    directory: Converted,
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
    from hf_posenc.patches.export.stock import stock_twin

    quiet()
    with whole_directory(out) as folder:
        model = load_converted(directory, "It is a stock one already.")
        stock, report = stock_twin(model, max_head_dim=max_head_dim, max_positions=max_positions)
        stock.save_pretrained(folder)
        _, note = copy_companions(str(directory), folder)
    typer.echo(f"{report}\n\nwrote {out}: {listing(out)}\n{note}")
    typer.echo(
        f"To load it:\n\n    from transformers import {report.model}\n"
        f'    model = {report.model}.from_pretrained("{out}")'
    )


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory to write; an earlier demo there is replaced.")] = Path(
        "posenc-demo"
    ),
    scheme: Annotated[str, typer.Option(help="Target scheme.")] = "fire",
    steps: Annotated[int, typer.Option(min=1, help="Training steps; fewer are faster and worse.")] = 200,
) -> None:
    """Convert and adapt a tiny built-in model, in about two minutes and without network."""
    quiet()
    from rich.console import Console

    from hf_posenc import registry
    from hf_posenc.recipes import demo as recipe

    registry.get(scheme)
    with whole_directory(out, replaceable=recipe.is_demo) as folder:
        recipe.run(folder, Console(), scheme=scheme, steps=steps)
    typer.echo(f"wrote {out}: {listing(out)}\n\nTo read it: {out / recipe.RUN / 'report.html'}")


# -- parsing of options ------------------------------------------------------------------------------------------------


def _layers(text: str | None) -> Layers:
    """Return the layers selected by `"0,2,5"`, `"0:8"` or `"every:4"`."""
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
    return None if text is None else list(words("--stacks", text, str))


def _scheme_options(scheme: str, pairs: list[str] | None) -> dict[str, Any]:
    """Return the options in `NAME=VALUE` pairs; values are JSON or words of Python, or else strings.

    The names are checked here, because an option named like an argument of `patch` would be mistaken for it.
    """
    from hf_posenc import registry
    from hf_posenc.patches.rotary import check_scheme

    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise OptionError(f"--option {pair!r}: expected NAME=VALUE, for instance width=64.")
        if name in options:
            raise OptionError(f"--option {pair!r}: {name} is given twice.")
        options[name] = _value(value)
    check_scheme(scheme)
    registry.check_options(registry.get(scheme), options)
    return options


def _value(text: str) -> Any:
    # Plans and errors name values as in Python.
    text = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
