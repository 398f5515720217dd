"""The report of a comparison: the recommendation first, then the figures behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_posenc.patches.directories import published, write_text
from hf_posenc.recipes.comparison.contestants import NATIVE, ORIGINAL
from hf_posenc.recipes.comparison.examiner import Findings
from hf_posenc.recipes.comparison.verdict import Verdict
from hf_posenc.recipes.evaluation.report import Section
from hf_posenc.recipes.reports import Cell, Table, render

HTML, MARKDOWN, PICTURES = "report.html", "report.md", "pictures"
# Upper limits of good and fair cells, as multiples of the native model or of the value at the trained length.
_GOOD, _FAIR = 1.05, 1.5
# Multiples of the trained length on the report card.
_TIMES = (4, 8)


def write(
    folder: Path,
    found: Mapping[str, Findings],
    verdict: Verdict | None,
    failed: Mapping[str, str],
    *,
    trained: int,
    settings: Mapping[str, Any],
) -> None:
    """Write report.html, report.md and pictures/, each file whole or not at all.

    Findings are by name: the equally trained native model under `NATIVE`, the original one under `ORIGINAL`, and the
    schemes; error messages are by scheme. There is no verdict if no scheme is left.
    """
    (folder / PICTURES).mkdir(exist_ok=True)
    # The reference comes first, in black; the original model comes last.
    rank = {NATIVE: 0, ORIGINAL: 2}
    ordered = {name: found[name] for name in sorted(found, key=lambda name: rank.get(name, 1))}
    sections = list(_sections(ordered))
    for section in sections:
        with published(folder / PICTURES / section.picture) as draft:
            section.figure().savefig(draft, format="png")
    marked = () if verdict is None else verdict.recommended
    values: dict[str, Any] = {
        "title": f"Positional encodings for {settings['model']}",
        "settings": settings,
        "noun": found[NATIVE].perplexity.quantity.noun,
        "schemes": len(found) - len({NATIVE, ORIGINAL} & {*found}),
        "verdict": verdict,
        "failed": failed,
        "costs": _costs(found, trained, marked, settings["differences"]),
        "limits": (_GOOD, _FAIR),
        "sections": sections,
        "pictures": PICTURES,
        "folder": folder,
    }
    write_text(folder / MARKDOWN, render("comparison", **values))
    write_text(folder / HTML, render("comparison", "html", **values))


def _graded(multiple: float, span: str = "") -> Cell:
    if math.isnan(multiple):
        return Cell("-")
    grade = "good" if multiple <= _GOOD else "fair" if multiple <= _FAIR else "poor"
    return Cell(f"{multiple:.2f}{span}" if multiple < 100 else "over 100", grade)


def _costs(
    found: Mapping[str, Findings], trained: int, marked: tuple[str, ...], differences: Mapping[str, str]
) -> Table:
    times = [each for each in _TIMES if each * trained in found[NATIVE].perplexity.points]
    header = ["", "step time", "step memory", *(f"at {each} times the length" for each in times)]
    header += ["new parameters", "more cache (bytes per token)", "at the start (times)", "start", "own settings"]
    rows: list[list[str | Cell]] = []
    for name, each in found.items():
        if name != ORIGINAL:
            cost, time = each.cost, each.cost.time
            span = "" if name == NATIVE else f" [{time.low:.2f}, {time.high:.2f}]"
            growths = (each.growth(factor * trained, trained).mean for factor in times)
            rows.append(
                [
                    name,
                    _graded(time.mean, span),
                    *map(_graded, (cost.memory_ratio, *growths)),
                    f"{cost.parameters:,}",
                    f"{cost.cache_bytes:,}",
                    "-" if each.start_ratio is None else f"{each.start_ratio:.3g}",
                    each.start,
                    differences.get(name, "-"),
                ]
            )
    return Table(header, rows, marked)


def _sections(found: Mapping[str, Findings]) -> Iterator[Section]:
    """Yield the results of each measure, of all models together."""
    for section in found[NATIVE].report.sections:
        models = {name: each.report[section.name].models[name] for name, each in found.items()}
        yield replace(section, models=models)
