"""Converted checkpoints on disk: what goes in comes out, through every class that can load it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import GATED, HEADS, auto, call, converted, parameters, same, stock
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    GPT2DoubleHeadsModel,
)

import hf_posenc
from hf_posenc.patches.architecture import architectures, auto_classes
from hf_posenc.scheme import Scheme

NAMES = ["llama", "gpt2", "t5"]
VIT = architectures()["vit"]
HEADS_OF_ALL = [
    *HEADS,
    *(("vit", kind) for kind in VIT.twins if issubclass(kind, transformers.PreTrainedModel) and kind not in VIT.parts),
]
LAST = dict(HEADS_OF_ALL)
heads = pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(n, k, id=k.__name__, marks=[] if LAST[n] is k else pytest.mark.grid) for n, k in HEADS_OF_ALL],
)


def scheme_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "hf_posenc" in name}


def saved(model: Any, folder: Path, **settings: Any) -> Any:
    """Save a model, and return what is loaded from there."""
    model.save_pretrained(folder, **settings)
    kind = next(name for name in NAMES if model.config.model_type.endswith(name))
    return auto(kind).from_pretrained(folder)


# -- there and back ----------------------------------------------------------------------------------------------------


@heads
def test_every_head_comes_back_bit_equal_through_every_class(name: str, kind: Any, tmp_path: Path) -> None:
    model = hf_posenc.patch(stock(name, kind), "fire")
    model.save_pretrained(tmp_path)
    twin = architectures()[name].twins[kind]
    autos = [getattr(transformers, auto) for auto, found in auto_classes(model.config_class).items() if found is twin]
    assert autos or kind is GPT2DoubleHeadsModel  # transformers has no Auto class for that one.
    for loader in (twin, *autos):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is type(model) is twin
        assert loaded.config.to_json_string() == AutoConfig.from_pretrained(tmp_path).to_json_string()
        assert loaded.config.posenc == json.loads(json.dumps(model.config.posenc))
        assert same(loaded, model)
        hf_posenc.verify(loaded)
    # The code in the card runs.
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("path/or/repo", str(tmp_path)), names)
    assert same(names["model"], model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("name", "scheme"), [("llama", "learned"), ("gpt2", "fire"), ("t5", "fire")])
def test_half_precision_leaves_schemes_in_float32(name: str, scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, load = converted(name, scheme), auto(name).from_pretrained
    model.save_pretrained(tmp_path / "full")
    found = [load(tmp_path / "full", dtype=dtype), model.to(dtype), auto(name).from_config(model.config, dtype=dtype)]
    model.save_pretrained(tmp_path / "half")
    found += [load(tmp_path / "half", dtype=wanted) for wanted in (dtype, "auto")]
    bodies = [transformers.AutoModel.from_pretrained(tmp_path / part, dtype=dtype) for part in ("full", "half")]
    assert all({value.dtype for value in scheme_weights(body).values()} == {torch.float32} for body in bodies)
    for other in found:
        assert next(other.parameters()).dtype == dtype
        assert scheme_weights(other)
        for key, value in scheme_weights(other).items():
            assert value.dtype == torch.float32, key
            assert value.isfinite().all()
            assert other is found[2] or torch.equal(value, scheme_weights(model)[key]), key
    with safe_open(tmp_path / "half" / "model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            assert (file.get_slice(key).get_dtype() == "F32") is ("hf_posenc" in key), key
    # In float16, transformers itself loads a part of T5 in float32.
    assert same(found[3].to(dtype), model)


def test_the_encoder_alone_of_a_converted_t5(tmp_path: Path) -> None:
    model = hf_posenc.patch(stock("t5", **GATED), "fire")
    model.save_pretrained(tmp_path)
    encoder, info = AutoModelForTextEncoding.from_pretrained(tmp_path, output_loading_info=True)
    assert (type(encoder).__name__, any(info["missing_keys"])) == ("PosencT5EncoderModel", False)
    ids = call(model)["input_ids"]
    with torch.no_grad():
        assert torch.equal(encoder(ids)[0], model.encoder(ids)[0])
    assert hf_posenc.verify(encoder).groups == (("fire", "remove", len(encoder.encoder.block)),)
    encoder.save_pretrained(tmp_path / "encoder")
    assert same(AutoModelForTextEncoding.from_pretrained(tmp_path / "encoder"), encoder)
    assert not hf_posenc.unpatch(encoder).config.to_dict().get("posenc")
    hf_posenc.patch(stock("t5"), "fire", stacks="decoder").save_pretrained(tmp_path / "decoder")
    with pytest.raises(hf_posenc.NotPatchedError, match="no scheme for any layer of the PosencT5EncoderModel"):
        hf_posenc.verify(AutoModelForTextEncoding.from_pretrained(tmp_path / "decoder"))


FRESH_HEADS: list[tuple[str, Any, set[str]]] = [
    ("llama", AutoModelForSequenceClassification, {"score.weight"}),
    ("gpt2", AutoModelForQuestionAnswering, {"qa_outputs.weight", "qa_outputs.bias"}),
    ("t5", AutoModelForTokenClassification, {"classifier.weight", "classifier.bias"}),
]


@pytest.mark.parametrize(("name", "loader", "fresh"), FRESH_HEADS)
def test_a_fresh_head_on_a_converted_base(name: str, loader: Any, fresh: set[str], tmp_path: Path) -> None:
    model = converted(name, "kerple")
    model.save_pretrained(tmp_path)
    labels = {} if loader is AutoModelForQuestionAnswering else {"num_labels": 3}
    loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True, **labels)
    assert set(info["missing_keys"]) == fresh
    assert not info["mismatched_keys"]
    body, loaded_body = (getattr(m, m.base_model_prefix, m).state_dict() for m in (model, loaded))
    assert any("hf_posenc" in key for key in loaded_body)
    for key in loaded_body.keys() - fresh:
        assert torch.equal(loaded_body[key], body[key]), key
    for key in fresh:
        assert loaded.state_dict()[key].abs().max() < 10, key
    hf_posenc.verify(loaded)
    loaded.save_pretrained(tmp_path / "head")
    assert same(loader.from_pretrained(tmp_path / "head"), loaded)


def test_a_head_that_takes_nothing_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    # The body of this class has another name than that of the others, converted or not: transformers would go on with a
    # body made again.
    converted("llama").save_pretrained(tmp_path)
    with pytest.raises(hf_posenc.CheckpointError, match=r"misses weights .* transformer\.layers\.0"):
        AutoModelForQuestionAnswering.from_pretrained(tmp_path)


# -- from a config -----------------------------------------------------------------------------------------------------

# The start of schemes that have no randomness in it, and the bounds of the others.
STARTS: list[tuple[str, dict[str, Any], Callable[[Any], bool]]] = [
    ("fire_s", {"gate": True}, lambda s: not s.gate_weight.any() and 0 < s.mlp[0].weight.abs().max() <= 1),
    ("t5", {"init": "normal"}, lambda s: 0.05 < s.weight.std() < 0.5),
    ("learned", {"init": "zero", "num_positions": 64}, lambda s: not s.wpe.weight.any()),
]


@pytest.mark.parametrize(("scheme", "options", "at_start"), STARTS)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_built_from_a_config_schemes_are_at_their_start(
    name: str, scheme: str, options: dict[str, Any], at_start: Callable[[Any], bool], tmp_path: Path
) -> None:
    model = converted(name, scheme, **options)
    model.config.save_pretrained(tmp_path)
    for build, config in ((auto(name).from_config, AutoConfig.from_pretrained(tmp_path)), (type(model), model.config)):
        built = build(config)
        assert type(built) is type(model)
        assert list(built.state_dict()) == list(model.state_dict())
        schemes = [module for module in built.modules() if isinstance(module, Scheme)]
        assert schemes
        assert all(map(at_start, schemes))
        assert all(parameter.dtype == torch.float32 for parameter in parameters(built))
        hf_posenc.verify(built)


# -- groups ------------------------------------------------------------------------------------------------------------


def test_groups_of_layers_come_back(tmp_path: Path) -> None:
    model = stock("llama")
    hf_posenc.patch(model, "fire", layers=[0], threshold=32.0)
    hf_posenc.patch(model, "kerple", layers=[1])
    loaded = saved(model, tmp_path / "two")  # The last layer keeps its own encoding.
    assert same(loaded, model)
    assert type(loaded.model.layers[2].self_attn) is transformers.models.llama.modeling_llama.LlamaAttention
    hf_posenc.patch(loaded, "kerple", layers=[2], native="keep")
    again = saved(loaded, tmp_path / "three")
    assert same(again, loaded)
    groups = [(group["id"], group["scheme"], group["native"]) for group in again.config.posenc["groups"]]
    assert groups == [(0, "fire", "remove"), (1, "kerple", "remove"), (2, "kerple", "keep")]
    # Nothing is left of groups that are replaced.
    hf_posenc.patch(again, "fire")
    assert same(saved(again, tmp_path / "one"), again)
    assert "kerple" not in (tmp_path / "one" / "config.json").read_text(encoding="utf-8")
    assert not [key for key in load_file(tmp_path / "one" / "model.safetensors") if "hf_posenc_shared" in key]


def native_table(model: Any) -> Any:
    if model.config.model_type.endswith("t5"):
        return model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    return model.transformer.wpe.weight


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_removed_native_table_is_all_that_is_frozen_and_kept(name: str, tmp_path: Path) -> None:
    loaded = saved(converted(name), tmp_path)
    frozen = [parameter for parameter in loaded.parameters() if not parameter.requires_grad]
    assert any(parameter is native_table(loaded) for parameter in frozen)
    assert len(frozen) == (1 if name == "gpt2" else 2)
    assert torch.equal(native_table(loaded), native_table(stock(name)))
    assert all(parameter.requires_grad for parameter in hf_posenc.unpatch(loaded).parameters())
    # One that the user froze stays so.
    model = stock(name)
    native_table(model).requires_grad_(False)
    assert not native_table(hf_posenc.unpatch(hf_posenc.patch(model, "fire"))).requires_grad


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_saving_what_was_loaded_keeps_every_byte(name: str, tmp_path: Path) -> None:
    first, second, theirs = (tmp_path / part for part in ("first", "second", "theirs"))
    loaded = saved(converted(name), first)
    loaded.save_pretrained(second)
    files = {path.name for path in first.iterdir()}
    assert files == {"README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_hf_posenc.py"}
    assert files == {path.name for path in second.iterdir()}
    for file in files - {"README.md"}:
        assert (second / file).read_bytes() == (first / file).read_bytes(), file
    # The card of a loaded model bears the name of where it came from.
    cards = ((folder / "README.md").read_text(encoding="utf-8") for folder in (first, second))
    assert len({card.split("<!-- hf_posenc begin -->")[1] for card in cards}) == 1
    # Unpatched it is the stock model, also in the folder of the converted one.
    hf_posenc.unpatch(loaded).save_pretrained(first)
    stock(name).save_pretrained(theirs)
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        assert (first / file).read_bytes() == (theirs / file).read_bytes(), file
    assert type(auto(name).from_pretrained(first)) is type(stock(name))


LOCKS = {"llama": "rope_parameters", "gpt2": "activation_function", "t5": "feed_forward_proj"}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_in_a_config(name: str, tmp_path: Path) -> None:
    model = converted(name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["architectures"]) == (f"hf_posenc_{name}", [type(model).__name__])
    assert "hf_posenc" in str(config[LOCKS[name]])
    assert config["posenc"]["locked"] == getattr(model.config, LOCKS[name])
    assert (config["posenc"]["format_version"], config["posenc"]["plugin_version"]) == (1, hf_posenc.__version__)
    (group,) = config["posenc"]["groups"]
    part = group["stacks"]["decoder"]
    assert (group["scheme"], part["layers"], part["options"]["threshold"]) == ("fire", [0, 1, 2], 512.0)
    for key, target in config["auto_map"].items():
        module, _, kind = target.partition(".")
        assert module == "modeling_hf_posenc"
        assert hasattr(transformers, key)
        assert kind in {twin.__name__ for twin in architectures()[name].twins.values()}
    # By itself, too.
    model.config.save_pretrained(tmp_path / "alone")
    alone = AutoConfig.from_pretrained(tmp_path / "alone")
    assert type(alone) is type(model.config)
    assert alone.to_json_string() == model.config.to_json_string()
    assert (alone.posenc, alone.auto_map) == (model.config.posenc, config["auto_map"])
    assert getattr(alone, LOCKS[name]) == getattr(model.config, LOCKS[name])


# -- card --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scheme", "arguments", "parts"),
    [
        ("llama", "fire", {}, ("`fire` (arXiv 2310.04418), instead of", "threshold=512.0", "start: break")),
        ("llama", "fire", {"native": "keep"}, ("`fire`", "over the model's own", "start: exact with native kept")),
        ("llama", "alibi", {"layers": [0, 2]}, ("decoder, layers 0, 2;",)),
        ("t5", "t5", {}, ("- encoder, layers 0-2; options: gate=False", "- decoder, layers 0-2;", "start: exact\n")),
    ],
)
def test_the_card_names_scheme_options_start_and_how_to_load(
    name: str, scheme: str, arguments: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    converted(name, scheme, **arguments).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    for part in (*parts, f"from transformers import {auto(name).__name__}\n", "library_name: transformers"):
        assert part in card, card
    assert all(part in card.split("---\n")[1] for part in ("- hf_posenc", f"- {scheme}"))
