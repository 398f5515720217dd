"""The commands for recipes and their runs: list, show, train, resume, push."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from hf_posenc.cli.application import AsJson, Options, app, is_main, keys_of, print_table, quiet, resumable, say_wrote

if TYPE_CHECKING:
    from hf_posenc.recipes.runs.run import Outcome

recipes_app = typer.Typer()
app.add_typer(recipes_app, name="recipes")

Name = Annotated[str, Argument(metavar="RECIPE", help="swap, extend, remove, control, or a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="KEY=VALUE", help="Keys of the recipe, such as model=DIR, data=FILE, scheme=NAME or steps=500."),
]
Folder = Annotated[Path, Argument(metavar="DIR", help="The folder of a run.")]


@recipes_app.callback(invoke_without_command=True)
def recipes(
    context: typer.Context,
    model: Annotated[str | None, Option("--for", metavar="MODEL", help="Recommend recipes for a model.")] = None,
    every: Annotated[bool, Option("--all", help="List all that suit, not the best five.")] = False,
    as_json: AsJson = False,
) -> None:
    """List or recommend recipes; show one."""
    if context.invoked_subcommand is not None:
        return
    from hf_posenc.recipes import library

    if model is None:
        known = {name: library.content(name)["summary"] for name in library.names()}
        print_table(("name", "summary"), list(known.items()), as_json=as_json)
        if not as_json:
            typer.echo("\nThose for your model, with what was measured:\n\n    hf-posenc recipes --for MODEL")
        return
    from hf_posenc.recipes import goals, loading

    quiet()
    config = loading.load_config(model)
    loading.language_class(model, config)
    found = goals.recommended(config)
    headers = ("recipe", "quality", "far", "measured on")
    rows = found if every else found[:5]
    print_table(headers, rows, as_json=as_json)
    if as_json:
        return
    typer.echo(
        "\nquality: perplexity over the control's (the original with the same training). far: perplexity of long texts "
        "over that at the length of the windows in training."
    )
    if len(found) > len(rows):
        typer.echo(f"{len(found) - len(rows)} more: --all")
    text = " data=TEXT" * (model != loading.TINY_LLAMA)
    typer.echo(f"\n    hf-posenc train {found[0].words} model={shlex.quote(model)}{text} --out DIR")


@recipes_app.command()
def show(recipe: Name, overrides: Overrides = None, option: Options = None) -> None:
    """Print a recipe with all keys and overrides, as a file to edit: `> mine.yaml`."""
    from hf_posenc.recipes.goals import read_recipe

    quiet()
    typer.echo(read_recipe(recipe, keys_of(overrides, option)).text(), nl=False)


@recipes_app.command()
def config(name: Annotated[str, Argument(metavar="NAME", help="one, ddp, fsdp2 or deepspeed.")]) -> None:
    """Print the path of a built-in config for `accelerate launch`."""
    from hf_posenc.recipes import library

    typer.echo(str(library.find_config(name)))


@app.command()
def train(
    context: typer.Context,
    recipe: Name,
    out: Annotated[Path | None, Option(help="Folder of the run (required); a run in it is continued.")] = None,
    overrides: Overrides = None,
    option: Options = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print what would be done; write nothing.")] = False,
) -> None:
    """Convert a model and train it according to a recipe."""
    from hf_posenc.recipes.goals import read_recipe

    quiet()
    read = read_recipe(recipe, keys_of(overrides, option))
    if dry_run:
        from hf_posenc.recipes import durations
        from hf_posenc.recipes.runs.case import Case
        from hf_posenc.recipes.runs.facts import header, line
        from hf_posenc.recipes.runs.forecast import forecast, seconds_for

        case = Case.of(read, reads_all=False)
        facts, _ = forecast(case)
        typer.echo("\n".join(header(facts)))
        typer.echo(line("time", durations.listed(seconds_for(read, case.texts))))
        return
    if out is None:
        raise typer.BadParameter("Got none; expected the folder of the run.", param_hint="--out")
    from hf_posenc.recipes.runs import run

    _follow(out, lambda console: run.train(read, out, console=console, command=context.obj))


@app.command()
def resume(directory: Folder) -> None:
    """Continue an interrupted run from its last complete checkpoint."""
    quiet()
    from hf_posenc.recipes.runs import run

    _follow(directory, lambda console: run.resume(directory, console=console))


@app.command()
def push(
    directory: Folder,
    repository: Annotated[str, Argument(metavar="REPO", help="Repository on the hub, such as me/my-model.")],
    private: Annotated[bool, Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[str | None, Option(metavar="BRANCH", help="Branch to push to. Default: main.")] = None,
) -> None:
    """Push the model of a finished run to the hub, with its card, table and picture."""
    from hf_posenc.recipes.runs import report

    typer.echo(f"pushed to {report.push(directory, repository, private=private, revision=revision)}")


def _follow(folder: Path, do: Callable[[Console], Outcome]) -> None:
    """Train in a folder, and say how a stopped run goes on, or else what there is and what may come next."""
    console = Console()
    with resumable(console, folder / "recipe.yaml", f"hf-posenc resume {shlex.quote(str(folder))}"):
        outcome = do(console)
    if outcome.already or not is_main():
        return
    say_wrote(outcome.folder, "report.html")
    adapters = list((outcome.folder / "model").glob("adapter_model*.safetensors"))
    if adapters:
        size = sum(file.stat().st_size for file in adapters)
        typer.echo(f"The weights of the adapter, in {outcome.folder / 'model'}, take {size / 1000:,.1f} KB.")
    # "." has no name to derive another from.
    place = outcome.folder if outcome.folder.name else outcome.folder.resolve()
    verdict, quoted = outcome.verdict, shlex.quote(str(place))
    if verdict is not None:
        typer.echo(f"\n{verdict}")
    if verdict is not None and verdict.wants_control:
        recipe, control = (shlex.quote(f"{place}{end}") for end in ("/recipe.yaml", "-control"))
        changes = "'conversion={scheme: null}' 'distillation={}' 'transfer={}' training.skip_to=null "
        changes += "lengthen.skip_to=null"
        typer.echo("\nTo train the control, and to compare:\n")
        typer.echo(f"    hf-posenc train {recipe} {changes} --out {control}")
        typer.echo(f"    hf-posenc eval {control} {quoted}")
    if verdict is None or not verdict.is_bad:
        typer.echo(f"\nTo push it:\n\n    hf-posenc push {quoted} REPO")
