"""Evaluation, adaptation and the demo."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import PositionError, ShapeError
from hf_posenc.cli import app
from hf_posenc.recipes import demo
from hf_posenc.recipes.adapt import AdaptationTrainer, Settings, Windows, adapt
from hf_posenc.recipes.distillation import divergence
from hf_posenc.recipes.evaluation import ContextCurve, context_curve, spread_windows
from hf_posenc.recipes.groups import parameter_groups

VOCABULARY = 50


def small(kind: str) -> Any:
    """A small random model."""
    torch.manual_seed(0)
    if kind == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **shape)).eval()
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **shape)).eval()


def counting(tokens: int) -> Tensor:
    """A text in which every token follows from the one before."""
    return torch.arange(tokens) % VOCABULARY


@pytest.fixture
def ids() -> Tensor:
    """A random text."""
    return torch.randint(VOCABULARY, (1000,), generator=torch.Generator().manual_seed(0))


# -- evaluation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", [None, "fire"])
def test_curve_equals_a_plain_loop(kind: str, scheme: str | None, ids: Tensor) -> None:
    model = small(kind)
    if scheme:
        hf_posenc.patch(model, scheme)
    windows, targets = 5, 16
    curve = context_curve(model, ids, (16, 40, 64), windows=windows, targets=targets, batch_size=2)
    for row, window in enumerate(spread_windows(ids, 65, windows)):
        for column, context in enumerate(curve.contexts):
            read = window[-context - 1 : -1]
            # transformers shifts labels itself: the last target is that of a token which is not read.
            labels = torch.full((1, context + 1), -100)
            labels[0, -targets:] = window[-targets:]
            with torch.no_grad():
                logits = model(input_ids=read[None]).logits
            padded = torch.cat([logits, torch.zeros(1, 1, VOCABULARY)], dim=1)
            loss = model.loss_function(logits=padded, labels=labels, vocab_size=VOCABULARY)
            assert curve.losses[column, row].item() == pytest.approx(loss.item(), abs=1e-6)


def test_estimates(ids: Tensor) -> None:
    ours = ContextCurve((8, 16), torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]], dtype=torch.float64))
    theirs = ContextCurve((8, 16), ours.losses + torch.tensor([[0.5, 0.5, 0.5], [0.0, 0.0, 3.0]]))
    perplexity = ours.perplexity(8)
    assert perplexity.mean == pytest.approx(math.exp(2.0))
    assert perplexity.error == pytest.approx(math.exp(2.0) / math.sqrt(3))
    # Windows that differ by the same amount leave no doubt about it, however different they are.
    paired = theirs.minus(ours, 8)
    assert (paired.mean, paired.error) == (0.5, 0.0)
    assert theirs.minus(ours, 16).error == pytest.approx(1.0)
    assert math.isnan(ContextCurve((8,), ours.losses[:1, :1]).perplexity(8).error)
    with pytest.raises(ShapeError, match="takes the same"):
        ours.minus(ContextCurve((8,), ours.losses[:1, :2]), 8)
    with pytest.raises(ShapeError, match="measured were 8, 16"):
        ours.perplexity(9)


def test_more_context_helps_a_model_that_can_use_it() -> None:
    model = small("llama")
    settings = Settings(steps=30, length=32, batch_size=8, learning_rate=1e-2, use_cpu=True)
    adapt(model, counting(2000), settings)
    curve = context_curve(model, counting(2000), (16, 32), windows=4, targets=16)
    assert curve.perplexity(32).mean < 5


def test_evaluation_leaves_the_mode_and_refuses_the_impossible(ids: Tensor) -> None:
    model = small("gpt2").train()
    context_curve(model, ids, (32,), windows=2, targets=16)
    assert model.training
    with pytest.raises(PositionError, match="cannot read 128 tokens"):
        context_curve(model, ids, (128,), windows=2, targets=16)
    with pytest.raises(ShapeError, match="at least 16 tokens"):
        context_curve(model, ids, (8, 32), windows=2, targets=16)
    with pytest.raises(ShapeError, match="take at least"):
        context_curve(model, ids, (500,), windows=2, targets=16)


# -- adaptation --------------------------------------------------------------------------------------------------------


def test_adapt_lowers_the_loss_and_trains_the_scheme() -> None:
    model = hf_posenc.patch(small("llama"), "fire")
    before = copy.deepcopy(model.state_dict())
    seen: list[int] = []
    losses = adapt(
        model,
        counting(2000),
        Settings(steps=25, length=32, batch_size=4, learning_rate=5e-3, use_cpu=True),
        progress=lambda step, loss: seen.append(step),
    )
    assert losses[-1] < 0.7 * losses[0]
    assert seen == list(range(1, 26))
    assert not model.training
    assert model.config.use_cache
    for name, value in model.state_dict().items():
        assert name.endswith("init_L") or not torch.equal(value, before[name]), name


@pytest.mark.parametrize("scheme", ["fire", "fire_s"])
def test_new_parameters_have_a_group_of_their_own(scheme: str) -> None:
    model = hf_posenc.patch(small("llama"), scheme)
    groups = parameter_groups(model, scheme_learning_rate=7e-3, weight_decay=0.2)
    new = {id(p) for module in model.modules() if isinstance(module, hf_posenc.Scheme) for p in module.parameters()}
    assert {id(p) for p in groups[0]["params"]} == new
    assert (groups[0]["lr"], groups[0]["weight_decay"]) == (7e-3, 0.0)
    assert [group["weight_decay"] for group in groups[1:]] == [0.2, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert len(parameter_groups(small("llama"), scheme_learning_rate=1e-3)) == 2


def test_the_trainer_uses_the_groups(tmp_path: Path) -> None:
    settings = Settings(steps=2, batch_size=2, length=8, learning_rate=1e-3, scheme_learning_rate=7e-3, use_cpu=True)
    trainer = AdaptationTrainer(
        model=hf_posenc.patch(small("llama"), "fire"),
        args=settings.arguments(str(tmp_path)),
        train_dataset=Windows(counting(100), 8, 4, seed=0),
        teacher=None,
        settings=settings,
    )
    trainer.create_optimizer_and_scheduler(num_training_steps=2)
    # The schedule scales each group's own peak.
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [7e-3, 1e-3, 1e-3]


def test_adapt_is_seeded() -> None:
    settings = Settings(steps=3, length=16, batch_size=2, use_cpu=True, seed=3)
    first, second = (hf_posenc.patch(small("llama"), "fire") for _ in range(2))
    assert adapt(first, counting(500), settings) == adapt(second, counting(500), settings)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_distillation_pulls_towards_the_teacher(ids: Tensor) -> None:
    teacher = small("llama")
    before = copy.deepcopy(teacher.state_dict())
    student = hf_posenc.patch(copy.deepcopy(teacher), "fire")
    with torch.no_grad():
        student.lm_head.weight.normal_(std=0.5)

    def distance() -> float:
        with torch.no_grad():
            return divergence(student(input_ids=ids[None, :32]).logits, teacher(input_ids=ids[None, :32]).logits).item()

    start = distance()
    settings = Settings(steps=20, length=32, batch_size=4, learning_rate=1e-2, distillation=1.0, use_cpu=True)
    adapt(student, ids, settings, teacher=teacher)
    assert distance() < start / 2
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_divergence_is_zero_for_equals_and_never_negative(ids: Tensor) -> None:
    one, other = torch.randn(2, 2, 5, 7, generator=torch.Generator().manual_seed(0))
    assert divergence(one, one + 3.0).item() == pytest.approx(0.0, abs=1e-6)
    assert divergence(one, other).item() > 0


def test_windows_are_seeded_and_inside_the_text() -> None:
    first, second, other = (Windows(torch.arange(20), 8, 50, seed=seed) for seed in (1, 1, 2))
    rows = [first[index]["input_ids"].tolist() for index in range(len(first))]
    assert rows == [second[index]["input_ids"].tolist() for index in range(50)]
    assert rows != [other[index]["input_ids"].tolist() for index in range(50)]
    assert all(row == list(range(row[0], row[0] + 8)) for row in rows)
    assert {row[0] for row in rows} <= set(range(13))
    with pytest.raises(ShapeError, match="at least one window"):
        Windows(torch.arange(5), 8, 1, seed=0)


# -- demo --------------------------------------------------------------------------------------------------------------


def test_demo(tmp_path: Path) -> None:
    screen = io.StringIO()
    outcome = demo.run(tmp_path, Console(file=screen, width=120), scheme="fire", steps=4, contexts=(64, 128), windows=4)
    assert outcome.difference == 0.0
    assert {path.name for path in tmp_path.iterdir()} == {"table.md", "perplexity.png", "model", ".posenc-demo"}
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    original, control, untrained, adapted = outcome.subjects
    for subject in outcome.subjects:
        cell = table.split(f"|{subject.name}|")[1].split(" ± ")[0]
        assert float(cell) == pytest.approx(subject.curve.perplexity(64).mean, abs=0.5)
        assert subject.name in screen.getvalue()
    assert "logits bit-equal, largest difference 0" in screen.getvalue()
    # Without training the original is best where it was trained; even four steps help the converted model.
    assert original.curve.perplexity(128).mean < untrained.curve.perplexity(128).mean
    assert adapted.curve.minus(untrained.curve, 128).mean < 0
    assert not hf_posenc.patching.surgery.is_patched(control.model)

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


def test_demo_proof_notices_another_model(tmp_path: Path) -> None:
    model = hf_posenc.patch(small("llama"), "fire")
    model.save_pretrained(tmp_path)
    ids = counting(20)[None]
    assert demo.difference_in_fresh_process(model, tmp_path, ids) == 0.0
    with torch.no_grad():
        model.lm_head.weight[3, 0] += 1e-3
    assert demo.difference_in_fresh_process(model, tmp_path, ids) > 0.0
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(hf_posenc.CheckpointError, match="fresh process"):
        demo.difference_in_fresh_process(model, tmp_path, ids)
