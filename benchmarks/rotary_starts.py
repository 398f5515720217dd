"""How exactly rotary schemes start: the largest change of a logit, for all rope types, near and far positions.

    python benchmarks/rotary_starts.py --output benchmarks/results/rotary_starts.md

A small Llama with grouped queries reads 13 tokens from a position on, before and after it is patched. In float64 the
stock model still computes its angles in float32; a column has it compute them in float64, as the schemes do for
float64 models.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
from memory import machine
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from test_rotary_family import start_error

TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
SCHEMES: list[tuple[str, dict[str, Any]]] = [
    ("rope", {}),
    ("rope2d", {}),
    ("rope2d", {"kind": "axial"}),
    ("liere", {}),
    ("comrope_ap", {}),
    ("comrope_ld", {}),
    ("fope", {}),
    ("xpos", {"anneal": True}),
]
FIRST = (0, 4_000, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [
        *(f"fp64, from {first:,}" for first in FIRST),
        *(f"fp64 against fp64 angles, from {first:,}" for first in FIRST),
        *(f"fp32, from {first:,}" for first in FIRST),
    ]
    lines = [
        "# Exactness of rotary starts",
        "",
        "Largest difference between the logits of a Llama (up to about 5) before and after patching, 13 tokens from "
        "a position on.",
        "",
        "| scheme | rope type | " + " | ".join(names) + " |",
        "|---|---|" + "---:|" * len(names),
    ]
    cases = [(scheme, options, kind) for scheme, options in SCHEMES for kind in TYPES]
    for scheme, options, kind in track(cases, "starts"):
        found = [start_error(kind, first, torch.float64, scheme, **options) for first in FIRST]
        found += [start_error(kind, first, torch.float64, scheme, exact_angles=True, **options) for first in FIRST]
        found += [start_error(kind, first, torch.float32, scheme, **options) for first in FIRST]
        given = "".join(f", {key}={value!r}" for key, value in options.items())
        lines.append(
            f"| {scheme}{given} | {kind} | " + " | ".join(f"{error:.1e}" if error else "0" for error in found) + " |"
        )
    command = "python benchmarks/rotary_starts.py"
    lines += ["", f"{machine()}", "", f"{date.today()}: `{command}`", ""]
    text = "\n".join(lines)
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
