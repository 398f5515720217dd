"""Every registered scheme has a page that is complete and current, and a picture that can be drawn."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path

import build_pages as script
import numpy
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from portraits import portrait

import hf_posenc

PAGES = script.PAGES
SECTIONS = ["Start", "Cost", "Cache", "When to choose it", "Paper", "Deviations"]

every_scheme = pytest.mark.parametrize("name", list(hf_posenc.schemes()))


def _text(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


@every_scheme
def test_a_page_is_complete(name: str) -> None:
    text = _text(name)
    assert re.findall(r"^## (.*)$", text, flags=re.M) == SECTIONS
    for section in text.split("\n## ")[1:]:
        assert section.partition("\n")[2].strip(), "an empty section"
    assert re.search(r"^```math\n.+?\n```$", text, flags=re.M | re.S)
    title, paragraph = text.split("\n\n")[:2]
    assert re.fullmatch(r"# .+", title)
    assert len(re.findall(r"[.!?](?=\s|$)", paragraph)) == 2, f"not two sentences: {paragraph}"


@pytest.mark.grid  # a picture takes seconds
@every_scheme
def test_facts_and_portrait_are_those_of_the_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    drawn = portrait(name)
    assert torch.equal(torch.get_rng_state(), before)
    _has_labelled_axes(name, drawn)
    monkeypatch.setattr(script, "portrait", lambda name: drawn)
    picture = script.draw(name)
    assert len(picture) < 60_000
    with Image.open(BytesIO(picture)) as image:
        assert image.size == (1000, 420)
    assert _text(name) == script.current(PAGES / f"{name}.md"), "run python docs/build_pages.py"


def _has_labelled_axes(name: str, figure: Figure) -> None:
    assert figure.get_suptitle().startswith(f"{name}: ")
    # The axes of a colour bar have a label on one side only.
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert panels[0].get_ylabel()
    for axes in panels:
        assert axes.get_xlabel()
        assert axes.lines or axes.images
        assert not any(numpy.isnan(line.get_ydata()).any() for line in axes.lines)
    assert all(axes.get_ylabel() for axes in figure.axes if axes not in panels)


def test_the_index_is_that_of_the_code() -> None:
    assert script.INDEX.read_text(encoding="utf-8") == script.current(script.INDEX), "run python docs/build_pages.py"
    linked = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\)", script.INDEX.read_text(encoding="utf-8"), flags=re.M)
    assert linked == [(name, name) for name in hf_posenc.schemes()]


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?<![\w./:])(?:/(?:work|home|root|tmp|Users)|\.\./shared)\b", text) == []
    # `[text]` may run over a line; code blocks hold no links.
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        assert (page.parent / file).is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (page.parent / file).read_text(encoding="utf-8"), flags=re.M)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
