"""Schemes of other projects: found by entry point, command line and recipe, and named by checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from unittest import mock

import pytest
import torch
from tiny import converted, ids, stock
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import CheckpointError, OptionError, plugins, registry
from hf_posenc.cli import app
from hf_posenc.patches.record import digest
from hf_posenc.recipes import Recipe
from hf_posenc.recipes.goals import read_recipe

CODE = """
import hf_posenc
from hf_posenc.schemes.families.additive import DistanceBias

@hf_posenc.register_scheme("theirs", paper="none", family="additive")
class Theirs(DistanceBias):
    'A step.'
    def values(self, distance, dtype):
        return -(distance.abs() > 3).to(dtype)[None].expand(self.geometry.heads, -1)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the current folder that registers a scheme; nothing of it stays."""
    (tmp_path / "their_schemes.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    hf_posenc.schemes()
    with mock.patch.dict(registry._SCHEMES), mock.patch.dict(sys.modules), mock.patch.object(sys, "path", sys.path[:]):
        yield "their_schemes"


def test_the_command_line_and_recipes_import_a_module(module: str) -> None:
    result = CliRunner().invoke(app, ["--import", module, "info", "theirs"])
    assert result.output.startswith("theirs: A step."), result.output
    del registry._SCHEMES["theirs"], sys.modules[module]
    Path("mine.yaml").write_text(f"plugins: [{module}]\nmodel: tiny-llama\nconversion: {{scheme: theirs}}\n")
    sys.path.remove(str(Path.cwd()))
    # A recipe may come from somebody else, with files next to it.
    for name in (module, "absent", ".relative"):
        with pytest.raises(OptionError, match=f"Cannot import the module '{name}'"):
            read_recipe("mine.yaml", [f"plugins=[{name}]"])
    sys.path.append(str(Path.cwd()))
    assert isinstance(read_recipe("mine.yaml"), Recipe)
    assert "theirs" in hf_posenc.schemes()


def test_an_installed_package_brings_schemes_and_a_broken_one_is_left_out(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.path.append(".")
    found = [EntryPoint("good", module, plugins.GROUP), EntryPoint("bad", "absent", plugins.GROUP)]
    monkeypatch.setattr(plugins, "_WAITING", None)
    monkeypatch.setattr(plugins, "entry_points", lambda group: found)
    with pytest.warns(UserWarning, match=r"The plugin 'bad' \(absent\) cannot be imported"):
        assert "theirs" in hf_posenc.schemes()


def test_a_checkpoint_names_the_module_that_it_needs(module: str, tmp_path: Path) -> None:
    plugins.load([module], here=True)
    model = converted("llama", "theirs")
    assert model.config.posenc["modules"] == [module]
    assert digest(model.config.posenc) == digest({**model.config.posenc, "modules": ["renamed"]})
    model.save_pretrained(tmp_path / "saved")
    theirs = registry._SCHEMES.pop("theirs")
    with pytest.raises(CheckpointError, match=r"cannot build the scheme 'theirs'.*import their_schemes before loading"):
        type(model).from_pretrained(tmp_path / "saved")
    registry._SCHEMES["theirs"] = theirs
    loaded = type(model).from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)
    assert "modules" not in hf_posenc.patch(stock("llama"), "fire").config.posenc
