"""A report as Markdown, and as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape


@dataclass(frozen=True)
class Heading:
    """A heading of the second level."""

    kind: ClassVar[str] = "heading"
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; a leading one is highlighted."""

    kind: ClassVar[str] = "text"
    text: str
    leading: bool = False


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

    kind: ClassVar[str] = "points"
    items: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: Text of the cell.
        grade: `"good"`, `"fair"` or `"poor"`, a colour in HTML and a word in Markdown; `""` for no grade.
    """

    text: str
    grade: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.grade})" if self.grade else self.text


@dataclass(frozen=True)
class Table:
    """A table with the names of its rows in the first column; marked rows are highlighted."""

    kind: ClassVar[str] = "table"
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    marked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A PNG file; a folded one is shown on a click."""

    kind: ClassVar[str] = "picture"
    title: str
    path: Path
    folded: bool = False

    def data(self) -> str:
        """Return the content of the file in base64."""
        return base64.b64encode(self.path.read_bytes()).decode("ascii")


Block: TypeAlias = Heading | Text | Points | Table | Picture

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(["html.jinja"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def markdown(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """Return a report as Markdown for a folder; pictures are linked relative to it."""
    return _TEMPLATES.get_template("page.md.jinja").render(title=title, blocks=blocks, folder=folder)


def html(title: str, blocks: Sequence[Block]) -> str:
    """Return a report as one HTML page with embedded pictures."""
    return _TEMPLATES.get_template("page.html.jinja").render(title=title, blocks=blocks)
