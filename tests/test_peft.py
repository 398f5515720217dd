"""Plain PEFT on a patched model, by hand and in a plain `Trainer`; and the adapters of recipes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from grid import once
from models import ARCHITECTURES, DIRECTORIES, arguments, logits, loss, moved, new_parameters, stock, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils.hotswap import hotswap_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer

import hf_posenc
from hf_posenc import CheckpointError, NotPatchedError, OptionError, PosencLoraConfig, RecipeError
from hf_posenc.patches import locks
from hf_posenc.recipes.schema.recipe import Adapter
from hf_posenc.recipes.training.adapter import attach, check_targets, quantization

pytestmark = [
    # What PEFT says of layers that it adapts well.
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]

TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "t5": ["q", "v"]}


def trainer(model: Any, folder: Path, callbacks: Any = None, **changes: Any) -> Trainer:
    settings = {"max_steps": 8, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "steps", "save_steps": 4}
    window = tokens("llama", 1, 16)[0]
    return Trainer(
        model=model,
        args=arguments(folder, **settings | changes),
        train_dataset=16 * [{"input_ids": window, "labels": window}],
        callbacks=callbacks,
    )


CONFIGS: dict[str, Any] = {
    "peft": lambda: LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["hf_posenc", "hf_posenc_shared"]),
    "lora": lambda: PosencLoraConfig(target_modules=["q_proj", "v_proj"]),
    "scheme": lambda: PosencLoraConfig(target_modules=[]),
}


@pytest.mark.parametrize("config", once(CONFIGS))
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


# -- plain LoRA, which carries the schemes -----------------------------------------------------------------------------

TWO: Any = {"target_modules": ["q_proj", "v_proj"]}


def plain(scheme: str = "alibi") -> Any:
    torch.manual_seed(4)
    model = stock("llama")
    model.config._name_or_path = str(DIRECTORIES["llama"])  # the base that adapters name
    return hf_posenc.patch(model, scheme)


LOAD_ALL = """
import sys
import peft
{start}
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
base, ids, *folders = sys.argv[1:]
for folder in folders:
    for load in {ways}:
        try:
            model = load(folder).eval()
        except (KeyError, ValueError) as error:
            print("REFUSED", error)
        else:
            with torch.no_grad():
                save_file({{"logits": model(**load_file(ids), use_cache=False).logits}}, folder + "/out")
"""


@pytest.mark.grid  # it starts processes
def test_adapters_load_in_fresh_processes_and_only_with_this_package(tmp_path: Path) -> None:
    ids, wanted = tokens("llama", 2, 12), {}
    save_file({"input_ids": ids}, tmp_path / "ids")
    stock("llama").save_pretrained(tmp_path / "base")
    for kind, scheme, config in (
        ("LoRA", "alibi", LoraConfig(**TWO)),
        ("DoRA", "alibi", LoraConfig(use_dora=True, **TWO)),
        ("scheme", "kerple", PosencLoraConfig(target_modules=[])),
    ):
        model = moved(get_peft_model(plain(scheme), config), 0.05, only="")
        wanted[tmp_path / kind] = logits(model, "llama", ids)
        for folder in (tmp_path / kind, tmp_path / f"{kind} edited"):
            model.save_pretrained(folder)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "peft_type": "LORA"}))

    def refusals(start: str, ways: str, folders: Any) -> list[str]:
        script = LOAD_ALL.format(start=start, ways=ways)
        places = [str(path) for path in (tmp_path / "base", tmp_path / "ids", *folders)]
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", script, *places], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]

    onto = "lambda folder: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)"
    # Elsewhere hf_posenc is imported first.
    assert refusals("import hf_posenc", f"[{onto}]", wanted) == []
    for folder, expected in wanted.items():
        assert torch.equal(load_file(folder / "out")["logits"], expected), folder
    both = [*wanted, *(folder.with_name(f"{folder.name} edited") for folder in wanted)]
    found = refusals("", f"[AutoModelForCausalLM.from_pretrained, {onto}]", both)
    assert len(found) == 2 * len(both)
    assert all("import hf_posenc" in line for line in found)


@pytest.mark.parametrize("dora", [False, True])
def test_plain_lora_carries_its_schemes(dora: bool, tmp_path: Path) -> None:
    ids, config = tokens("llama", 2, 12), LoraConfig(use_dora=dora, **TWO)
    model = moved(get_peft_model(plain(), config), 0.05, only="")
    wanted = logits(model, "llama", ids)
    model.save_pretrained(tmp_path)
    other = plain("nope")
    before = logits(other, "llama", ids)
    with pytest.raises(OptionError, match="trained with the schemes 'alibi', and the model has 'nope'"):
        PeftModel.from_pretrained(other, tmp_path)
    assert torch.equal(logits(other, "llama", ids), before)
    # The scheme has no weights, so a stock model can be converted.
    for base in (stock("llama"), plain()):
        assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path).eval(), "llama", ids), wanted)
    # What was given makes adapters of other schemes, and is PEFT's own, which makes an ordinary one of a stock model.
    for base, folder in ((plain("nope"), tmp_path / "nope"), (stock("llama"), tmp_path / "stock")):
        config.base_model_name_or_path = None
        again = get_peft_model(base, config)
        again.save_pretrained(folder)
    PeftModel.from_pretrained(plain("nope"), tmp_path / "nope")
    assert type(config) is LoraConfig
    assert json.loads((tmp_path / "stock" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert type(again.base_model) is peft.LoraModel
    PeftModel.from_pretrained(stock("llama"), tmp_path / "stock")


def test_plain_lora_on_a_scheme_with_weights_needs_these_weights(tmp_path: Path) -> None:
    ids = tokens("llama", 2, 12)
    model = moved(get_peft_model(plain("fire"), LoraConfig(**TWO)), 0.05, only="")
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(plain("fire"), tmp_path).eval()
    assert torch.equal(logits(loaded, "llama", ids), logits(model, "llama", ids))
    base = stock("llama")
    with pytest.raises(OptionError, match="the schemes 'fire', whose weights it does not hold, and the model has none"):
        PeftModel.from_pretrained(base, tmp_path)
    assert type(base).__name__ == "LlamaForCausalLM"
    with pytest.raises(CheckpointError, match=r"other weights .*rest differ"):
        PeftModel.from_pretrained(moved(plain("fire"), only=""), tmp_path)


# -- other kinds, which are PEFT's own ---------------------------------------------------------------------------------

# What the defaults of a kind do not have, or do not fit: sizes for the tiny model.
NEEDED: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 9}, "OFT": {"oft_block_size": 4}, "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4}, "P_TUNING": {"encoder_hidden_size": 8},
    "VBLORA": {"num_vectors": 16, "vector_length": 4, "r": 2},
    "HRA": {"r": 4}, "FOURIERFT": {"n_frequency": 8}, "IA3": {"feedforward_modules": []}, "RANDLORA": {"r": 4},
    "SHIRA": {"r": 2}, "ROAD": {"group_size": 4}, "TRAINABLE_TOKENS": {"token_indices": [1, 2, 30]},
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 2]},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1},
}  # fmt: skip
# Kinds that fill the cache without positions, and are refused; that need other packages or several tasks; and that
# build a smaller model from the config.
LEFT_OUT = {"PREFIX_TUNING", "CARTRIDGE", "ADAMSS", "POLY", "MULTITASK_PROMPT_TUNING", "XLORA", "SHADOW"}
EVERY = [kind.value for kind in peft.PeftType if kind.value not in LEFT_OUT and kind in PEFT_TYPE_TO_CONFIG_MAPPING]
FEW = {"LORA", "IA3", "LN_TUNING", "PROMPT_TUNING", "ADALORA"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.grid) for kind in EVERY]
)
def test_every_kind_trains_and_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    ids, given = tokens("llama", 2, 12), NEEDED.get(kind, {})
    maker: Any = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    known = maker.__dataclass_fields__
    given |= (
        TWO if "target_modules" in known and kind not in ("TRAINABLE_TOKENS", "LN_TUNING", "ADAPTION_PROMPT") else {}
    )
    given |= {"num_virtual_tokens": 3} if "num_virtual_tokens" in known and kind != "CPT" else {}
    model = get_peft_model(plain(), maker(task_type="CAUSAL_LM", **given))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss(model, "llama", tokens("llama", 2, 19)).backward()
    optimizer.step()
    wanted = logits(model.eval(), "llama", ids)
    start = logits(plain(), "llama", ids)
    assert wanted.shape != start.shape or not torch.equal(wanted, start)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(plain(), tmp_path).eval(), "llama", ids), wanted)
    if kind == "LORA":
        return
    # It is PEFT's, without the embeddings, and names no stock model as its base.
    assert type(model.base_model).__module__.startswith("peft.") or model.peft_config["default"].is_prompt_learning
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["base_model_name_or_path"]) == (kind, locks.UNSAVED)
    assert str(DIRECTORIES["llama"]) not in (tmp_path / "README.md").read_text()
    if kind != "TRAINABLE_TOKENS":
        assert not any("embed_tokens" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    with pytest.raises(CheckpointError, match=r"was not saved\. Save it and load the folder"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)


def test_another_kind_goes_onto_a_converted_checkpoint_by_its_name(tmp_path: Path) -> None:
    ids = tokens("llama", 2, 12)
    plain("fire").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = moved(get_peft_model(base, peft.IA3Config(task_type="CAUSAL_LM")), 0.05, only="")
    assert sorted(model.targeted_module_names) == sorted(
        get_peft_model(stock("llama"), peft.IA3Config()).targeted_module_names
    )
    model.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("*.bin"))
    del base
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    frozen = {name: p for name, p in model.named_parameters() if "ia3" not in name}
    loaded.load_state_dict(frozen, strict=False)  # `moved` changed the base as well
    assert torch.equal(logits(loaded, "llama", ids), logits(model, "llama", ids))


def test_adapters_of_another_kind_with_schemes_are_refused(tmp_path: Path) -> None:
    get_peft_model(plain(), peft.IA3Config()).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    config = {**json.loads(file.read_text()), "posenc": {}, "base_weights": {}}
    for kind in (
        "HF_POSENC_IA3",
        "HF_POSENC_IA3: run `import hf_posenc` (pip install hf-posenc) before this adapter is loaded",
    ):
        file.write_text(json.dumps({**config, "peft_type": kind}))
        for base in (stock("llama"), plain()):
            with pytest.raises(CheckpointError, match="adapter of type IA3 with its scheme, and only LoRA has one now"):
                PeftModel.from_pretrained(base, tmp_path)


# -- weights of schemes in adapters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_scheme_weights_that_a_plain_adapter_trains_are_kept(shared: bool, tmp_path: Path) -> None:
    ids = tokens("llama", 2, 12)
    base = hf_posenc.patch(stock("llama"), "fire", shared=shared)
    plain = logits(base, "llama", ids)
    model = get_peft_model(base, LoraConfig(modules_to_save=["hf_posenc"], **TWO))
    torch.testing.assert_close(logits(model, "llama", ids), plain)
    trained = logits(moved(model, 0.05, only=""), "llama", ids)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(stock("llama"), tmp_path).eval()
    assert torch.equal(logits(loaded, "llama", ids), trained)
    torch.testing.assert_close(logits(loaded.merge_and_unload(), "llama", ids), trained, atol=1e-4, rtol=1e-4)


def test_only_an_adapter_of_the_same_scheme_is_swapped_in(tmp_path: Path) -> None:
    for scheme in ("alibi", "nope"):
        get_peft_model(plain(scheme), LoraConfig(init_lora_weights=False, **TWO)).save_pretrained(tmp_path / scheme)
    model = PeftModel.from_pretrained(plain(), tmp_path / "alibi")
    hotswap_adapter(model, str(tmp_path / "alibi"), "default")
    with pytest.raises(ValueError, match="incompatible: for posenc"):
        hotswap_adapter(model, str(tmp_path / "nope"), "default")
    # PEFT swaps no weights of schemes.
    for base in ("fire", "kerple"):
        get_peft_model(plain(base), PosencLoraConfig(init_lora_weights=False, **TWO)).save_pretrained(tmp_path / base)
    model = PeftModel.from_pretrained(stock("llama"), tmp_path / "fire")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for base in ("fire", "kerple"):
        with pytest.raises((KeyError, ValueError)):
            hotswap_adapter(model, str(tmp_path / base), "default")
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# -- the adapters of recipes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_adapter_of_a_recipe(architecture: str) -> None:
    def base() -> Any:
        return hf_posenc.patch(stock(architecture), "kerple")

    model = base()
    assert attach(model, Adapter()) is model
    with pytest.raises(RecipeError, match=r"adapter\.rank is 100000; expected at most"):
        check_targets(model, Adapter(kind="lora", rank=100_000))
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
    for scheme in ("alibi", "nope"):
        with pytest.raises(OptionError, match=f"'{scheme}' has no parameters"):
            attach(hf_posenc.patch(stock("llama"), scheme), Adapter(kind="scheme"))
    assert quantization(Adapter(kind="lora")) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install bitsandbytes"):
        quantization(Adapter(kind="lora", four_bit=True))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    found = quantization(Adapter(kind="scheme", four_bit=True), precision="bfloat16")
    assert found is not None
    assert (found.load_in_4bit, found.bnb_4bit_quant_type) == (True, "nf4")
    assert found.bnb_4bit_compute_dtype == torch.bfloat16
