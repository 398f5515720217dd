"""Training by a recipe, and the demo."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models import stock, windows
from rich.console import Console
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.recipes import demo
from hf_posenc.recipes.schema.recipe import Conversion, Distillation, Recipe, Saving, Training
from hf_posenc.recipes.training.callbacks import parameter_groups
from hf_posenc.recipes.training.distillation import Teacher
from hf_posenc.recipes.training.trainer import adaptation_trainer


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def trainer(model: Any, folder: Path, teacher: Teacher | None = None, **training: Any) -> Any:
    """Return the trainer of a recipe, whose sections of other names are keywords, too."""
    others = {name: training.pop(name) for name in ("distillation", "saving") if name in training}
    what = Recipe(model="small", conversion=Conversion(scheme="fire"), training=Training(**training), **others)
    return adaptation_trainer(model, what, windows("llama", 13), folder=folder, teacher=teacher)


@pytest.mark.parametrize("scheme", ["fire", "fire_s"])
def test_new_parameters_have_a_group_of_their_own(scheme: str) -> None:
    model = hf_posenc.patch(stock("llama"), scheme)
    groups = parameter_groups(model, scheme_learning_rate=7e-3, weight_decay=0.2)
    new = {id(p) for module in model.modules() if isinstance(module, hf_posenc.Scheme) for p in module.parameters()}
    assert {id(p) for p in groups[0]["params"]} == new
    assert (groups[0]["lr"], groups[0]["weight_decay"]) == (7e-3, 0.0)
    assert [group["weight_decay"] for group in groups[1:]] == [0.2, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert len(parameter_groups(stock("llama"), scheme_learning_rate=1e-3)) == 2


def test_the_trainer_does_as_the_recipe_says(tmp_path: Path) -> None:
    keys = {"batch_size": 4, "micro_batch_size": 2, "max_grad_norm": 0.5, "precision": "bfloat16", "seed": 3}
    rates = {"learning_rate": 1e-3, "scheme_learning_rate": 7e-3, "warmup": 0.25}
    model = hf_posenc.patch(stock("llama"), "fire")
    before = copy.deepcopy(model.state_dict())
    run = trainer(model, tmp_path, steps=40, **keys, **rates, gradient_checkpointing=True, saving=Saving(every=7))
    run.create_optimizer_and_scheduler(num_training_steps=40)
    # The schedule scales each group's own peak.
    assert [group["initial_lr"] for group in run.optimizer.param_groups] == [7e-3, 1e-3, 1e-3]
    args = run.args
    assert (args.max_steps, args.per_device_train_batch_size, args.gradient_accumulation_steps) == (40, 2, 2)
    assert (args.warmup_steps, args.max_grad_norm, args.bf16, args.fp16) == (10, 0.5, True, False)
    assert (args.seed, args.data_seed, args.save_strategy, args.save_steps) == (3, 3, "steps", 7)
    assert run.train_dataset.indices == range(12)
    asked: list[Any] = []
    model.register_forward_pre_hook(lambda _, args, given: asked.append(given["use_cache"]), with_kwargs=True)
    args.max_steps = 2
    run.train()
    assert asked == 4 * [False]
    assert model.config.use_cache
    assert model.model.gradient_checkpointing
    after = model.state_dict()
    assert all(name.endswith("init_L") or not torch.equal(after[name], value) for name, value in before.items())


def test_a_teacher_that_has_faded_is_let_go(tmp_path: Path) -> None:
    fading = Distillation(share=0.5, until=0.5)
    for distillation, gone in ((fading, True), (dataclasses.replace(fading, until=0.0), False)):
        teacher = stock("llama")
        model, held = hf_posenc.patch(stock("llama"), "fire"), weakref.ref(teacher)
        run = trainer(model, tmp_path, Teacher(teacher), steps=4, batch_size=2, distillation=distillation)
        del teacher
        run.train()
        gc.collect()
        assert (held() is None) == gone
        # Whoever shows the loss on text would go on showing what was logged last.
        losses = {entry["step"]: entry for entry in run.state.log_history if "loss" in entry}
        assert all("text_loss" in entry for entry in losses.values())
        assert (losses[4]["text_loss"] == pytest.approx(losses[4]["loss"], rel=1e-5)) == gone


# -- demo --------------------------------------------------------------------------------------------------------------


@pytest.mark.grid
def test_demo(tmp_path: Path) -> None:
    screen = io.StringIO()
    outcome = demo.run(tmp_path, Console(file=screen, width=120), scheme="fire", steps=2, windows=4)
    assert {path.name for path in tmp_path.iterdir()} == {"control", "run", ".posenc-demo"}
    shown = " ".join(screen.getvalue().split())
    # After two steps it is no match for the control, and that is said.
    assert outcome.verdict.is_bad
    assert "worse than the control" in shown
    assert " ".join(outcome.verdict.sentences) in shown
    assert "Train it longer" not in shown, "the demo takes no keys of recipes"
    assert demo.is_demo(tmp_path)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert not demo.is_demo(tmp_path)


def test_demo_replaces_an_earlier_demo_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(folder: Path, console: Console, *, scheme: str, steps: int) -> None:
        (folder / demo.MARKER).write_text(f"{scheme} {steps}", encoding="utf-8")

    monkeypatch.setattr(demo, "run", pretend)
    out = tmp_path / "out"
    for steps in (1, 2):
        assert CliRunner().invoke(app, ["demo", "--out", str(out), "--steps", str(steps)]).exit_code == 0
        assert (out / demo.MARKER).read_text(encoding="utf-8") == f"fire {steps}"
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    refused = CliRunner().invoke(app, ["demo", "--out", str(out)])
    assert refused.exit_code == 1
    assert "exists and is not empty" in refused.stderr
    assert (out / "notes.txt").read_text(encoding="utf-8") == "mine"
