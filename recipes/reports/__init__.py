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
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console

from hf_posenc import __version__

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def say(console: Console | None, text: str, style: str | None = None) -> None:
    """Print a text as it is, without a look for markup; nothing without a console."""
    if console is not None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Table:
    """A table with the names of its rows in the first column."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def markdown(self) -> str:
        cells = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            for row in cells
        ]
        lines.insert(1, ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])])
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{self.caption}\n\n{text}" if self.caption else text


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
        "markdown": Table.markdown,
        "embedded": lambda path: base64.b64encode(path.read_bytes()).decode("ascii"),
        # Lines of a template are one paragraph.
        "flow": lambda text: type(text)(" ").join(text.split()),
        "thousands": lambda number: f"{number:,}",
    }
    return environment


def versions() -> dict[str, str]:
    """Return the versions of this package, of Python and of the packages that results depend on."""
    own = {"hf-posenc": __version__, "python": platform.python_version()}
    return own | {name: metadata.version(name) for name in _PACKAGES}
