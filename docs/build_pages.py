"""Write the generated parts of the pages of all registered schemes. The site draws their pictures, see `draw`.

python docs/build_pages.py          # facts and index
python docs/build_pages.py --check  # only report what is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import fields
from functools import cache
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image
from portraits import portrait
from transformers import LlamaConfig

import hf_posenc
from hf_posenc.patches.plan import Plan

PAGES = Path(__file__).parent / "schemes"
INDEX = PAGES / "README.md"
FACTS = ("<!-- facts: generated -->", "<!-- end of facts -->")
TABLE = ("<!-- index: generated -->", "<!-- end of index -->")
# Line plots have few colours; with this many a heat map shows no steps.
_COLOURS = 192


def llama_3_8b() -> LlamaConfig:
    """Return the config of Llama-3-8B, the reference for all numbers."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        dtype="bfloat16",
    )


@cache
def planned(name: str) -> Plan:
    """Return what a scheme would cost in Llama-3-8B."""
    return hf_posenc.plan(llama_3_8b(), name)


def facts(info: hf_posenc.SchemeInfo) -> str:
    """Return the generated part of a scheme's page: a table of facts."""
    plan = planned(info.name)
    rows = [
        ("Name", f"`{info.name}`"),
        ("Family", info.family),
        ("Directions", ", ".join(info.directions)),
        ("Source", _source(info.paper)),
        ("Start", info.start),
        ("Executors", ", ".join(plan.executors)),
        ("Options", ", ".join(f"`{option}`" for option in info.option_defaults()) or "none"),
        ("Parameters added to Llama-3-8B", f"{plan.parameters:,} ({plan.parameter_bytes:,} bytes)"),
    ]
    for field in fields(plan):
        if field.name.startswith("cache_"):
            label = f"{field.name.replace('_', ' ').capitalize()}, Llama-3-8B"
            rows.append((label, _over_layers(getattr(plan, field.name), llama_3_8b().num_hidden_layers)))
    return "\n".join(
        [
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {_cell(value)} |" for name, value in rows),
            "",
        ]
    )


def index() -> str:
    """Return the table of all registered schemes."""
    lines = [
        "",
        "| Scheme | What it does | Family | Start | Parameters | Cache bytes per token |",
        "|---|---|---|---|---:|---:|",
    ]
    for info in hf_posenc.schemes().values():
        plan = planned(info.name)
        row = (f"[{info.name}]({info.name}.md)", _cell(info.summary), info.family, info.start)
        lines.append(f"| {' | '.join(row)} | {plan.parameters:,} | {plan.cache_bytes_per_token:,} |")
    return "\n".join([*lines, ""])


def current(page: Path) -> str:
    """Return the current text of a scheme's page, or of the index.

    Raises:
        SystemExit: The page is missing or lacks the markers.
    """
    if page == INDEX:
        return _filled(page, TABLE, index())
    return _filled(page, FACTS, facts(hf_posenc.schemes()[page.stem]))


def pages() -> list[Path]:
    """Return the pages of all registered schemes, and the index."""
    return [*(PAGES / f"{name}.md" for name in hf_posenc.schemes()), INDEX]


def draw(name: str) -> bytes:
    """Return the picture of a scheme, a PNG."""
    return png(portrait(name))


def png(figure: Figure) -> bytes:
    """Return a picture with few colours, so that the file is small."""
    drawn, small = BytesIO(), BytesIO()
    figure.savefig(drawn, format="png")
    image = Image.open(drawn).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only report pages that are out of date")
    check = parser.parse_args().check
    stale = 0
    for page in pages():
        text = current(page)
        state = "up to date"
        if page.read_text(encoding="utf-8") != text:
            stale += 1
            state = "out of date"
            if not check:
                page.write_text(text, encoding="utf-8")
                state = "written"
        sys.stdout.write(f"{page.name}: {state}\n")
        sys.stdout.flush()
    if check and stale:
        sys.exit(f"{stale} of the pages are out of date. Run: python docs/build_pages.py")


def _filled(page: Path, markers: tuple[str, str], body: str) -> str:
    """Return the text of a page with the part between its markers replaced."""
    if not page.exists():
        sys.exit(f"{page} is missing. Copy a page of another scheme and rewrite it.")
    start, end = markers
    before, found, rest = page.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        sys.exit(f"{page} needs the markers {start} and {end}.")
    return f"{before}{start}\n{body}\n{end}{after}"


def _source(paper: str) -> str:
    return f"[arXiv:{paper}](https://arxiv.org/abs/{paper})" if re.fullmatch(r"\d{4}\.\d{4,5}", paper) else paper


def _over_layers(total: int, layers: int) -> str:
    if total % layers:
        return f"{total:,} in all, {total / layers:,.1f} per layer on average"
    return f"{total:,} in all, {total // layers:,} per layer" if total else "0"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    main()
