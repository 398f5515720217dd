"""What a run measures: where it is kept, at which lengths, and that nothing is measured twice."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models import stock, tokens
from rich.console import Console
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import hf_posenc
from hf_posenc import CheckpointError, PositionError, RecipeError
from hf_posenc.recipes.evaluation.curve import ContextCurve, context_curve
from hf_posenc.recipes.evaluation.lengths import contexts_for, readable_curve
from hf_posenc.recipes.runs.measurements import CONVERTED, NATIVE, Measurements, Measuring
from hf_posenc.recipes.training.callbacks import Handover


def curve(value: float = 0.0, contexts: tuple[int, ...] = (16, 32)) -> ContextCurve:
    generator = torch.Generator().manual_seed(0)
    return ContextCurve(contexts, value + torch.rand(len(contexts), 3, generator=generator, dtype=torch.float64))


def text(length: int = 1000) -> Tensor:
    return tokens("llama", 1, length)[0]


# -- the file ----------------------------------------------------------------------------------------------------------


def test_measurements_come_back_bit_equal(tmp_path: Path) -> None:
    path = tmp_path / "measurements.json"
    assert Measurements.load(path).course() == []
    written = Measurements.load(path)
    odd = ContextCurve((16,), torch.tensor([[math.pi * 1e-7, 1 / 3, math.nan, math.inf]], dtype=torch.float64))
    given = {(NATIVE, 0): curve(1.0), (CONVERTED, 20): curve(3.0), (CONVERTED, 0): curve(2.0), (CONVERTED, 100): odd}
    for (name, step), value in given.items():
        written.record(name, step, value)
    read = Measurements.load(path)
    for (name, step), value in given.items():
        found = read.at(name, step)
        assert found is not None
        assert found.contexts == value.contexts
        assert found.losses.numpy().tobytes() == value.losses.numpy().tobytes()
    assert [step for step, _ in read.course()] == [0, 20, 100]
    for name, key in (("native", (NATIVE, 0)), ("before", (CONVERTED, 0)), ("after", (CONVERTED, 100))):
        named = read.curve(name)
        assert named is not None
        assert named.contexts == given[key].contexts
    assert read.at(NATIVE, 1) is None


def test_there_is_no_after_before_the_first_step() -> None:
    measurements = Measurements()
    measurements.record(CONVERTED, 0, curve())
    assert measurements.curve("after") is None
    assert measurements.curve("native") is None


def test_a_write_that_is_cut_off_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "measurements.json"
    measurements = Measurements.load(path)
    measurements.record(NATIVE, 0, curve())
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        measurements.record(CONVERTED, 0, curve())
    assert path.read_bytes() == before
    monkeypatch.undo()
    assert Measurements.load(path).at(CONVERTED) is None


def test_other_processes_read_and_do_not_write(tmp_path: Path) -> None:
    path = tmp_path / "measurements.json"
    Measurements.load(path).record(NATIVE, 0, curve())
    before = path.read_bytes()
    other = Measurements.load(path, writes=False)
    assert other.at(NATIVE) is not None
    other.record(CONVERTED, 0, curve())
    assert other.at(CONVERTED) is not None
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format_version": 1}', "cannot be read"),
        (
            '{"format_version": 1, "curves": [{"name": "native", "step": 0, "contexts": [8], "losses": []}]}',
            "cannot be read",
        ),
        (
            '{"format_version": 1, "curves": [{"name": "native", "step": 0, "contexts": [8, 9], "losses": [[1.0]]}]}',
            "losses of shape",
        ),
        ('{"format_version": 7, "curves": []}', "format_version 7"),
    ],
)
def test_damaged_measurements(tmp_path: Path, damage: str, message: str) -> None:
    path = tmp_path / "measurements.json"
    path.write_text(damage)
    with pytest.raises(CheckpointError, match=message):
        Measurements.load(path)


# -- the lengths -------------------------------------------------------------------------------------------------------


def test_usual_contexts() -> None:
    assert contexts_for(256, 10**6, windows=4) == ((64, 128, 256, 512, 1024, 2048), ())
    contexts, notes = contexts_for(128, 10**6, windows=4)
    assert contexts == (64, 128, 256, 512, 1024)
    assert notes == ("not measured at 32 tokens: shorter than the 64 tokens that are scored",)


@pytest.mark.parametrize("missing", [0, 1])
def test_contexts_as_the_text_allows(missing: int) -> None:
    needed = 512 + 1 + 3 * 64
    contexts, notes = contexts_for(256, needed - missing, windows=4)
    assert contexts[-1] == (512, 256)[missing]
    assert f"there are {needed - missing}" in notes[-1]
    context_curve(stock("llama"), text(needed - missing), contexts[-1:], windows=4)


def test_contexts_that_were_asked_for() -> None:
    assert contexts_for(128, 2000, windows=4, contexts=[512, 96]) == ((96, 512), ())
    with pytest.raises(
        RecipeError, match=r"evaluation.contexts: not measured at 4096 tokens: 4 windows of it take 4,289"
    ):
        contexts_for(128, 2000, windows=4, contexts=[512, 4096])
    with pytest.raises(RecipeError, match="not measured at 16 tokens: shorter"):
        contexts_for(128, 2000, windows=4, contexts=[16])
    with pytest.raises(RecipeError, match="more held-out text"):
        contexts_for(128, 200, windows=4)


def test_a_table_that_ends_is_read_to_its_end() -> None:
    """GPT-2 reads no further than its table; what it scores is what a model scores that reads on."""
    ids, contexts = tokens("gpt2", 1, 3000)[0], (64, 128, 512)
    model = stock("gpt2")
    assert model.config.n_positions == 128
    native = readable_curve(model, ids, contexts, windows=3)
    assert native.contexts == (64, 128)
    seen: list[Tensor] = []
    handle = model.register_forward_pre_hook(lambda m, args, call: seen.append(call["input_ids"]), with_kwargs=True)
    readable_curve(model, ids, contexts, windows=3)
    short = seen[0]
    handle.remove()
    hf_posenc.patch(model, "kerple")
    seen.clear()
    model.register_forward_pre_hook(lambda m, args, call: seen.append(call["input_ids"]), with_kwargs=True)
    assert readable_curve(model, ids, contexts, windows=3).contexts == contexts
    assert torch.equal(seen[0], short)
    with hf_posenc.disabled(model):
        assert readable_curve(model, ids, contexts, windows=3).contexts == (64, 128)


def test_the_end_of_a_table_is_known_before_the_forward() -> None:
    """On CUDA, a lookup beyond a table ends the process."""

    def evaluate(model: Any, ids: Tensor, contexts: Any, **options: Any) -> ContextCurve:
        return curve(contexts=tuple(contexts))

    def readable(model: Any) -> tuple[int, ...]:
        return readable_curve(model, text(), (64, 128, 256), windows=2, evaluate=evaluate).contexts

    assert readable(stock("gpt2")) == (64, 128)
    assert readable(hf_posenc.patch(stock("gpt2"), "kerple", native="keep")) == (64, 128)
    model = hf_posenc.patch(stock("gpt2"), "kerple")
    assert readable(model) == (64, 128, 256)
    with hf_posenc.disabled(model):
        assert readable(model) == (64, 128)


def test_the_table_of_a_scheme_ends_too() -> None:
    model = hf_posenc.patch(stock("llama"), "learned", num_positions=128)
    assert readable_curve(model, text(), (64, 128, 256), windows=2).contexts == (64, 128)
    with pytest.raises(PositionError, match="can read none of 256, 512 tokens"):
        readable_curve(model, text(2000), (256, 512), windows=2)


# -- during a training -------------------------------------------------------------------------------------------------


class Counted:
    """Counts how often a model is measured, and says nothing of it."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def __call__(self, model: Any) -> ContextCurve:
        self.steps.append(float(model.lm_head.weight.detach().sum()))
        torch.rand(3)  # an evaluation may draw
        return curve()


def trainer(
    folder: Path, *callbacks: TrainerCallback, model: Any = None, steps: int = 6, save: bool = False
) -> Trainer:
    windows = [{"input_ids": row, "labels": row} for row in tokens("llama", 2 * steps, 16, seed=4)]
    made = Trainer(
        model=stock("llama") if model is None else model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="steps" if save else "no",
            save_steps=2,
            dataloader_pin_memory=False,
        ),
        train_dataset=windows,
        callbacks=list(callbacks),
    )
    made.remove_callback(PrinterCallback)
    return made


@pytest.mark.parametrize(("every", "expected"), [(0, [0, 6]), (2, [0, 2, 4, 6]), (4, [0, 4, 6]), (6, [0, 6])])
def test_when_it_measures(tmp_path: Path, every: int, expected: list[int]) -> None:
    measurements, measure = Measurements(), Counted()
    trainer(tmp_path, Measuring(measurements, measure, every=every)).train()
    assert [step for step, _ in measurements.course()] == expected
    assert len(set(measure.steps)) == len(expected)  # each of other weights


def test_a_resumed_run_measures_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "measurements.json"

    def run(stop: int | None, resume: bool) -> tuple[int, str]:
        measure, out = Counted(), io.StringIO()
        console = Console(file=out, width=100)
        measuring = Measuring(Measurements.load(path), measure, every=1, console=console)
        measuring.take(NATIVE, 0, stock("llama"))
        made = trainer(tmp_path / "checkpoints", measuring, Stop(stop), save=True)
        if stop is None:
            made.train(resume_from_checkpoint=str(tmp_path / "checkpoints" / "checkpoint-2") if resume else None)
        else:
            with pytest.raises(KeyboardInterrupt):
                made.train()
        return len(measure.steps), out.getvalue()

    assert run(3, resume=False)[0] == 5  # native, 0, 1, 2, 3
    count, printed = run(None, resume=True)
    assert count == 3  # 4, 5, 6
    rows = [line[:16].strip() for line in printed.splitlines()]
    assert rows == ["tokens read", "native", *(f"step {step}" for step in range(7))]
    assert [step for step, _ in Measurements.load(path).course()] == list(range(7))
    assert run(None, resume=True)[0] == 0


class Stop(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_measuring_does_not_change_the_training(tmp_path: Path) -> None:
    def weights(*callbacks: TrainerCallback) -> dict[str, Tensor]:
        model = stock("gpt2", resid_pdrop=0.3)  # draws random numbers while it trains
        trainer(tmp_path, *callbacks, model=model).train()
        return dict(model.state_dict())

    plain, measured = weights(), weights(Measuring(Measurements(), Counted(), every=1))
    for name, value in plain.items():
        assert torch.equal(value, measured[name]), name


@pytest.mark.parametrize("contexts", [(64, 2048), ()])
def test_the_rows(contexts: tuple[int, ...]) -> None:
    out = io.StringIO()
    console = Console(file=out, width=30)
    measuring = Measuring(Measurements(), lambda model: wanted.pop(0), contexts=contexts, console=console)
    wanted = [
        ContextCurve((64,), torch.log(torch.tensor([[2.25]], dtype=torch.float64))),
        ContextCurve((64, 2048), torch.log(torch.tensor([[3.5], [1234.4]], dtype=torch.float64))),
    ]
    measuring.take(NATIVE, 0, None)
    measuring.take(CONVERTED, 20, None)
    heading = "tokens read            64    2,048"
    if contexts:
        native = [heading, "native               2.25        -"]
    else:
        native = ["tokens read            64", "native               2.25", heading]
    assert out.getvalue().splitlines() == [*native, "step 20               3.5     1234"]


def test_each_measurement_is_kept_at_once(tmp_path: Path) -> None:
    path = tmp_path / "measurements.json"
    seen: list[int] = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(len(json.loads(path.read_text())["curves"]))

    trainer(tmp_path, Measuring(Measurements.load(path), Counted(), every=2), Look()).train()
    assert seen == [1, 2, 2, 3, 3, 3]


def test_a_handover_starts_at_the_native_model_and_ends_without_it(tmp_path: Path) -> None:
    def measure(model: Any) -> ContextCurve:
        return context_curve(model, text(400), (64, 128), windows=2)

    model = stock("llama")
    measurements = Measurements()
    measuring = Measuring(measurements, measure)
    measuring.take(NATIVE, 0, model)
    hf_posenc.patch(model, "fire", native="keep")
    trainer(tmp_path, Handover(0.5), measuring, model=model, steps=2).train()
    native, before, after = (measurements.curve(name) for name in ("native", "before", "after"))
    assert native is not None
    assert before is not None
    assert after is not None
    assert torch.allclose(native.losses, before.losses, atol=1e-4)
    assert torch.equal(after.losses, measure(model).losses)
    assert not torch.allclose(native.losses, after.losses, atol=1e-2)
