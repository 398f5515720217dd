"""Adapters that carry their scheme, with LoRA and without: onto stock models, in fresh processes, merged, and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, DIRECTORIES, auto, inputs, logits, loss, new_parameters, stacks_for, stock, tokens
from peft import AutoPeftModel, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

import hf_posenc
from hf_posenc import NotPatchedError, OptionError, PosencLoraConfig
from hf_posenc.recipes.training.distillation import Teacher
from hf_posenc.recipes.training.handover import Handover

# PEFT 0.21 asks transformers 5.23 for a name that is deprecated there.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "t5": ["q", "v"]}
CASES = [(architecture, name) for architecture in ARCHITECTURES for name in hf_posenc.schemes()]


def adapted(architecture: str, scheme: str, *, scheme_only: bool = False, **options: Any) -> PeftModel:
    """A converted model with an adapter, trained for two steps."""
    torch.manual_seed(4)
    base = hf_posenc.patch(stock(architecture), scheme, **{**stacks_for(architecture, scheme), **options})
    return trained(base, architecture, scheme_only=scheme_only)


def trained(base: Any, architecture: str, *, scheme_only: bool) -> PeftModel:
    targets = [] if scheme_only else TARGETS[architecture]
    model = get_peft_model(base, PosencLoraConfig(target_modules=targets, fan_in_fan_out=architecture == "gpt2"))
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
    hf_posenc.verify(model)
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


@pytest.mark.parametrize(
    ("extra", "scheme_only"),
    [("import hf_posenc", False), ("import peft, hf_posenc", True), ("", True)],
)
def test_fresh_process(extra: str, scheme_only: bool, tmp_path: Path) -> None:
    model = adapted("llama", "kerple", scheme_only=scheme_only)
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


# -- without LoRA ------------------------------------------------------------------------------------------------------

# Schemes of layers, shared ones on the body, ones that read the queries; on both stacks of T5.
ALONE = [
    ("llama", "fire", {}),
    ("llama", "fire", {"shared": True}),
    ("gpt2", "t5", {}),
    ("t5", "kerple", {}),
    ("llama", "cope", {"layers": "every:2"}),
]


@pytest.mark.parametrize(("architecture", "scheme", "options"), ALONE)
def test_the_scheme_alone(architecture: str, scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
    ids = tokens(architecture, 2, 15)
    native = logits(stock(architecture), architecture, ids)
    model = adapted(architecture, scheme, scheme_only=True, **options)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name in new_parameters(model) if ".modules_to_save.default." in name
    }
    assert torch.equal(Teacher.within(model)(inputs(architecture, ids)).logits, native)
    after = logits(model, architecture, ids)
    with model.disable_adapter():
        assert not torch.equal(logits(model, architecture, ids), after)
    model.save_pretrained(tmp_path)
    own = [name for name in model.state_dict() if ".modules_to_save.default." in name]  # and buffers
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == len(own)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == []

    loaded = PeftModel.from_pretrained(stock(architecture), tmp_path).eval()
    assert torch.equal(logits(loaded, architecture, ids), after)
    merged = loaded.merge_and_unload()
    assert torch.equal(logits(merged, architecture, ids), after)
    merged.save_pretrained(tmp_path / "merged")
    again = type(merged).from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again, architecture, ids), after)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [{}, {"shared": True}])
def test_gradient_checkpointing_changes_no_gradient(reentrant: bool, options: dict[str, Any]) -> None:
    model = adapted("llama", "fire", scheme_only=True, **options).train()
    ids = tokens("llama", 2, 15)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        loss(model, "llama", ids).backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    wanted = gradients()
    base = model.base_model.model
    # Its name from transformers 5.23 on, and before.
    getattr(base, "activation_checkpointing_enable", base.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for got, want in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_several_adapters_on_one_base(tmp_path: Path) -> None:
    ids = tokens("llama", 2, 15)
    model = adapted("llama", "fire", scheme_only=True)
    first = logits(model, "llama", ids)
    model.add_adapter("second", PosencLoraConfig(target_modules=["q_proj"]))
    assert torch.equal(logits(model, "llama", ids), first)
    model.set_adapter("second")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".second." in name:
                parameter.add_(0.1)
    second = logits(model, "llama", ids)
    assert not torch.equal(second, first)
    model.set_adapter("default")
    assert torch.equal(logits(model, "llama", ids), first)
    model.save_pretrained(tmp_path)

    loaded = PeftModel.from_pretrained(stock("llama"), tmp_path / "second", adapter_name="second").eval()
    loaded.load_adapter(tmp_path, "default")
    assert torch.equal(logits(loaded, "llama", ids), second)
    loaded.set_adapter("default")
    assert torch.equal(logits(loaded, "llama", ids), first)
    loaded.set_adapter("second")
    loaded.delete_adapter("default")
    torch.testing.assert_close(logits(loaded.merge_and_unload(), "llama", ids), second, atol=1e-4, rtol=1e-4)


def test_adapters_on_one_base_have_the_same_schemes(tmp_path: Path) -> None:
    adapted("llama", "kerple").save_pretrained(tmp_path)
    model = adapted("llama", "fire")
    with pytest.raises(OptionError, match="trained with the schemes 'kerple', and the model has 'fire'"):
        model.load_adapter(tmp_path, "second")
    assert list(model.peft_config) == ["default"]


@pytest.mark.parametrize("scheme", ["alibi", "nope"])
def test_a_scheme_without_weights_needs_lora(scheme: str) -> None:
    base = hf_posenc.patch(stock("llama"), scheme)
    with pytest.raises(OptionError, match=f"'{scheme}' has no parameters"):
        get_peft_model(base, PosencLoraConfig(target_modules=[]))
    get_peft_model(base, PosencLoraConfig(target_modules=["q_proj"]))


# -- handing over ------------------------------------------------------------------------------------------------------


def handed_over(folder: Path, *, scheme_only: bool, until: int) -> PeftModel:
    """A model under an adapter after `until` of 6 steps of which the first 4 hand over."""
    torch.manual_seed(0)
    base = hf_posenc.patch(stock("llama"), "kerple", native="keep", gate=False)
    model = get_peft_model(base, PosencLoraConfig(target_modules=[] if scheme_only else ["q_proj"]))
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=6,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=until,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens("llama", 16, 12)]
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Handover(4 / 6)]).train()
    return model.eval()


@pytest.mark.parametrize("scheme_only", [False, True])
def test_an_adapter_of_a_finished_handover_is_without_the_native_encoding(scheme_only: bool, tmp_path: Path) -> None:
    ids = tokens("llama", 2, 15)
    model = handed_over(tmp_path, scheme_only=scheme_only, until=6)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(stock("llama"), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded, "llama", ids), logits(model, "llama", ids))
    posenc = loaded.base_model.model.config.posenc
    assert posenc["groups"][0]["native"] == "remove"
    assert "strengths" not in posenc
    assert model.peft_config["default"].posenc == posenc
    hf_posenc.verify(loaded.merge_and_unload())


def test_an_adapter_from_the_middle_of_a_handover_has_its_strengths(tmp_path: Path) -> None:
    handed_over(tmp_path, scheme_only=False, until=3)
    middle = tmp_path / "run" / "checkpoint-3"
    strengths = {"native": 0.5, "scheme": 0.5}
    assert json.loads((middle / "adapter_config.json").read_text())["posenc"]["strengths"] == pytest.approx(strengths)
    loaded = PeftModel.from_pretrained(stock("llama"), middle).eval()
    assert loaded.base_model.model.config.posenc["strengths"] == pytest.approx(strengths)
    half = logits(loaded, "llama", tokens("llama", 2, 15))
    hf_posenc.set_strength(loaded.base_model.model, native=0.4, scheme=0.6)
    assert not torch.equal(logits(loaded, "llama", tokens("llama", 2, 15)), half)

    fresh = hf_posenc.patch(stock("llama"), "kerple", native="keep", gate=False)
    with pytest.raises(OptionError, match="trained with the strengths"):
        PeftModel.from_pretrained(fresh, middle)
    hf_posenc.set_strength(fresh, **loaded_strengths(middle))
    assert torch.equal(logits(PeftModel.from_pretrained(fresh, middle).eval(), "llama", tokens("llama", 2, 15)), half)


def loaded_strengths(folder: Path) -> dict[str, float]:
    strengths: dict[str, float] = json.loads((folder / "adapter_config.json").read_text())["posenc"]["strengths"]
    return strengths


# -- other ways to load ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "t5"])
@pytest.mark.parametrize("scheme_only", [False, True])
def test_auto_classes_load_an_adapter(architecture: str, scheme_only: bool, tmp_path: Path) -> None:
    ids = tokens(architecture, 2, 15)
    base = hf_posenc.patch(auto(architecture).from_pretrained(DIRECTORIES[architecture]), "kerple")
    model = trained(base, architecture, scheme_only=scheme_only)
    model.save_pretrained(tmp_path)
    for loaded in (auto(architecture).from_pretrained(tmp_path), AutoPeftModel.from_pretrained(tmp_path)):
        assert torch.equal(logits(loaded.eval(), architecture, ids), logits(model, architecture, ids))
