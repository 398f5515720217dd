"""Comparison of schemes for a model: adapt it to each under one budget, measure all side by side, write one report.

    found = compare("tiny-llama", "comparison", schemes=("fire", "alibi"), budget=300)
    print(*found.verdict.sentences, sep="\n")

`contestants` makes the recipes, `examiner` measures each model, `verdict` draws conclusions, `report` writes them down,
and `run` does all of it.
"""

from __future__ import annotations

from hf_posenc.recipes.comparison.examiner import Findings
from hf_posenc.recipes.comparison.run import Comparison, compare
from hf_posenc.recipes.comparison.verdict import Verdict

__all__ = ["Comparison", "Findings", "Verdict", "compare"]
