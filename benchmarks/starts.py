"""Convert a checkpoint to every scheme at its most careful start: how far do logits move, and does training move it?

    python benchmarks/starts.py CHECKPOINT TEXT --output TABLE.md

"Careful" is the model's own encoding removed where the scheme then starts exactly, else kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from memory import machine
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_posenc

STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    text = arguments.text.read_text(encoding="utf-8")[: 16 * arguments.rows * arguments.length]
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = ids[: arguments.rows * arguments.length].view(arguments.rows, arguments.length)
    table = []
    for name in hf_posenc.schemes():
        table.append(row(arguments.checkpoint, name, ids))
        sys.stderr.write(table[-1] + "\n")
    lines = [
        "# Starts with the native encoding kept",
        "",
        f"Each scheme at its most careful start, on {arguments.rows} x {arguments.length} tokens. Then {STEPS} steps "
        "of Adam "
        "(learning rate 0.001, no decay) on the new parameters alone.",
        "",
        "| scheme | native encoding | start | largest change of a logit | new parameters | tensors moved by step 1 | "
        "by step 2 |",
        "|---|---|---|---:|---:|---:|---:|",
        *table,
        "",
        "A tensor that step 1 leaves alone is a factor of a product whose other factor starts at zero.",
        "",
        machine(),
    ]
    output = "\n".join(lines) + "\n"
    sys.stdout.write(output)
    if arguments.output:
        arguments.output.write_text(output, encoding="utf-8")


def row(checkpoint: Path, name: str, ids: Tensor) -> str:
    """Return one line of the table."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
    native = "remove" if hf_posenc.plan(model, name).start == "exact" else "keep"
    plan = hf_posenc.plan(model, name, native=native)
    hf_posenc.patch(model, name, native=native)
    with torch.no_grad():
        change = float((model(ids, use_cache=False).logits - before).abs().max())
    fresh = {key: p for key, p in model.named_parameters() if "hf_posenc" in key and p.requires_grad}
    moved = []
    if fresh:
        optimizer = torch.optim.Adam(fresh.values(), lr=1e-3)
        start = {key: p.detach().clone() for key, p in fresh.items()}
        for _ in range(STEPS):
            model.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            moved.append(sum(not torch.equal(p, start[key]) for key, p in fresh.items()))
    steps = " | ".join(f"{count} of {len(fresh)}" for count in moved) or "- | -"
    kept = "kept" if native == "keep" else "removed"
    return f"| {name} | {kept} | {plan.start} | {change:.2g} | {plan.parameters:,} | {steps} |"


if __name__ == "__main__":
    main()
