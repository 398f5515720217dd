"""The same recipe in one process and in two (gloo, on the CPU): the same losses, and checkpoints that load anywhere.

DDP runs with the grid, FSDP2 on demand: pytest -m slow tests/test_distributed.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import stock, text_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import hf_posenc
from hf_posenc import ArchitectureError
from hf_posenc.recipes import library
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import run

RECIPE = """
model: tiny-llama
conversion: {{scheme: fire_s, options: {{threshold: 64.0}}, native: handover, handover: 0.5}}
data: {{source: {text}}}
training: {{steps: 6, length: 32, batch_size: 8, learning_rate: 1e-3}}
distillation: {{share: 0.5, hidden: 0.1}}
evaluation: {{contexts: [64], windows: 2}}
saving: {{every: 3}}
"""

# The sums over a batch are made in another order, which moves a float32 by some 1e-7 of its size; six steps of Adam,
# which divides small gradients by themselves, make up to 1e-5 of it. A window too many or too few would make 1e-2.
TOLERANCE = 5e-5


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(text=text_file()), encoding="utf-8")
    return path


def launch(
    config: str, recipe: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> subprocess.CompletedProcess[str]:
    """Run a recipe with `accelerate launch -m hf_posenc train`, in two processes without accelerators.

    Their losses are computed in pieces.
    """
    few = "from hf_posenc.recipes.training import pieces\n\npieces.AT_ONCE = 20_000\n"
    (recipe.parent / "few_logits.py").write_text(few, encoding="utf-8")
    monkeypatch.syspath_prepend(recipe.parent)
    for name, value in (
        ("OMP_NUM_THREADS", "1"),
        ("ACCELERATE_USE_CPU", "true"),
        ("PYTHONPATH", os.pathsep.join(sys.path)),
    ):
        monkeypatch.setenv(name, value)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(library.find_config(config))]
    command = [*launcher, "--num_processes", "2", "-m", "hf_posenc", "--import", "few_logits"]
    command += ["train", str(recipe), "--out", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def losses(folder: Path) -> list[float]:
    state = json.loads((folder / "checkpoints" / "checkpoint-3" / "trainer_state.json").read_text(encoding="utf-8"))
    return [entry["loss"] for entry in state["log_history"]]


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).eval()(torch.arange(40)[None] + 30).logits


@pytest.mark.parametrize(
    "config", [pytest.param("ddp", marks=pytest.mark.grid), pytest.param("fsdp2", marks=pytest.mark.slow)]
)
def test_two_processes_train_as_one(config: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if config == "fsdp2":  # Each stage divides the model among the processes, or finds it divided.
        text = recipe.read_text(encoding="utf-8").replace("native: handover, handover: 0.5", "native: remove")
        text = text.replace("windows: 2", "windows: 2, prompts: 1")
        # At higher rates a transfer moves weights whose gradient is rounding too far for the tolerance.
        rates = "learning_rate: 1e-4, scheme_learning_rate: 1e-4"
        text += f"transfer: {{steps: 3, {rates}}}\nlengthen: {{steps: 4, length: 48, {rates}}}\n"
        recipe.write_text(text, encoding="utf-8")
    alone = run.train(read_recipe(recipe), tmp_path / "one")
    done = launch(config, recipe, tmp_path / "two", monkeypatch)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count(f"wrote {tmp_path / 'two'}") == 1
    record = json.loads((tmp_path / "two" / "run.json").read_text(encoding="utf-8"))
    assert record["starts"][0]["processes"] == 2
    # With FSDP2 the optimizer's state is that of a sharded model; with DDP it is the trainer's own.
    files = {path.name for path in (tmp_path / "two" / "checkpoints" / "checkpoint-3").iterdir()}
    assert ("optimizer.bin" in files) == (config == "fsdp2")
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors"} <= files

    assert len(losses(tmp_path / "one")) == 3
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=TOLERANCE)
    curves = [
        json.loads((tmp_path / name / "measurements.json").read_text(encoding="utf-8")) for name in ("one", "two")
    ]
    # Perplexities of single windows after 13 steps are up to 8e-4 apart.
    torch.testing.assert_close(*map(torch.tensor, map(numbers, curves)), rtol=30 * TOLERANCE, atol=0)
    # Adam moves a weight whose gradient is rounding by as much as any other: logits, of a size of 5, end up to 0.007
    # apart. Three more steps move them by 10.
    for part in ("model", "checkpoints/checkpoint-3"):
        torch.testing.assert_close(logits(tmp_path / "one" / part), logits(tmp_path / "two" / part), atol=2e-2, rtol=0)
    assert alone.loss is not None


SHARDED = """
import sys
import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard
from models import stock, tokens
import hf_posenc

torch.distributed.init_process_group("gloo")
ids = tokens("llama", 2, 40)
for name in sys.argv[1:]:
    losses = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = hf_posenc.patch(stock("llama").bfloat16(), name)
        parts = [x for x in model.modules() if isinstance(x, hf_posenc.Scheme)]
        within = {y for x in parts for y in x.modules() if y is not x}
        for unit in (*(x for x in parts if x not in within), *model.model.layers, model) if sharded else ():
            fully_shard(unit)
        losses.append(model(input_ids=ids, labels=ids).loss)
    losses[1].backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad), name
    torch.testing.assert_close(*losses, rtol=2e-3, atol=0, msg=name)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_schemes_are_units_of_fsdp_in_half_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.py").write_text(SHARDED, encoding="utf-8")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(tmp_path / "run.py")]
    done = subprocess.run([*launcher, *hf_posenc.schemes()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


SPLIT: list[dict[str, Any]] = [
    {"tp_plan": "auto"},
    {"tp_size": 2},
    {"distributed_config": {"tp_size": 2}},
    {"distributed_config": DistributedConfig(tp_plan={"layers.*.self_attn.q_proj": "colwise"})},
    {"distributed_config": DistributedConfig(pp_size=2)},
]


@pytest.mark.parametrize("asked", SPLIT, ids=str)
def test_layers_split_between_devices_are_refused(asked: dict[str, Any], tmp_path: Path) -> None:
    hf_posenc.patch(stock("llama"), "alibi").save_pretrained(tmp_path)
    with pytest.raises(ArchitectureError, match="split between devices"):
        AutoModelForCausalLM.from_pretrained(tmp_path, **asked)


def test_a_model_whose_layers_are_split_is_not_patched() -> None:
    model = stock("llama")
    model._tp_size = 2  # as transformers leaves it
    with pytest.raises(ArchitectureError, match="split between devices"):
        hf_posenc.patch(model, "alibi")


def numbers(content: object) -> list[float]:
    """Return all fractions in some JSON."""
    if isinstance(content, dict):
        return [number for value in content.values() for number in numbers(value)]
    if isinstance(content, list):
        return [number for value in content for number in numbers(value)]
    return [content] if isinstance(content, float) else []
