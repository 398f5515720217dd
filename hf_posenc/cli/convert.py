"""The commands that describe schemes, and convert, verify and export checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from typer import Argument, Option

import hf_posenc
from hf_posenc.cli.application import (
    AsJson,
    Options,
    app,
    print_json,
    print_table,
    quiet,
    say_wrote,
    scheme_options,
    show,
)
from hf_posenc.cli.checkpoints import copy_companions, load_converted, load_model, say_how_to_load
from hf_posenc.errors import OptionError
from hf_posenc.patches.atomic_files import reading, whole_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_posenc.recipes.training.features import FeaturesResult

Model = Annotated[str, Argument(metavar="MODEL", help='A directory, a name on the hub, or "tiny-llama" (built in).')]
Out = Annotated[Path, Argument(metavar="OUT", help="Folder to write; must not exist.")]


def _scheme_names(incomplete: str) -> list[str]:
    return [name for name in hf_posenc.schemes() if name.startswith(incomplete)]


def _fate(text: str) -> str | float:
    """Return a share as a number, and any other text as it is: `patch` says what it expects."""
    try:
        return float(text)
    except ValueError:
        return text


SchemeName = Annotated[
    str, Argument(metavar="SCHEME", help="A scheme; `hf-posenc schemes` lists them.", autocompletion=_scheme_names)
]
Converted = Annotated[Path, Argument(metavar="DIR", help="A converted checkpoint.")]
NativeOption = Annotated[
    Any,
    Option(
        parser=_fate,
        metavar="FATE",
        help="Fate of the model's own encoding: remove, keep, or a share of its rotary pairs (0.375 or fast).",
    ),
]
LayerChoice = Annotated[str | None, Option("--layers", help='"0,2,5", "0:8" or "every:4". Default: all layers.')]
StackChoice = Annotated[str | None, Option("--stacks", help='"encoder" or "decoder". Default: both.')]
Steps = Annotated[int, Option(min=1, help="Optimizer steps.")]
Rate = Annotated[float | None, Option(help="Peak rate of the model; default: by its size and its weights.")]
Seed = Annotated[int, Option(min=0, help="Random seed.")]
Keys = Annotated[
    list[str] | None, Argument(metavar="scheme.NAME=VALUE", help="Options of the scheme, also given as -o NAME=VALUE.")
]


@app.command()
def schemes(as_json: AsJson = False) -> None:
    """List the positional schemes."""
    rows = []
    for info in hf_posenc.schemes().values():
        directions = "both" if len(info.directions) == 2 else info.directions[0]
        rows.append((info.name, info.family, directions, info.start, info.paper, info.headline))
    headers = ("name", "family", "directions", "start", "paper", "what it is")
    print_table(headers, rows, wide=("directions", "start", "paper"), as_json=as_json)


@app.command()
def info(scheme: SchemeName) -> None:
    """Describe a scheme and its options."""
    typer.echo(str(hf_posenc.describe(scheme)))


@app.command()
def plan(
    model: Model,
    scheme: SchemeName,
    keys: Keys = None,
    native: NativeOption = "remove",
    layers: LayerChoice = None,
    stacks: StackChoice = None,
    option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Print what a conversion would do. Only the model's config is read."""
    from hf_posenc.recipes.loading import load_config

    quiet()
    selection = {**scheme_options(scheme, keys, option), "native": native, "layers": layers, "stacks": stacks}
    show(hf_posenc.plan(load_config(model), scheme, **selection), as_json=as_json)


@app.command()
def layers(
    model: Model,
    scheme: SchemeName,
    keys: Keys = None,
    native: NativeOption = "remove",
    option: Options = None,
    text: Annotated[str | None, Option(metavar="FILE", help='A text file, jsonl or parquet; or "builtin".')] = None,
    steps: Annotated[int, Option(min=0, help="Steps of the attention transfer of all layers; 0 is none.")] = 60,
    length: Annotated[int | None, Option(min=2, help="Tokens per window, by default 256 or fewer.")] = None,
    spare: Annotated[int | None, Option(min=0, help="Layers to leave as they are; default: a quarter.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what it costs to convert each layer alone, in perplexity and copying, and name the cheapest hybrid."""
    import torch

    from hf_posenc.patches.architecture import of_model
    from hf_posenc.recipes import durations
    from hf_posenc.recipes.data.collation import corruptor
    from hf_posenc.recipes.data.sources import read_text
    from hf_posenc.recipes.data.windows import start_token, token_ids
    from hf_posenc.recipes.loading import load, trained_length
    from hf_posenc.recipes.processes import processes
    from hf_posenc.recipes.runs import hybrids
    from hf_posenc.recipes.runs.request import text_for
    from hf_posenc.recipes.training.layers import layer_costs, windows_for

    quiet()
    options, text = scheme_options(scheme, keys, option), text_for(model, text=text)
    loaded, tokenizer = load(model, dtype=torch.float32)
    loaded.to(processes().device)
    hides = corruptor(loaded.config, tokenizer)
    windows = windows_for(
        token_ids(read_text(text), tokenizer),
        length,
        trained=trained_length(loaded.config),
        start=start_token(tokenizer) if hides is None else None,
    )
    if len(windows) < 2:
        raise OptionError(
            f"--text {text} has fewer than two windows of {windows.shape[1]:,} tokens. Give more text, or a smaller "
            "--length."
        )
    count = sum(len(of_model(loaded).attentions(body)) for body in of_model(loaded).stacks(loaded).values())
    if spare is not None and spare >= count:
        raise OptionError(f"--spare is {spare}, and the model has {count} layers. Give a number from 0 to {count - 1}.")
    spared = count // 4 if spare is None else spare
    with _working(loaded, "steps and layers") as (console, show_done):
        found = layer_costs(
            loaded,
            scheme,
            windows,
            native=native,
            options=options,
            hides=hides,
            special=tokenizer.all_special_ids,
            spared=[spared],
            steps=steps,
            progress=lambda done: show_done(done, steps + count),
            tell=lambda seconds: console.print(
                f"time: {durations.words(seconds)} for {steps} steps and {count} layers", highlight=False
            ),
        )
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    headers = (
        "stack",
        "layer",
        "distance",
        "perplexity (%)",
        *(f"{name} (%)" for name in found.abilities),
        "price (%)",
    )
    rows = [
        (
            each.stack,
            each.layer,
            "" if each.distance is None else f"{each.distance:.3f}",
            f"{100 * math.expm1(each.cost):+.1f}",
            *(f"{100 * each.abilities[name]:.0f}" for name in found.abilities),
            f"{100 * found.price(each):.1f}",
        )
        for each in found.layers
    ]
    print_table(headers, rows)
    typer.echo("\n" + "\n".join(hybrids.sentences(found, spared)))
    for stack, picked in found.cheapest(spared).items():
        if picked and spared:
            which = f"--stacks {stack} " * (len(found.cheapest(spared)) > 1)
            typer.echo(f"\n    {which}--layers {','.join(map(str, picked))}")


@app.command()
def convert(
    model: Model,
    scheme: SchemeName,
    out: Out,
    keys: Keys = None,
    native: NativeOption = "remove",
    layers: LayerChoice = None,
    stacks: StackChoice = None,
    option: Options = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Option(help="Data type; auto keeps the stored one.")
    ] = "auto",
) -> None:
    """Convert a checkpoint and save it. The printed plan says whether it needs training afterwards."""
    from hf_posenc.patches.architecture import auto_name
    from hf_posenc.recipes.loading import load_config, place

    quiet()
    selection = {**scheme_options(scheme, keys, option), "native": native, "layers": layers, "stacks": stacks}
    with whole_directory(out) as folder:
        show(hf_posenc.plan(load_config(model), scheme, **selection), as_json=False)
        loaded = hf_posenc.patch(load_model(model, dtype), scheme, **selection)
        verification = hf_posenc.verify(loaded)
        loaded.save_pretrained(folder)
        copy_companions(place(model), folder)
    typer.echo(f"\n{verification}\n")
    kind = auto_name(type(loaded.config), type(loaded).__name__) or "AutoModel"
    say_how_to_load(out, kind, "import hf_posenc")


@app.command()
def embed(
    model: Annotated[Path, Argument(metavar="FOLDER", help="A folder of sentence-transformers.")],
    scheme: SchemeName,
    out: Out,
    keys: Keys = None,
    native: NativeOption = "remove",
    option: Options = None,
    text: Annotated[str | None, Option(metavar="FILE", help='A text file, jsonl or parquet; or "builtin".')] = None,
    length: Annotated[int, Option(min=34, help="Tokens that the result reads, special ones included.")] = 2048,
    steps: Steps = 300,
    batch_size: Annotated[int, Option(min=1, help="Texts per step.")] = 8,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Give sentence embeddings another scheme and a longer text, and train them to agree with the original's."""
    import torch
    from transformers import AutoModel

    from hf_posenc.recipes.data.sources import read_text
    from hf_posenc.recipes.data.windows import token_ids
    from hf_posenc.recipes.loading import load_config, load_tokenizer, seeded
    from hf_posenc.recipes.processes import processes
    from hf_posenc.recipes.runs.request import text_for
    from hf_posenc.recipes.training import embeddings

    quiet()
    options, text = scheme_options(scheme, keys, option), text_for(str(model), text=text)
    config, tokenizer = load_config(str(model)), load_tokenizer(str(model))
    _check_stock(config, str(model))
    embedder = embeddings.Embedder.of(model, tokenizer, config)
    size = length - embedder.length + embedder.room
    ids = token_ids(read_text(text), tokenizer)
    ids = ids[: len(ids) // size * size].view(-1, size)
    with whole_directory(out) as folder, seeded(seed):
        with reading(f"The weights of {model}"):
            loaded = AutoModel.from_pretrained(model, dtype=torch.float32)
        hf_posenc.patch(loaded, scheme, native=native, **options).to(processes().device)
        shared: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "seed": seed}
        found = _distilled(
            loaded, lambda tell: embeddings.distil_embeddings(loaded, ids, embedder, progress=tell, **shared), steps
        )
        tokenizer.model_max_length = length
        loaded.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        embeddings.write_modules(model, folder, length)
    _print_agreement(found, "tokens", as_json=as_json)
    if not as_json:
        say_wrote(out)
        typer.echo("\nTo load it:\n\n    import hf_posenc\n    from sentence_transformers import SentenceTransformer")
        typer.echo(f'    model = SentenceTransformer("{out}")')


@app.command()
def enlarge(
    model: Model,
    out: Out,
    images: Annotated[Path, Option(metavar="DIR", help="A folder of pictures, also in folders inside.")],
    keys: Keys = None,
    size: Annotated[int | None, Option(min=1, help="Pixels of a side; default: twice those of the original.")] = None,
    scheme: Annotated[
        str | None, Option(help="Another scheme; default: the model's own.", autocompletion=_scheme_names)
    ] = None,
    native: NativeOption = "remove",
    option: Options = None,
    steps: Steps = 300,
    batch_size: Annotated[int, Option(min=1, help="Pictures per step.")] = 8,
    learning_rate: Rate = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Make an image encoder for larger images, and train it to agree with the original on the same pictures."""
    from hf_posenc.patches import images as encoders
    from hf_posenc.patches.architecture import auto_name
    from hf_posenc.recipes.loading import load_config, place, seeded
    from hf_posenc.recipes.processes import processes
    from hf_posenc.recipes.training import features, pictures
    from hf_posenc.scheme import Scheme

    quiet()
    if scheme is None and (keys or option or native != "remove"):
        raise OptionError("Options of a scheme are given, and no scheme. Give --scheme NAME.")
    options = {} if scheme is None else scheme_options(scheme, keys, option)
    config, files = load_config(model), pictures.picture_files(images)
    _check_stock(config, model)
    encoders.check_encoder(config)
    processor = pictures.load_processor(place(model))
    larger = pictures.enlarged(processor, size or 2 * pictures.side(processor))
    with whole_directory(out) as folder, seeded(seed):
        original = load_model(model, "float32").to(processes().device)
        made = encoders.resized(original, pictures.side(larger))
        if scheme is not None:
            hf_posenc.patch(made, scheme, native=native, **options).to(processes().device)
            if any(module.facts().end for module in made.modules() if isinstance(module, Scheme)):
                raise OptionError(
                    f"{scheme} is a table for one size, and pictures of two sizes are learned. Leave --scheme out: the "
                    "model's own table is interpolated."
                )
        samples = pictures.Pictures(files, (processor, larger), original)
        shared: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "seed": seed}
        shared["learning_rate"] = learning_rate
        found = _distilled(
            made, lambda tell: features.distil_features(made, original, samples, progress=tell, **shared), steps
        )
        made.save_pretrained(folder)
        larger.save_pretrained(folder)
    _print_agreement(found, "pixels", as_json=as_json)
    if not as_json:
        kind = type(made).__name__
        imports = () if scheme is None else ("import hf_posenc",)
        say_how_to_load(out, (scheme and auto_name(type(made.config), kind)) or kind, *imports)


@app.command()
def shorten(
    model: Model,
    out: Out,
    sounds: Annotated[Path, Option(metavar="DIR", help="A folder of .wav files, also in folders inside.")],
    seconds: Annotated[int, Option(min=1, help="Seconds that the result pads sound to; longer ones are cut.")],
    steps: Steps = 300,
    batch_size: Annotated[int, Option(min=1, help="Sounds per step.")] = 8,
    learning_rate: Rate = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Make an encoder of sound for shorter sounds, and train it to agree with the original, which pads them."""
    from hf_posenc.patches.added import shortened, sound_encoder
    from hf_posenc.recipes.loading import load_config, place, seeded
    from hf_posenc.recipes.processes import processes
    from hf_posenc.recipes.training import features
    from hf_posenc.recipes.training import sounds as heard

    quiet()
    _check_stock(load_config(model), model)
    original = load_model(model, "float32").to(processes().device).eval()
    sound_encoder(original)
    if not (original.can_generate() and original.config.is_encoder_decoder):
        raise OptionError(f"{model} is a {type(original).__name__}; expected a model that writes what it hears.")
    extractor = heard.load_extractor(place(model))
    files = heard.sound_files(sounds, extractor.sampling_rate)
    with whole_directory(out) as folder, seeded(seed):
        shorter = heard.shorter(extractor, seconds)
        samples = heard.Sounds(files, (extractor, shorter), original)
        made = shortened(original, samples.positions)
        # Its words stay as they are, and with them the head.
        made.get_output_embeddings().requires_grad_(False)
        shared: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "seed": seed}
        shared["learning_rate"] = learning_rate
        found = _distilled(
            made, lambda tell: features.distil_features(made, original, samples, progress=tell, **shared), steps
        )
        made.save_pretrained(folder)
        copy_companions(place(model), folder)
        shorter.save_pretrained(folder)
    _print_agreement(found, "seconds", as_json=as_json)
    if not as_json:
        say_how_to_load(out, type(made).__name__)


@contextlib.contextmanager
def _working(model: PreTrainedModel, what: str) -> Iterator[tuple[Console, Callable[[int, int], None]]]:
    """Compute in bfloat16 where that pays, and show a bar; yield its console, and a function of what is done of all."""
    import torch
    from rich.progress import Progress

    from hf_posenc.recipes.processes import bfloat16_pays, processes

    console, is_wide = Console(stderr=True), bfloat16_pays(model.config.get_text_config().hidden_size)
    with (
        torch.autocast(processes().device.type, torch.bfloat16, enabled=is_wide),
        Progress(console=console, disable=not console.is_terminal, transient=True) as bar,
    ):
        task = bar.add_task(what, total=None)
        yield console, lambda done, total: bar.update(task, completed=done, total=total)


def _check_stock(config: Any, model: str) -> None:
    from hf_posenc.patches import record

    if record.from_config(config):
        raise OptionError(f"{model} is converted already, so its own encoding is gone. Give the original folder.")


def _distilled(
    model: PreTrainedModel, distil: Callable[[Callable[[int, int], None]], FeaturesResult], steps: int
) -> FeaturesResult:
    """Run the distillation of a model, a function of its progress; raise `OptionError` if it brought nothing."""
    from hf_posenc.recipes import durations

    seen: list[tuple[float, int]] = []

    def tell(done: int, total: int) -> None:
        show_done(done, total)
        seen.append((time.monotonic(), done))
        # One step would not tell, since samples differ in size.
        if len(seen) == 1 + steps // 20 > 1:
            (began, first), (now, last) = seen[0], seen[-1]
            left = (total - last) * (now - began) / (last - first)
            console.print(f"time: {durations.words(left)} for the steps, and measuring", highlight=False)

    with _working(model, "steps") as (console, show_done):
        found = distil(tell)
    if not found.accepted:
        raise OptionError(f"{found.sentence} Nothing is written. Give more data or --steps.")
    return found


def _print_agreement(found: FeaturesResult, unit: str, *, as_json: bool) -> None:
    rows = [row.row(unit) for row in found.rows]
    print_table(list(rows[0]), [list(row.values()) for row in rows], as_json=as_json)
    if not as_json:
        typer.echo(found.sentence)


@app.command()
def verify(directory: Converted, as_json: AsJson = False) -> None:
    """Load a converted checkpoint and check that its scheme is active."""
    quiet()
    show(hf_posenc.verify(load_converted(directory, "Convert it first: hf-posenc convert.")), as_json=as_json)


@app.command()
def explain(
    directory: Converted,
    length: Annotated[int | None, Option(min=1, help="Tokens of the sequence: by default 256 or fewer.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which executor computes the attention of each layer of a converted checkpoint."""
    quiet()
    model = load_converted(directory, "Convert it first: hf-posenc convert.")
    show(hf_posenc.explain(model, length=length), as_json=as_json)


@app.command()
def export(
    directory: Converted,
    out: Out,
    max_positions: Annotated[
        int | None,
        Option(min=1, help="Rows of the table of positions, for schemes without a maximum length."),
    ] = None,
) -> None:
    """Write a converted checkpoint as a stock one that needs no hf-posenc, if a stock model computes the same."""
    quiet()
    with whole_directory(out) as folder:
        model = load_converted(directory, "It is a stock one already.")
        report = hf_posenc.export_stock(model, folder, max_positions=max_positions)
        copy_companions(str(directory), folder)
    typer.echo(f"{report}\n")
    say_how_to_load(out, report.model)


@app.command()
def gguf(
    directory: Annotated[Path, Argument(metavar="DIR", help="The exported or the converted checkpoint.")],
    source: Annotated[Path, Argument(metavar="FILE", help="What llama.cpp's converter made of it.")],
    out: Annotated[Path, Argument(metavar="OUT", help="GGUF file to write.")],
) -> None:
    """Write a GGUF file with what llama.cpp's converter leaves out: factors of an exported rotation, ALiBi's slopes."""
    from hf_posenc.patches.export.gguf import complete_gguf

    quiet()
    typer.echo(complete_gguf(load_model(str(directory)), source, out))


@app.command()
def demo(
    out: Annotated[Path, Option(help="Folder to write; an earlier demo there is replaced.")] = Path("posenc-demo"),
    scheme: Annotated[str, Option(help="Target scheme.")] = "fire",
    steps: Annotated[int, Option(min=1, help="Training steps; fewer are faster and worse.")] = 200,
) -> None:
    """Convert and adapt a tiny built-in model, in two to four minutes and without network."""
    quiet()
    from hf_posenc.recipes import demo as recipe

    hf_posenc.describe(scheme)  # An unknown one is refused before the control is trained.
    with whole_directory(out, replaceable=recipe.is_demo) as folder:
        recipe.run(folder, Console(), scheme=scheme, steps=steps)
    say_wrote(out, f"{recipe.RUN}/report.html")
