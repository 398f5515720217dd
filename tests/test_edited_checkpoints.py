"""One edit of a converted checkpoint, of any key of config.json or of a tensor: it loads as it was, or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edits import edits
from grid import once
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import auto, converted, same
from transformers import AutoConfig

import hf_posenc
from hf_posenc.errors import CheckpointError
from hf_posenc.patches import checkpoint
from hf_posenc.patches.record import digest as digest_of
from hf_posenc.patches.surgery import is_of_scheme

CONVERSIONS: dict[str, Callable[[], Any]] = {
    "llama, strengths": lambda: faded(converted("llama", "alibi", moved=True, native="keep")),
    "t5, kerple": lambda: converted("t5", "kerple", moved=True),
    "llama, hybrid": lambda: hf_posenc.patch(
        converted("llama", "kerple", moved=True, layers=[0]), "alibi", layers=[1, 2]
    ),
    "vit, rope2d": lambda: converted("vit", "rope2d", moved=True),
}


def faded(model: Any) -> Any:
    hf_posenc.set_strength(model, native=0.5, scheme=0.75)
    return model


def others(key: Any, value: Any) -> list[Any]:
    """Return values to put in the place of one: near it, and of other types."""
    retyped: list[Any] = [None, [value], {"0": value}, str(value)]
    if isinstance(value, bool):
        return [not value, int(value), *retyped]
    if isinstance(value, (int, float)):
        return [value + 1, -1 - value, value + 0.5, bool(value), float("inf"), *retyped]
    if isinstance(value, str):
        words = ["nope", "keep", "remove", "power", "zero"]
        return [word for word in words if word != value] + [5, None, [value], ""]
    return [None, 5, "x", [], {}]


@pytest.mark.grid
@pytest.mark.parametrize("name", once(sorted(CONVERSIONS), more=0))
def test_no_edit_of_the_record_loads_as_another_function(name: str, tmp_path: Path) -> None:
    model = CONVERSIONS[name]()
    model.save_pretrained(tmp_path)
    load = auto(name.partition(",")[0]).from_pretrained
    data = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    digest = data["posenc"].pop("digest")
    refused = equal = 0
    for what, record in edits(data["posenc"], others):
        bound = {**record, "digest": digest} if isinstance(record, dict) else record
        if isinstance(bound, dict) and digest_of(record) != digest:
            (tmp_path / "config.json").write_text(json.dumps({**data, "posenc": bound}), encoding="utf-8")
            with pytest.raises(CheckpointError):
                AutoConfig.from_pretrained(tmp_path)
        bound = {**record, "digest": digest_of(record)} if isinstance(record, dict) else record
        (tmp_path / "config.json").write_text(json.dumps({**data, "posenc": bound}), encoding="utf-8")
        try:
            loaded = load(tmp_path)
        except hf_posenc.PosencError:
            refused += 1
        except Exception:
            # What the locked field of the model's own config must be, transformers says when it reads it.
            if "'locked'" not in what:
                raise
            refused += 1
        else:
            assert same(loaded, model), what
            equal += 1
    assert refused >= 60
    assert equal < 30  # of the version of the plugin, and numbers that are written in another way


def near(key: Any, value: Any) -> list[Any]:
    """Return a value of the same type."""
    if key == "use_cache":
        return []  # keys of a cache lie otherwise in memory, which moves last bits on some processors
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1]
    return [f"{value}_2"] if isinstance(value, str) else []


each = pytest.mark.parametrize("name", once(CONVERSIONS, more=1))


@each
def test_no_edit_beside_the_record_loads_as_another_function(name: str, tmp_path: Path) -> None:
    model = CONVERSIONS[name]()
    model.save_pretrained(tmp_path)
    load = auto(name.partition(",")[0]).from_pretrained
    data = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    record, equal = data.pop("posenc"), set()
    for what, config in edits(data, near):
        (tmp_path / "config.json").write_text(json.dumps({**config, "posenc": record}), encoding="utf-8")
        try:
            loaded = load(tmp_path, trust_remote_code=False)  # or transformers asks, and waits
        except Exception:  # transformers refuses some in words of its own
            continue
        assert same(loaded, model), what
        equal |= {*re.findall(r"'(\w+)'", what)[:1]}
    assert "transformers_version" in equal
    assert equal <= checkpoint._FREE


@each
def test_no_edit_of_a_tensor_is_loaded(name: str, tmp_path: Path) -> None:
    model = CONVERSIONS[name]()
    model.save_pretrained(tmp_path)
    load, path = auto(name.partition(",")[0]).from_pretrained, tmp_path / "model.safetensors"
    weights = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    keys = [key for key in weights if is_of_scheme(key)]
    for key in (*keys, next(key for key in weights if key not in keys)):
        tensor = weights[key]
        edited = [{f"{key}_2": tensor}, {}, {key: tensor.bfloat16()}, {key: tensor[None]}, {key: tensor.long()}]
        # The values of a model's own weights are the user's, as in a stock checkpoint.
        for other in edited + [{key: tensor + 0.01}] * (key in keys):
            save_file({inner: value for inner, value in weights.items() if inner != key} | other, path, metadata)
            with pytest.raises(CheckpointError):
                load(tmp_path)
    save_file(weights, path, metadata)
    assert same(load(tmp_path), model)
    # As it was before values counted.
    save_file(weights, path, {**metadata, checkpoint.FILES: checkpoint._bound(path, values=False)})
    assert same(load(tmp_path), model)
