"""An edited converted checkpoint is refused, or computes what it did: edits are generated from the fields of the record."""

from __future__ import annotations

import copy
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import CheckpointError

Place = tuple[Any, ...]

# A scheme, its options, and edits of them at equal shapes. Any other edit is made from the fields that are there.
CONVERSIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "stick_breaking": (
        {},
        [{"scheme": "nope", "options": {}}, {"scheme": "alibi", "options": {}}, {"options": {"attend_current": True}}],
    ),
    "sinusoidal": ({"native": "keep"}, [{"options": {"base": 500.0}}, {"options": {"scale": 2.0}}]),
    "alibi": ({}, [{"scheme": "sandwich", "options": {}}, {"scheme": "nope", "options": {}}]),
    "kerple": ({"native": "keep"}, [{"options": {"kernel": "power"}}]),
    "cope": ({"npos": 8}, [{"options": {"scale_position_logits": False}}]),
    "rope": ({"layers": [0, 2]}, [{"options": {"theta": 77.0}}, {"options": {"layout": "interleaved"}}]),
}


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the place of everything in nested JSON."""
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*place, key))


def at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def edits(record: dict[str, Any], more: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield edited copies of a record, with what was done."""

    def edited(place: Place, *new: Any) -> dict[str, Any]:
        copied = copy.deepcopy(record)
        holder = at(copied, place[:-1])
        if new:
            holder[place[-1]] = new[0]
        else:
            del holder[place[-1]]
        return copied

    for place in places(record):
        old = at(record, place)
        yield f"{place} dropped", edited(place)
        others: list[Any] = [None, [], {}, "x", 7, -1, 1.7, True, False]
        if isinstance(old, list):
            others += [[*old, *old[:1]], old[:-1], [True, *old[1:]]]
        if isinstance(old, dict):
            others.append({**old, "unknown": 1})
        if isinstance(old, (int, float)) and not isinstance(old, bool):
            others += [old + 1, old * 2, str(old)]
        for new in others:
            if new != old or type(new) is not type(old):
                yield f"{place} = {new!r}", edited(place, new)
    for change in more:
        copied = copy.deepcopy(record)
        group = copied["groups"][0]
        group["scheme"] = change.get("scheme", group["scheme"])
        for part in group["stacks"].values():
            part["options"] = {**part["options"], **change["options"]} if "scheme" not in change else change["options"]
        yield f"{change}", copied
    strengths = {"native": 1.0, "scheme": 0.0}
    yield "strengths", {**record, "strengths": strengths}


@pytest.mark.parametrize("scheme", CONVERSIONS)
def test_no_edit_of_a_record_loads_as_something_else(scheme: str, tmp_path: Path) -> None:
    options, more = CONVERSIONS[scheme]
    ids = models.tokens("llama", 1, 12)
    hf_posenc.patch(models.stock("llama"), scheme, **options).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    want = models.logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), "llama", ids)
    outcomes = {"refused": 0, "equal": 0}
    for what, record in edits(config["posenc"], more):
        path.write_text(json.dumps({**config, "posenc": record}), encoding="utf-8")
        try:
            model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        except CheckpointError:
            outcomes["refused"] += 1
        else:
            assert torch.equal(models.logits(model, "llama", ids), want), what
            outcomes["equal"] += 1
    assert outcomes["refused"] > 60
    assert outcomes["equal"] < 20


@pytest.mark.parametrize("scheme", ["kerple", "alibi"])
def test_the_config_of_another_conversion_is_refused(scheme: str, tmp_path: Path) -> None:
    """Weights bear the digest of their record, so that a config which is right by itself is noticed, too."""
    hf_posenc.patch(models.stock("llama"), "kerple").save_pretrained(tmp_path / "one")
    options = {"kernel": "power"} if scheme == "kerple" else {"learned_slopes": True}
    hf_posenc.patch(models.stock("llama"), scheme, **options).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "config.json", tmp_path / "one" / "config.json")
    with pytest.raises(CheckpointError, match="saved with another record"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "one")


def saved(folder: Path, scheme: str = "fire", **options: Any) -> dict[str, torch.Tensor]:
    """Save a converted model in a folder, and return its weights."""
    hf_posenc.patch(models.stock("llama"), scheme, **options).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
def test_a_base_weight_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    tensors.pop(name)
    write(tmp_path, tensors)
    with pytest.raises(RuntimeError, match=f"misses weights of the model: .*{name}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_whole_numbers_are_no_weights_of_a_scheme(tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    name = next(name for name in tensors if "hf_posenc" in name)
    write(tmp_path, {**tensors, name: tensors[name].long()})
    with pytest.raises(CheckpointError, match="misshapen weights of the positional scheme"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "option", "size"),
    [
        ("t5", "max_distance", 10**8),
        ("cope", "npos", 2 * 10**7),
        ("fire", "width", 10**9),
        ("learned", "num_positions", 10**9),
    ],
)
def test_a_config_cannot_demand_memory(scheme: str, option: str, size: int, tmp_path: Path) -> None:
    saved(tmp_path, scheme)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in config["posenc"]["groups"][0]["stacks"].values():
        part["options"][option] = size
    path.write_text(json.dumps(config), encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_layers_that_were_cut_are_not_saved_as_if_they_were_there(tmp_path: Path) -> None:
    model = hf_posenc.patch(models.stock("llama"), "fire")
    model.model.layers = model.model.layers[:2]
    with pytest.raises(hf_posenc.ArchitectureError, match="layers were cut"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("outside", ["../outside.safetensors", "{absolute}"])
def test_an_index_that_leads_outside_is_refused(outside: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    hf_posenc.patch(models.stock("llama"), "fire").save_pretrained(folder, max_shard_size="200KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    shard = sorted(set(content["weight_map"].values()))[0]
    shutil.move(folder / shard, tmp_path / "outside.safetensors")
    new = outside.format(absolute=tmp_path / "outside.safetensors")
    content["weight_map"] = {name: new if file == shard else file for name, file in content["weight_map"].items()}
    index.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_every_shard_bears_the_digest_and_older_checkpoints_bear_none(tmp_path: Path) -> None:
    ids = models.tokens("llama", 1, 12)
    model = hf_posenc.patch(models.stock("llama"), "fire")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    for file in (tmp_path / "sharded").glob("*.safetensors"):
        with safe_open(file, framework="pt") as content:
            assert len(content.metadata()["hf_posenc_record"]) == 64
    model.save_pretrained(tmp_path / "old")
    write(tmp_path / "old", load_file(tmp_path / "old" / "model.safetensors"))  # without metadata of ours
    for folder in ("sharded", "old"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
        assert torch.equal(models.logits(loaded, "llama", ids), models.logits(model, "llama", ids))
