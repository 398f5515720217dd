"""What a run measures: where it is kept, at which lengths, and that nothing is measured twice."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import stock, tokens
from rich.console import Console
from torch import Tensor
from transformers import TrainerState

import hf_posenc
from hf_posenc import CheckpointError, PositionError, RecipeError
from hf_posenc.recipes.evaluation.grid import PERPLEXITY, Grid
from hf_posenc.recipes.evaluation.perplexity import context_curve, contexts_for
from hf_posenc.recipes.evaluation.verdict import ORIGINAL
from hf_posenc.recipes.runs.measurements import Measurements, Measuring


def grid(value: float = 0.0, contexts: tuple[int, ...] = (16, 32)) -> Grid:
    generator = torch.Generator().manual_seed(0)
    losses = value + torch.rand(len(contexts), 3, generator=generator, dtype=torch.float64)
    return Grid(PERPLEXITY, {"tokens read": contexts}, losses)


def text(length: int = 1000) -> Tensor:
    return tokens("llama", 1, length)[0]


# -- the file ----------------------------------------------------------------------------------------------------------


def test_measurements_come_back_bit_equal(tmp_path: Path) -> None:
    path = tmp_path / "measurements.json"
    assert Measurements.load(path).course() == []
    written = Measurements.load(path)
    odd = torch.tensor([[math.pi * 1e-7, 1 / 3, math.inf], [math.nan] * 3], dtype=torch.float64)
    given = {ORIGINAL: grid(1.0), 20: grid(3.0), 0: grid(2.0), 100: Grid(PERPLEXITY, grid().axes, odd)}
    for key, value in given.items():
        assert (written.curve("after") is None) == (20 not in written._grids)
        written.record(key, {"perplexity": value})
    before = path.read_bytes()
    for read in (Measurements.load(path), Measurements.load(path, writes=False)):
        for key, value in given.items():
            found = read.curve(key)
            assert found is not None
            assert (found.quantity, found.axes) == (value.quantity, value.axes)
            assert found.samples.numpy().tobytes() == value.samples.numpy().tobytes()
        assert [step for step, _ in read.course()] == [0, 20, 100]
        for name, key in (("original", ORIGINAL), ("before", 0), ("after", 100)):
            assert read.curve(name) is read.curve(key)
        assert read.curve(1) is None
    # Other processes read and do not write.
    read.record(7, {"perplexity": grid()})
    assert read.curve(7) is not None
    assert path.read_bytes() == before


def test_damage_is_said(tmp_path: Path) -> None:
    path = tmp_path / "measurements.json"
    section = '{"name": "x", "title": "", "note": "", "models": {"native": [3]}}'
    for damage, message in (
        ("{", "Invalid JSON"),
        ('{"format_version": 7, "sections": []}', "format_version: Input should be 2"),
        (f'{{"format_version": 2, "sections": [{section}]}}', "sections.0.models.native.0"),
    ):
        path.write_text(damage)
        with pytest.raises(CheckpointError, match=rf"cannot be read \(.*{message}.*Remove the file"):
            Measurements.load(path)


# -- the lengths -------------------------------------------------------------------------------------------------------


def test_contexts() -> None:
    assert contexts_for(256, 10**6, windows=4) == ((64, 128, 256, 512, 1024, 2048), ())
    assert contexts_for(128, 10**6, windows=4) == ((64, 128, 256, 512, 1024), ())
    # As the text allows, to the token.
    needed = 512 + 1 + 3 * 64
    for missing, longest in ((0, 512), (1, 256)):
        contexts, notes = contexts_for(256, needed - missing, windows=4)
        assert contexts[-1] == longest
        assert f"there are {needed - missing}" in notes[-1]
        context_curve(stock("llama"), text(needed - missing), contexts[-1:], windows=4)
    # Those that were asked for.
    assert contexts_for(128, 2000, windows=4, contexts=[512, 96]) == ((96, 512), ())
    for trained, tokens_there, asked, message in (
        (128, 2000, [512, 4096], r"Contexts: not measured at 4096 tokens: 4 windows of it take 4,289"),
        (128, 2000, [16], "not measured at 16 tokens: shorter"),
        (128, 200, None, "more held-out text"),
        (4, 10**6, None, "not measured at 8 tokens: shorter than the 64 tokens"),
    ):
        with pytest.raises(RecipeError, match=message):
            contexts_for(trained, tokens_there, windows=4, contexts=asked)


def test_a_table_that_ends_is_read_to_its_end() -> None:
    """GPT-2 reads no further than its table; what it scores is what a model scores that reads on.

    The end is known before the forward: on CUDA, a lookup beyond a table ends the process.
    """
    ids, contexts = tokens("gpt2", 1, 3000)[0], (64, 128, 512)
    seen: list[Tensor] = []

    def reads(model: Any) -> tuple[int, ...]:
        found = context_curve(model, ids, contexts, windows=3)
        return tuple(context for context in contexts if found.reads(context))

    model = stock("gpt2")
    model.register_forward_pre_hook(lambda m, args, call: seen.append(call["input_ids"]), with_kwargs=True)
    assert model.config.n_positions == 128
    assert reads(model) == (64, 128)
    short, seen[:] = list(seen), []
    hf_posenc.patch(model, "kerple")
    assert reads(model) == contexts
    assert all(torch.equal(a, b) for a, b in zip(short, seen, strict=False))
    assert [rows.shape[1] for rows in (*short, *seen)] == [64, 128, *contexts]
    with hf_posenc.disabled(model):
        assert reads(model) == (64, 128)
    assert reads(hf_posenc.patch(stock("gpt2"), "kerple", native="keep")) == (64, 128)


def test_the_table_of_a_scheme_ends_too() -> None:
    model = hf_posenc.patch(stock("llama"), "learned", num_positions=128)
    found = context_curve(model, text(), (64, 128, 256), windows=2)
    assert [found.reads(context) for context in found.points] == [True, True, False]
    with pytest.raises(PositionError, match="can read none of 256, 512 tokens"):
        context_curve(model, text(2000), (256, 512), windows=2)


# -- during a training -------------------------------------------------------------------------------------------------


def measured(path: Path, *, every: int, begin: int = 0, until: int | None = None) -> tuple[int, str]:
    """Let a callback see the events of a training of six steps; return how often it measures, and what it prints."""
    taken: list[Grid] = []
    out = io.StringIO()

    def measure(model: Any) -> dict[str, Grid]:
        torch.rand(3)  # an evaluation may draw
        taken.append(grid())
        return {"perplexity": taken[-1]}

    state, console = TrainerState(max_steps=6, global_step=begin), Console(file=out, width=100)
    measuring = Measuring(Measurements.load(path), measure, every=every, console=console)
    drawn = torch.get_rng_state()
    measuring.take(ORIGINAL, None)
    measuring.on_train_begin(None, state, None)
    for state.global_step in range(begin + 1, (until or 6) + 1):
        measuring.on_step_end(None, state, None)
    if until is None:
        measuring.on_train_end(None, state, None)
    assert torch.equal(torch.get_rng_state(), drawn)  # the training goes on as if nothing had been measured
    return len(taken), out.getvalue()


def test_when_it_measures_and_nothing_twice(tmp_path: Path) -> None:
    for every, steps in ((0, [0, 6]), (4, [0, 4, 6]), (6, [0, 6])):
        path = tmp_path / f"{every}.json"
        assert measured(path, every=every)[0] == 1 + len(steps)
        assert [step for step, _ in Measurements.load(path).course()] == steps
    path = tmp_path / "measurements.json"
    assert measured(path, every=1, until=3)[0] == 5  # native, 0, 1, 2, 3
    count, printed = measured(path, every=1, begin=2)
    assert count == 3  # 4, 5, 6
    rows = [line[:16].strip() for line in printed.splitlines()]
    assert rows == ["tokens read", "original", *(f"step {step}" for step in range(7))]
    assert [step for step, _ in Measurements.load(path).course()] == list(range(7))
    assert measured(path, every=1, begin=2)[0] == 0
