"""The command line: `hf-posenc --help`.

Everything heavy is imported inside the commands, so that help and the table of schemes come at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from hf_posenc import __version__
from hf_posenc.errors import ArchitectureError, CheckpointError, LayerSelectionError, OptionError, PosencError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hf_posenc.selection import Layers

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")


class OutputError(PosencError):
    """A directory cannot be written."""


class _Commands(TyperGroup):
    """Commands whose expected failures are one line on stderr."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (PosencError, OSError) as error:
            typer.echo(f"hf-posenc: {_one_line(error)}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    help="Replace the positional encoding of a Hugging Face model, and look at what that does.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A local directory, or a name on the hub.")]
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


@app.command()
def schemes() -> None:
    """List the positional schemes."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hf_posenc import registry

    table = Table("name", "family", "directions", "start", "paper", "what it is", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.no_wrap = column.header in ("name", "family", "paper")
    for info in registry.schemes().values():
        # The full stop of "et al. 2024" ends no sentence.
        sentence = re.split(r"(?<=[.])\s(?=[A-Z`])", info.summary, maxsplit=1)[0]
        directions = "both" if len(info.directions) == 2 else info.directions[0]
        row = (info.name, info.family, directions, info.start, info.paper, sentence)
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    # Nothing is gained by wrapping what goes into a file or another program.
    Console(width=None if console.is_terminal else 200).print(table)


@app.command()
def info(scheme: SchemeName) -> None:
    """Describe a scheme and its options."""
    from hf_posenc.describing import describe

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
    from hf_posenc import planning

    _quiet()
    options = _scheme_options(scheme, option)
    config = _load_config(model)
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
    from hf_posenc import patching, planning

    _quiet()
    options = _scheme_options(scheme, option)
    selection: dict[str, Any] = {"native": native, "layers": _layers(layers), "stacks": _stacks(stacks), **options}
    with whole_directory(out) as folder:
        config = _load_config(model)
        typer.echo(str(planning.plan(config, scheme, **selection)))
        loaded = _load_model(model, config, dtype)
        patching.patch(loaded, scheme, **selection)
        verification = planning.verify(loaded)
        loaded.save_pretrained(folder)
        has_tokenizer = _copy_tokenizer(model, folder)
        written = _listing(folder)
    typer.echo(f"\n{verification}")
    typer.echo(f"\nwrote {out}: {written}")
    if not has_tokenizer:
        typer.echo(f"{model} has no tokenizer, so none was written.")
    typer.echo(f"\nTo load it:\n\n{_how_to_load(loaded, out, has_tokenizer)}")


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A converted checkpoint.")],
) -> None:
    """Load a converted checkpoint and prove that its scheme is active."""
    from hf_posenc import planning, record

    _quiet()
    config = _load_config(str(directory))
    if not record.from_config(config):
        raise CheckpointError(
            f"{directory} is not a converted checkpoint: its config.json names no scheme. "
            "Convert it first: hf-posenc convert."
        )
    typer.echo(str(planning.verify(_load_model(str(directory), config, "auto"))))


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

    _quiet()
    registry.get(scheme)
    with whole_directory(out, replaceable=recipe.is_demo) as folder:
        recipe.run(folder, Console(), scheme=scheme, steps=steps)
    typer.echo(f"wrote {out}: {_listing(out)}")


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


# -- models ------------------------------------------------------------------------------------------------------------


def _quiet() -> None:
    """Keep transformers from writing between our lines; what a user should know of a patch is in its plan."""
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("hf_posenc").setLevel(logging.ERROR)


def _load_config(model: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    # A hub name has at most one slash. Anything else that is not there would be answered by a puzzling line on the hub.
    if not Path(model).is_dir() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise CheckpointError(
            f"There is no directory {model}. Give a directory with a checkpoint, or a name on the hub."
        )
    if Path(model).is_dir() and not Path(model, "config.json").is_file():
        raise CheckpointError(f"There is no config.json in {model}. Give the directory of a checkpoint.")
    with _reading(model, "config"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(model)
    return config


def _load_model(model: str, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    kind = _model_class(config)
    with _reading(model, "weights"):
        loaded: PreTrainedModel = kind.from_pretrained(model, dtype=dtype)
    return loaded


def _model_class(config: PreTrainedConfig) -> Any:
    """Return the class that a config names, or the one that generates text."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from hf_posenc.patches.architecture import of_config

    known = {kind.__name__: kind for pair in of_config(config).twins.items() for kind in pair}
    named = [known[name] for name in config.architectures or [] if name in known]
    if config.architectures and not named:
        raise ArchitectureError(
            f"The checkpoint holds a {config.architectures[0]}, which cannot be patched. "
            f"Known: {', '.join(sorted(known))}."
        )
    fallback = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    return named[0] if named else fallback


@contextlib.contextmanager
def _reading(model: str, what: str) -> Iterator[None]:
    """Turn what a damaged or unreachable checkpoint raises into one error; other errors of ours pass."""
    from safetensors import SafetensorError

    try:
        yield
    except PosencError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"The {what} of {model} cannot be read: {_one_line(error)}") from error


def _copy_tokenizer(model: str, folder: Path) -> bool:
    """Save the tokenizer of a checkpoint into a folder, if it has one."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    with _reading(model, "tokenizer"):
        if not any(cached_file(model, name, _raise_exceptions_for_missing_entries=False) for name in _TOKENIZER_FILES):
            return False
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return True


def _how_to_load(model: PreTrainedModel, out: Path, has_tokenizer: bool) -> str:
    from hf_posenc.patches import auto

    names = [name for name, kind in auto.classes_for(type(model.config)).items() if kind is type(model)]
    # Models that generate are listed under AutoModelForPreTraining as well, which says less.
    name = names[-1] if names else "AutoModel"
    lines = [
        "    import hf_posenc",
        f"    from transformers import {name}{', AutoTokenizer' if has_tokenizer else ''}",
        f'    model = {name}.from_pretrained("{out}")',
        f'    tokenizer = AutoTokenizer.from_pretrained("{out}")',
    ]
    return "\n".join(lines if has_tokenizer else lines[:-1])


# -- directories -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole_directory(out: Path, replaceable: Callable[[Path], bool] = lambda folder: False) -> Iterator[Path]:
    """Give a directory to write to, which becomes `out` when the block ends, and vanishes if it fails or is stopped.

    Args:
        out: The directory that is to be there whole, or not at all.
        replaceable: Whether an `out` that is there, and not empty, may be replaced.

    Raises:
        OutputError: `out` exists and must be kept, or cannot be made.
    """
    if not out.parent.is_dir():
        raise OutputError(f"There is no directory {out.parent} to write {out.name} in. Make it first.")
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} exists and is a file. Choose another name, or remove it first.")
    if out.is_dir() and any(out.iterdir()) and not replaceable(out):
        raise OutputError(f"{out} exists and is not empty. Choose another name, or remove it first.")
    # On the same file system, so that it can be renamed.
    folder = out.parent / f".{out.name}.{secrets.token_hex(4)}"
    # A signal must find its handler from the moment the folder is there.
    with _removed_when_terminated(folder):
        try:
            folder.mkdir()
            yield folder
            _make_readable(folder)
            if out.is_dir():
                shutil.rmtree(out)
            os.replace(folder, out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _removed_when_terminated(folder: Path) -> Iterator[None]:
    """Remove a folder when a termination signal comes, as job schedulers send it, and end the process."""

    def stop(number: int, frame: object) -> None:
        # Not by an exception: Python swallows one that is raised while an object is being deleted, and goes on.
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _make_readable(folder: Path) -> None:
    # safetensors makes its files private; a checkpoint is as readable as the user's other files.
    umask = os.umask(0)
    os.umask(umask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def _listing(folder: Path) -> str:
    """Return the names of the files in a folder, with their size in all."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = sorted({path.relative_to(folder).parts[0] + "/" * (path.parent != folder) for path in files})
    return f"{', '.join(names)} ({sum(path.stat().st_size for path in files) / 1e6:.1f} MB)"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
