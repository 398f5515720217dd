"""The page of the documentation with the results of `loaders.py`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "loaders.json"
PAGE = HERE.parents[1] / "docs" / "loaders.md"


def read() -> dict[str, Any]:
    empty: dict[str, Any] = {"versions": {}, "cells": {}, "altered": {}}
    return {**empty, **json.loads(RESULTS.read_text(encoding="utf-8"))} if RESULTS.exists() else empty


def counts(rows: Iterable[dict[str, str]], loader: str) -> list[int]:
    """Return how many cells of a loader are equal, refused and faults."""
    found = Counter(row[loader].partition(":")[0] for row in rows if loader in row)
    return [found["equal"], found["refused"], found["fault"]]


def text(stored: dict[str, Any], order: Iterable[str]) -> str:
    """Return the page of the documentation, with the loaders in an order."""
    versions, cells = stored["versions"], stored["cells"]
    loaders = [row for name in order for row in versions if row == name or row.startswith(f"{name} (")]
    lines = [f"| scheme | {' | '.join(loaders)} |", "|---" * (len(loaders) + 1) + "|"]
    notes: dict[str, int] = {}
    for case, row in cells.items():
        found = []
        for loader in loaders:
            cell = row.get(loader, "")
            if cell.startswith(("refused", "fault")):
                word, _, why = cell.partition(": ")
                why = re.sub(r"'[^']*'|\b\w+ \(layer \d+\)|layer \d+|\d+", "…", why).replace("|", "/")
                cell = f"{word} [{notes.setdefault(why, len(notes) + 1)}]"
            found.append(cell)
        lines.append(f"| {case} | {' | '.join(found)} |")
    lines += ["", "| loader | version | equal | refused | faults | altered: equal | refused | faults |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for loader in loaders:
        numbers = [str(n) for rows in (cells, stored["altered"]) for n in counts(rows.values(), loader)]
        lines.append(f"| {loader} | {versions[loader]} | {' | '.join(numbers)} |")
    lines += ["", "| | in which words |", "|---|---|", *(f"| {number} | {why} |" for why, number in notes.items())]
    return f"""# Which loader takes which scheme

Made by `python benchmarks/serve/loaders.py`, on the CPU. Each row is a small random Llama that was converted (of
sentence-transformers, a BERT), its scheme moved from its start, and saved; each column a program that loads the folder
in a process of its own. *Equal*: the same logits, bit for bit in transformers, PEFT and TRL, up to rounding elsewhere,
or in servers the same greedy tokens after three prompts. *Refused*: an error, in the words below.
Nothing else may occur; what is empty was not run yet. *No plugin* is a process in which hf_posenc cannot be imported;
*export* a stock class with what `hf-posenc export` wrote, which llama.cpp reads, too. *Altered* folders have another
number in config.json, or a tensor of another name (one of the scheme, if it has any).

{chr(10).join(lines)}
"""
