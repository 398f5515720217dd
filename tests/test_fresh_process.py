"""Converted checkpoints in processes of their own: right with the package, refused without it.

Each process handles the checkpoints of all architectures, since starting one takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_posenc

IDS = torch.arange(14).view(2, 7)
ARCHITECTURES = ["llama", "gpt2", "t5"]
SEEDED = {"vocab_size": 48}


def converted(name: str) -> Any:
    torch.manual_seed(0)
    if name == "llama":
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
        config: Any = LlamaConfig(**SEEDED, **shape, num_attention_heads=4, num_key_value_heads=2)
        return hf_posenc.patch(LlamaForCausalLM(config).eval(), "fire")
    if name == "gpt2":
        config = GPT2Config(**SEEDED, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
        return hf_posenc.patch(GPT2LMHeadModel(config).eval(), "kerple")
    config = T5Config(**SEEDED, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, decoder_start_token_id=0)
    return hf_posenc.patch(T5ForConditionalGeneration(config).eval(), "t5_clipped", init="normal")


# What every process starts with: the checkpoints, and a way to say what came of each attempt.
PRELUDE = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
outcomes = {}

def attempt(name, function):
    try:
        outcomes[name] = ["loaded", type(function()).__name__]
    except BaseException as error:
        outcomes[name] = [" ".join(kind.__name__ for kind in type(error).__mro__), str(error)]

def save_logits(models, to):
    import torch
    from safetensors.torch import save_file
    ids = torch.arange(14).view(2, 7)
    found = {}
    for name, model in models.items():
        call = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})
        with torch.no_grad():
            found[name] = model(**call).logits
    save_file(found, folder / to)

def finish():
    (folder / "outcomes.json").write_text(json.dumps(outcomes), encoding="utf-8")
"""


def run(script: str, folder: Path) -> dict[str, list[str]]:
    """Run a script in a new process that nobody can answer a question in; return the outcomes it tells."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    # Hub identifiers play no part here; the modules of remote code go where they cannot meet older ones.
    environment |= {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
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
    """A directory with one converted checkpoint per architecture and the logits that each must give."""
    folder = tmp_path_factory.mktemp("fresh")
    logits = {}
    for name in ARCHITECTURES:
        model = converted(name)
        model.save_pretrained(folder / name)
        call = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name == "t5" else {})
        with torch.no_grad():
            logits[name] = model(**call).logits
    save_file(logits, folder / "expected.safetensors")
    return folder


def check_bit_equal(folder: Path, name: str) -> None:
    expected, got = load_file(folder / "expected.safetensors"), load_file(folder / name)
    assert set(got) == set(ARCHITECTURES)
    for architecture in ARCHITECTURES:
        assert torch.equal(got[architecture], expected[architecture]), architecture


WITHOUT = """
import transformers
heads = {
    "llama": ("AutoModelForCausalLM", "LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"),
    "gpt2": ("AutoModelForCausalLM", "GPT2LMHeadModel", "GPT2Model", "GPT2ForSequenceClassification"),
    "t5": ("AutoModelForSeq2SeqLM", "T5ForConditionalGeneration", "T5EncoderModel", "T5ForSequenceClassification"),
}
for name, (auto, *stock) in heads.items():
    for kind in ("AutoConfig", "AutoModel", auto):
        load = getattr(transformers, kind).from_pretrained
        attempt(f"{name} {kind}", lambda: load(folder / name))
        attempt(f"{name} {kind} refused", lambda: load(folder / name, trust_remote_code=False))
    for kind in stock:
        load = getattr(transformers, kind).from_pretrained
        attempt(f"{name} {kind}", lambda: load(folder / name))
        attempt(f"{name} {kind} eager", lambda: load(folder / name, attn_implementation="eager"))
        attempt(f"{name} {kind} misshapen", lambda: load(folder / name, ignore_mismatched_sizes=True))
assert "hf_posenc" not in sys.modules
"""


@pytest.fixture(scope="module")
def without(folder: Path) -> dict[str, list[str]]:
    return run(WITHOUT, folder)


def test_without_the_package_every_way_to_load_was_tried(without: dict[str, list[str]]) -> None:
    assert len(without) == 3 * (3 * 2 + 3 * 3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_the_package_nothing_loads(without: dict[str, list[str]], architecture: str) -> None:
    for attempt, (kind, message) in without.items():
        if attempt.startswith(architecture):
            assert kind.split()[0] in ("KeyError", "ValueError", "StrictDataclassClassValidationError"), (attempt, kind)
            # The way that transformers names leads through the stub; the locks name the package.
            assert ("trust_remote_code=True" if " Auto" in attempt else "hf_posenc") in message, (attempt, message)


BLOCKED = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_posenc":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
for name in ("llama", "gpt2", "t5"):
    auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    attempt(f"{name} head", lambda: auto.from_pretrained(folder / name, trust_remote_code=True))
    attempt(f"{name} body", lambda: AutoModel.from_pretrained(folder / name, trust_remote_code=True))
"""


def test_trust_without_the_package_installed_is_an_import_error_that_names_it(folder: Path) -> None:
    outcomes = run(BLOCKED, folder)
    assert len(outcomes) == 6
    for attempt, (kind, message) in outcomes.items():
        assert "ImportError" in kind.split(), (attempt, kind)
        assert "hf_posenc" in message, (attempt, message)


TRUSTED = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
assert "hf_posenc" not in sys.modules
models, again = {}, {}
for name in ("llama", "gpt2", "t5"):
    auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    attempt(f"{name} config", lambda: AutoConfig.from_pretrained(folder / name, trust_remote_code=True))
    models[name] = auto.from_pretrained(folder / name, trust_remote_code=True)
    models[name].save_pretrained(folder / "again" / name)
    again[name] = auto.from_pretrained(folder / "again" / name, trust_remote_code=True)
    attempt(f"{name} body", lambda: AutoModel.from_pretrained(folder / "again" / name, trust_remote_code=True))
    outcomes[f"{name} class"] = [type(models[name]).__module__, type(models[name]).__name__]
save_logits(models, "trusted.safetensors")
save_logits(again, "again.safetensors")
"""


def test_trust_with_the_package_loads_through_the_stub_and_saves_again(folder: Path) -> None:
    outcomes = run(TRUSTED, folder)
    check_bit_equal(folder, "trusted.safetensors")
    check_bit_equal(folder, "again.safetensors")
    assert outcomes["llama class"] == ["hf_posenc.patches.llama", "PosencLlamaForCausalLM"]
    assert outcomes["gpt2 config"] == ["loaded", "PosencGPT2Config"]
    assert outcomes["t5 body"] == ["loaded", "PosencT5Model"]
    for name in ARCHITECTURES:
        first, second = folder / name, folder / "again" / name
        assert {path.name for path in second.iterdir()} == {path.name for path in first.iterdir()}
        # Byte for byte, auto_map and lock included.
        for file in ("config.json", "modeling_hf_posenc.py", "generation_config.json", "model.safetensors"):
            assert (second / file).read_bytes() == (first / file).read_bytes(), (name, file)
        # The remote code that ran is the stub, nothing else.
        modules = [path.name for path in (folder / "modules").rglob("*.py") if path.name != "__init__.py"]
        assert set(modules) == {"modeling_hf_posenc.py"}


LOADED = """
models = {}
for name in ("llama", "gpt2", "t5"):
    auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    models[name] = auto.from_pretrained(folder / name)
    attempt(f"{name} body", lambda: AutoModel.from_pretrained(folder / name))
"""

BEFORE = f"""
import hf_posenc
assert "torch" not in sys.modules
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
{LOADED}
save_logits(models, "before.safetensors")
"""

AFTER = f"""
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
import hf_posenc
{LOADED}
save_logits(models, "after.safetensors")
"""

# The models, not the Auto classes, are what is imported first here.
BETWEEN = f"""
from transformers import LlamaForCausalLM
import hf_posenc
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
{LOADED}
save_logits(models, "between.safetensors")
"""

BODIES = {
    "llama body": ["loaded", "PosencLlamaModel"],
    "gpt2 body": ["loaded", "PosencGPT2Model"],
    "t5 body": ["loaded", "PosencT5Model"],
}


@pytest.mark.parametrize(
    ("script", "name"),
    [(BEFORE, "before"), (AFTER, "after"), (BETWEEN, "between")],
    ids=["before transformers", "after the Auto classes", "after a model"],
)
def test_with_the_package_imported_plain_auto_classes_load_bit_equal(folder: Path, script: str, name: str) -> None:
    assert run(script, folder) == BODIES
    check_bit_equal(folder, f"{name}.safetensors")
