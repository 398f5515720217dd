"""Every registered scheme has a page that is complete and current, and a picture that can be drawn."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from portraits import portrait

import hf_posenc

DOCS = Path(__file__).parent.parent / "docs"
PAGES = DOCS / "schemes"
SECTIONS = ["Start", "Cost", "Cache", "When to choose it", "Paper", "Deviations"]

every_scheme = pytest.mark.parametrize("name", list(hf_posenc.schemes()))
every_page = pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)


def _script() -> Any:
    """Return `docs/build_pages.py` as a module."""
    spec = importlib.util.spec_from_file_location("build_pages", DOCS / "build_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _text(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


@every_scheme
def test_a_page_has_all_parts(name: str) -> None:
    text = _text(name)
    assert re.findall(r"^## (.*)$", text, flags=re.M) == SECTIONS
    for section in text.split("\n## ")[1:]:
        assert section.partition("\n")[2].strip(), "an empty section"
    assert re.search(r"^```math\n.+?\n```$", text, flags=re.M | re.S)


@every_scheme
def test_a_page_opens_with_two_sentences(name: str) -> None:
    title, paragraph = _text(name).split("\n\n")[:2]
    assert re.fullmatch(r"# .+", title)
    assert len(re.findall(r"[.!?](?=\s|$)", paragraph)) == 2, paragraph


@every_scheme
def test_facts_are_those_of_the_code(name: str) -> None:
    assert _text(name) == _script().current(PAGES / f"{name}.md"), "run python docs/build_pages.py"


def test_the_index_is_that_of_the_code() -> None:
    script = _script()
    assert script.INDEX.read_text(encoding="utf-8") == script.current(script.INDEX), "run python docs/build_pages.py"
    linked = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\)", script.INDEX.read_text(encoding="utf-8"), flags=re.M)
    assert linked == [(name, name) for name in hf_posenc.schemes()]


@every_scheme
def test_a_picture_is_small_and_of_one_size(name: str) -> None:
    path = PAGES / f"{name}.png"
    assert f"]({path.name})" in _text(name)
    assert path.stat().st_size < 60_000
    with Image.open(path) as image:
        assert image.size == (1000, 420)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # `[text]` may run over a line; code blocks hold no links.
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        assert (page.parent / file).is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (page.parent / file).read_text(encoding="utf-8"), flags=re.M)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_pages_name_no_path_of_a_machine(page: Path) -> None:
    assert re.findall(r"(?<![\w./:])(?:/(?:work|home|root|tmp|Users)|\.\./shared)\b", page.read_text("utf-8")) == []


@every_scheme
def test_a_portrait_has_labelled_axes(name: str) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    figure = portrait(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(figure, Figure)
    assert figure.get_suptitle().startswith(f"{name}: ")
    # The axes of a colour bar have a label on one side only.
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert panels
    assert panels[0].get_ylabel()
    for axes in panels:
        assert axes.get_xlabel()
        assert axes.lines or axes.images
        for line in axes.lines:
            assert not numpy.isnan(line.get_ydata()).any()
    bars = [axes for axes in figure.axes if axes not in panels]
    assert all(axes.get_ylabel() for axes in bars)


@every_scheme
def test_a_portrait_is_the_same_each_time(name: str) -> None:
    first, second = (portrait(name) for _ in range(2))
    for one, other in zip(first.axes, second.axes, strict=True):
        for a, b in zip(one.lines, other.lines, strict=True):
            numpy.testing.assert_array_equal(a.get_ydata(), b.get_ydata())
        for a, b in zip(one.images, other.images, strict=True):
            numpy.testing.assert_array_equal(a.get_array(), b.get_array())


def test_a_portrait_takes_options() -> None:
    (curve,) = {len(axes.lines) for axes in portrait("kerple", kernel="power").axes}
    assert curve == 9  # eight heads and the line at zero
    with pytest.raises(hf_posenc.UnknownSchemeError):
        portrait("kerpel")
    with pytest.raises(hf_posenc.OptionError):
        portrait("kerple", kernel="cubic")


def test_the_command_finds_and_repairs_a_stale_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = _script()
    page, index = tmp_path / "nope.md", tmp_path / "README.md"
    monkeypatch.setattr(script, "PAGES", tmp_path)
    monkeypatch.setattr(script, "INDEX", index)
    known = hf_posenc.schemes()
    monkeypatch.setattr(hf_posenc, "schemes", lambda: {"nope": known["nope"]})
    shutil.copy(PAGES / "README.md", index)
    stale = _text("nope").replace("| Family | absolute |", "| Family | rotary |")
    page.write_text(stale, encoding="utf-8")

    monkeypatch.setattr(sys, "argv", ["build_pages.py", "--check"])
    with pytest.raises(SystemExit, match="2 of the pages are out of date"):
        script.main()
    assert page.read_text(encoding="utf-8") == stale
    assert not (tmp_path / "nope.png").exists()

    monkeypatch.setattr(sys, "argv", ["build_pages.py"])
    script.main()
    assert page.read_text(encoding="utf-8") == _text("nope")
    assert (tmp_path / "nope.png").exists()

    monkeypatch.setattr(sys, "argv", ["build_pages.py", "--check"])
    script.main()
    assert capsys.readouterr().out.endswith("nope.md: up to date\nREADME.md: up to date\n")

    page.write_text("# NoPE\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="needs the markers"):
        script.main()
    page.unlink()
    with pytest.raises(SystemExit, match="is missing"):
        script.main()
