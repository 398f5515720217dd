"""Comparison of schemes for a model: adapt it to each under one budget, measure all side by side, write one report.

    found = compare("tiny-llama", "comparison", schemes=("fire", "alibi"), budget=300)
    print(*found.recommendation.sentences, sep="\n")

`findings` measures each model, `recommendation` draws conclusions, and `run` makes the recipes, does all of it and
writes the report.
"""

from __future__ import annotations

from hf_posenc.recipes.comparison.findings import Findings
from hf_posenc.recipes.comparison.recommendation import Recommendation
from hf_posenc.recipes.comparison.run import Comparison, compare

__all__ = ["Comparison", "Findings", "Recommendation", "compare"]
