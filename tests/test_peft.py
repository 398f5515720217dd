"""Plain PEFT on a patched model, by hand and in a plain `Trainer`; and the adapters of recipes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, logits, loss, new_parameters, stacks_for, stock, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

import hf_posenc
from hf_posenc import NotPatchedError, OptionError, PosencLoraConfig, RecipeError
from hf_posenc.recipes.schema.recipe import Adapter
from hf_posenc.recipes.training.adapter import attach, quantization

# PEFT 0.21 asks transformers 5.23 for a name that is deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

GEOMETRY = hf_posenc.Geometry(heads=4, kv_heads=2, head_dim=4, hidden_size=16, max_positions=64, last=False)
TRAINED = [name for name in hf_posenc.schemes() if list(hf_posenc.build(name, GEOMETRY).parameters())]
TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "t5": ["q", "v"]}
SAVED = ["hf_posenc", "hf_posenc_shared"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("scheme", TRAINED)
def test_lora_and_scheme_in_one_adapter(architecture: str, scheme: str, tmp_path: Path) -> None:
    ids = tokens(architecture, 2, 19)

    def base() -> torch.nn.Module:
        torch.manual_seed(4)
        start = stock(architecture)
        torch.manual_seed(4)
        return hf_posenc.patch(start, scheme, **stacks_for(architecture, scheme))

    plain = logits(base(), architecture, ids)
    config = LoraConfig(
        target_modules=TARGETS[architecture],
        modules_to_save=SAVED,
        fan_in_fan_out=architecture == "gpt2",
    )
    model = get_peft_model(base(), config)
    torch.testing.assert_close(logits(model, architecture, ids), plain)
    before = {name: p.detach().clone() for name, p in new_parameters(model).items() if p.requires_grad}
    assert before
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    loss(model, architecture, ids).backward()
    optimizer.step()
    moved = [name for name, p in new_parameters(model).items() if name in before and not torch.equal(p, before[name])]
    assert moved
    trained = logits(model.eval(), architecture, ids)
    assert (trained - plain).abs().max() > 1e-4

    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path).eval()
    assert torch.equal(logits(loaded, architecture, ids), trained)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits(merged, architecture, ids), trained, atol=1e-4, rtol=1e-4)
    hf_posenc.verify(merged)
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(
        logits(type(merged).from_pretrained(tmp_path / "merged"), architecture, ids), logits(merged, architecture, ids)
    )


def trainer(model: Any, folder: Path, **changes: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=8,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **changes,
    )
    window = tokens("llama", 1, 16)[0]
    return Trainer(model=model, args=arguments, train_dataset=16 * [{"input_ids": window, "labels": window}])


CONFIGS: dict[str, Any] = {
    "peft": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=SAVED),
    "lora": lambda: PosencLoraConfig(target_modules=["q_proj", "v_proj"]),
    "scheme": lambda: PosencLoraConfig(target_modules=[]),
}


@pytest.mark.parametrize("config", list(CONFIGS))
def test_a_plain_trainer_adapts_and_resumes(config: str, tmp_path: Path) -> None:
    def start() -> Any:
        torch.manual_seed(0)
        return get_peft_model(hf_posenc.patch(stock("llama"), "kerple"), CONFIGS[config]())

    run = trainer(start(), tmp_path / "a")
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    moved = {name for name, p in run.model.named_parameters() if not torch.equal(p, before[name])}
    assert {name for name in moved if "hf_posenc" in name} == {
        name for name in new_parameters(run.model) if ".modules_to_save." in name
    }
    assert all("hf_posenc" in name or "lora_" in name for name in moved)
    assert any("lora_" in name for name in moved) == (config != "scheme")

    again = trainer(start(), tmp_path / "b")
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    for (name, one), other in zip(run.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    # What it saved is an adapter.
    ids = tokens("llama", 2, 15)
    base = hf_posenc.patch(stock("llama"), "kerple") if config == "peft" else stock("llama")
    loaded = PeftModel.from_pretrained(base, tmp_path / "a" / "checkpoint-8").eval()
    assert torch.equal(logits(loaded, "llama", ids), logits(run.model.eval(), "llama", ids))


# -- the adapters of recipes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_adapter_of_a_recipe(architecture: str) -> None:
    def base() -> Any:
        return hf_posenc.patch(stock(architecture), "kerple")

    model = base()
    assert attach(model, Adapter()) is model
    lora = attach(model, Adapter(kind="lora", rank=3, alpha=6.0, dropout=0.5))
    config = lora.peft_config["default"]
    assert isinstance(config, PosencLoraConfig)
    layers = [module for module in lora.modules() if hasattr(module, "lora_A")]
    assert layers
    for layer in layers:
        assert (layer.r["default"], layer.scaling["default"], layer.lora_dropout["default"].p) == (3, 2.0, 0.5)
    assert type(lora).__name__ == ("PeftModelForSeq2SeqLM" if architecture == "t5" else "PeftModelForCausalLM")
    alone = attach(base(), Adapter(kind="scheme"))
    assert all("hf_posenc" in name for name, p in alone.named_parameters() if p.requires_grad)
    control = attach(stock(architecture), Adapter(kind="lora", targets=TARGETS[architecture]))
    assert type(control.peft_config["default"]) is LoraConfig


def test_adapters_that_a_recipe_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotPatchedError, match="no scheme to carry"):
        attach(stock("llama"), Adapter(kind="scheme"))
    with pytest.raises(OptionError, match="'alibi' has no parameters"):
        attach(hf_posenc.patch(stock("llama"), "alibi"), Adapter(kind="scheme"))
    assert quantization(Adapter(kind="lora")) is None
    with pytest.raises(RecipeError, match="4 bits cannot be trained"):
        quantization(Adapter(four_bit=True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install bitsandbytes"):
        quantization(Adapter(kind="lora", four_bit=True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    found = quantization(Adapter(kind="scheme", four_bit=True), precision="bfloat16")
    assert found is not None
    assert (found.load_in_4bit, found.bnb_4bit_quant_type) == (True, "nf4")
    assert found.bnb_4bit_compute_dtype == torch.bfloat16
