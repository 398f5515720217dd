"""Evaluation of language models: the same measures on the same inputs, side by side.

    report = hf_posenc.evaluate({"original": model, "fire": other}, [ContextPerplexity(ids, (128, 512))])
    report.write(folder)

Each measure has its own file: `perplexity`, `recall`, `generation`.
"""

from __future__ import annotations

from hf_posenc.recipes.evaluation.generation import Generation as Generation
from hf_posenc.recipes.evaluation.grid import Grid as Grid
from hf_posenc.recipes.evaluation.grid import Quantity as Quantity
from hf_posenc.recipes.evaluation.measure import Measure as Measure
from hf_posenc.recipes.evaluation.measure import Workers as Workers
from hf_posenc.recipes.evaluation.measure import evaluate as evaluate
from hf_posenc.recipes.evaluation.perplexity import ContextPerplexity as ContextPerplexity
from hf_posenc.recipes.evaluation.perplexity import context_curve as context_curve
from hf_posenc.recipes.evaluation.recall import AssociativeRecall as AssociativeRecall
from hf_posenc.recipes.evaluation.recall import InductionCopy as InductionCopy
from hf_posenc.recipes.evaluation.report import Report as Report
from hf_posenc.recipes.evaluation.report import Section as Section
from hf_posenc.recipes.intervals import Interval as Interval
