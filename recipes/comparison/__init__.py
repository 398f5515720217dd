"""Comparison of schemes for a model: adapt it to each under one budget, measure all side by side, write one report.

    found = compare("tiny-llama", "comparison", schemes=("fire", "alibi"), budget=300)
    print(*found.recommendation.sentences, sep="\n")

`recommendation` draws conclusions, and `run` does all before: it makes the recipes, trains, measures and reports.
"""

from __future__ import annotations

from hf_posenc.recipes.comparison.recommendation import Findings, Recommendation
from hf_posenc.recipes.comparison.run import Comparison, compare

__all__ = ["Comparison", "Findings", "Recommendation", "compare"]
