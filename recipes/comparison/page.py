"""A report as Markdown, and as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True)
class Heading:
    """A heading of the second level."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph; a leading one is highlighted."""

    text: str
    leading: bool = False


@dataclass(frozen=True)
class Points:
    """A list of sentences."""

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


@dataclass(frozen=True)
class Table:
    """A table with the names of its rows in the first column; marked rows are highlighted."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    marked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A PNG file; a folded one is shown on a click."""

    title: str
    path: Path
    folded: bool = False


Block: TypeAlias = Heading | Text | Points | Table | Picture

_STYLE = """
:root { color-scheme: light; --line: #d9dde3; --soft: #f4f6f8; --ink: #1c2430; --grey: #5b6675; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 68rem; margin: 2rem auto 4rem;
  padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { margin: .4rem 0; max-width: 60rem; } ul { margin: .4rem 0; padding-left: 1.2rem; max-width: 60rem; }
li { margin: .2rem 0; }
.leading { font-size: 1.2rem; font-weight: 600; background: #e8f1fa; border-left: 5px solid #0072b2; padding: .7rem
1rem;
  margin: 1rem 0; max-width: none; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { background: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; }
td.words { text-align: left; white-space: normal; } td:first-child { font-weight: 600; white-space: nowrap; }
tr.marked td { background: #e8f1fa; }
.interval { color: var(--grey); font-size: .82em; }
td.good, tr.marked td.good { background: #d3ecdf; } td.fair, tr.marked td.fair { background: #fbeecb; }
td.poor, tr.marked td.poor { background: #f6d5c6; }
img { max-width: 100%; height: auto; display: block; }
details { margin: .4rem 0; border: 1px solid var(--line); border-radius: 5px; }
summary { cursor: pointer; padding: .4rem .8rem; font-weight: 600; } details img { padding: .5rem; }
"""


def markdown(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """Return a report as Markdown for a folder; pictures are linked relative to it."""
    lines = [f"# {title}", ""]
    for block in blocks:
        lines += [*_markdown(block, folder), ""]
    return "\n".join(lines)


def _markdown(block: Block, folder: Path) -> Iterator[str]:
    if isinstance(block, Heading):
        yield f"## {block.text}"
    elif isinstance(block, Text):
        yield f"**{block.text}**" if block.leading else block.text
    elif isinstance(block, Points):
        yield from (f"- {item}" for item in block.items)
    elif isinstance(block, Table):
        yield _row(block.header)
        yield _row(["---", *("---:" for _ in block.header[1:])])
        for row in block.rows:
            yield _row([cell.text + f" ({cell.grade})" * bool(cell.grade) for cell in row])
    else:
        yield f"![{block.title}]({block.path.relative_to(folder).as_posix()})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def html(title: str, blocks: Sequence[Block]) -> str:
    """Return a report as one HTML page with embedded pictures."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h2>{escape(block.text)}</h2>"
    if isinstance(block, Text):
        return f"<p{' class=leading' if block.leading else ''}>{escape(block.text)}</p>"
    if isinstance(block, Points):
        return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in block.items)}</ul>"
    if isinstance(block, Table):
        head = "".join(f"<th>{escape(name)}</th>" for name in block.header)
        rows = "\n".join(
            f"<tr{' class=marked' * (row[0].text in block.marked)}>{''.join(map(_cell, row))}</tr>"
            for row in block.rows
        )
        return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'
    data = base64.b64encode(block.path.read_bytes()).decode("ascii")
    image = f'<img alt="{escape(block.title)}" src="data:image/png;base64,{data}">'
    return f"<details><summary>{escape(block.title)}</summary>{image}</details>" if block.folded else image


def _cell(cell: Cell) -> str:
    mean, bracket, rest = cell.text.partition(" [")
    text = escape(mean) + (f' <span class="interval">[{escape(rest)}</span>' if bracket else "")
    kind = cell.grade or ("words" if cell.text[:1].isalpha() else "")
    # The title says in words what the colour shows.
    title = f' title="{cell.grade}"' if cell.grade else ""
    return f"<td{f' class={kind}' * bool(kind)}{title}>{text}</td>"
