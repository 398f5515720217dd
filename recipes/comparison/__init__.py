"""Comparison of schemes for a model: adapt it to each under one budget, measure all side by side, write one report.

    found = compare("tiny-llama", "comparison", schemes=("fire", "alibi"), budget=300)
    print(*found.verdict.sentences, sep="\n")

`findings` measures each model, `verdict` draws conclusions, and `run` makes the recipes, does all of it and writes the
report.
"""

from __future__ import annotations

from hf_posenc.recipes.comparison.findings import Findings
from hf_posenc.recipes.comparison.run import Comparison, compare
from hf_posenc.recipes.comparison.verdict import Verdict

__all__ = ["Comparison", "Findings", "Verdict", "compare"]
