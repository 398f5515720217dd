"""Weights that go into a model that is patched already are of the same record, whoever reads them."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import load_checkpoint_in_model
from models import arguments, logits, moved, stock, tokens, windows
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_model
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import load_sharded_checkpoint
from variants import VARIANTS

import hf_posenc
from hf_posenc import CheckpointError, PosencError, PosencLoraConfig


@functools.cache
def alike() -> list[tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]]:
    """Return pairs of different schemes or options whose weights have the same names and shapes."""
    found: dict[Any, list[Any]] = {}
    cases = [(scheme, options) for scheme in hf_posenc.schemes() for options in VARIANTS.get(scheme, [{}])]
    for scheme, options in [*cases, ("kerple", {"native": "keep", "gate": False}), ("kerple", {"layers": [0, 1]})]:
        try:
            model = hf_posenc.patch(stock("llama"), scheme, **options)
        except PosencError:
            continue  # for images
        weights = tuple((name, tensor.shape) for name, tensor in model.state_dict().items())
        others = found.setdefault(weights, [])
        if model.config.posenc not in [record for _, record in others]:
            others.append(((scheme, options), model.config.posenc))
    return [(one, two) for others in found.values() for (one, _), (two, _) in itertools.pairwise(others)]


def model(scheme: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return hf_posenc.patch(stock("llama"), scheme, **options)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def trainer(inside: Any, folder: Path, **changes: Any) -> Trainer:
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **changes}
    return Trainer(model=inside, args=arguments(folder, **settings), train_dataset=windows("llama", 4))


def through_torch(source: Any, folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    torch.save(source.state_dict(), folder / "weights.pt")
    return torch.load(folder / "weights.pt", weights_only=True)


def saved(source: Any, folder: Path, **changes: Any) -> str:
    source.save_pretrained(folder, **changes)
    return str(folder)


def accelerated(source: Any, folder: Path, target: Any, *, safe: bool = False) -> None:
    """Load what accelerate saved."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(source)
    accelerator.save_state(str(folder), safe_serialization=safe)
    if safe:
        source.config.save_pretrained(folder)  # its file alone has no record
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(target)
    accelerator.load_state(str(folder))


# Each way to load the weights of the first model, saved in a folder, into the second.
WAYS: dict[str, Callable[[Any, Path, Any], Any]] = {
    "load_state_dict": lambda source, folder, target: target.load_state_dict(source.state_dict()),
    "not strict": lambda source, folder, target: target.load_state_dict(source.state_dict(), strict=False),
    "assigned": lambda source, folder, target: target.load_state_dict(source.state_dict(), assign=True),
    "the body alone": lambda source, folder, target: target.model.load_state_dict(source.model.state_dict()),
    "in a wrapper": lambda source, folder, target: Wrapper(target).load_state_dict(Wrapper(source).state_dict()),
    "torch.save": lambda source, folder, target: target.load_state_dict(through_torch(source, folder)),
    "Trainer": lambda source, folder, target: trainer(target, folder)._load_from_checkpoint(saved(source, folder)),
    "Trainer, shards": lambda source, folder, target: trainer(target, folder)._load_from_checkpoint(
        saved(source, folder, max_shard_size="300KB")
    ),
    "load_sharded_checkpoint": lambda source, folder, target: load_sharded_checkpoint(
        target, saved(source, folder, max_shard_size="300KB"), strict=False
    ),
    "load_checkpoint_in_model": lambda source, folder, target: load_checkpoint_in_model(target, saved(source, folder)),
    "safetensors": lambda source, folder, target: load_model(target, f"{saved(source, folder)}/model.safetensors"),
    "accelerate": accelerated,
    "accelerate, safetensors": functools.partial(accelerated, safe=True),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_no_way_loads_weights_of_another_record(way: str, tmp_path: Path) -> None:
    ids = tokens("llama", 1, 9)
    pairs = alike()
    assert {pair[0][0] for pair in pairs} >= {"alibi", "kerple", "nope", "stick_breaking", "fox"}
    for number, (first, second) in enumerate(pairs if way == "load_state_dict" else pairs[::6]):
        source, target = moved(model(*first)), model(*second)
        weights = {name: tensor.clone() for name, tensor in target.state_dict().items()}
        with pytest.raises(CheckpointError, match=f"other schemes, options or layers than this .*{second[0]}"):
            WAYS[way](source, tmp_path / str(number), target)
        assert all(torch.equal(weights[name], tensor) for name, tensor in target.state_dict().items())
    same = model(*first)
    WAYS[way](source, tmp_path / "same", same)
    assert torch.equal(logits(same.eval(), "llama", ids), logits(source.eval(), "llama", ids))


@pytest.mark.parametrize(("start", "other"), [({"kernel": "log"}, {"kernel": "power"}), ({}, {"layers": [0]})])
def test_a_trainer_resumes_its_own_schemes_only(start: Any, other: Any, tmp_path: Path) -> None:
    whole = trainer(model("kerple", start), tmp_path)
    whole.train()
    checkpoint = str(tmp_path / "checkpoint-1")
    again = trainer(model("kerple", start), tmp_path / "again")
    again.train(resume_from_checkpoint=checkpoint)
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(
        CheckpointError, match=r"checkpoint-1 is that of a model with other schemes|has unknown weights"
    ):
        trainer(model("kerple", other), tmp_path / "other").train(resume_from_checkpoint=checkpoint)


def test_a_trainer_resumes_an_adapter_on_its_base_and_schemes(tmp_path: Path) -> None:
    def adapted(base: Any) -> Any:
        torch.manual_seed(0)
        return get_peft_model(base, PosencLoraConfig(target_modules=["q_proj"]))

    whole = trainer(adapted(model("kerple", {})), tmp_path)
    whole.train()
    checkpoint = str(tmp_path / "checkpoint-1")
    again = trainer(adapted(model("kerple", {})), tmp_path / "again")
    again.train(resume_from_checkpoint=checkpoint)
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)
    other = adapted(model("kerple", {"kernel": "power"}))
    with pytest.raises(CheckpointError, match=r"checkpoint-1 is that of a model with other schemes, options or layers"):
        trainer(other, tmp_path / "other").train(resume_from_checkpoint=checkpoint)
    base = model("kerple", {})
    with torch.no_grad():
        base.model.layers[0].mlp.up_proj.weight[:, 3] *= 1.1
    with pytest.raises(CheckpointError, match=r"other weights than those of this .*matrices differ"):
        trainer(adapted(base), tmp_path / "base").train(resume_from_checkpoint=checkpoint)


def test_what_has_no_record_is_loaded() -> None:
    one, two = moved(model("kerple", {})), model("kerple", {"kernel": "power"})
    before = one.state_dict()
    assert set(before) == {*dict(one.named_parameters()), "lm_head.weight"}  # tensors only
    two.load_state_dict(dict(one.state_dict()))  # tensors by name, which nothing tells apart
    hf_posenc.set_strength(strong := model("kerple", {"native": "keep"}), native=0.5)
    strong.load_state_dict(model("kerple", {"native": "keep"}).state_dict())  # a handover sets them again
    plain = get_peft_model(copy.deepcopy(one), LoraConfig(target_modules=["q_proj"]))
    assert isinstance(plain, PeftModel)
    plain.load_state_dict(plain.state_dict())
