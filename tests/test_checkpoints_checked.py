"""Converted checkpoints that were edited, cut or mixed: they load as what was saved, or not at all."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from inspect import getattr_static
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import KINDS, auto, converted, same, stock
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

import hf_posenc
from hf_posenc.errors import CheckpointError
from hf_posenc.patches import checkpoint
from hf_posenc.patches.llama import PosencLlamaForCausalLM
from hf_posenc.patches.record import digest as digest_of

PLAIN = {"format": "pt"}


def saved(folder: Path, scheme: str = "fire", **options: Any) -> Any:
    """Save a converted Llama, and return it."""
    model = converted("llama", scheme, moved=True, **options)
    model.save_pretrained(folder)
    return model


def edit_config(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    # As if the digest did not notice every edit.
    if isinstance(data.get("posenc"), dict):
        data["posenc"]["digest"] = digest_of(data["posenc"])
    path.write_text(json.dumps(data), encoding="utf-8")


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], *, bound: bool = True) -> None:
    """Change the tensors of a file; without `bound` it names no record."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata(path) if bound else PLAIN)


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if transformers gets to reading weights, which is when it allocates."""

    def reached(*args: Any, **kwargs: Any) -> None:
        pytest.fail("transformers was about to allocate and read the weights")

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(reached))


# -- the record is bound to the weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_every_file_of_weights_has_the_digest_of_the_record(name: str, tmp_path: Path) -> None:
    model = converted(name, "kerple", moved=True)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "given", True, {key: value.clone() for key, value in model.state_dict().items()})
    files = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(files) > 4
    (digest,) = {metadata(path)[checkpoint.DIGEST] for path in files}
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert not hasattr(model, "hf_quantizer")
    for folder in ("one", "many", "given"):
        loaded = auto(name).from_pretrained(tmp_path / folder)
        assert same(loaded, model)
    # safetensors writes metadata in any order, but equal models give equal files.
    contents = set()
    for again in ("one", "two", "three", "four", "five"):
        loaded.save_pretrained(tmp_path / again)
        contents.add((tmp_path / again / "model.safetensors").read_bytes())
    assert len(contents) == 1
    # The stock model bears nothing of it.
    hf_posenc.unpatch(loaded).save_pretrained(tmp_path / "stock")
    assert metadata(tmp_path / "stock" / "model.safetensors") == PLAIN
    with pytest.raises(ValueError, match="nonsense"):
        model.save_pretrained(tmp_path, max_shard_size="nonsense")
    assert not hasattr(model, "hf_quantizer")


def test_each_save_replaces_its_own_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # or it waits for the hub again and again
    model = converted("llama", "fire")
    load = AutoModelForCausalLM.from_pretrained
    # A clone without Git LFS has such files.
    (tmp_path / "other.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")

    def save(**options: Any) -> PreTrainedModel:
        with torch.no_grad():
            model.lm_head.weight.add_(0.1)
        model.save_pretrained(tmp_path, **options)
        return copy.deepcopy(model)

    save()
    sharded = save(max_shard_size="20KB")
    assert same(load(tmp_path), sharded)
    save(variant="fp16", max_shard_size="20KB")
    half = save(variant="fp16")
    assert same(load(tmp_path, variant="fp16"), half)
    assert same(load(tmp_path), sharded)
    shutil.copy(next(tmp_path.glob("model-00001*")), tmp_path / "model.safetensors")
    # As a copy of a repository on the hub, too.
    snapshot = tmp_path / "hub" / "models--me--there" / "snapshots" / "main"
    shutil.copytree(tmp_path, snapshot, ignore=shutil.ignore_patterns("hub"))
    for place, options in ((tmp_path, {}), ("me/there", {"cache_dir": tmp_path / "hub", "local_files_only": True})):
        with pytest.raises(CheckpointError, match=r"holds two checkpoints: model\.safetensors, and the shards"):
            load(place, **options)
        assert same(load(place, variant="fp16", **options), half)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "20KB"}])
@pytest.mark.parametrize("name", KINDS)
def test_weights_without_the_digest_of_a_record_are_refused(name: str, shards: dict[str, str], tmp_path: Path) -> None:
    converted(name, "alibi").save_pretrained(tmp_path, **shards)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    with safe_open(file, "pt") as weights:
        kept = {key: value for key, value in weights.metadata().items() if key != checkpoint.DIGEST}
    save_file(load_file(file), file, kept)
    with pytest.raises(CheckpointError, match="does not say to which record of the scheme it belongs"):
        auto(name).from_pretrained(tmp_path)


def test_the_digest_follows_the_strengths_and_the_config_in_memory(tmp_path: Path) -> None:
    model = converted("llama", "alibi", native="keep")
    hf_posenc.set_strength(model, native=0.5, scheme=0.75)
    model.save_pretrained(tmp_path / "part")
    load = AutoModelForCausalLM.from_pretrained
    loaded = load(tmp_path / "part")
    assert same(loaded, model)
    assert same(load(tmp_path / "part", config=loaded.config), model)
    hf_posenc.drop_native(loaded)
    loaded.save_pretrained(tmp_path / "dropped")
    assert same(load(tmp_path / "dropped"), loaded)
    with pytest.raises(CheckpointError, match="another record"):
        load(tmp_path / "part", config=loaded.config)


# Edits that leave every shape as it is, and with it nothing to notice but the digest.
@pytest.mark.parametrize(
    ("scheme", "group", "options"),
    [
        ("stick_breaking", {"scheme": "nope"}, None),
        ("stick_breaking", {}, {"attend_current": True}),
        ("alibi", {"scheme": "sandwich"}, None),
        ("kerple", {}, {"kernel": "power"}),
    ],
)
def test_an_edit_that_keeps_all_shapes_is_refused(
    scheme: str, group: dict[str, Any], options: dict[str, Any] | None, tmp_path: Path, nothing_is_read: None
) -> None:
    saved(tmp_path, scheme)

    def change(data: Any) -> None:
        edited = data["posenc"]["groups"][0]
        edited.update(group)
        part = edited["stacks"]["decoder"]
        part["options"] = {} if options is None else {**part["options"], **options}

    edit_config(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was saved with another record.*Restore"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# -- weights that are not there, or others -----------------------------------------------------------------------------

MISSING = {
    "llama": ("model.layers.1.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"),
    "gpt2": ("transformer.wpe.weight", "transformer.wte.weight"),  # the head is tied to the latter
    "t5": ("shared.weight", "decoder.block.0.layer.1.EncDecAttention.k.weight"),
    "vit": ("vit.embeddings.patch_embeddings.projection.weight",),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_weight_of_the_model_is_no_random_one(name: str, tmp_path: Path, nothing_is_read: None) -> None:
    # Without parameters of a scheme, which were looked at before.
    for weight in MISSING[name]:
        converted(name, "alibi").save_pretrained(tmp_path)
        edit_weights(tmp_path, lambda tensors: tensors.pop(weight))  # noqa: B023 - called at once
        with pytest.raises(CheckpointError, match="misses weights of the model: "):
            auto(name).from_pretrained(tmp_path)
        # Another head takes no body that is not whole.
        for loader in (AutoModel, AutoModelForSequenceClassification) if weight == "model.norm.weight" else ():
            with pytest.raises(CheckpointError, match=r"misses weights .*norm\.weight"):
                loader.from_pretrained(tmp_path, pad_token_id=0)


def test_more_layers_in_the_file_than_in_the_config_are_refused(tmp_path: Path, nothing_is_read: None) -> None:
    saved(tmp_path, "alibi", layers=[0])
    edit_config(tmp_path, lambda data: data.update(num_hidden_layers=2))
    for loader in (AutoModelForCausalLM, AutoModel):
        with pytest.raises(CheckpointError, match=r"has unknown weights of the model: model\.layers\.2"):
            loader.from_pretrained(tmp_path)


def test_weights_of_another_shape_are_refused_unless_accepted(tmp_path: Path) -> None:
    saved(tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(50, 32)}))
    # Callers of transformers catch its own class.
    with pytest.raises(RuntimeError, match=r"misshapen.*lm_head\.weight \(\[50, 32\], expected \[60, 32\]\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert issubclass(CheckpointError, ValueError)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    assert loaded.lm_head.weight.shape == (60, 32)
    # Those of schemes are never accepted.
    edit_weights(tmp_path, lambda tensors: tensors.update({WEIGHT: torch.zeros(7, 1)}))
    with pytest.raises(CheckpointError, match="has misshapen weights of the positional scheme"):
        AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


# What a config could ask for, and what the error names.
HUNGRY: list[tuple[str, Callable[[Any], object], str]] = [
    ("t5", lambda data: options_of(data).update(max_distance=10**8), "max_distance"),
    ("cope", lambda data: options_of(data).update(npos=2 * 10**7), "npos"),
    ("fire", lambda data: options_of(data).update(width=10**9), "width"),
    ("fire", lambda data: data.update(vocab_size=10**9), r"misshapen.*embed_tokens"),
]


def options_of(data: Any) -> Any:
    return data["posenc"]["groups"][0]["stacks"]["decoder"]["options"]


@pytest.mark.parametrize(("scheme", "change", "named"), HUNGRY)
def test_a_config_cannot_demand_memory(
    scheme: str, change: Callable[[Any], object], named: str, tmp_path: Path, nothing_is_read: None
) -> None:
    saved(tmp_path, scheme)
    edit_config(tmp_path, change)
    for bound in (True, False):
        edit_weights(tmp_path, lambda tensors: None, bound=bound)
        with pytest.raises(CheckpointError, match=named):
            AutoModelForCausalLM.from_pretrained(tmp_path)


# Keys of config.json that are no fields: methods, properties and constants of the class, and names of this package.
def shadows(kind: Any) -> list[str]:
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    own = {name for name in dir(kind) if not (isinstance(found := getattr_static(kind, name), property) and found.fset)}
    return [*sorted(own - known - {"auto_map", "model_type"}), "posenc_locked", "posenc_origin"]


@pytest.mark.parametrize("name", KINDS)
def test_keys_that_shadow_the_class_are_refused(name: str, tmp_path: Path) -> None:
    model = converted(name, "alibi")
    model.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    names = shadows(type(model.config))
    assert {"posenc_lock", "to_dict", "to_json_string", "validate", "from_pretrained", "base_config_key"} <= {*names}
    for key in names:
        (tmp_path / "config.json").write_text(json.dumps({**data, key: 5}), encoding="utf-8")
        with pytest.raises(CheckpointError, match=re.escape(f"config.json has the key {key!r}")):
            AutoConfig.from_pretrained(tmp_path)


# -- files that are spoilt ---------------------------------------------------------------------------------------------


def in_config(change: Callable[[Any], object]) -> Callable[[Path], object]:
    """Without a digest that notices it."""
    return lambda folder: (edit_weights(folder, lambda tensors: None, bound=False), edit_config(folder, change))


def record(**changes: Any) -> Callable[[Path], object]:
    return in_config(lambda data: data["posenc"].update(changes))


def group(**changes: Any) -> Callable[[Path], object]:
    return in_config(lambda data: data["posenc"]["groups"][0].update(changes))


def part(**changes: Any) -> Callable[[Path], object]:
    return in_config(lambda data: data["posenc"]["groups"][0]["stacks"]["decoder"].update(changes))


def in_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_weights(folder, change, bound=False)


def cut(end: int, pattern: str = "model.safetensors") -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        file = sorted(folder.glob(pattern))[-1]
        file.write_bytes(file.read_bytes()[:end])

    return spoil


def cut_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    converted("llama", "fire").save_pretrained(folder, max_shard_size="20KB")
    cut(-100, "model-*.safetensors")(folder)


def spoil_index(content: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")

    return spoil


def take_stock_weights(folder: Path) -> None:
    stock("llama").save_pretrained(folder / "stock")
    shutil.move(folder / "stock" / "model.safetensors", folder / "model.safetensors")


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


WEIGHT = "model.layers.1.self_attn.hf_posenc.mlp.0.weight"
EXTRA = WEIGHT.replace("mlp", "extra")
# What is done to the files of a model, and facts of the error.
# fmt: off
SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (cut(-1000), "model.safetensors ... truncated ... download or save it again"),
    (cut_shard, "model-000 ... truncated ... download or save it again"),
    (spoil_index('{"weight_map": {"lm'), "index.json cannot be read ... download or save it again"),
    (spoil_index('{"metadata": {}, "weight_map": {}}'), "index.json cannot be read ... no file of any tensor"),
    (pickle_weights, "pytorch_model.bin is no safetensors file"),
    (take_stock_weights, "misses weights ... and 18 more ... unconverted model"),
    (in_weights(lambda tensors: tensors.pop(WEIGHT)), f"misses weights ... {WEIGHT} ... save it again"),
    (in_weights(lambda tensors: tensors.update({EXTRA: torch.zeros(3)})), f"unknown weights ... {EXTRA}"),
    (in_weights(lambda tensors: tensors.update({WEIGHT: torch.zeros(7, 1)})), f"misshapen weights ... {WEIGHT}"),
    (in_weights(lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].long()})), f"misshapen weights ... {WEIGHT}"),
    (record(format_version=99), "posenc format 99 ... formats up to 1 ... pip install -U hf-posenc"),
    (record(groups=[]), "damaged (groups: "),
    (record(strengths={"scheme": 0}), "strengths with native='remove'"),
    (in_config(lambda data: data.update(posenc=[1])), "damaged ... Restore"),
    (in_config(lambda data: data.pop("posenc")), "'posenc' ... Restore config.json"),
    (in_config(lambda data: data["rope_parameters"].update(rope_theta=5e5)),
        "rope_parameters={ ... 500000.0 ... pass rope_parameters=... to from_pretrained"),
    (group(scheme="fire_two"), "build the scheme 'fire_two' ... Did you mean 'fire ... Upgrade hf-posenc"),
    (group(stacks={"middle": {"layers": [0], "options": {}}}), "layer 0 of the middle"),
    (part(options={"thresold": 3.0}), "no option 'thresold' ... config.json"),
    (part(options={"width": 0}), "width=0 ... config.json"),
    (part(layers=[0, 1, 7]), "layer 7 of the decoder ... layers: {'decoder': 3} ... Restore"),
]
# fmt: on


@pytest.mark.parametrize(("spoil", "facts"), SPOILT, ids=[facts for _, facts in SPOILT])
def test_spoilt_files_have_one_clear_error(
    spoil: Callable[[Path], object], facts: str, tmp_path: Path, nothing_is_read: None
) -> None:
    saved(tmp_path)
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=".*".join(map(re.escape, facts.split(" ... ")))) as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_stock_weights_are_no_converted_model(tmp_path: Path) -> None:
    stock("llama").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"not that of a converted model.* Load it with LlamaFor.*patch"):
        PosencLlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", KINDS)
def test_a_stock_class_does_not_take_the_config_of_a_converted_model(name: str, tmp_path: Path) -> None:
    model = converted(name, "kerple")
    model.save_pretrained(tmp_path)
    config, kind = AutoConfig.from_pretrained(tmp_path), type(stock(name))
    for build in (lambda: kind(config), lambda: kind.from_pretrained(tmp_path, config=config)):
        with pytest.raises(CheckpointError, match=rf"for a {kind.__name__}, which would ignore .*unpatch"):
            build()
    assert same(auto(name).from_pretrained(tmp_path, config=config), model)
    assert isinstance(kind(hf_posenc.unpatch(model).config), kind)


def test_a_newer_config_builds_no_model() -> None:
    config = copy.deepcopy(converted("llama", "alibi").config)
    config.posenc["format_version"] = 99
    with pytest.raises(CheckpointError, match=r"posenc format 99.*pip install -U hf-posenc"):
        AutoModelForCausalLM.from_config(config)


def test_a_model_whose_layers_were_cut_is_not_saved(tmp_path: Path) -> None:
    for kept in (slice(2), slice(1, None), slice(None, None, -1)):
        model = hf_posenc.patch(converted("llama", "kerple", layers=[0]), "alibi", layers=[1, 2])
        model.model.layers = model.model.layers[kept]
        with pytest.raises(hf_posenc.ArchitectureError, match="layers were cut, added or moved"):
            model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, nothing_is_read: None) -> None:
    folder, outside = tmp_path / "ours", tmp_path / "outside.safetensors"
    converted("llama", "fire").save_pretrained(folder, max_shard_size="20KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    shard = index["weight_map"]["lm_head.weight"]
    shutil.move(folder / shard, outside)
    for name in ("../outside.safetensors", str(outside)):
        led = {key: name if value == shard else value for key, value in index["weight_map"].items()}
        path.write_text(json.dumps({**index, "weight_map": led}), encoding="utf-8")
        with pytest.raises(CheckpointError, match="outside of the checkpoint"):
            AutoModelForCausalLM.from_pretrained(folder)
