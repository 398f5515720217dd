"""Evaluation of language models: the same measures on the same inputs, side by side.

    report = hf_posenc.evaluate({"original": model, "fire": other}, [ContextPerplexity(ids, (128, 512))])
    report.write(folder)

Each measure has its own file: `perplexity`, `recall`, `generation`.
"""

from __future__ import annotations

from hf_posenc.recipes.evaluation.generation import Generation
from hf_posenc.recipes.evaluation.grid import Grid, Quantity
from hf_posenc.recipes.evaluation.measure import Measure, Workers, evaluate
from hf_posenc.recipes.evaluation.perplexity import ContextPerplexity, context_curve
from hf_posenc.recipes.evaluation.recall import AssociativeRecall, InductionCopy
from hf_posenc.recipes.evaluation.report import Report, Section
from hf_posenc.recipes.intervals import Interval

__all__ = [
    "AssociativeRecall",
    "ContextPerplexity",
    "Generation",
    "Grid",
    "InductionCopy",
    "Interval",
    "Measure",
    "Quantity",
    "Report",
    "Section",
    "Workers",
    "context_curve",
    "evaluate",
]
