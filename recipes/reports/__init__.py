"""Reports: one set of Jinja2 templates for Markdown, HTML and the model card.

Each report is one template, written with macros for headings, texts, tables and pictures. `markdown.jinja` and
`html.jinja` define these macros, so a report can be rendered in both formats.
"""

from __future__ import annotations

import base64
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hf_posenc import __version__

# Largest number of characters in a line of a Markdown table, unless two columns have more.
_WIDTH = 100
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class Cell(NamedTuple):
    """A graded cell of a table: `"good"`, `"fair"` or `"poor"` is a colour in HTML and a word in Markdown."""

    text: str
    grade: str = ""


@dataclass(frozen=True)
class Table:
    """A table with the names of its rows in the first column."""

    header: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    marked: Sequence[str] = ()  # names of highlighted rows
    caption: str = ""


def render(template: str, kind: Literal["markdown", "html"] = "markdown", **values: Any) -> str:
    """Return a report as text, from the variables of its template; HTML needs the `folder` of the pictures."""
    text = _environment(kind == "html").get_template(f"{template}.jinja").render(kind=kind, **values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def _environment(html: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "markdown": _markdown,
        "embedded": lambda path: base64.b64encode(path.read_bytes()).decode("ascii"),
        # Lines of a template are one paragraph.
        "flow": lambda text: type(text)(" ").join(text.split()),
        "thousands": lambda number: f"{number:,}",
    }
    return environment


def _markdown(table: Table) -> str:
    """Return a table as Markdown, in several parts if its lines would be too long for a terminal."""
    cells = [[_cell(cell) for cell in row] for row in (table.header, *table.rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    parts: list[list[int]] = []
    for column in range(1, len(widths)):
        if not parts or sum(widths[i] + 3 for i in (0, *parts[-1], column)) + 1 > _WIDTH:
            parts.append([])
        parts[-1].append(column)
    text = []
    for part in parts or [[]]:
        lines = [[row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in part)] for row in cells]
        lines.insert(1, ["-" * widths[0], *("-" * (widths[i] - 1) + ":" for i in part)])
        text.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join([table.caption, *text] if table.caption else text)


def _cell(cell: str | Cell) -> str:
    text = cell if isinstance(cell, str) else f"{cell.text} ({cell.grade})" if cell.grade else cell.text
    return text.replace("|", "\\|")


def versions() -> dict[str, str]:
    """Return the versions of this package, of Python and of the packages that results depend on."""
    own = {"hf-posenc": __version__, "python": platform.python_version()}
    return own | {name: metadata.version(name) for name in _PACKAGES}
