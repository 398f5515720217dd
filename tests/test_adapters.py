"""Adapters that carry their scheme, with LoRA and without: onto stock models, in fresh processes, merged, refused."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import edits
from grid import FIRSTS
from models import DIRECTORIES, auto, in_turn, inputs, logits, loss, new_parameters, stacks_for, stock, tokens
from peft import AutoPeftModel, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_peft import trainer

import hf_posenc
from hf_posenc import CheckpointError, OptionError, PosencLoraConfig
from hf_posenc.patches import adapter_files
from hf_posenc.recipes.training.callbacks import Handover
from hf_posenc.recipes.training.distillation import Teacher

TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "t5": ["q", "v"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter, which no test changes."""
    folder = tmp_path_factory.mktemp("saved")
    adapted("llama", "fire").save_pretrained(folder)
    return folder


# A scheme for each set of seams with LoRA. Without it: those of layers, shared on the body, or that read the queries.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((architecture, scheme, {}) for architecture, scheme in in_turn(sorted(FIRSTS))),
    ("llama", "fire", {"scheme_only": True, "shared": True}),
    ("gpt2", "t5", {"scheme_only": True}),
    ("t5", "kerple", {"scheme_only": True}),
    ("llama", "cope", {"scheme_only": True, "layers": "every:2"}),
]


def adapted(architecture: str, scheme: str, *, scheme_only: bool = False, **options: Any) -> PeftModel:
    """A converted model with an adapter, trained for two steps."""
    torch.manual_seed(4)
    base = hf_posenc.patch(stock(architecture), scheme, **{**stacks_for(architecture, scheme), **options})
    return trained(base, architecture, scheme_only=scheme_only)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the `adapter_config.json` of a saved adapter."""
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def state(model: Any) -> tuple[Any, ...]:
    """All of a model that a failed call must leave alone."""
    modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return modules, trained, type(model.config), model.config.to_dict()


def unchanged(model: Any, call: Callable[[], Any], error: Any, match: str) -> None:
    """Expect an error after which a model is as it was."""
    before, weights = state(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(error, match=match):
        call()
    assert state(model) == before
    after = model.state_dict()
    assert weights.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights.items())


def refused(model: Any, folder: Path, match: str) -> None:
    """Expect that PEFT does not load an adapter, and that the model is as it was."""
    unchanged(model, lambda: PeftModel.from_pretrained(model, folder), CheckpointError, match)
    hf_posenc.patch(model, "nope")


def trained(base: Any, architecture: str, *, scheme_only: bool) -> PeftModel:
    targets = [] if scheme_only else TARGETS[architecture]
    model = get_peft_model(base, PosencLoraConfig(target_modules=targets, fan_in_fan_out=architecture == "gpt2"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        model.zero_grad()
        loss(model, architecture, tokens(architecture, 2, 19, seed=step)).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize(("architecture", "scheme", "options"), CASES)
def test_an_adapter_converts_the_stock_model_it_is_loaded_onto(
    architecture: str, scheme: str, options: dict[str, Any], tmp_path: Path
) -> None:
    ids, scheme_only = tokens(architecture, 2, 15), options.get("scheme_only", False)
    model = adapted(architecture, scheme, **options)
    hf_posenc.verify(model)
    after = logits(model, architecture, ids)
    own = [name for name in model.state_dict() if "hf_posenc" in name and ".modules_to_save." in name]  # and buffers
    if scheme_only:
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained == {name for name in new_parameters(model) if ".modules_to_save.default." in name} <= set(own)
        native = logits(stock(architecture), architecture, ids)
        assert torch.equal(Teacher.within(model)(inputs(architecture, ids)).logits, native)
    with model.disable_adapter():
        before = logits(model, architecture, ids)
    assert not torch.equal(before, after)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len([name for name in saved if scheme_only or "hf_posenc" in name]) == len(own)

    loaded = PeftModel.from_pretrained(stock(architecture), tmp_path, low_cpu_mem_usage=scheme_only).eval()
    assert torch.equal(logits(loaded, architecture, ids), after)
    assert loaded.base_model.model.config.posenc == model.base_model.model.config.posenc
    merged, tolerance = loaded.merge_and_unload(), 0 if scheme_only else 1e-4
    torch.testing.assert_close(logits(merged, architecture, ids), after, atol=tolerance, rtol=tolerance)
    merged.save_pretrained(tmp_path / "merged")
    again = type(merged).from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again, architecture, ids), logits(merged, architecture, ids))


@pytest.mark.filterwarnings("ignore:Adapter default was active which is now deleted:UserWarning")
@pytest.mark.parametrize(
    ("architecture", "scheme", "options"),
    [case if number % 5 == 4 else pytest.param(*case, marks=pytest.mark.grid) for number, case in enumerate(CASES)],
)
def test_a_stock_base_stays_the_base(architecture: str, scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
    def off(ids: torch.Tensor) -> torch.Tensor:
        with loaded.disable_adapter():
            return logits(loaded, architecture, ids)

    ids = tokens(architecture, 2, 15)
    base, plain = stock(architecture), {"target_modules": TARGETS[architecture], "init_lora_weights": False}
    base.config._name_or_path = base.name_or_path = str(DIRECTORIES[architecture])
    before, wanted = state(base), logits(base, architecture, ids)
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    around = get_peft_model(stock(architecture), LoraConfig(fan_in_fan_out=architecture == "gpt2", **plain)).eval()
    around.save_pretrained(tmp_path / "plain")
    without = logits(around, architecture, ids)
    model = adapted(architecture, scheme, **options)
    model.save_pretrained(tmp_path / "scheme")
    after = logits(model, architecture, ids)

    loaded = PeftModel.from_pretrained(base, tmp_path / "scheme").eval()
    assert torch.equal(off(ids), wanted)
    assert torch.equal(logits(loaded, architecture, ids), after)
    # A plain adapter is one of the stock model, after the other and before it, and is saved as such.
    loaded.load_adapter(tmp_path / "plain", "plain")
    assert torch.equal(logits(loaded, architecture, ids), after)
    loaded.set_adapter("plain")
    assert torch.equal(logits(loaded, architecture, ids), without)
    assert torch.equal(off(ids), wanted)
    assert torch.equal(logits(loaded, architecture, ids), without)
    loaded.save_pretrained(tmp_path / "again", selected_adapters=["plain"])
    again = PeftModel.from_pretrained(stock(architecture), tmp_path / "again" / "plain").eval()
    assert torch.equal(logits(again, architecture, ids), without)
    other = copy.deepcopy(loaded)
    torch.testing.assert_close(logits(other.merge_and_unload(), architecture, ids), without, atol=1e-4, rtol=1e-4)
    loaded.set_adapter("default")
    assert torch.equal(logits(loaded, architecture, ids), after)
    assert torch.equal(off(ids), wanted)
    other = copy.deepcopy(loaded)
    other.delete_adapter("default")
    assert torch.equal(logits(other, architecture, ids), without)
    merged = copy.deepcopy(loaded).merge_and_unload()
    torch.testing.assert_close(logits(merged, architecture, ids), after, atol=1e-4, rtol=1e-4)
    loaded.set_adapter("plain")
    unloaded = loaded.unload().requires_grad_(True)
    found = unloaded.state_dict()
    assert unloaded is base
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert torch.equal(logits(unloaded, architecture, ids), wanted)
    assert [kind for _, kind, _ in state(unloaded)[0]] == [kind for _, kind, _ in before[0]]
    assert unloaded.config.to_dict() == before[3]


def test_an_adapter_fits_a_model_converted_in_the_same_way_only(saved: Path, working: PeftModel) -> None:
    ids = tokens("llama", 2, 15)
    base = hf_posenc.patch(stock("llama"), "fire")
    before = logits(base, "llama", ids)
    same = PeftModel.from_pretrained(base, saved).eval()
    assert torch.equal(logits(same, "llama", ids), logits(working, "llama", ids))
    with same.disable_adapter():  # What the adapter was trained over does not replace the schemes of a base.
        assert torch.equal(logits(same, "llama", ids), before)
    for scheme, options in (("kerple", {}), ("fire", {"width": 8}), ("fire", {"layers": [0]})):
        other = hf_posenc.patch(stock("llama"), scheme, **options)
        with pytest.raises(OptionError, match="trained with the schemes 'fire'"):
            PeftModel.from_pretrained(other, saved)
    # So does a second adapter on one base.
    model = adapted("llama", "kerple")
    with pytest.raises(OptionError, match="trained with the schemes 'fire', and the model has 'kerple'"):
        model.load_adapter(saved, "second")
    assert list(model.peft_config) == ["default"]


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
    model.add_adapter("plain", LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("plain")
    plain = logits(model, "llama", ids)
    model.set_adapter("default")
    assert torch.equal(logits(model, "llama", ids), first)
    model.save_pretrained(tmp_path)
    torch.manual_seed(4)  # as in `adapted`
    base = hf_posenc.patch(stock("llama"), "fire")
    # It has no weights of schemes, nor those that the others began with.
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "plain").eval(), "llama", ids), plain)

    loaded = PeftModel.from_pretrained(stock("llama"), tmp_path / "second", adapter_name="second").eval()
    loaded.load_adapter(tmp_path, "default")
    assert torch.equal(logits(loaded, "llama", ids), second)
    loaded.set_adapter("default")
    assert torch.equal(logits(loaded, "llama", ids), first)
    loaded.set_adapter("second")
    loaded.delete_adapter("default")
    torch.testing.assert_close(logits(loaded.merge_and_unload(), "llama", ids), second, atol=1e-4, rtol=1e-4)


# -- handing over ------------------------------------------------------------------------------------------------------


def handed_over(folder: Path, *, scheme_only: bool, until: int) -> PeftModel:
    """A model under an adapter after `until` of 6 steps of which the first 4 hand over."""
    torch.manual_seed(0)
    base = hf_posenc.patch(stock("llama"), "kerple", native="keep", gate=False)
    model = get_peft_model(base, PosencLoraConfig(target_modules=[] if scheme_only else ["q_proj"]))
    trainer(model, folder / "run", max_steps=6, save_steps=until, callbacks=[Handover(4 / 6)]).train()
    return model.eval()


@pytest.mark.parametrize("scheme_only", [False, True])
def test_an_adapter_of_a_finished_handover_is_without_the_native_encoding(scheme_only: bool, tmp_path: Path) -> None:
    ids = tokens("llama", 2, 15)
    model = handed_over(tmp_path, scheme_only=scheme_only, until=6)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(stock("llama"), tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded, "llama", ids), logits(model, "llama", ids))
    posenc = loaded.base_model.model.config.posenc
    assert (posenc["groups"][0]["native"], "strengths" in posenc) == ("remove", False)
    assert model.peft_config["default"].posenc == posenc
    hf_posenc.verify(loaded.merge_and_unload())


def test_an_adapter_from_the_middle_of_a_handover_has_its_strengths(tmp_path: Path) -> None:
    ids = tokens("llama", 2, 15)
    handed_over(tmp_path, scheme_only=False, until=3)
    middle = tmp_path / "run" / "checkpoint-3"
    strengths = json.loads((middle / "adapter_config.json").read_text())["posenc"]["strengths"]
    assert strengths == pytest.approx({"native": 0.5, "scheme": 0.5})
    loaded = PeftModel.from_pretrained(stock("llama"), middle).eval()
    assert loaded.base_model.model.config.posenc["strengths"] == strengths
    half = logits(loaded, "llama", ids)
    fresh = hf_posenc.patch(stock("llama"), "kerple", native="keep", gate=False)
    with pytest.raises(OptionError, match=r"trained with .*set_strength"):
        PeftModel.from_pretrained(fresh, middle)
    hf_posenc.set_strength(fresh, **strengths)
    assert torch.equal(logits(PeftModel.from_pretrained(fresh, middle).eval(), "llama", ids), half)


# -- other ways to load ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "scheme_only"), [("llama", False), ("t5", True)])
def test_auto_classes_load_an_adapter(architecture: str, scheme_only: bool, tmp_path: Path) -> None:
    ids = tokens(architecture, 2, 15)
    base = hf_posenc.patch(auto(architecture).from_pretrained(DIRECTORIES[architecture]), "kerple")
    model = trained(base, architecture, scheme_only=scheme_only)
    model.save_pretrained(tmp_path)
    loaded = AutoPeftModel.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded, architecture, ids), logits(model, architecture, ids))
    with pytest.raises(CheckpointError, match=r"PeftModel.from_pretrained"):
        auto(architecture).from_pretrained(tmp_path)


# -- right or not at all -----------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the weights of a saved adapter, and leave what they are bound to."""
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    change(weights)
    save_file(weights, file, metadata)


def without(part: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda weights: [weights.pop(key) for key in list(weights) if part in key])


def retyped(part: str, dtype: torch.dtype) -> Callable[[Path], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        key = next(key for key in weights if part in key)
        weights[key] = weights[key].to(dtype)

    return lambda folder: rewrite(folder, change)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without_metadata(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file), file, {"format": "pt"})


def unbound(folder: Path) -> None:
    edit(folder, lambda config: config.pop("base_weights"))
    without_metadata(folder)


def unbased(folder: Path) -> None:
    edit(folder, lambda config: config.pop("base_weights"))
    adapter_files.bind(folder)


def misshapen(part: str) -> Callable[[Path], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        key = next(key for key in weights if part in key)
        weights[key] = torch.cat([weights[key], weights[key]])

    return lambda folder: rewrite(folder, change)


# What is done to the folder of an adapter, and what the error then names.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one tensor of LoRA gone": (
        without("layers.1.self_attn.q_proj.lora_A"),
        r"adapter_model.safetensors misses .*model.layers.1.self_attn.q_proj.lora_A.weight.* save the adapter again",
    ),
    "one tensor of a scheme gone": (
        without("layers.1.self_attn.hf_posenc.c"),
        "misses .*layers.1.self_attn.hf_posenc.c",
    ),
    "LoRA misshapen": (misshapen("lora_B"), r"has misshapen .*lora_B.weight \(\[\d+, 8\], expected \[\d+, 8\]\)"),
    "scheme misshapen": (misshapen("hf_posenc.mlp"), "has misshapen .*hf_posenc.mlp"),
    **{
        f"{part} of {dtype}": (retyped(part, dtype), rf"misshapen .*{part}.* expected torch.float32\)")
        for part, dtype in (("lora_B", torch.int32), ("hf_posenc", torch.bool), ("lora_A", torch.float8_e4m3fn))
    },
    "another width": (
        lambda folder: (edit(folder, wider), adapter_files.bind(folder)),
        "has misshapen .*hf_posenc.mlp",
    ),
    "cut short": (cut, "adapter_model.safetensors cannot be read .*truncated.* save it again"),
    "pickled": (pickled, "adapter_model.bin is pickled.* save the adapter again"),
    "unknown scheme": (lambda folder: (edit(folder, unknown), adapter_files.bind(folder)), "'unknown'"),
    "no digests": (unbound, "has no digest of its adapter_config.json .* save the adapter again"),
    "no digest in the weights": (without_metadata, "has no digest of its adapter_config.json"),
    "no digest of the base": (unbased, "has no fingerprint of its base"),
    "another config": (lambda folder: edit(folder, wider), "adapter_config.json is not the one .* Restore both"),
}


def wider(config: dict[str, Any]) -> None:
    config["posenc"]["groups"][0]["stacks"]["decoder"]["options"]["width"] = 16


def unknown(config: dict[str, Any]) -> None:
    config["posenc"]["groups"][0]["scheme"] = "unknown"


@pytest.fixture(scope="module")
def working() -> PeftModel:
    """The model with that adapter, which no test changes."""
    return adapted("llama", "fire")


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_adapter_leaves_the_model_as_it_was(
    damage: str, saved: Path, working: PeftModel, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(saved, folder)
    spoil, match = DAMAGES[damage]
    spoil(folder)
    refused(stock("llama"), folder, match)
    # A second adapter next to one that works.
    unchanged(working, lambda: working.load_adapter(folder, "second"), (CheckpointError, OptionError), "adapter")
    assert list(working.peft_config) == ["default"]


def test_an_adapter_knows_its_base(saved: Path) -> None:
    ids = tokens("llama", 2, 15)
    wanted = logits(PeftModel.from_pretrained(stock("llama"), saved).eval(), "llama", ids)
    for dtype in (torch.bfloat16, torch.float16):
        PeftModel.from_pretrained(stock("llama").to(dtype), saved)
    for name, part in (("layers.1.mlp.up_proj", "matrices"), ("model.norm", "rest"), ("embed_tokens", "rest")):
        other = stock("llama")
        with torch.no_grad():
            next(module for key, module in other.named_modules() if key.endswith(name)).weight.mul_(1.01)
        assert not torch.equal(logits(other, "llama", ids), logits(stock("llama"), "llama", ids))
        differs = rf"other weights than .* LlamaForCausalLM \({part} differ\).*any_base=True"
        refused(copy.deepcopy(other), saved, differs)
        accepted = PeftModel.from_pretrained(other, saved, any_base=True).eval()
        assert not torch.equal(logits(accepted, "llama", ids), wanted)
        accepted.save_pretrained(saved / name)
        PeftModel.from_pretrained(accepted.unload(), saved / name)  # it is its base from now on


NAMES = {
    "scheme": ["alibi", "kerple"],
    "native": ["keep"],
    "peft_type": ["LORA", "HF_POSENC_IA3", "IA3"],
    "bias": ["all"],
}


def others(key: Any, value: Any) -> list[Any]:
    """Other values for an entry of `adapter_config.json`, of its type and of none."""
    found: dict[type, Callable[[Any], list[Any]]] = {
        bool: lambda old: [not old],
        int: lambda old: [old + 1, old / 2, 0],
        float: lambda old: [old + 1, old / 2, 0],
        str: lambda old: [*NAMES.get(key, [f"{old}x"]), ""],
        list: lambda old: [old[:-1], [], None],
        dict: lambda old: [{}, [], {f"{name}x": entry for name, entry in old.items()}],
        type(None): lambda old: [True, 1, "q_proj", ["v_proj"]],
    }
    return [other for other in found[type(value)](value) if other != value]


# PEFT warns of entries that it does not know.
@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments:UserWarning")
def test_no_edit_of_the_config_loads_with_other_logits(saved: Path, working: PeftModel, tmp_path: Path) -> None:
    ids = tokens("llama", 2, 15)
    wanted = logits(working, "llama", ids)
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    names = "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping", "posenc', 'plugin_"
    free = tuple(f"('{name}" for name in names)
    base, count = stock("llama"), 0
    before = state(base)
    for what, changed in [*edits(config, others), ("any_base", {**config, "any_base": True})]:
        file.write_text(json.dumps(changed))
        try:
            loaded = PeftModel.from_pretrained(base, tmp_path).eval()
        except (hf_posenc.PosencError, ValueError, KeyError, TypeError):
            count += 1
            assert state(base) == before, what
        else:
            assert what.startswith(free), what
            assert torch.equal(logits(loaded, "llama", ids), wanted), what
            base = stock("llama")
    assert count > 150


def test_an_adapter_of_the_first_version_loads(saved: Path, working: PeftModel, tmp_path: Path) -> None:
    ids = tokens("llama", 2, 15)
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)

    def first(config: dict[str, Any]) -> None:
        config["base_weights"] = adapter_files.fingerprint(stock("llama"), ["hf_posenc"], 1)
        del config["base_weights"]["version"]

    edit(tmp_path, first)
    edit(tmp_path, lambda config: config.update(peft_type="HF_POSENC_LORA", task_type="HF_POSENC"))
    # It held what its schemes began with, too.
    prefix = "base_model.model.model.layers.0.self_attn.hf_posenc"
    rewrite(tmp_path, lambda found: found.update({f"{prefix}.original_module.c": found[f"{prefix}.c"] + 1}))
    adapter_files.bind(tmp_path)
    loaded = PeftModel.from_pretrained(stock("llama"), tmp_path).eval()
    assert torch.equal(logits(loaded, "llama", ids), logits(working, "llama", ids))
    other = stock("llama")
    with torch.no_grad():
        other.model.norm.weight.mul_(1.01)
    refused(other, tmp_path, "rest differ")


def test_an_adapter_is_made_and_loaded_by_peft_alone(saved: Path) -> None:
    config = PeftConfig.from_pretrained(saved)
    model, converted = stock("llama"), hf_posenc.patch(stock("llama"), "fire")
    loads = lambda: PeftModel.from_pretrained(model, saved, config=config), lambda: model.load_adapter(saved)
    for load in loads:
        unchanged(model, load, CheckpointError, r"PeftModel.from_pretrained.* leave out config=")
    for call in (lambda: converted.load_adapter(saved), lambda: converted.add_adapter(PosencLoraConfig())):
        unchanged(converted, call, OptionError, r"Use peft.get_peft_model")
