"""The code in the documents and notebooks runs, as written."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
import typer
from models import CACHE, DIRECTORIES, stock

import hf_posenc
from hf_posenc import registry
from hf_posenc.cli import app
from hf_posenc.patches import surgery
from hf_posenc.recipes.data.text import builtin_text

ROOT = Path(__file__).parent.parent
# How families of schemes are called in the tables of docs/concepts.md.
FAMILIES = {"the rotary schemes": "rotary", "all biases": "additive"}
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]
# Said behind the language of a block, as in "python { .slow }", that is not run: it takes minutes, the hub, or an
# extra.
NOT_RUN = {"slow", "network", "extra"}
# Pages whose code registers something are run by tests of their own; code for contributors is theirs too.
BY_THEMSELVES = {"docs/own_scheme.md", "docs/own_architecture.md", "CONTRIBUTING.md"}


def _quickstart_holds(page: ModuleType) -> bool:
    """Whether perplexities at a short and a long context are as the comments of the quickstart say."""
    (short, long), (swapped, _), (fitted, fitted_long) = page.native, page.swapped, page.fitted
    return long > 2 * short and short < fitted < 0.6 * swapped and fitted_long < 1.1 * fitted


# What must hold after the code of a document, in addition to its own assertions.
HOLDS: dict[str, Callable[[ModuleType], bool]] = {
    "README.md": lambda page: surgery.is_patched(page.model) and page.output.shape == (2, 8, 32, 16),
    "docs/own_trainer.md": lambda page: surgery.is_patched(page.merged),
    "docs/quickstart.md": _quickstart_holds,
}
# Replaced in the code of documents: small models and texts, few steps, no accelerator.
SMALLER = {
    '"HuggingFaceTB/SmolLM2-135M"': repr(str(DIRECTORIES["llama"])),
    'report_to="none"': 'report_to="none", use_cpu=True, dataloader_pin_memory=False',
    "max_steps=4": "max_steps=2",
    '"training.steps=4"': '"training.steps=2", "data.source=text.txt", "evaluation.windows=4"',
}


def _blocks(name: str, language: str) -> list[tuple[str, str]]:
    """Return what stands behind the language, and the code, of every block of a document."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}(?: +{{ \.(\w+) }})?\n(.*?)^ *```$", text, flags=re.M | re.S)
    return [(mark, re.sub(rf"^{indent}", "", body, flags=re.M)) for indent, mark, body in found]


WITH_CODE = [name for name in DOCUMENTS if _blocks(name, "python")]
every_document_with_code = pytest.mark.parametrize("name", WITH_CODE)


def _run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Run the blocks of a document, in order, as a module in an empty folder, with local checkpoints."""
    code = "\n".join(body for mark, body in _blocks(name, "python") if not mark)
    for whole, small in SMALLER.items():
        code = code.replace(whole, small)
    module = f"code_of_{Path(name).stem}"
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    # Set first, so that it is gone afterwards.
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    del sys.modules[module]
    return importlib.import_module(module)


@every_document_with_code
def test_code_compiles_and_its_marks_are_known(name: str) -> None:
    # A mark in another form would hide its block.
    assert len(re.findall(r"^ *```python", (ROOT / name).read_text("utf-8"), re.M)) == len(_blocks(name, "python"))
    for mark, body in _blocks(name, "python"):
        compile(body, name, "exec")
        assert not mark or mark in NOT_RUN, mark


# They train.
LONG = ("docs/adaptation.md", "docs/own_trainer.md")
RUN = [pytest.param(n, marks=[pytest.mark.grid] * (n in LONG)) for n in WITH_CODE if n not in BY_THEMSELVES]


@pytest.mark.parametrize("name", RUN)
def test_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in LONG:
        (tmp_path / "text.txt").write_text(builtin_text("heldout")[:20000], encoding="utf-8")
    if name == "docs/loading.md":
        hf_posenc.patch(stock("llama"), "fire").save_pretrained(tmp_path / "converted")
    page = _run(name, tmp_path, monkeypatch)
    assert name not in HOLDS or HOLDS[name](page)


def test_readme_names_every_scheme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in hf_posenc.schemes() if f"`{name}`" not in text] == []


COMMANDS = [
    line
    for name in DOCUMENTS
    for language in ("bash", "console")
    for _, body in _blocks(name, language)
    for line in body.splitlines()
    if line.startswith("hf-posenc ")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_with_their_options(line: str) -> None:
    _, *words = shlex.split(line, comments=True)
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
    assert not getattr(command, "commands", {}) or not words or words[0].startswith("-"), f"no command {words[0]}"
    options = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= options


@pytest.mark.usefixtures("own_registry")
def test_own_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page runs, with assertions of its own, and its scheme works on the other architectures too."""
    _run("docs/own_scheme.md", tmp_path, monkeypatch)
    assert [option.name for option in hf_posenc.describe("window").options] == ["size", "init"]
    for name in DIRECTORIES:
        model = stock(name)
        assert hf_posenc.plan(model, "window", native="keep").start == "exact with native kept"
        hf_posenc.verify(hf_posenc.patch(model, "window", size=4))


@pytest.mark.usefixtures("own_registry")
def test_own_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page runs, with assertions of its own, and its architecture takes every scheme."""
    page = _run("docs/own_architecture.md", tmp_path, monkeypatch)
    model, ids = page.model, page.ids
    with torch.no_grad():
        before = model(ids).logits
        for scheme in hf_posenc.schemes():
            hf_posenc.verify(hf_posenc.patch(model, scheme))
        hf_posenc.patch(model, "kerple", native="keep")
        hf_posenc.set_strength(model, scheme=0.5, native=0.5)
        first = model(ids[:, :9], use_cache=True)
        rest = model(ids[:, 9:], **{CACHE: first[CACHE]}).logits
        full = model(ids, use_cache=False).logits
        torch.testing.assert_close(torch.cat([first.logits, rest], 1), full, atol=1e-5, rtol=1e-5)
        model.save_pretrained(tmp_path / "saved")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.equal(loaded(ids, use_cache=False).logits, full)
        assert torch.equal(hf_posenc.unpatch(model)(ids).logits, before)


def _named(text: str) -> set[str]:
    """Return the schemes that a sentence names, alone or as a family, less those behind a `but`."""
    others = " ".join(re.findall(r"but (`\w+`(?: and `\w+`)*)", text))
    found = set(re.findall(r"`(\w+)`", text))
    found |= {
        name
        for name, info in hf_posenc.schemes().items()
        for said, kind in FAMILIES.items()
        if said in text and info.family == kind
    }
    return found - set(re.findall(r"`(\w+)`", others))


def test_concepts_name_the_schemes_that_override_each_seam() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| ([^|]+) \|$", (ROOT / "docs/concepts.md").read_text(encoding="utf-8"), flags=re.M
    )
    told = {seam: _named(names) for seam, names in rows}
    assert told == {
        seam: {
            name
            for name in hf_posenc.schemes()
            if getattr(registry.get(name).cls, seam) is not getattr(hf_posenc.Scheme, seam)
        }
        for seam in told
    }
    assert len(told) == 9


def test_concepts_name_the_schemes_that_start_exact() -> None:
    text = " ".join((ROOT / "docs" / "concepts.md").read_text(encoding="utf-8").split())
    said = re.search(r"(the rotary schemes but[^|]*?) on Llama, ([^|]*?) on GPT-2, ([^|]*?) on T5", text)
    assert said is not None
    for kind, names in zip(("llama", "gpt2", "t5"), said.groups(), strict=True):
        model = stock(kind)
        stacks = {"stacks": "decoder"} if kind == "t5" else {}
        exact = {name for name in hf_posenc.schemes() if hf_posenc.plan(model, name, **stacks).start == "exact"}
        assert _named(names) == exact


# -- notebooks ---------------------------------------------------------------------------------------------------------

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_ran_and_small(path: Path) -> None:
    assert path.stat().st_size < 200_000
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run it from the top"
    for cell in cells:
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr", output["text"]
    pictures = [output for cell in cells for output in cell["outputs"] if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2


# The longer one on demand: it trains several models.
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=p.stem, marks=pytest.mark.slow if "compare" in p.stem else pytest.mark.grid)
        for p in NOTEBOOKS
    ],
)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell, in a kernel of its own, with a few steps of training instead of some hundred."""
    nbclient = pytest.importorskip("nbclient", reason="the extra docs is not installed")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("NOTEBOOK_STEPS", "2")
    notebook: Any = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
