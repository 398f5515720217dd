"""Adapters that carry their scheme: onto stock models, in fresh processes, merged, and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, DIRECTORIES, logits, loss, new_parameters, stacks_for, stock, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import hf_posenc
from hf_posenc import NotPatchedError, OptionError, PosencLoraConfig

# PEFT 0.21 asks transformers 5.23 for a name that is deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "t5": ["q", "v"]}
CASES = [(architecture, name) for architecture in ARCHITECTURES for name in hf_posenc.schemes()]


def adapted(architecture: str, scheme: str, **options: Any) -> PeftModel:
    """A converted model with an adapter, trained for a step."""
    torch.manual_seed(4)
    base = hf_posenc.patch(stock(architecture), scheme, **{**stacks_for(architecture, scheme), **options})
    config = PosencLoraConfig(target_modules=TARGETS[architecture], fan_in_fan_out=architecture == "gpt2")
    model = get_peft_model(base, config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        model.zero_grad()
        loss(model, architecture, tokens(architecture, 2, 19, seed=step)).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize(("architecture", "scheme"), CASES)
def test_an_adapter_converts_the_stock_model_it_is_loaded_onto(architecture: str, scheme: str, tmp_path: Path) -> None:
    ids = tokens(architecture, 2, 15)
    model = adapted(architecture, scheme)
    trained = logits(model, architecture, ids)
    model.save_pretrained(tmp_path)
    own = [name for name in model.state_dict() if "hf_posenc" in name and ".modules_to_save." in name]  # and buffers
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len([name for name in saved if "hf_posenc" in name]) == len(own)

    loaded = PeftModel.from_pretrained(stock(architecture), tmp_path).eval()
    assert torch.equal(logits(loaded, architecture, ids), trained)
    assert loaded.base_model.model.config.posenc == model.base_model.model.config.posenc
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged, architecture, ids), trained, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = type(merged).from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again, architecture, ids), logits(merged, architecture, ids))


def test_targets_are_found_without_naming_them() -> None:
    model = get_peft_model(hf_posenc.patch(stock("llama"), "fire"), PosencLoraConfig())
    assert {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name} == {"q_proj", "v_proj"}
    assert not any("lora" in name for name in new_parameters(model))


def test_an_adapter_fits_a_model_converted_in_the_same_way_only(tmp_path: Path) -> None:
    model = adapted("llama", "fire")
    model.save_pretrained(tmp_path)
    ids = tokens("llama", 2, 15)
    same = PeftModel.from_pretrained(hf_posenc.patch(stock("llama"), "fire"), tmp_path).eval()
    assert torch.equal(logits(same, "llama", ids), logits(model, "llama", ids))
    for scheme, options in (("kerple", {}), ("fire", {"width": 8}), ("fire", {"layers": [0]})):
        other = hf_posenc.patch(stock("llama"), scheme, **options)
        with pytest.raises(OptionError, match="trained with the schemes 'fire'"):
            PeftModel.from_pretrained(other, tmp_path)


def test_nothing_to_carry() -> None:
    model = stock("llama")
    with pytest.raises(NotPatchedError, match="no scheme to carry"):
        get_peft_model(model, PosencLoraConfig(target_modules=["q_proj"]))
    assert type(model).__name__ == "LlamaForCausalLM"


def test_a_failed_conversion_leaves_the_stock_model(tmp_path: Path) -> None:
    adapted("llama", "fire").save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    config["posenc"]["groups"][0]["scheme"] = "unknown"
    file.write_text(json.dumps(config))
    model, ids = stock("llama"), tokens("llama", 2, 9)
    before = logits(model, "llama", ids)
    with pytest.raises(hf_posenc.CheckpointError, match="'unknown'"):
        PeftModel.from_pretrained(model, tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not hasattr(model.config, "posenc")
    assert torch.equal(logits(model, "llama", ids), before)


def test_a_plain_adapter_still_works(tmp_path: Path) -> None:
    model = get_peft_model(stock("llama"), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    PeftModel.from_pretrained(stock("llama"), tmp_path)


LOAD = """
import sys
import torch
{extra}
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

base, adapter, ids, out = sys.argv[1:]
torch.set_num_threads(1)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
with torch.no_grad():
    save_file({{"logits": model(**load_file(ids), use_cache=False).logits}}, out)
"""


@pytest.mark.parametrize("extra", ["import hf_posenc", "import peft, hf_posenc", ""])
def test_fresh_process(extra: str, tmp_path: Path) -> None:
    model = adapted("llama", "kerple")
    model.save_pretrained(tmp_path / "adapter")
    ids = tokens("llama", 2, 15)
    save_file({"input_ids": ids}, tmp_path / "ids")
    arguments = [str(path) for path in (DIRECTORIES["llama"], tmp_path / "adapter", tmp_path / "ids", tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(extra=extra), *arguments], capture_output=True, text=True, check=False
    )
    if extra:
        assert done.returncode == 0, done.stderr
        assert torch.equal(load_file(tmp_path / "out")["logits"], logits(model, "llama", ids))
    else:
        assert done.returncode != 0
        assert "HF_POSENC_LORA" in done.stderr
