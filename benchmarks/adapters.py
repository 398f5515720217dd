"""Size of adapters, and what they compute loaded onto the stock model in a fresh process, and merged.

python benchmarks/adapters.py --output benchmarks/results/adapters.md
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory import machine
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed
from transformers.utils import logging

import hf_posenc
from hf_posenc.recipes.data.text import builtin_text

BASE = Path(str(files("hf_posenc") / "tiny_llama"))
KINDS = {"LoRA and scheme": ["q_proj", "v_proj"], "scheme alone": []}
RANK, STEPS, ROWS, LENGTH = 8, 20, 4, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=["fire", "kerple", "t5", "cope", "fox", "alibi"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    table = []
    for scheme in arguments.schemes:
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                table.append(row(scheme, kind, Path(folder)))
            sys.stderr.write(table[-1] + "\n")
    lines = [
        "# Adapters: sizes and exactness",
        "",
        f"Adapters for the tiny Llama ({kilobytes(BASE / 'model.safetensors')} KB of weights) after {STEPS} steps of "
        "Adam on "
        f"{ROWS} x {LENGTH} tokens; LoRA of rank {RANK} on q_proj and v_proj. Differences are the largest of any "
        "logit from the "
        f"trained model on {ROWS} x {LENGTH} held-out tokens, to logits of up to 20; each model was loaded in a fresh "
        "process.",
        "",
        "| scheme | adapter | trained parameters | weights, KB | adapter_config.json, KB | onto the stock model | "
        "merged | "
        "merged, saved and loaded |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *table,
        "",
        f"{machine()}, peft {version('peft')}",
        "",
        f"Command: `python {' '.join(sys.argv)}`",
    ]
    output = "\n".join(lines) + "\n"
    sys.stdout.write(output)
    if arguments.output:
        arguments.output.write_text(output, encoding="utf-8")


def row(scheme: str, kind: str, folder: Path) -> str:
    """Return one line of the table."""
    try:
        parameters, wanted = apart(partial(trained, scheme, kind, folder / "adapter"))
    except hf_posenc.OptionError:
        return f"| {scheme} | {kind} | nothing to train | | | | | |"
    loaded, merged = apart(partial(reloaded, folder / "adapter", folder / "merged"))
    again = apart(partial(converted, folder / "merged"))
    sizes = [kilobytes(folder / "adapter" / name) for name in ("adapter_model.safetensors", "adapter_config.json")]
    changes = [f"{np.abs(got - wanted).max():.2g}" for got in (loaded, merged, again)]
    return "| " + " | ".join([scheme, kind, f"{parameters:,}", *sizes, *changes]) + " |"


def apart(function: Any) -> Any:
    """Call a function in a fresh process. (What it returns is pickled; a tensor would be gone with the process.)"""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function)


def trained(scheme: str, kind: str, folder: Path) -> tuple[int, np.ndarray]:
    """Train and save an adapter; return the number of its parameters and the logits."""
    set_seed(0)
    base = hf_posenc.patch(stock(), scheme)
    model = get_peft_model(base, hf_posenc.PosencLoraConfig(r=RANK, target_modules=KINDS[kind]))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    ids = tokens("train")
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in parameters), logits(model)


def reloaded(adapter: Path, merged: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of an adapter on a stock model, and of the two merged, which are saved."""
    model = PeftModel.from_pretrained(stock(), adapter)
    before = logits(model)
    whole = model.merge_and_unload()
    whole.save_pretrained(merged)
    return before, logits(whole)


def converted(folder: Path) -> np.ndarray:
    """Return the logits of a converted checkpoint."""
    return logits(AutoModelForCausalLM.from_pretrained(folder))


def stock() -> PreTrainedModel:
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(BASE)


def tokens(split: str) -> Tensor:
    """Return text as token ids, int64 `[ROWS, LENGTH]`."""
    text = builtin_text(split)[: 16 * ROWS * LENGTH]
    ids = AutoTokenizer.from_pretrained(BASE)(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: ROWS * LENGTH]).view(ROWS, LENGTH)


def logits(model: torch.nn.Module) -> np.ndarray:
    """Return the logits on held-out text, float32 `[ROWS, LENGTH, V]`."""
    with torch.no_grad():
        return model.eval()(tokens("heldout"), use_cache=False).logits.numpy()


def kilobytes(path: Path) -> str:
    return f"{path.stat().st_size / 1000:.1f}"


if __name__ == "__main__":
    main()
