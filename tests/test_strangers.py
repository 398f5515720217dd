"""Model types that nothing here names: folders of transformers under other names, and a sample of the survey."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import survey
import torch
import transformers
from grid import once
from transformers import AutoConfig

import hf_posenc
from hf_posenc.errors import ArchitectureError

# A folder of transformers, its class prefix, what these are called here, the head, its Auto class, and small sizes.
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_SIZES |= {"vocab_size": 60}
STRANGERS = {
    "granite": ("Granite", "Basalt", "ForCausalLM", "AutoModelForCausalLM", {"num_key_value_heads": 2}),
    "electra": ("Electra", "Amber", "ForMaskedLM", "AutoModelForMaskedLM", {"embedding_size": 32}),
    "dinov2": ("Dinov2", "Trilobite", "Model", "AutoModel", {"image_size": 16, "patch_size": 4, "mlp_ratio": 2}),
}  # fmt: skip


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on the path, for packages of a test, which are forgotten after it."""
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path.remove(str(tmp_path))
    for name in [name for name in sys.modules if "_package" in name.partition(".")[0]]:
        del sys.modules[name]


def renamed(folder: str, place: Path) -> tuple[str, Any]:
    """Write the code of a model type under another name; return the new type, and a small model."""
    old, new, head, auto, sizes = STRANGERS[folder]
    kind = new.lower()
    package = place / f"{kind}_package"
    package.mkdir()
    (package / "__init__.py").touch()
    for part in ("configuration", "modeling"):
        source = Path(transformers.__file__).parent / "models" / folder / f"{part}_{folder}.py"
        code = source.read_text(encoding="utf-8").replace(old, new).replace(old.upper(), new.upper())
        code = re.sub(rf"\b{folder}\b|(?<=_){folder}\b|\b{folder}(?=_)", kind, code)
        code = re.sub(r"from \.\.\.(?=\w)", "from transformers.", code).replace("from ... ", "from transformers ")
        (package / f"{part}_{kind}.py").write_text(code, encoding="utf-8")
    (package / "register.py").write_text(
        f"""
import transformers
from .configuration_{kind} import {new}Config
from .modeling_{kind} import {new}{head}

transformers.AutoConfig.register("{kind}", {new}Config)
transformers.{auto}.register({new}Config, {new}{head})
""",
        encoding="utf-8",
    )
    modeling = importlib.import_module(f"{package.name}.modeling_{kind}")
    config = getattr(importlib.import_module(f"{package.name}.configuration_{kind}"), f"{new}Config")
    assert config.model_type == kind
    torch.manual_seed(0)
    return kind, getattr(modeling, new + head)(config(**{**_SIZES, **sizes})).eval()


_LOAD = """
import sys, torch, transformers, hf_posenc
folder, package, auto = sys.argv[1:]
sys.path.insert(0, folder)
__import__(f"{package}_package.register")
model = getattr(transformers, auto).from_pretrained(f"{folder}/saved").eval()
call, expected = torch.load(f"{folder}/call.pt")
with torch.no_grad():
    assert torch.equal(model(**call)[0], expected)
assert hf_posenc.verify(model).difference > 0
assert type(model).__module__ == f"hf_posenc.patches.{package}", type(model).__module__
stock = hf_posenc.unpatch(model)
assert type(stock).__module__ == f"{package}_package.modeling_{package}"
"""


@pytest.mark.parametrize("folder", once(STRANGERS))
def test_a_type_of_another_package_needs_no_line(folder: str, package: Path) -> None:
    kind, model = renamed(folder, package)
    images = folder == "dinov2"
    call = {"pixel_values": torch.randn(2, 3, 16, 16)} if images else {"input_ids": torch.randint(5, 60, (2, 13))}
    with torch.no_grad():
        before = model(**call)[0]
        exact = hf_posenc.patch(model, "rope" if folder == "granite" else "learned")
        assert float((exact(**call)[0] - before).abs().max()) <= 1e-5 * float(before.abs().max())
        hf_posenc.patch(model, "kerple")
        after = model(**call)[0]
    assert not torch.allclose(after, before, atol=1e-4)
    assert model.config.model_type == f"hf_posenc_{kind}"
    model.save_pretrained(package / "saved")
    assert json.loads((package / "saved" / "config.json").read_text())["model_type"] == f"hf_posenc_{kind}"
    torch.save((call, after), package / "call.pt")
    with torch.no_grad():
        # Nobody has registered the type in this process.
        assert torch.equal(type(model).from_pretrained(package / "saved").eval()(**call)[0], after)
        assert torch.equal(hf_posenc.unpatch(model)(**call)[0], before)
    script = [sys.executable, "-c", _LOAD, str(package), kind, STRANGERS[folder][3]]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_model_whose_config_has_the_type_of_another_is_refused(package: Path) -> None:
    _, model = renamed("granite", package)
    type(model.config).model_type = "llama"
    with pytest.raises(ArchitectureError, match=r"no class of transformers\.models\.llama.* a type of its own"):
        hf_posenc.patch(model, "rope")


# -- the survey --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", survey.SAMPLE)
def test_a_sample_of_the_survey(name: str) -> None:
    row = survey.survey(name)
    assert row["came"] == "works", row


def test_the_page_of_the_survey_is_that_of_its_results() -> None:
    stored = json.loads((survey.RESULTS / "survey.json").read_text(encoding="utf-8"))
    assert survey.PAGE.read_text(encoding="utf-8") == survey.text(stored)
    came = {name: row["came"] for name, row in stored["types"].items()}
    assert {came[name] for name in survey.SAMPLE} == {"works"}
    assert "broken" not in came.values()
    assert AutoConfig.for_model("hf_posenc_granite").model_type == "hf_posenc_granite"
