"""Models whose layers accelerate moves in and out: hooks keep calling the patched forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from grid import FIRSTS
from models import DIRECTORIES, auto, in_turn, logits, stacks_for, stock, tokens
from variants import VARIANTS, identify

import hf_posenc

CASES = in_turn(sorted(FIRSTS))
TWO = {"num_hidden_layers": 2}


def _offloaded(model: Any, architecture: str, source: Path, folder: Path) -> Any:
    """Load with some layers on disk, which puts accelerate's hooks on every module that has weights."""
    names = [name for name, module in model.named_modules() if type(module).__name__.endswith(("Layer", "Block"))]
    blocks = [name for name in names if name.split(".")[-1].isdigit() and name.split(".")[-2] != "layer"]
    covered = {name: "disk" if index % 2 else "cpu" for index, name in enumerate(blocks)}
    rest = {
        name.rsplit(".", 1)[0]: "cpu"
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not any(name.startswith(block + ".") for block in blocks)
    }
    return auto(architecture).from_pretrained(source, device_map=rest | covered, offload_folder=folder, **TWO).eval()


@pytest.mark.parametrize(("architecture", "scheme"), CASES)
def test_layers_on_disk(architecture: str, scheme: str, tmp_path: Path) -> None:
    ids = tokens(architecture, 2, 15)
    reference = stock(architecture)
    torch.manual_seed(3)
    hf_posenc.patch(reference, scheme, **stacks_for(architecture, scheme))
    expected = logits(reference, architecture, ids)

    model = _offloaded(stock(architecture), architecture, DIRECTORIES[architecture], tmp_path / "a")
    before = logits(model, architecture, ids)
    torch.manual_seed(3)
    hf_posenc.patch(model, scheme, **stacks_for(architecture, scheme))
    torch.testing.assert_close(logits(model, architecture, ids), expected)
    hf_posenc.unpatch(model)
    assert torch.equal(logits(model, architecture, ids), before)

    reference.save_pretrained(tmp_path / "saved")
    loaded = _offloaded(reference, architecture, tmp_path / "saved", tmp_path / "b")
    torch.testing.assert_close(logits(loaded, architecture, ids), expected)


# With options, some schemes have modules of their own, with weights.
ON_DISK = [(*case, {}) for case in CASES]
ON_DISK += [
    pytest.param("llama", name, options, marks=pytest.mark.grid)
    for name in VARIANTS
    for options in VARIANTS[name]
    if options
]


@pytest.mark.parametrize(("architecture", "scheme", "options"), ON_DISK, ids=identify)
def test_a_patched_model_is_put_on_disk(
    architecture: str, scheme: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = hf_posenc.patch(stock(architecture), scheme, **stacks_for(architecture, scheme), **options)
    ids = tokens(architecture, 2, 100)
    expected = logits(model, architecture, ids)
    disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    torch.testing.assert_close(logits(model, architecture, ids), expected)
