"""Convert a checkpoint to several schemes without training: save, reload, generate, perplexity by context length.

    python benchmarks/conversions.py CHECKPOINT TEXT --schemes alibi fire kerple nope t5 --output TABLE.md
    python benchmarks/conversions.py CHECKPOINT TEXT --schemes fire kerple t5 --per-layer --fit --output TABLE.md
    python benchmarks/conversions.py CHECKPOINT TEXT --schemes fire shaw cope --per-layer --match --output TABLE.md

The same 64 target tokens are scored at every context length.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from memory import machine
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc.recipes.evaluation import context_curve
from hf_posenc.recipes.schema.checks import additive
from hf_posenc.recipes.training.fit_bias import fit
from hf_posenc.recipes.training.transfer import match

# Text before the part that is scored, in windows: what `fit` and `match` look at.
FITTED, MATCHED = (8, 512), (1200, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--schemes", nargs="+", default=["alibi", "fire", "kerple", "nope", "t5"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--held-out", type=float, default=0.15, help="use this last part of the text")
    parser.add_argument("--fit", action="store_true", help="also fit each scheme to the model's own bias")
    parser.add_argument("--match", action="store_true", help="also fit each scheme to what attention writes")
    parser.add_argument("--per-layer", action="store_true", help="give schemes that layers can share one per layer")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    text = arguments.text.read_text(encoding="utf-8")
    cut = int(len(text) * (1 - arguments.held_out))
    train = torch.tensor(tokenizer(text[: min(cut, 1_000_000)], add_special_tokens=False)["input_ids"])
    text = text[cut:]
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    prompt = ids[:32][None]
    rows = []
    fixed = {"alibi", "sandwich"}  # nothing to fit
    fitted = [f"{name}, fitted" for name in arguments.schemes if arguments.fit and name in set(additive()) - fixed]
    matched = [f"{name}, attention fitted" for name in arguments.schemes if arguments.match]
    for row in ("native", *arguments.schemes, *fitted, *matched):
        scheme = row.partition(",")[0]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint).eval()
        note = "-"
        if scheme != "native":
            shareable = "shared" in hf_posenc.schemes()[scheme].option_defaults()
            options = {"shared": False} if arguments.per_layer and shareable else {}
            before = hf_posenc.patch(model, scheme, **options)
            if row in fitted:
                fit(before, ids=windows(train, *FITTED))
            if row in matched:
                match(before, windows(train, *MATCHED))
            with tempfile.TemporaryDirectory() as directory:
                before.save_pretrained(directory)
                model = AutoModelForCausalLM.from_pretrained(directory).eval()
            with torch.no_grad():
                difference = float((model(prompt).logits - before(prompt).logits).abs().max())
            note = f"{difference:g}"
        new = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
        plain = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, use_cache=False
        )
        same = "yes" if torch.equal(new, plain) else "NO"
        curve = context_curve(model, ids, arguments.contexts, windows=arguments.windows, batch_size=2)
        cells = [f"{curve.at(context).mean:.2f}" for context in arguments.contexts]
        rows.append(f"| {row} | " + " | ".join(cells) + f" | {note} | {same} |")
        sys.stderr.write(rows[-1] + "\n")
    lines = [
        "# Perplexity after a conversion without training",
        "",
        f"Perplexity of the same 64 tokens by context length, before any training; {arguments.windows} windows.",
        "",
        "| scheme | "
        + " | ".join(map(str, arguments.contexts))
        + " | logits after reload differ by | cache = no cache |",
        "|---|" + "---:|" * len(arguments.contexts) + "---:|---|",
        *rows,
        "",
        machine(),
    ]
    output = "\n".join(lines) + "\n"
    sys.stdout.write(output)
    if arguments.output:
        arguments.output.write_text(output, encoding="utf-8")


def windows(ids: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Return the first windows of a text, `[count, length]`, or as many as there are."""
    count = min(count, len(ids) // length)
    return ids[: count * length].view(count, length)


if __name__ == "__main__":
    main()
