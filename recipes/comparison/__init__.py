"""Which scheme for a model: several of them adapted under one budget, measured side by side, and one report.

    found = compare("tiny-llama", "comparison", schemes=("fire", "alibi"), budget=300)
    print(*found.verdict.sentences, sep="\n")

One file is one thing: `contestants` says who takes part, `examining` what is measured of each (with `cost` and `decay`),
`verdict` what follows from the figures, `report` (with `pictures` and `page`) how it is written, `running` does it all.
"""

from __future__ import annotations

from hf_posenc.recipes.comparison.findings import Findings
from hf_posenc.recipes.comparison.run import Comparison, compare
from hf_posenc.recipes.comparison.verdict import Verdict

__all__ = ["Comparison", "Findings", "Verdict", "compare"]
