"""The bar of a run, and results in a notebook."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
import sys
from pathlib import Path
from typing import Any

from models import arguments, stock, windows
from rich.console import Console
from transformers import Trainer, TrainerControl, TrainerState

import hf_posenc
from hf_posenc.recipes.runs.facts import Facts
from hf_posenc.recipes.runs.progress import Progress
from hf_posenc.recipes.schema.recipe import Conversion, Distillation, Recipe, Training

RECIPE = Recipe(
    model="tiny-llama",
    conversion=Conversion(scheme="fire"),
    training=Training(steps=200, batch_size=16, precision="bfloat16"),
    distillation=Distillation(share=0.5),
)
FACTS = Facts(
    recipe=RECIPE,
    architecture="llama",
    native="rotary encoding (RoPE)",
    trained_length=128,
    parameters=468_600,
    new_parameters=792,
    trained_parameters=468_600,
    options={"decoder": {"threshold": 64.0, "gate": False}},
    layers={"decoder": 4},
    start="break, after a fit to the native encoding",
    cautions=("The patched model computes another function and must be adapted.",),
    data_tokens=1_000_000,
    processes=2,
    device="CPU with 2 threads",
    command="hf-posenc train swap --out run",
    versions={"hf-posenc": "0.1.0", "python": "3.11.7"},
)


def facts_with(facts: Facts = FACTS, **changes: Any) -> Facts:
    """Return facts of a recipe in which some sections, or some of their keys, are others."""
    sections = {
        name: dataclasses.replace(getattr(facts.recipe, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(facts, recipe=dataclasses.replace(facts.recipe, **sections))


# -- the bar -----------------------------------------------------------------------------------------------------------


def played(progress: Progress, steps: int = 6, *, begin: int = 0, until: int | None = None, **logs: float) -> None:
    """Let a callback see the events of a training, or of one that goes on, without any model."""
    state, control = TrainerState(max_steps=steps, global_step=begin), TrainerControl()
    progress.on_train_begin(None, state, control)
    for state.global_step in range(begin + 1, (until or steps) + 1):
        progress.on_step_begin(None, state, control)
        progress.on_step_end(None, state, control)
        progress.on_log(None, state, control, logs={"loss": 1.0, **logs})
    if until is None:
        progress.on_train_end(None, state, control)


TOKENS = 2 * 16


def test_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=60), TOKENS, interval=0) as progress:
        given = arguments(tmp_path, max_steps=6, logging_steps=1)
        Trainer(stock("llama"), given, train_dataset=windows("llama", 12), callbacks=[progress]).train()
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    assert "\x1b" not in out.getvalue()
    assert [line.split(",")[0] for line in lines] == [f"step {step}/6" for step in (1, 2, 3, 4, 5, 6)]
    assert "tokens/s" not in lines[0]
    assert " left" not in lines[0]
    pattern = r"step 3/6, loss \d+\.\d{3}, perplexity [\d.e+]+, [\d,]+ tokens/s, [\d:]+ elapsed, \d:\d\d:\d\d left"
    assert re.fullmatch(pattern, lines[2])
    assert lines[-1].endswith(" elapsed")


def test_a_bar_in_a_terminal_that_is_in_order_afterwards() -> None:
    for fails in (False, True):
        out = io.StringIO()
        console = Console(file=out, width=90, force_terminal=True, legacy_windows=False, color_system=None)
        with contextlib.suppress(RuntimeError), Progress(console, TOKENS) as progress:
            played(progress, until=3 if fails else None)
            if fails:
                raise RuntimeError("stop")
        assert "\x1b[?25l" in out.getvalue()
        assert out.getvalue().rstrip("\n").endswith("\x1b[?25h")  # the cursor is back
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
        assert fails or re.search(r"step 6/6 ━+ loss 1\.000, perplexity", plain)


# -- results in a notebook ---------------------------------------------------------------------------------------------


def test_results_read_in_a_notebook_as_print_says_them() -> None:
    """Every record of ours with words of its own has the same ones in `repr`, which a notebook shows."""
    for name in ("patches.export.stock", "recipes.evaluation.verdict", "recipes.comparison"):
        importlib.import_module(f"hf_posenc.{name}")
    found = {
        kind
        for name, module in list(sys.modules.items())
        if name.startswith("hf_posenc")
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and "__str__" in vars(kind)
    }
    assert {kind.__name__ for kind in found} >= {"Plan", "Verification", "Explanation", "Description", "Verdict"}
    # The one that `dataclass` makes has the fields.
    assert not [kind for kind in found if kind.__repr__.__qualname__ == f"{kind.__qualname__}.__repr__"]
    model = hf_posenc.patch(stock("llama"), "alibi")
    for shown in (hf_posenc.plan(stock("llama"), "fire"), hf_posenc.verify(model), hf_posenc.explain(model)):
        assert repr(shown) == str(shown)
        assert "\n" in repr(shown) or repr(shown).startswith("active: ")
    assert repr(hf_posenc.describe("fire")) == str(hf_posenc.describe("fire"))
