"""Worth of the attention transfer: trainings of equal tokens with it and without, relative to a control.

    python benchmarks/stages.py --model MODEL --train TRAIN.txt --held-out HELD_OUT.txt

The two trainings of a scheme see as many tokens: a third of them in the transfer and the others in the distillation, or
all in the distillation. The control is the original after the same training on the text.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from memory import machine

from hf_posenc.recipes.evaluation.grid import Grid
from hf_posenc.recipes.runs.run import train
from hf_posenc.recipes.schema.recipe import Conversion, Data, Distillation, Evaluation, Recipe, Training, Transfer

SCHEMES: dict[str, dict[str, Any]] = {
    "kerple": {"shared": False},
    "alibi": {"learned_slopes": True, "shared": False},
    "fire": {},
    "t5": {"shared": False},
    "fox": {},
    "cope": {},
    "nope": {},
}
STEPS, BATCH, WINDOWS = 300, 4, 64
RESULT = Path(__file__).parent / "results" / "stages.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--train", default="builtin")
    parser.add_argument("--held-out", default=None)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[*SCHEMES], choices=SCHEMES)
    arguments = parser.parse_args()
    rows = []
    for seed in range(arguments.seeds):
        control = measured(None, 0, seed, arguments)
        for name in arguments.only:
            found = [measured(name, steps, seed, arguments).relative_to(control) for steps in (0, STEPS // 3)]
            points = [point for point in control.points if control.reads(point)]
            rows.append(
                f"| {name} | {seed} | " + " | ".join(f"{grid.write(p)}" for p in points for grid in found) + " |"
            )
            sys.stderr.write(rows[-1] + "\n")
    heads = [f"{point:,}, {words}" for point in points for words in ("without", "with")]
    text = [
        "# The attention transfer at equal tokens",
        "",
        f"Perplexity in % of the control, by read tokens, without and with the transfer; {STEPS} steps of {BATCH} x "
        f"{arguments.length} tokens in all; {WINDOWS} held-out windows, paired, with 95 % intervals.",
        "",
        f"| scheme | seed | {' | '.join(heads)} |",
        f"|---|---|{'---:|' * len(heads)}",
        *rows,
        "",
        f"{machine()}.",
        "",
        "Command: `python benchmarks/stages.py --model MODEL --train TRAIN --held-out HELD_OUT`",
    ]
    RESULT.write_text("\n".join(text) + "\n", encoding="utf-8")


def measured(scheme: str | None, steps: int, seed: int, arguments: argparse.Namespace) -> Grid:
    """Return the perplexities after a training with so many steps of transfer; without a scheme, of the control."""
    recipe = Recipe(
        model=arguments.model,
        conversion=Conversion(scheme=scheme, options=SCHEMES.get(scheme or "", {})),
        data=Data(source=arguments.train, held_out=arguments.held_out),
        transfer=Transfer(steps=steps),
        training=Training(steps=STEPS - steps, length=arguments.length, batch_size=BATCH, seed=seed),
        distillation=Distillation(share=1.0 if scheme else 0.0),
        evaluation=Evaluation(contexts=[arguments.length, 8 * arguments.length], windows=WINDOWS),
    )
    with tempfile.TemporaryDirectory() as folder:
        found = train(recipe, Path(folder) / "run").measurements.curve("after")
    assert found is not None
    return found


if __name__ == "__main__":
    main()
