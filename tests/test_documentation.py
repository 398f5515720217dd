"""The code in the documents runs, as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import DIRECTORIES, stock

import hf_posenc
from hf_posenc import registry
from hf_posenc.patches import architecture as architectures
from hf_posenc.patches import auto
from hf_posenc.recipes.text import builtin_text

ROOT = Path(__file__).parent.parent


def _blocks(name: str, language: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, flags=re.M | re.S)
    return [re.sub(rf"^{indent}", "", body, flags=re.M) for indent, body in found]


def _marked(name: str, mark: str) -> str:
    """Return the code block that follows a marker comment."""
    text = (ROOT / name).read_text(encoding="utf-8").split(f"<!-- {mark} -->", 1)[1]
    indent, body = re.findall(r"^( *)```python\n(.*?)^ *```$", text, flags=re.M | re.S)[0]
    return re.sub(rf"^{indent}", "", body, flags=re.M)


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of the README, in order, with a local checkpoint in place of the one on the hub."""
    code = "\n".join(_blocks("README.md", "python"))
    code = code.replace('"HuggingFaceTB/SmolLM2-135M"', repr(str(DIRECTORIES["llama"])))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), namespace)
    assert type(namespace["model"]).__name__ == "PosencLlamaForCausalLM"
    assert namespace["output"].shape == (2, 8, 32, 16)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adaptation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "\n".join(_blocks("docs/adaptation.md", "python"))
    code = code.replace('"HuggingFaceTB/SmolLM2-135M"', repr(str(DIRECTORIES["llama"])))
    code = code.replace('report_to="none"', 'report_to="none", use_cpu=True, dataloader_pin_memory=False')
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(builtin_text("heldout")[:20000], encoding="utf-8")
    namespace: dict[str, object] = {}
    exec(compile(code, "adaptation.md", "exec"), namespace)
    assert type(namespace["merged"]).__name__ == "PosencLlamaForCausalLM"


def test_readme_names_every_scheme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in hf_posenc.schemes() if f"`{name}`" not in text] == []


def test_readme_commands_exist() -> None:
    commands = "\n".join(_blocks("README.md", "bash"))
    names = {line.split()[1] for line in commands.splitlines() if line.startswith("hf-posenc")}
    help_text = subprocess.run(
        [sys.executable, "-c", "from hf_posenc.cli import app; app()", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert {name for name in names | {"demo", "schemes", "info"} if name not in help_text} == set()


@pytest.fixture
def _registry_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_posenc.schemes()
    architectures.architectures()
    monkeypatch.setattr(registry, "_SCHEMES", dict(registry._SCHEMES))
    monkeypatch.setattr(architectures, "_ARCHITECTURES", dict(architectures._ARCHITECTURES))


def _module(name: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    __import__(name)


@pytest.mark.usefixtures("_registry_as_before")
def test_add_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _module("window", _marked("CONTRIBUTING.md", "scheme"), tmp_path, monkeypatch)
    assert "window" in hf_posenc.schemes()
    assert [option.name for option in hf_posenc.describe("window").options] == ["size"]
    for name in DIRECTORIES:
        model = hf_posenc.patch(stock(name), "window", size=4)
        hf_posenc.verify(model)
    prompt = torch.arange(20, 40)[None]
    model = hf_posenc.patch(stock("llama"), "window", size=4)
    settings = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(prompt, **settings), model.generate(prompt, use_cache=False, **settings))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(type(model).from_pretrained(tmp_path / "saved")(prompt).logits, model(prompt).logits)


@pytest.mark.usefixtures("_registry_as_before")
def test_add_an_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    _module("posenc_mistral", _marked("CONTRIBUTING.md", "architecture"), tmp_path, monkeypatch)
    config = MistralConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=None,
        initializer_range=0.1,
    )
    model = MistralForCausalLM(config).eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        before = model(ids).logits
        torch.testing.assert_close(hf_posenc.patch(model, "rope")(ids).logits, before, atol=1e-5, rtol=1e-5)
        for scheme in hf_posenc.schemes():
            hf_posenc.verify(hf_posenc.patch(model, scheme))
            full = model(ids, use_cache=False).logits
            first = model(ids[:, :9], use_cache=True)
            rest = model(ids[:, 9:], past_key_values=first.past_key_values).logits
            torch.testing.assert_close(torch.cat([first.logits, rest], 1), full, atol=1e-5, rtol=1e-5)
        hf_posenc.patch(model, "kerple", native="keep")
        hf_posenc.set_strength(model, scheme=0.5)
        with pytest.raises(hf_posenc.OptionError, match="of mistral cannot be at part of its strength"):
            hf_posenc.set_strength(model, native=0.5)
        model.save_pretrained(tmp_path / "saved")
        loaded = auto.modeling_auto.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert torch.equal(hf_posenc.unpatch(model)(ids).logits, before)
