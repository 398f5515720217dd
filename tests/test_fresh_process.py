"""Converted checkpoints in processes of their own: right with the package, refused without it.

Each process handles the checkpoints of all architectures, since starting one takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny import TEXTS, converted, ids, outputs, stock

import hf_posenc

SCHEMES = {"llama": "fire", "gpt2": "kerple", "t5": "t5_clipped"}

# What every process starts with: the checkpoints, and ways to say what came of each attempt.
PRELUDE = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
outcomes, logits = {}, {}

def attempt(name, function):
    try:
        outcomes[name] = ["loaded", type(function()).__name__]
    except BaseException as error:
        outcomes[name] = [" ".join(kind.__name__ for kind in type(error).__mro__), str(error)]

def auto(name):
    import transformers
    return transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM

def compute(name, model):
    import torch
    from safetensors.torch import load_file
    ids = load_file(folder / "ids")["ids"]
    with torch.no_grad():
        logits[name] = model(input_ids=ids, **({"decoder_input_ids": ids.flip(1)} if "t5" in name else {})).logits

def finish():
    (folder / "outcomes.json").write_text(json.dumps(outcomes), encoding="utf-8")
    if logits:
        from safetensors.torch import save_file
        save_file(logits, folder / "logits")
"""


def run(script: str, folder: Path) -> dict[str, list[str]]:
    """Run a script in a new process that nobody can answer a question in; return the outcomes it tells."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    # Hub identifiers play no part here; the modules of remote code go where they cannot meet older ones.
    environment |= {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    (folder / "logits").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script + "\nfinish()\n", str(folder)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes: dict[str, list[str]] = json.loads((folder / "outcomes.json").read_text(encoding="utf-8"))
    return outcomes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one converted checkpoint per architecture, and its stock model in another folder."""
    folder = tmp_path_factory.mktemp("fresh")
    save_file({"ids": ids()}, folder / "ids")
    for name in TEXTS:
        converted(name, SCHEMES[name]).save_pretrained(folder / name)
        hf_posenc.unpatch(converted(name)).save_pretrained(folder / "stock" / name)
    return folder


def check_bit_equal(folder: Path, prefix: str = "") -> None:
    found = load_file(folder / "logits")
    for name in TEXTS:
        assert found[prefix + name].equal(outputs(converted(name, SCHEMES[name]))[0]), name


WITHOUT = """
import transformers
heads = {
    "llama": ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Model", "GPT2ForSequenceClassification"),
    "t5": ("T5ForConditionalGeneration", "T5EncoderModel", "T5ForSequenceClassification"),
}
for name, stock in heads.items():
    for kind in ("AutoConfig", "AutoModel", auto(name).__name__):
        load = getattr(transformers, kind).from_pretrained
        attempt(f"{name} {kind}", lambda: load(folder / name))
        attempt(f"{name} {kind} refused", lambda: load(folder / name, trust_remote_code=False))
    for kind in stock:
        load = getattr(transformers, kind).from_pretrained
        attempt(f"{name} {kind}", lambda: load(folder / name))
        attempt(f"{name} {kind} eager", lambda: load(folder / name, attn_implementation="eager"))
        attempt(f"{name} {kind} misshapen", lambda: load(folder / name, ignore_mismatched_sizes=True))
    model, info = getattr(transformers, stock[0]).from_pretrained(folder / "stock" / name, output_loading_info=True)
    assert not any(info.values()), info
    compute(f"stock {name}", model)
assert "hf_posenc" not in sys.modules

# Without the package, even trust ends in an error that names it.
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_posenc":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
for name in heads:
    for load in (auto(name).from_pretrained, transformers.AutoModel.from_pretrained):
        attempt(f"{name} {load.__self__.__name__} trusted", lambda: load(folder / name, trust_remote_code=True))
sys.meta_path.pop(0)
"""

TRUSTED = """
from transformers import AutoConfig, AutoModel
assert "hf_posenc" not in sys.modules
for name in ("llama", "gpt2", "t5"):
    load, again = auto(name).from_pretrained, folder / "again" / name
    attempt(f"{name} config", lambda: AutoConfig.from_pretrained(folder / name, trust_remote_code=True))
    model = load(folder / name, trust_remote_code=True)
    compute(name, model)
    model.save_pretrained(again)
    compute("again " + name, load(again, trust_remote_code=True))
    attempt(f"{name} body", lambda: AutoModel.from_pretrained(again, trust_remote_code=True))
    outcomes[f"{name} class"] = [type(model).__module__, type(model).__name__]
"""


LATER = ("config", "body", "class")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, list[str]]:
    """What came of each attempt in one process, which finds the package in the end."""
    return run(WITHOUT + TRUSTED, folder)


@pytest.mark.grid
def test_without_the_package_nothing_loads_but_unpatched_models(folder: Path, outcomes: dict[str, list[str]]) -> None:
    found = {attempt: said for attempt, said in outcomes.items() if not attempt.endswith(LATER)}
    assert len(found) == 3 * (3 * 2 + 3 * 3 + 2)
    for attempt, (kind, message) in found.items():
        if attempt.endswith("trusted"):
            assert "ImportError" in kind.split(), (attempt, kind)
            assert "hf_posenc" in message, (attempt, message)
            continue
        assert kind.split()[0] in ("KeyError", "ValueError", "StrictDataclassClassValidationError"), (attempt, kind)
        # The way that transformers names leads through the stub; the locks name the package.
        assert ("trust_remote_code=True" if " Auto" in attempt else "hf_posenc") in message, (attempt, message)
    logits = load_file(folder / "logits")
    for name in TEXTS:
        assert logits[f"stock {name}"].equal(outputs(stock(name))[0]), name


@pytest.mark.grid
def test_trust_with_the_package_loads_through_the_stub_and_saves_again(
    folder: Path, outcomes: dict[str, list[str]]
) -> None:
    check_bit_equal(folder)
    check_bit_equal(folder, "again ")
    assert outcomes["llama class"] == ["hf_posenc.patches.llama", "PosencLlamaForCausalLM"]
    assert outcomes["gpt2 config"] == ["loaded", "PosencGPT2Config"]
    assert outcomes["t5 body"] == ["loaded", "PosencT5Model"]
    for name in TEXTS:
        first, second = folder / name, folder / "again" / name
        assert {path.name for path in second.iterdir()} == {path.name for path in first.iterdir()}
        # Byte for byte, auto_map and lock included.
        for file in ("config.json", "modeling_hf_posenc.py", "generation_config.json", "model.safetensors"):
            assert (second / file).read_bytes() == (first / file).read_bytes(), (name, file)
    # The remote code that ran is the stub, nothing else.
    modules = {path.name for path in (folder / "modules").rglob("*.py")}
    assert modules == {"modeling_hf_posenc.py", "__init__.py"}
