"""Distance from the original attention after a transfer, by learning rates.

    python benchmarks/rates.py --model MODEL --text TEXT.txt

Prints a table for one model. The defaults of `hf_posenc.recipes.training.stages` come from such tables.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch

import hf_posenc
from hf_posenc.recipes.evaluation.text import read_text, token_ids
from hf_posenc.recipes.loading import load
from hf_posenc.recipes.training.transfer import match

RATES, FACTORS = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2), (2, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--text", default="builtin")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--schemes", nargs="+", default=["kerple", "fire", "nope"])
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model, dtype=torch.float32)
    size = arguments.length
    ids = token_ids(read_text(arguments.text), tokenizer, most=size * arguments.batch * (arguments.steps + 1))
    windows = ids[: len(ids) // size * size].view(-1, size)
    sys.stdout.write("| scheme | rate of the scheme / projections | " + " | ".join(map(str, RATES)) + " |\n")
    for name in arguments.schemes:
        for factor in FACTORS:
            cells = []
            for rate in RATES:
                torch.manual_seed(0)
                converted = hf_posenc.patch(copy.deepcopy(model), name)
                found = match(
                    converted,
                    windows,
                    projections=True,
                    steps=arguments.steps,
                    batch_size=arguments.batch,
                    learning_rate=rate,
                    scheme_learning_rate=factor * rate,
                )
                cells.append(f"{sum(found.after) / len(found.after):.3f}")
            sys.stdout.write(f"| {name} | {factor} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
