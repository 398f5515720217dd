"""The library alone, without the packages of the extra `recipes`; recipes and the command line name the extra."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_public import ROOT, _imports, _sources

import hf_posenc
from hf_posenc.__main__ import main
from hf_posenc.errors import RECIPES

LIBRARY = {"torch", "transformers", "accelerate", "peft", "safetensors"}
# What torch, transformers and huggingface_hub bring.
BROUGHT = {"triton", "huggingface_hub", "jinja2", "yaml", "filelock"}

# As if these were not installed. Some are only needed by others of them.
ABSENT = ["datasets", "matplotlib", "pandas", "pyarrow", "pydantic", "pydantic_core", "rich", "trl", "typer"]
PRELUDE = f"""
import sys
for name in {ABSENT}:
    sys.modules[name] = None
"""

USE = """
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
import hf_posenc

config = LlamaConfig(
    vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)
ids, folder = torch.arange(20)[None], Path(sys.argv[1])

def logits(model):
    with torch.no_grad():
        return model(input_ids=ids).logits

geometry = hf_posenc.Geometry(heads=4, kv_heads=2, head_dim=8, hidden_size=32, max_positions=64)
places = torch.arange(20)[None]
q, (k, v), hidden = torch.randn(1, 4, 20, 8), torch.randn(2, 1, 2, 20, 8), torch.randn(1, 20, 32)
for name in sys.argv[2:]:
    hf_posenc.describe(name)
    scheme = hf_posenc.build(name, geometry)
    hf_posenc.attend(scheme, q, k, v, query_positions=places, key_positions=places, hidden=hidden)
    model = LlamaForCausalLM(config).eval()
    str(hf_posenc.plan(model, name))
    hf_posenc.patch(model, name)
    assert hf_posenc.verify(model)
    str(hf_posenc.explain(model))
    model.save_pretrained(folder / name)
    loaded = AutoModelForCausalLM.from_pretrained(folder / name)
    assert logits(loaded).equal(logits(model)), name
    hf_posenc.unpatch(loaded)

hf_posenc.export_stock(hf_posenc.patch(LlamaForCausalLM(config), "nope"), folder / "stock")

from peft import LoraConfig, PeftModel, get_peft_model
base = LlamaForCausalLM(config).eval()
base.save_pretrained(folder / "base")
adapted = get_peft_model(hf_posenc.patch(base, "fire"), hf_posenc.PosencLoraConfig(target_modules=["q_proj"]))
adapted.save_pretrained(folder / "adapter")
again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter")
assert logits(again.eval()).equal(logits(adapted.eval()))
"""


def process(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRELUDE + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_library_imports_what_its_own_dependencies_bring() -> None:
    known = LIBRARY | BROUGHT | sys.stdlib_module_names | {"hf_posenc"}
    for module, path in _sources().items():
        if not module.startswith(("hf_posenc.recipes", "hf_posenc.cli")):
            found = {name.partition(".")[0] for name in _imports(path, inside_functions=True)}
            if module.startswith("hf_posenc.patches.serving"):
                found.discard("vllm")  # which calls it
            assert found <= known, f"{module} imports {found - known}"


@pytest.mark.grid
def test_the_library_works_without_the_extra(tmp_path: Path) -> None:
    done = process(USE, str(tmp_path), "alibi", "fox", "learned", "rope", "tape")
    assert done.returncode == 0, done.stderr


def _declared(table: str, name: str) -> set[str]:
    """Return the packages that a list of pyproject.toml names."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition(f"[{table}]\n")[2]
    found = re.search(rf"^{name} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert found, name
    return set(re.findall(r'^ *"([\w-]+)', found[1].replace(", ", "\n"), re.MULTILINE))


def test_dependencies_are_those_that_are_looked_for() -> None:
    assert _declared("project", "dependencies") == LIBRARY
    extras = "project.optional-dependencies"
    assert {name.replace("pyyaml", "yaml") for name in _declared(extras, "recipes")} == set(RECIPES)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in ("test", "real", "docs"):
        assert re.search(rf'^{extra} = \[\s*"hf-posenc\[recipes\]"', text, re.MULTILINE), extra
    assert re.search(r'^hf-posenc = "hf_posenc.__main__:main"$', text, re.MULTILINE)


def test_ci_runs_on_the_ends_of_the_declared_ranges() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lowest, newest = (
        dict(re.findall(r"^(\w+)==(.+)$", (ROOT / ".ci" / f"{end}.txt").read_text(encoding="utf-8"), re.MULTILINE))
        for end in ("lowest", "newest")
    )
    for name in LIBRARY - {"torch"}:  # an argument of .ci/ends
        declared = re.search(rf'^    "{name}>=([\d.]+),<(\d+)\.(\d+)",$', text, re.MULTILINE)
        assert declared, name
        first, major, beyond = declared.groups()
        assert lowest[name] == first + ".0" * (2 - first.count(".")), name
        assert newest[name].startswith(f"{major}.{int(beyond) - 1}."), name


class Absent:
    """A finder that refuses one package."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == self.name:
            raise ImportError(f"{name} is not here")


@pytest.mark.parametrize("refuses", [False, True], ids=["none", "refused"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_missing_package_is_one_line(name: str, refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if refuses:
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "meta_path", [Absent(name), *sys.meta_path])
    else:
        monkeypatch.setitem(sys.modules, name, None)
    line = f'need packages that are not installed: {name}. Run pip install "hf-posenc[recipes]".'
    monkeypatch.delitem(sys.modules, "hf_posenc.recipes", raising=False)
    with pytest.raises(hf_posenc.MissingPackageError, match=re.escape(line) + "$"):
        importlib.import_module("hf_posenc.recipes")
    with pytest.raises(SystemExit, match=re.escape(line) + "$"):
        main()


def test_the_command_ends_with_one_line_and_an_error() -> None:
    for code in ("import runpy; runpy.run_module('hf_posenc', run_name='__main__')", "import hf_posenc.recipes.demo"):
        done = process(code)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.endswith('Run pip install "hf-posenc[recipes]".'), done.stderr
        assert "demo" in code or done.stderr.count("\n") == 1, done.stderr
