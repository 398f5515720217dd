"""QLoRA: a converted model whose own weights are in 4 bits, under an adapter; on demand.

Needs bitsandbytes, which computes on CPUs too. It is no dependency of this package:

    pip install bitsandbytes    # or: pip install --no-deps --target somewhere, and PYTHONPATH=somewhere
    python -m pytest tests/test_qlora.py -m slow
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from models import logits, loss, tokens
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_posenc
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import run
from hf_posenc.recipes.schema.recipe import Adapter
from hf_posenc.recipes.training.adapter import attach, keep_unpacked, quantization
from hf_posenc.recipes.training.distillation import Teacher

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes, see above"),
    # PEFT says so whenever a weight in 4 bits is merged.
    pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit linear may get different generations:UserWarning"),
]

LORA = Adapter(kind="lora", targets=["q_proj", "v_proj"], four_bit=True)
SCHEME = Adapter(kind="scheme", four_bit=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, whose sizes are multiples of the blocks of 64 that are quantised together."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 64}
    config = LlamaConfig(vocab_size=1024, num_attention_heads=4, num_key_value_heads=2, **sizes)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def quantised(folder: Path) -> Any:
    """A model in 4 bits after an evaluation, for which some CPUs pack its weights, with a small loss."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization(LORA)).eval()
    logits(model, "llama", tokens("llama", 1, 4))
    return model


def unpacked(folder: Path) -> Any:
    model = quantised(folder)
    keep_unpacked(model)
    return model


@pytest.mark.parametrize("adapter", [LORA, SCHEME], ids=lambda adapter: adapter.kind)
@pytest.mark.parametrize("scheme", list(hf_posenc.schemes()))
def test_qlora(scheme: str, adapter: Adapter, folder: Path, tmp_path: Path) -> None:
    ids = tokens("llama", 4, 17)
    native = logits(unpacked(folder), "llama", ids)
    base = hf_posenc.patch(quantised(folder), scheme)
    if adapter is SCHEME and not [name for name, _ in base.named_parameters() if "hf_posenc" in name]:
        with pytest.raises(hf_posenc.OptionError, match="has no parameters"):
            attach(base, adapter)
        return
    model = attach(base, adapter).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("hf_posenc" in name or (adapter is LORA and "lora_" in name) for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert model.base_model.model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    optimizer, losses = torch.optim.Adam(trained.values(), lr=3e-2), []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(loss(model, "llama", ids))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    after = logits(model.eval(), "llama", ids)
    assert torch.equal(Teacher.within(model)({"input_ids": ids}).logits, native)

    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(unpacked(folder), tmp_path).eval()
    assert torch.equal(logits(loaded, "llama", ids), after)
    dense = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path).eval()
    assert (logits(dense, "llama", ids) - after).abs().max() < 0.5  # what 4 bits cost
    merged = loaded.merge_and_unload()
    assert type(merged).__name__ == "PosencLlamaForCausalLM"
    # Rounding to 4 bits again; where nothing is added to them, they stay as they were.
    assert (logits(merged, "llama", ids) - after).abs().max() <= (0.3 if adapter is LORA else 0)


@pytest.mark.parametrize("kind", ["lora", "scheme"])
def test_a_recipe_trains_over_four_bits(kind: str, tmp_path: Path) -> None:
    changes = f"""scheme=kerple adapter.four_bit=true adapter.kind={kind} training.steps=2 training.batch_size=2
        training.length=32 data.limit=50 distillation.share=0.5 evaluation.windows=2 evaluation.contexts=[64]""".split()
    outcome = run.train(read_recipe("swap", changes), tmp_path / "out")
    assert AutoPeftModelForCausalLM.from_pretrained(outcome.model).peft_config


# Schemes with linear layers of their own, and with matrices.
@pytest.mark.parametrize("scheme", ["fire", "tape", "fox_pro", "transformer_xl"])
def test_a_converted_checkpoint_loads_in_four_bits(scheme: str, folder: Path, tmp_path: Path) -> None:
    ids = tokens("llama", 4, 17)
    torch.manual_seed(1)
    dense = hf_posenc.patch(AutoModelForCausalLM.from_pretrained(folder), scheme)
    dense.save_pretrained(tmp_path / "dense")
    model = quantised(tmp_path / "dense")
    for name, module in model.named_modules():
        if "hf_posenc" in name:
            assert type(module).__module__.split(".")[0] != "bitsandbytes", name
            for own, parameter in module.named_parameters():
                assert parameter.dtype == torch.float32
                assert torch.equal(parameter, dense.get_parameter(f"{name}.{own}"))
    assert (logits(model, "llama", ids) - logits(dense, "llama", ids)).abs().max() < 0.5
    model.save_pretrained(tmp_path / "four_bits")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "four_bits").eval()
    assert torch.equal(logits(again, "llama", ids), logits(model, "llama", ids))
