"""The name of a model leads to what it computes, or to an error: other libraries load models again by their name."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoProcessor, PreTrainedModel

import hf_posenc
from hf_posenc import CheckpointError
from hf_posenc.patches import locks


def names(model: Any) -> set[str]:
    inside = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return {name for module in inside for name in (module.name_or_path, module.config._name_or_path)}


def loaded(folder: Path, architecture: str) -> Any:
    return models.auto(architecture).from_pretrained(folder).eval()


def named(architecture: str) -> Any:
    return loaded(models.DIRECTORIES[architecture], architecture)


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_no_name_leads_to_a_model_that_was_changed_in_memory(architecture: str) -> None:
    model = named(architecture)
    before = names(model)
    hf_posenc.patch(model, "fire", layers=[0], native="keep")
    for change in (
        lambda: None,
        lambda: hf_posenc.patch(model, "alibi", layers=[1], native="keep"),
        lambda: hf_posenc.patch(model, "fire", native="keep"),
        lambda: hf_posenc.set_strength(model, native=0.0),
        lambda: hf_posenc.drop_native(model),
    ):
        change()
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert names(one) == {locks.UNSAVED}
    for kind in (AutoConfig, AutoModel, models.auto(architecture)):
        with pytest.raises(CheckpointError, match=r"ref_model=copy.deepcopy\(model\).*processing_class=tokenizer"):
            kind.from_pretrained(model.config._name_or_path)
    with pytest.raises(ValueError, match="save_it_or_pass_ref_model_and_processing_class"):
        AutoProcessor.from_pretrained(model.config._name_or_path)
    with pytest.raises((CheckpointError, OSError)):
        type(models.stock(architecture)).from_pretrained(model.config._name_or_path)
    assert names(hf_posenc.unpatch(model)) == before


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_the_name_of_a_loaded_checkpoint_leads_to_it(architecture: str, tmp_path: Path) -> None:
    ids = models.tokens(architecture, 1, 12)
    hf_posenc.patch(named(architecture), "kerple").save_pretrained(tmp_path)
    for secret in ("posenc_origin", locks.UNSAVED):
        assert secret not in (tmp_path / "config.json").read_text(encoding="utf-8")
    assert f"# {models.DIRECTORIES[architecture].name}\n" in (tmp_path / "README.md").read_text(encoding="utf-8")
    model = loaded(tmp_path, architecture)
    assert names(model) == {str(tmp_path)}
    again = loaded(Path(model.config._name_or_path), architecture)
    assert torch.equal(models.logits(again, architecture, ids), models.logits(model, architecture, ids))
    # Its name leads to the converted model, not to the stock one that is left.
    assert names(hf_posenc.unpatch(model)) == {locks.UNSAVED}
