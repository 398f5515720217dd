"""Converted checkpoints on disk: what goes in comes out, through every class that can load it."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import stacks_for
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5ForQuestionAnswering,
    T5Model,
)

import hf_posenc
from hf_posenc.patches import gpt2 as gpt2_patches
from hf_posenc.patches import llama as llama_patches
from hf_posenc.patches import t5 as t5_patches
from hf_posenc.patches.architecture import architectures
from hf_posenc.scheme import Scheme

IDS = torch.arange(14).view(2, 7)


# -- models ------------------------------------------------------------------------------------------------------------


def config_of(name: str) -> Any:
    """Return a tiny config; `t5_gated` is T5 1.1, with an untied head."""
    if name == "llama":
        shape = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
        return LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    if name == "gpt2":
        shape = {"vocab_size": 48, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
        return GPT2Config(**shape, bos_token_id=0, eos_token_id=0, pad_token_id=0, num_labels=2)
    shape = {"vocab_size": 48, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    if name == "t5_gated":
        shape |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 2}
    return T5Config(**shape, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)


FAMILY = {"llama": "llama", "gpt2": "gpt2", "t5": "t5", "t5_gated": "t5"}
NAMES = list(FAMILY)
GENERATOR: dict[str, Any] = {
    "llama": LlamaForCausalLM,
    "gpt2": GPT2LMHeadModel,
    "t5": T5ForConditionalGeneration,
    "t5_gated": T5ForConditionalGeneration,
}
AUTO_GENERATOR: dict[str, Any] = {
    "llama": AutoModelForCausalLM,
    "gpt2": AutoModelForCausalLM,
    "t5": AutoModelForSeq2SeqLM,
    "t5_gated": AutoModelForSeq2SeqLM,
}


def stock(name: str, kind: Any = None) -> Any:
    torch.manual_seed(0)
    return (kind or GENERATOR[name])(config_of(name)).eval()


def converted(name: str, scheme: str = "fire", **options: Any) -> Any:
    torch.manual_seed(1)
    return hf_posenc.patch(stock(name), scheme, **{**stacks_for(name, scheme), **options})


def outputs(model: Any) -> list[torch.Tensor]:
    """Return every tensor that a forward gives."""
    call = {"input_ids": IDS}
    if isinstance(model, (T5Model, T5ForConditionalGeneration, T5ForQuestionAnswering)):
        call["decoder_input_ids"] = IDS
    if isinstance(model, GPT2DoubleHeadsModel):
        call = {"input_ids": IDS[:, None].repeat(1, 2, 1), "mc_token_ids": torch.tensor([[6, 5], [6, 4]])}
    if isinstance(model, transformers.T5ForSequenceClassification):
        # It reads the hidden state at the end of the sequence.
        call = {"input_ids": torch.cat([IDS[:, :-1] % 40 + 2, torch.ones(2, 1, dtype=torch.long)], dim=1)}
    with torch.no_grad():
        result = model(**call)
    return [value for value in result.values() if isinstance(value, torch.Tensor)]


def same(first: Any, second: Any) -> bool:
    ours, theirs = outputs(first), outputs(second)
    return len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))


def parameters_of_schemes(model: nn.Module | dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = model.state_dict() if isinstance(model, nn.Module) else model
    return {name: value for name, value in state.items() if "hf_posenc" in name}


def stock_models() -> list[tuple[str, Any]]:
    """Return every model class that the package has a twin for, with the name of a config for it."""
    found = []
    for name in NAMES:
        for kind in architectures()[FAMILY[name]].twins:
            if issubclass(kind, transformers.PreTrainedModel) and kind.__name__ != "T5Stack":
                found.append((name, kind))
    return found


STOCK_MODELS = stock_models()


def autos_for(family: str, twin: type) -> list[Any]:
    """Return the `Auto` classes that load a converted checkpoint as this class."""
    found = []
    for name, auto in vars(transformers.models.auto.modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        config_class = next(c for c in architectures()[family].twins.values() if hasattr(c, "model_type"))
        if isinstance(auto, type) and mapping is not None and config_class in mapping and mapping[config_class] is twin:
            found.append(getattr(transformers, name, auto))
    return found


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), STOCK_MODELS, ids=[f"{name}-{kind.__name__}" for name, kind in STOCK_MODELS])
def test_every_head_comes_back_bit_equal_through_every_class(name: str, kind: Any, tmp_path: Path) -> None:
    model = hf_posenc.patch(stock(name, kind), "fire")
    model.save_pretrained(tmp_path)
    twin = type(model)
    assert twin is architectures()[FAMILY[name]].twins[kind]
    loaders = [twin, *autos_for(FAMILY[name], twin)]
    assert len(loaders) > 1 or kind is GPT2DoubleHeadsModel  # transformers has no Auto class for that one.
    for loader in loaders:
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is twin
        assert loaded.config.to_json_string() == AutoConfig.from_pretrained(tmp_path).to_json_string()
        assert loaded.config.posenc == json.loads(json.dumps(model.config.posenc))
        assert same(loaded, model)
        hf_posenc.verify(loaded)


def test_the_auto_classes_of_the_issue_are_among_those_tried() -> None:
    tried = {auto.__name__ for name, kind in STOCK_MODELS for auto in autos_for(FAMILY[name], twin_of(name, kind))}
    assert tried >= {
        "AutoModel",
        "AutoModelForCausalLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
        "AutoModelForQuestionAnswering",
        "AutoModelForTextEncoding",
    }


def twin_of(name: str, kind: type) -> type:
    return architectures()[FAMILY[name]].twins[kind]


SCHEMES = list(hf_posenc.schemes())


@pytest.mark.parametrize("native", ["remove", "keep"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_every_scheme_comes_back_bit_equal(name: str, scheme: str, native: Any, tmp_path: Path) -> None:
    model = converted(name, scheme, native=native)
    # Away from its start, so that a fresh value would show.
    for parameter in parameters(model):
        nn.init.uniform_(parameter, 0.1, 0.9)
    model.save_pretrained(tmp_path)
    loaded = AUTO_GENERATOR[name].from_pretrained(tmp_path)
    assert same(loaded, model)
    assert not same(loaded, stock(name)) or (scheme, native) == ("nope", "keep") or (name, scheme) == ("llama", "rope")


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for module in model.modules() if isinstance(module, Scheme) for parameter in module.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_sharded(name: str, tmp_path: Path) -> None:
    model = converted(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert same(AUTO_GENERATOR[name].from_pretrained(tmp_path), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scheme", ["fire", "learned"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_leaves_schemes_in_float32(name: str, scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = converted(name, scheme)
    model.save_pretrained(tmp_path / "full")
    loaded = AUTO_GENERATOR[name].from_pretrained(tmp_path / "full", dtype=dtype)
    half = model.to(dtype)
    half.save_pretrained(tmp_path / "half")
    for other in (
        half,
        loaded,
        *(AUTO_GENERATOR[name].from_pretrained(tmp_path / "half", dtype=d) for d in (dtype, "auto")),
    ):
        assert next(other.parameters()).dtype == dtype
        schemes = parameters_of_schemes(other)
        assert schemes
        for key, value in schemes.items():
            assert value.dtype == torch.float32, key
            assert torch.equal(value, parameters_of_schemes(model)[key]), key
    with safe_open(tmp_path / "half" / "model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            assert (file.get_slice(key).get_dtype() == "F32") is ("hf_posenc" in key), key
    # In float16, transformers itself loads a part of T5 in float32.
    again = AUTO_GENERATOR[name].from_pretrained(tmp_path / "half", dtype=dtype).to(dtype)
    assert same(again, half)


@pytest.mark.parametrize("name", ["t5", "t5_gated"])
@pytest.mark.parametrize("scheme", ["fire", "kerple"])
def test_the_encoder_alone_of_a_converted_t5(name: str, scheme: str, tmp_path: Path) -> None:
    model = converted(name, scheme)
    model.save_pretrained(tmp_path)
    for loader in (AutoModelForTextEncoding, t5_patches.PosencT5EncoderModel):
        encoder, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(encoder) is t5_patches.PosencT5EncoderModel
        assert not any(info["missing_keys"])
        with torch.no_grad():
            assert torch.equal(encoder(IDS)[0], model.encoder(IDS)[0])
        hf_posenc.verify(encoder)
    encoder.save_pretrained(tmp_path / "encoder")
    assert same(AutoModelForTextEncoding.from_pretrained(tmp_path / "encoder"), encoder)
    assert not hf_posenc.unpatch(encoder).config.to_dict().get("posenc")


FRESH_HEADS = [
    ("llama", AutoModelForSequenceClassification, {"score.weight"}),
    ("llama", AutoModelForTokenClassification, {"score.weight", "score.bias"}),
    ("gpt2", AutoModelForSequenceClassification, {"score.weight"}),
    ("gpt2", AutoModelForTokenClassification, {"classifier.weight", "classifier.bias"}),
    ("gpt2", AutoModelForQuestionAnswering, {"qa_outputs.weight", "qa_outputs.bias"}),
    (
        "t5",
        AutoModelForSequenceClassification,
        {f"classification_head.{part}.{end}" for part in ("dense", "out_proj") for end in ("weight", "bias")},
    ),
    ("t5", AutoModelForTokenClassification, {"classifier.weight", "classifier.bias"}),
    ("t5", AutoModelForQuestionAnswering, {"qa_outputs.weight", "qa_outputs.bias"}),
]


@pytest.mark.parametrize("scheme", ["fire", "kerple"])
@pytest.mark.parametrize(
    ("name", "auto", "fresh"), FRESH_HEADS, ids=[f"{name}-{auto.__name__}" for name, auto, _ in FRESH_HEADS]
)
def test_a_fresh_head_on_a_converted_base(name: str, auto: Any, fresh: set[str], scheme: str, tmp_path: Path) -> None:
    model = converted(name, scheme)
    model.save_pretrained(tmp_path)
    labels = {} if auto is AutoModelForQuestionAnswering else {"num_labels": 3}
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True, **labels)
    assert set(info["missing_keys"]) == fresh
    assert not info["mismatched_keys"]
    assert not info["error_msgs"]
    body, loaded_body = (getattr(m, m.base_model_prefix, m).state_dict() for m in (model, loaded))
    assert parameters_of_schemes(loaded_body)
    for key, value in loaded_body.items():
        if f"{loaded.base_model_prefix}.{key}" in loaded.state_dict() or key not in fresh:
            assert torch.equal(value, body[key]), key
    for key in fresh:
        assert loaded.state_dict()[key].abs().max() < 10, key
    hf_posenc.verify(loaded)
    loaded.save_pretrained(tmp_path / "head")
    assert same(auto.from_pretrained(tmp_path / "head"), loaded)


def test_a_head_that_takes_nothing_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    # The body of this class has another name than that of the others, converted or not: transformers would go on with a
    # body made again.
    stock("llama").save_pretrained(tmp_path / "stock")
    _, info = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "stock", output_loading_info=True)
    assert "transformer.layers.0.self_attn.q_proj.weight" in info["missing_keys"]
    converted("llama").save_pretrained(tmp_path / "converted")
    with pytest.raises(hf_posenc.CheckpointError, match=r"misses weights .* transformer\.layers\.0"):
        AutoModelForQuestionAnswering.from_pretrained(tmp_path / "converted")


# -- from a config -----------------------------------------------------------------------------------------------------

# The start of each scheme that has no randomness in it, and the bounds of the others.
STARTS: list[tuple[str, dict[str, Any], Callable[[Any], bool]]] = [
    ("fire", {}, lambda s: s.c.item() == pytest.approx(0.1) and s.L_multiplier.item() == 1 and s.init_L.item() == 512),
    ("fire", {"init": "zero", "init_c": 0.5}, lambda s: s.c.item() == 0.5 and not s.mlp[2].weight.any()),
    ("fire_s", {"gate": True}, lambda s: not s.gate_weight.any() and 0 < s.mlp[0].weight.abs().max() <= 1),
    (
        "kerple",
        {"weighted": True},
        lambda s: 0 < s.bias_p.max() <= 2 and 0 < s.bias_a.max() <= 1 and 0 < s.wei_p.max() <= 2,
    ),
    (
        "alibi",
        {"learned_slopes": True, "gate": True},
        lambda s: (
            torch.equal(s.log_slopes, torch.tensor([0.25, 0.0625, 2**-6, 2**-8]).log()) and not s.gate_weight.any()
        ),
    ),
    ("t5_clipped", {"init": "zero"}, lambda s: not s.r.any()),
    ("t5", {"init": "normal"}, lambda s: 0.05 < s.weight.std() < 0.5),
    ("learned", {"init": "normal", "num_positions": 64}, lambda s: 0.015 < s.wpe.weight.std() < 0.025),
    ("learned", {"init": "zero", "num_positions": 64}, lambda s: not s.wpe.weight.any()),
    ("rope", {"gate": True}, lambda s: not s.gate_weight.any()),
    ("sinusoidal", {"gate": True}, lambda s: not s.gate_weight.any()),
]


@pytest.mark.parametrize(("scheme", "options", "at_start"), STARTS, ids=[f"{s}-{o}" for s, o, _ in STARTS])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5_gated"])
def test_built_from_a_config_schemes_are_at_their_start(
    name: str, scheme: str, options: dict[str, Any], at_start: Callable[[Any], bool], tmp_path: Path
) -> None:
    model = converted(name, scheme, **options)
    model.config.save_pretrained(tmp_path)
    for config in (model.config, AutoConfig.from_pretrained(tmp_path)):
        for build in (AUTO_GENERATOR[name].from_config, type(model)):
            torch.manual_seed(2)
            built = build(config)
            assert type(built) is type(model)
            assert list(built.state_dict()) == list(model.state_dict())
            schemes = [module for module in built.modules() if isinstance(module, Scheme)]
            assert schemes
            for module in schemes:
                assert at_start(module)
                for parameter in module.parameters():
                    assert parameter.dtype == torch.float32
                    assert parameter.isfinite().all()
            hf_posenc.verify(built)


def test_built_from_a_config_native_tables_are_copied_from_the_model_built() -> None:
    for name, scheme in (("gpt2", "learned"), ("t5", "t5"), ("t5", "t5_clipped")):
        config = converted(name, scheme).config
        assert "init" not in str(config.posenc) or "native" in str(config.posenc)
        torch.manual_seed(3)
        built = AUTO_GENERATOR[name].from_config(config).eval()
        # The start is the built model's own table, so the built model computes what it would without the patch.
        patched = outputs(built)
        with hf_posenc.disabled(built):
            for ours, theirs in zip(patched, outputs(built), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_from_a_config(name: str) -> None:
    built = AUTO_GENERATOR[name].from_config(converted(name).config, dtype=torch.bfloat16)
    assert next(built.parameters()).dtype == torch.bfloat16
    for value in parameters_of_schemes(built).values():
        assert value.dtype == torch.float32
        assert value.isfinite().all()


# -- groups ------------------------------------------------------------------------------------------------------------


def test_groups_of_layers_come_back(tmp_path: Path) -> None:
    model = stock("llama")
    hf_posenc.patch(model, "fire", layers=[0], threshold=32.0)
    hf_posenc.patch(model, "kerple", layers=[1])
    model.save_pretrained(tmp_path / "two")  # The last layer keeps its own encoding.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert same(loaded, model)
    assert type(loaded.model.layers[2].self_attn) is transformers.models.llama.modeling_llama.LlamaAttention
    hf_posenc.patch(loaded, "kerple", layers=[2], native="keep")
    loaded.save_pretrained(tmp_path / "three")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "three")
    assert same(again, loaded)
    assert [group["scheme"] for group in again.config.posenc["groups"]] == ["fire", "kerple", "kerple"]
    assert [group["native"] for group in again.config.posenc["groups"]] == ["remove", "remove", "keep"]
    assert len({group["id"] for group in again.config.posenc["groups"]}) == 3
    hf_posenc.verify(again)


def test_replacing_a_group_leaves_nothing_of_it_on_disk(tmp_path: Path) -> None:
    model = hf_posenc.patch(hf_posenc.patch(stock("llama"), "kerple", layers=[0, 1]), "fire", layers=[2])
    hf_posenc.patch(model, "fire")
    model.save_pretrained(tmp_path)
    assert "kerple" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    assert not [key for key in load_file(tmp_path / "model.safetensors") if "hf_posenc_shared" in key]
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("native", ["remove", "keep"])
def test_groups_of_stacks_come_back(native: Any, tmp_path: Path) -> None:
    model = stock("t5")
    hf_posenc.patch(model, "kerple", stacks="encoder", native=native)
    hf_posenc.patch(model, "fire", stacks="decoder", layers="every:2", native=native)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert same(loaded, model)
    hf_posenc.verify(loaded)
    assert loaded.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.requires_grad is (
        native == "keep"
    )
    assert loaded.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.requires_grad


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_one_stack_alone_comes_back(stack: str, tmp_path: Path) -> None:
    model = hf_posenc.patch(stock("t5"), "fire_s", stacks=stack)
    model.save_pretrained(tmp_path)
    assert same(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), model)


def test_kept_native_encoding_with_an_exact_start_gives_the_stock_outputs(tmp_path: Path) -> None:
    for name in ("llama", "gpt2", "t5"):
        model = converted(name, "fire", native="keep")
        model.save_pretrained(tmp_path / name)
        loaded = AUTO_GENERATOR[name].from_pretrained(tmp_path / name)
        for ours, theirs in zip(outputs(loaded), outputs(stock(name)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# -- values and freezing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["fire", "fire_s", "kerple", "t5", "t5_clipped", "learned"])
@pytest.mark.parametrize("name", NAMES)
def test_trained_values_are_not_made_anew(name: str, scheme: str, tmp_path: Path) -> None:
    model = converted(name, scheme)
    for parameter in parameters(model):
        nn.init.constant_(parameter, 3.25)
    model.save_pretrained(tmp_path)
    loaded = AUTO_GENERATOR[name].from_pretrained(tmp_path)
    assert parameters(loaded)
    for parameter in parameters(loaded):
        assert bool((parameter == 3.25).all())


def native_table(model: Any) -> Any:
    if isinstance(model, T5ForConditionalGeneration):
        return model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    return model.transformer.wpe.weight


@pytest.mark.parametrize("name", ["gpt2", "t5", "t5_gated"])
def test_the_removed_native_table_stays_frozen_and_kept(name: str, tmp_path: Path) -> None:
    model = converted(name)
    assert not native_table(model).requires_grad
    model.save_pretrained(tmp_path)
    loaded = AUTO_GENERATOR[name].from_pretrained(tmp_path)
    assert not native_table(loaded).requires_grad
    # Everything else is trained, and everything trained is used.
    others = [p for p in loaded.parameters() if not p.requires_grad]
    assert len(others) == (1 if name == "gpt2" else 2)
    loaded(input_ids=IDS, labels=IDS).loss.backward()
    assert [key for key, p in loaded.named_parameters() if p.requires_grad and p.grad is None] == []
    assert torch.equal(native_table(loaded), native_table(stock(name)))
    hf_posenc.unpatch(loaded)
    assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_table_that_the_user_froze_stays_frozen_after_unpatch(name: str) -> None:
    model = stock(name)
    native_table(model).requires_grad_(False)
    hf_posenc.unpatch(hf_posenc.patch(model, "fire"))
    assert not native_table(model).requires_grad


# -- back to stock -----------------------------------------------------------------------------------------------------

LOAD_STOCK = """
import json, sys
from pathlib import Path
import torch
import transformers
from safetensors.torch import save_file
found = {}
for folder in Path(sys.argv[1]).iterdir():
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    auto = transformers.AutoModelForSeq2SeqLM if "T5" in kind else transformers.AutoModelForCausalLM
    assert type(auto.from_pretrained(folder)) is type(model)
    ids = torch.arange(14).view(2, 7)
    call = {"input_ids": ids} | ({"decoder_input_ids": ids} if "T5" in kind else {})
    with torch.no_grad():
        found[folder.name] = model(**call).logits
assert "hf_posenc" not in sys.modules
save_file(found, sys.argv[2])
"""


def test_unpatched_checkpoints_are_stock_and_load_without_the_package(tmp_path: Path) -> None:
    folders, logits = tmp_path / "stock", tmp_path / "logits.safetensors"
    for name in NAMES:
        converted(name).save_pretrained(tmp_path / "converted" / name)
        loaded = AUTO_GENERATOR[name].from_pretrained(tmp_path / "converted" / name)
        assert hf_posenc.unpatch(loaded) is loaded
        assert type(loaded) is GENERATOR[name]
        loaded.save_pretrained(folders / name)
        stock(name).save_pretrained(tmp_path / "never converted" / name)
        assert {path.name for path in (folders / name).iterdir()} == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
        }
        text = (folders / name / "config.json").read_text(encoding="utf-8")
        assert "posenc" not in text
        assert "auto_map" not in text
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            ours, theirs = (tmp_path / kind / name / file for kind in ("stock", "never converted"))
            assert ours.read_bytes() == theirs.read_bytes(), (name, file)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_STOCK, str(folders), str(logits)],
        env={name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = load_file(logits)
    for name in NAMES:
        assert torch.equal(found[name], outputs(stock(name))[0]), name


def test_unpatching_in_a_directory_of_a_converted_model_leaves_no_way_back(tmp_path: Path) -> None:
    model = converted("llama")
    model.save_pretrained(tmp_path)
    hf_posenc.unpatch(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LlamaForCausalLM
    assert same(loaded, stock("llama"))


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_saving_what_was_loaded_keeps_every_byte(name: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    converted(name).save_pretrained(first)
    AUTO_GENERATOR[name].from_pretrained(first).save_pretrained(second)
    assert {path.name for path in first.iterdir()} == {path.name for path in second.iterdir()}
    for path in first.iterdir():
        if path.name != "README.md":
            assert (second / path.name).read_bytes() == path.read_bytes(), path.name
    # The card of a loaded model bears the name of where it came from.
    ours, theirs = ((folder / "README.md").read_text(encoding="utf-8") for folder in (first, second))
    assert ours.split("<!-- hf_posenc begin -->")[1] == theirs.split("<!-- hf_posenc begin -->")[1]


def test_what_is_in_a_directory(tmp_path: Path) -> None:
    converted("llama").save_pretrained(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_hf_posenc.py"}
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "hf_posenc_llama"
    assert config["architectures"] == ["PosencLlamaForCausalLM"]
    assert config["rope_parameters"] == {"rope_type": "hf_posenc", "rope_theta": 10000.0}
    assert config["posenc"]["locked"]["rope_type"] == "default"
    assert config["posenc"]["format_version"] == 1
    assert config["posenc"]["plugin_version"] == hf_posenc.__version__
    (group,) = config["posenc"]["groups"]
    assert group["scheme"] == "fire"
    assert group["stacks"]["decoder"]["layers"] == [0, 1, 2]
    assert group["stacks"]["decoder"]["options"] == {
        "init_c": 0.1,
        "threshold": 512.0,
        "width": 32,
        "init": "paper",
        "normalizer": "both",
        "directed": False,
        "gate": False,
        "shared": False,
    }
    for key, target in config["auto_map"].items():
        module, _, kind = target.partition(".")
        assert module == "modeling_hf_posenc"
        assert hasattr(transformers, key)
        assert hasattr(llama_patches, kind)
    # The others can read what the user may read.
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir() if path.suffix != ".safetensors"}
    assert len(modes) == 1


def test_the_locks_of_the_others(tmp_path: Path) -> None:
    for name, field in (("gpt2", "activation_function"), ("t5", "feed_forward_proj")):
        model = converted(name)
        true = getattr(model.config, field)
        model.save_pretrained(tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
        assert "hf_posenc" in config[field]
        assert config["posenc"]["locked"] == true
        assert getattr(AutoConfig.from_pretrained(tmp_path / name), field) == true
    assert gpt2_patches.PosencGPT2Config.model_type == "hf_posenc_gpt2"


def test_a_config_by_itself_can_be_saved_and_loaded(tmp_path: Path) -> None:
    config = converted("gpt2").config
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    assert loaded.to_json_string() == config.to_json_string()
    assert loaded.posenc == config.posenc
    assert loaded.auto_map == json.loads(loaded.to_json_string())["auto_map"]
    assert "auto_map" not in vars(loaded)


def test_nothing_but_safetensors(tmp_path: Path) -> None:
    for name in NAMES:
        converted(name).save_pretrained(tmp_path / name)
        suffixes = {path.suffix for path in (tmp_path / name).iterdir()}
        assert suffixes == {".json", ".safetensors", ".py", ".md"}


def test_a_second_save_replaces_what_the_first_left(tmp_path: Path) -> None:
    converted("llama", "fire").save_pretrained(tmp_path, max_shard_size="20KB")
    model = converted("llama", "kerple", kernel="power")
    model.save_pretrained(tmp_path)
    # transformers leaves the index of the shards, and does not read it where there is a single file.
    assert list(tmp_path.glob("model-*")) == []
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert card.count("## Positional encoding") == 1
    assert "`kerple`" in card
    assert "`fire`" not in card
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    # Another architecture in the same place.
    other = converted("gpt2")
    other.save_pretrained(tmp_path)
    stub = (tmp_path / "modeling_hf_posenc.py").read_text(encoding="utf-8")
    assert "PosencGPT2LMHeadModel" in stub
    assert "Llama" not in stub
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), other)


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    converted("llama").save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "README.md").exists()
    assert not (tmp_path / "modeling_hf_posenc.py").exists()


# -- card --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scheme", "arguments", "parts"),
    [
        ("llama", "fire", {}, ("`fire` (arXiv 2310.04418), instead of", "threshold=512.0", "start: break")),
        ("llama", "fire", {"native": "keep"}, ("`fire`", "over the model's own", "start: exact with native kept")),
        ("llama", "rope", {}, ("`rope` (arXiv 2104.09864)", "layout='half'", "start: exact\n")),
        ("llama", "alibi", {"layers": [0, 2]}, ("decoder, layers 0, 2;",)),
        ("gpt2", "learned", {}, ("`learned`", "num_positions=64", "start: exact\n")),
        (
            "t5",
            "t5",
            {},
            ("- encoder, layers 0-2; options: gate=False", "- decoder, layers 0-2;", "start: exact\n"),
        ),
    ],
)
def test_the_card_names_scheme_options_start_and_how_to_load(
    name: str, scheme: str, arguments: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    converted(name, scheme, **arguments).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    for part in parts:
        assert part in card, card
    head = transformers.models.auto.modeling_auto
    auto = AUTO_GENERATOR[name].__name__
    assert hasattr(head, auto)
    for part in (f"from transformers import {auto}\n", f"{auto}.from_pretrained(", "import hf_posenc", "hf-posenc"):
        assert part in card, card
    metadata = card.split("---\n")[1]
    assert "library_name: transformers" in metadata
    assert "- hf_posenc" in metadata
    assert f"- {scheme}" in metadata


@pytest.mark.parametrize(("name", "kind"), STOCK_MODELS, ids=[f"{name}-{kind.__name__}" for name, kind in STOCK_MODELS])
def test_the_code_in_the_card_runs(name: str, kind: Any, tmp_path: Path) -> None:
    model = hf_posenc.patch(stock(name, kind), "alibi")
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("path/or/repo", str(tmp_path)), names)
    assert same(names["model"], model)


def test_an_existing_card_keeps_its_text(tmp_path: Path) -> None:
    theirs = "---\nlicense: mit\ntags:\n- mine\n---\n\n# Mine\n\nText ünïcode.\n"
    (tmp_path / "README.md").write_text(theirs, encoding="utf-8")
    converted("llama").save_pretrained(tmp_path)
    once = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "# Mine\n\nText ünïcode.\n" in once
    assert "license: mit" in once
    assert "- mine" in once
    # What the user writes below our part stays there, too.
    (tmp_path / "README.md").write_text(once + "\n## Results\n\nGood.\n", encoding="utf-8")
    converted("llama", "kerple").save_pretrained(tmp_path)
    twice = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "# Mine\n\nText ünïcode.\n" in twice
    assert twice.endswith("## Results\n\nGood.\n")
    assert twice.count("## Positional encoding") == 1
    assert "`fire`" not in twice
    converted("llama", "kerple").save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == twice


def test_a_card_without_metadata_keeps_its_text(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Mine\n\nOnly text.\n", encoding="utf-8")
    converted("llama").save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "# Mine\n\nOnly text.\n" in card
    assert "## Positional encoding" in card


# -- parts that only hold together with the rest -----------------------------------------------------------------------


def test_weights_of_another_shape_are_refused_unless_accepted(tmp_path: Path) -> None:
    converted("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(50, 32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(hf_posenc.CheckpointError, match=r"misshapen.*lm_head\.weight.*ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    assert loaded.lm_head.weight.shape == (48, 32)


def test_two_architectures_side_by_side(tmp_path: Path) -> None:
    for name in NAMES:
        converted(name).save_pretrained(tmp_path / name)
    loaded = {name: AutoModel.from_pretrained(tmp_path / name) for name in NAMES}
    assert {name: type(model).__name__ for name, model in loaded.items()} == {
        "llama": "PosencLlamaModel",
        "gpt2": "PosencGPT2Model",
        "t5": "PosencT5Model",
        "t5_gated": "PosencT5Model",
    }
    # Converted models leave their stock classes as they are.
    for name in NAMES:
        assert type(AUTO_GENERATOR[name].from_config(config_of(name))) is GENERATOR[name]
