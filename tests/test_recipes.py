"""Adaptation and the demo."""

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
from rich.console import Console
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerControl, TrainerState
from typer.testing import CliRunner

import hf_posenc
from hf_posenc.cli import app
from hf_posenc.recipes import demo
from hf_posenc.recipes.schema.recipe import Conversion, Distillation, Recipe, Saving, Training
from hf_posenc.recipes.training.callbacks import parameter_groups
from hf_posenc.recipes.training.distillation import Teacher, divergence
from hf_posenc.recipes.training.trainer import LogAndSave, adaptation_trainer

VOCABULARY = 50


def small() -> Any:
    """A small random model."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **shape)).eval()


def counting(tokens: int) -> Tensor:
    """A text in which every token follows from the one before."""
    return torch.arange(tokens) % VOCABULARY


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.fixture
def ids() -> Tensor:
    """A random text."""
    return torch.randint(VOCABULARY, (1000,), generator=torch.Generator().manual_seed(0))


# -- adaptation --------------------------------------------------------------------------------------------------------


def recipe(*, share: float = 0.0, every: int = 1000, **training: Any) -> Recipe:
    """What to do with a model of the above."""
    return Recipe(
        model="small",
        conversion=Conversion(scheme="fire"),
        training=Training(**training),
        distillation=Distillation(share=share),
        saving=Saving(every=every),
    )


def adapt(*given: Any, **options: Any) -> list[float]:
    """Train a model by a recipe, and return the losses."""
    trainer = adaptation_trainer(*given, **options)
    trainer.train()
    trainer.model.eval()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def windows(ids: Tensor, length: int) -> list[dict[str, Tensor]]:
    """The windows of a text, one after the other."""
    return [{"input_ids": row, "labels": row} for row in ids[: len(ids) // length * length].view(-1, length)]


def test_training_lowers_the_loss_and_trains_the_scheme(tmp_path: Path) -> None:
    model = hf_posenc.patch(small(), "fire")
    before = copy.deepcopy(model.state_dict())
    what = recipe(steps=25, batch_size=4, learning_rate=5e-3)
    losses = adapt(model, what, windows(counting(2000), 32), folder=tmp_path)
    assert len(losses) == 25
    assert losses[-1] < 0.7 * losses[0]
    assert model.config.use_cache
    for name, value in model.state_dict().items():
        assert name.endswith("init_L") or not torch.equal(value, before[name]), name


@pytest.mark.parametrize("scheme", ["fire", "fire_s"])
def test_new_parameters_have_a_group_of_their_own(scheme: str) -> None:
    model = hf_posenc.patch(small(), scheme)
    groups = parameter_groups(model, scheme_learning_rate=7e-3, weight_decay=0.2)
    new = {id(p) for module in model.modules() if isinstance(module, hf_posenc.Scheme) for p in module.parameters()}
    assert {id(p) for p in groups[0]["params"]} == new
    assert (groups[0]["lr"], groups[0]["weight_decay"]) == (7e-3, 0.0)
    assert [group["weight_decay"] for group in groups[1:]] == [0.2, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert len(parameter_groups(small(), scheme_learning_rate=1e-3)) == 2


def test_the_trainer_does_as_the_recipe_says(tmp_path: Path) -> None:
    trainer = adaptation_trainer(
        hf_posenc.patch(small(), "fire"),
        recipe(
            steps=40,
            batch_size=4,
            micro_batch_size=2,
            learning_rate=1e-3,
            scheme_learning_rate=7e-3,
            warmup=0.25,
            max_grad_norm=0.5,
            precision="bfloat16",
            gradient_checkpointing=True,
            seed=3,
            every=7,
        ),
        windows(counting(110), 8),
        folder=tmp_path,
    )
    trainer.create_optimizer_and_scheduler(num_training_steps=40)
    # The schedule scales each group's own peak.
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [7e-3, 1e-3, 1e-3]
    args = trainer.args
    assert (args.max_steps, args.per_device_train_batch_size, args.gradient_accumulation_steps) == (40, 2, 2)
    assert (args.warmup_steps, args.max_grad_norm, args.bf16, args.fp16) == (10, 0.5, True, False)
    assert (args.seed, args.data_seed, args.save_strategy, args.save_steps) == (3, 3, "steps", 7)
    assert trainer.train_dataset.indices == range(12)
    asked: list[Any] = []
    trainer.model.register_forward_pre_hook(lambda _, args, given: asked.append(given["use_cache"]), with_kwargs=True)
    trainer.args.max_steps = 1
    trainer.train()
    assert asked == 2 * [False]
    assert trainer.model.model.gradient_checkpointing


def test_a_resumed_run_logs_the_same_means() -> None:
    def after(step: int, *, saves: bool) -> tuple[bool, bool]:
        control = TrainerControl(should_save=saves)
        LogAndSave().on_step_end(None, TrainerState(global_step=step, max_steps=9), control)
        return control.should_log, control.should_save

    assert [after(3, saves=False), after(3, saves=True), after(9, saves=True)] == [
        (False, False),
        (True, True),
        (True, False),
    ]


def test_training_is_seeded(ids: Tensor, tmp_path: Path) -> None:
    models = [hf_posenc.patch(small(), "fire") for _ in range(3)]
    one, same, other = (
        adapt(model, recipe(steps=3, batch_size=2, seed=seed), windows(ids, 16), folder=tmp_path)
        for model, seed in zip(models, (3, 3, 4), strict=True)
    )
    assert one == same != other
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(first, second)


def test_distillation_pulls_towards_the_teacher(ids: Tensor, tmp_path: Path) -> None:
    teacher = small()
    before = copy.deepcopy(teacher.state_dict())
    student = hf_posenc.patch(copy.deepcopy(teacher), "fire")
    with torch.no_grad():
        student.lm_head.weight.normal_(std=0.5)

    def distance() -> float:
        with torch.no_grad():
            return divergence(student(input_ids=ids[None, :32]).logits, teacher(input_ids=ids[None, :32]).logits).item()

    start = distance()
    what = recipe(steps=20, batch_size=4, learning_rate=1e-2, share=1.0)
    adapt(student, what, windows(ids, 32), teacher=Teacher(teacher), folder=tmp_path)
    assert distance() < start / 2
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_a_teacher_that_has_faded_is_let_go(ids: Tensor, tmp_path: Path) -> None:
    what = recipe(steps=4, batch_size=2)
    fading = dataclasses.replace(what, distillation=Distillation(share=0.5, until=0.5))
    for chosen, gone in ((fading, True), (dataclasses.replace(what, distillation=Distillation(share=0.5)), False)):
        teacher = small()
        trainer = adaptation_trainer(
            hf_posenc.patch(small(), "fire"),
            chosen,
            windows(ids, 16),
            folder=tmp_path,
            teacher=Teacher(teacher),
        )
        held = weakref.ref(teacher)
        del teacher
        trainer.train()
        gc.collect()
        assert (held() is None) == gone
        # Whoever shows the loss on text would go on showing what was logged last.
        losses = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
        assert all("text_loss" in entry for entry in losses.values())
        assert (losses[4]["text_loss"] == pytest.approx(losses[4]["loss"], rel=1e-5)) == gone


# -- demo --------------------------------------------------------------------------------------------------------------


def test_demo(tmp_path: Path) -> None:
    screen = io.StringIO()
    outcome = demo.run(tmp_path, Console(file=screen, width=120), scheme="fire", steps=2, windows=4)
    assert {path.name for path in tmp_path.iterdir()} == {"control", "run", ".posenc-demo"}
    shown = " ".join(screen.getvalue().split())
    # After two steps it is no match for the control, and that is said.
    assert outcome.verdict.is_bad
    assert "than the control: at 128 tokens" in shown
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
