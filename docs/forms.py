"""The picture of what swaps of SmolLM2-135M cost, from the samples in `benchmarks/results`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from matplotlib.figure import Figure

from hf_posenc.recipes import intervals
from hf_posenc.recipes.reports.curves import Line, Panel, lines_figure

SAMPLES = Path(__file__).parents[1] / "benchmarks" / "results" / "SmolLM2-135M_forms.jsonl"
ORIGINAL, FORM = "original", ", fast"
PERPLEXITY = "perplexity in % of the original"


def forms() -> Figure:
    """Draw perplexities relative to the original, and the shares of tokens copied and recalled, by length."""
    rows = {row["name"]: row["measured"] for row in map(json.loads, SAMPLES.read_text(encoding="utf-8").splitlines())}
    names = [ORIGINAL, *(name for name in rows if name.endswith(FORM))]

    def line(name: str, what: str) -> Line:
        found = []
        for length, samples in rows[name][what].items():
            own = torch.tensor(samples, dtype=torch.float64)
            if what == "perplexity" and length in rows[ORIGINAL][what]:
                interval = intervals.of_exponential(own - torch.tensor(rows[ORIGINAL][what][length]))
            else:
                interval = intervals.of_mean(own)
            if int(length) <= 8192:  # for which the original was trained
                found.append((int(length), interval.times(100)))
        return found

    titles = {"perplexity": PERPLEXITY, "copy": "tokens copied (%)", "recall": "values recalled (%)"}
    panels = [
        Panel(
            lines={name.removesuffix(FORM): line(name, what) for name in names},
            y=title,
            is_log=what == "perplexity",
            top=100 if what == "copy" else None,
        )
        for what, title in titles.items()
    ]
    return lines_figure("SmolLM2-135M with a scheme over its fast rotary pairs", panels)
