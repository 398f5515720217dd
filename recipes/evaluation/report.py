"""The report of an evaluation: several models side by side, as JSON, Markdown and pictures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc.patches.directories import published, write_text
from hf_posenc.recipes.evaluation import pictures
from hf_posenc.recipes.evaluation.grid import PERPLEXITY, Grid, Point

DATA, TEXT = "report.json", "report.md"

_FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Section:
    """The results of one measure for all models.

    Attributes:
        name: Name of the measure, also in file names.
        title: Title of table and picture.
        note: Definition of the measured quantity.
        found: Grids by the name of the model, the same quantities for each.
        mark: Labelled point on the last axis.
    """

    name: str
    title: str
    note: str
    found: Mapping[str, tuple[Grid, ...]]
    mark: tuple[float, str] | None = None

    @property
    def picture(self) -> str:
        """File name of the picture."""
        return f"{self.name}.png"

    def quantities(self) -> list[dict[str, Grid]]:
        """Return the grids of each quantity by the name of the model."""
        count = len(next(iter(self.found.values())))
        return [{name: grids[index] for name, grids in self.found.items()} for index in range(count)]

    def as_json(self) -> dict[str, Any]:
        """Return the section as JSON values."""
        quantities = [
            {
                "quantity": first.quantity.name,
                "unit": first.quantity.unit,
                "guess": None if first.quantity.guess is None else first.quantity.guess * first.quantity.scale,
                "axes": {axis: list(points) for axis, points in first.axes.items()},
                "models": {name: grid.as_json() for name, grid in grids.items()},
            }
            for grids in self.quantities()
            for first in [next(iter(grids.values()))]
        ]
        return {"measure": self.name, "title": self.title, "note": self.note, "quantities": quantities}

    def markdown(self) -> Iterator[str]:
        """Return the lines of this section, without its picture."""
        yield from (f"## {self.title}", "", self.note, "")
        for grids in self.quantities():
            yield from _table(grids)
        if len(self.found) > 1:
            yield from self._compared()

    def _compared(self) -> Iterator[str]:
        """Return tables of perplexities relative to the first model, paired by sample."""
        for grids in self.quantities():
            first, *others = grids
            if grids[first].quantity is PERPLEXITY:
                yield f"Relative to {first}, paired by sample:"
                yield ""
                yield from _table({name: grids[name].relative_to(grids[first]) for name in others})


@dataclass(frozen=True, eq=False)
class Report:
    """The results of an evaluation.

    Attributes:
        sections: One section per measure.
        settings: Further facts: text, versions, command.
    """

    sections: tuple[Section, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, measure: str) -> Section:
        """Return the section of a measure, by its name."""
        return next(section for section in self.sections if section.name == measure)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values: estimates with 95 % confidence intervals, and samples."""
        sections = [section.as_json() for section in self.sections]
        return {"format_version": _FORMAT_VERSION, "settings": dict(self.settings), "sections": sections}

    def markdown(self) -> str:
        """Return the report as Markdown; its pictures are those that `write` saves next to it."""
        lines = ["# Evaluation", "", "Estimates with 95 % confidence intervals in brackets.", ""]
        for section in self.sections:
            lines += [*section.markdown(), f"![{section.title}]({section.picture})", ""]
        if self.settings:
            lines += ["## How it was made", "", *(f"- {name}: {value}" for name, value in self.settings.items()), ""]
        return "\n".join(lines)

    def write(self, folder: str | Path) -> None:
        """Write report.json, report.md and one picture per measure into a folder, each file whole or not at all."""
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        for section in self.sections:
            with published(folder / section.picture) as draft:
                pictures.draw(draft, section.title, section.quantities(), section.mark)
        write_text(folder / DATA, json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n")
        write_text(folder / TEXT, self.markdown())


def is_report(folder: Path) -> bool:
    """Whether a folder holds a report and no other files."""
    try:
        sections = json.loads((folder / DATA).read_text(encoding="utf-8"))["sections"]
        own = {DATA, TEXT, *(f"{section['measure']}.png" for section in sections)}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return own >= {path.name for path in folder.iterdir()}


def _table(grids: Mapping[str, Grid]) -> Iterator[str]:
    """Return a table with a row per model; with two axes, a row per point of the first axis and model."""
    first = next(iter(grids.values()))
    quantity, *outer, (axis, points) = first.quantity, *first.axes.items()
    guess = "" if quantity.guess is None else f"; guessing gives {quantity.guess * quantity.scale:.3g}"
    yield from (f"{quantity.label[0].upper()}{quantity.label[1:]} by {axis}{guess}:", "")
    yield _row(*(name for name, _ in outer), axis, *map(_heading, points))
    yield _row(*("---" for _ in outer), "---", *("---:" for _ in points))
    for place in itertools.product(*(places for _, places in outer)):
        for model, grid in grids.items():
            cells = (quantity.write(grid.at(*place, point)) for point in points)
            yield _row(*map(_heading, place), model, *cells)
    yield ""


def _heading(point: Point) -> str:
    return f"{point:,}" if isinstance(point, int) else str(point)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
