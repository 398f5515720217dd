"""Results of measures for several models: JSON, Markdown and pictures.

Runs (`measurements.json`), evaluations (`report.json`) and comparisons (`results.json`) share the JSON format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from matplotlib.figure import Figure
from pydantic import WrapSerializer

from hf_posenc.errors import PosencError
from hf_posenc.patches.atomic_files import write_text
from hf_posenc.recipes.evaluation.grid import MASKED_PERPLEXITY, PERPLEXITY, Grid, table
from hf_posenc.recipes.evaluation.verdict import Verdict, judge
from hf_posenc.recipes.reports import Table, render
from hf_posenc.recipes.reports.curves import Mark, Panel, lines_figure, save_figure
from hf_posenc.recipes.storage import load, save

DATA, TEXT = "report.json", "report.md"


# In files, a grid has its estimates, for readers of other programs.
_Written = Annotated[Grid, WrapSerializer(lambda grid, plain: {**plain(grid), "estimates": grid.estimates()})]


@dataclass(frozen=True, eq=False)
class Section:
    """The results of one measure: grids by the name of the model, the same quantities for each.

    The note defines what is measured; the mark is a labelled point on the last axis.
    """

    name: str
    title: str
    note: str
    models: Mapping[str, tuple[_Written, ...]]
    mark: Mark | None = None

    @property
    def picture(self) -> str:
        return f"{self.name}.png"

    def quantities(self) -> list[dict[str, Grid]]:
        """Return the grids of each quantity by the name of the model, up to the last point that any was measured at."""
        every = list(self.models.values())
        count = max(grid.measured() for grids in every for grid in grids)
        return [
            {name: grids[index].first(count) for name, grids in self.models.items()} for index in range(len(every[0]))
        ]

    def tables(self) -> Iterator[Table]:
        """Return a table per quantity; perplexities are also compared with the first model, paired by sample."""
        for grids in self.quantities():
            yield table(grids)
        for grids in self.quantities():
            first, *others = grids
            if others and grids[first].quantity in (PERPLEXITY, MASKED_PERPLEXITY):
                relative = {name: grids[name].relative_to(grids[first]) for name in others}
                yield table(relative, f"In % of the perplexity of {first}, paired by sample:")

    def markdown(self) -> str:
        """Return the section as Markdown, without its picture."""
        return render("section", section=self)

    def figure(self) -> Figure:
        return lines_figure(self.title, [panel(grids, self.mark) for grids in self.quantities()])


def panel(grids: dict[str, Grid], mark: Mark | None) -> Panel:
    first = next(iter(grids.values()))
    quantity, scale = first.quantity, first.quantity.scale
    return Panel(
        lines={name: [(point, grid.at(point).times(scale)) for point in grid.points] for name, grid in grids.items()},
        x=first.axis,
        y=quantity.label,
        is_log=quantity.estimator == "exponential",
        top=100.0 if quantity.unit == "%" and quantity.estimator != "exponential" else None,
        level=None if quantity.guess is None else (quantity.guess * scale, "guessing"),
        mark=mark,
    )


@dataclass(frozen=True, eq=False)
class Report:
    """Results of measures, a section for each, with further facts: text, versions, command."""

    sections: tuple[Section, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    format_version: Literal[2] = 2

    def __getitem__(self, measure: str) -> Section:
        return next(section for section in self.sections if section.name == measure)

    def results(self, model: str) -> dict[str, Grid]:
        """Return the first grid of each measure of a model, by the name of the measure."""
        return {section.name: section.models[model][0] for section in self.sections if model in section.models}

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each model but the first, next to the first; none without perplexity."""
        first, *others = self.sections[0].models
        length = next((section.mark[0] for section in self.sections if section.mark is not None), None)
        if length is None:
            return []
        judged = (
            judge(self.results(name), self.results(first), int(length), name=name, other=first) for name in others
        )
        return [verdict for verdict in judged if verdict is not None]

    def markdown(self) -> str:
        """Return the report as Markdown; its pictures are those that `write` saves next to it."""
        settings = [f"{name}: {value}" for name, value in self.settings.items()]
        return render("evaluation", report=self, settings=settings, verdicts=list(map(str, self.verdicts())))

    def write(self, folder: str | Path) -> None:
        """Write report.json, report.md and one picture per measure into a folder, each file whole or not at all."""
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        for section in self.sections:
            save_figure(section.figure(), folder / section.picture)
        save(self, folder / DATA)
        write_text(folder / TEXT, self.markdown())


def is_report(folder: Path) -> bool:
    """Whether a folder holds the report of an evaluation and no other files."""
    try:
        pictures = {section.picture for section in load(Report, folder / DATA, "").sections}
    except PosencError:
        return False
    return {DATA, TEXT, *pictures} >= {path.name for path in folder.iterdir()}
