"""A comparison: all under one budget, what fails is said, what is done is not done again, and rules decide."""

from __future__ import annotations

import base64
import dataclasses
import gc
import json
import math
import os
import re
import signal
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import DIRECTORIES
from torch import nn
from transformers import AutoConfig, LlamaConfig
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import OptionError, RecipeError, UnknownSchemeError, cli
from hf_posenc.recipes.comparison import findings as examining
from hf_posenc.recipes.comparison import verdict
from hf_posenc.recipes.comparison.findings import NATIVE, ORIGINAL, Cost, Findings
from hf_posenc.recipes.comparison.run import contestants, differences
from hf_posenc.recipes.comparison.verdict import judge, leaders
from hf_posenc.recipes.evaluation.grid import MASKED_PERPLEXITY, PERPLEXITY, RATIO, Grid
from hf_posenc.recipes.evaluation.report import Report, Section
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.loading import load_tiny_llama
from hf_posenc.recipes.reports import Cell, Table, render
from hf_posenc.recipes.schema.recipe import Recipe
from hf_posenc.recipes.storage import load

CONFIG = load_tiny_llama()[0].config


# -- who takes part ----------------------------------------------------------------------------------------------------


def entered(
    *overrides: str, schemes: tuple[str, ...] | None = ("fire", "rope"), config: Any = CONFIG, model: str = "here"
) -> dict[str, Recipe]:
    if model == "here" and not any(pair.startswith("data") for pair in overrides):
        overrides = (*overrides, "data=builtin")
    return contestants(model, config, schemes=schemes, budget=7, overrides=overrides, samples=2)


def test_all_have_one_budget_and_one_training_and_what_differs_is_told(tmp_path: Path) -> None:
    """A recipe that is named itself is what was asked for."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: tiny-llama\nconversion: {scheme: rope}\ntraining: {skip_to: 512}\n")
    found = entered("training.batch_size=4", schemes=("fire", "cope", "rope", str(mine)))
    assert list(found) == [NATIVE, "fire", "cope", "rope", "mine"]
    for name, each in found.items():
        training = each.training
        assert (each.model, training.steps, training.batch_size, training.length) == ("here", 7, 4, 128)
        assert training.skip_to == (512 if name == "mine" else None)
        assert (each.distillation.share > 0) == (name not in (NATIVE, "mine"))
    # The goal of this scheme skips positions.
    assert found["rope"].distillation == found["fire"].distillation
    assert found["fire"].conversion == read_recipe("swap", ["scheme=fire"]).conversion
    assert found[NATIVE].conversion.scheme is None
    teacher = "distillation.share=1.0, distillation.hidden=2.0, distillation.until=0.8"
    assert differences(found) == {
        NATIVE: "no scheme, no teacher",
        "fire": f"conversion.options={{'threshold': 64}}, conversion.fit=native, {teacher}",
        "cope": f"conversion.native=keep, {teacher}",
        "rope": teacher,
        "mine": "training.skip_to=512",
    }
    # Shorter windows are measured where the last tokens of a text have room.
    short = entered("training.length=32")[NATIVE]
    assert (short.training.length, short.evaluation.contexts, short.evaluation.windows) == (32, [64], 2)
    mine.write_text(
        "model: tiny-llama\nconversion: {scheme: fire}\ndata: {source: docs.jsonl}\ntraining: {batch_size: 16}\n"
    )
    changes = ("data.source=docs.jsonl", "training.batch_size=16")
    for given, said in (
        ((), r"mine has data.source='docs.jsonl', and native 'builtin'.*data.source=docs.jsonl"),
        (changes[:1], r"mine has training.batch_size=16, and native 8"),
    ):
        with pytest.raises(RecipeError, match=said):
            entered(*given, schemes=(str(mine), "rope"), model="tiny-llama")
    assert {each.training.batch_size for each in entered(*changes, schemes=(str(mine), "rope")).values()} == {16}


def test_a_transfer_reads_no_more_than_the_budget() -> None:
    config = LlamaConfig(hidden_size=512, num_attention_heads=8, num_hidden_layers=1, max_position_embeddings=256)
    found = entered("training.batch_size=2", config=config)
    # The other one starts with what the model computes.
    assert [found[name].transfer.steps for name in ("fire", "rope")] == [7 * 2, 0]
    assert not entered("transfer.steps=0", schemes=("fire",), config=config)["fire"].transfer.steps


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
def test_the_usual_schemes_fit_each_architecture(architecture: str) -> None:
    config = AutoConfig.from_pretrained(DIRECTORIES[architecture])
    found = entered("training.length=128", schemes=None, config=config)
    assert len(found) >= 8
    assert all(name == NATIVE or hf_posenc.schemes()[name].usual for name in found)
    # The control is the same whatever is named first, so that a comparison can be extended.
    (name, *_) = (name for name in reversed(found) if name != NATIVE)
    assert entered("training.length=128", schemes=(name,), config=config)[NATIVE] == found[NATIVE]


@pytest.mark.parametrize(
    ("schemes", "overrides", "error", "said"),
    [
        (("fir",), (), UnknownSchemeError, "fir"),
        (("sinusoid.yaml",), (), RecipeError, "no file"),
        (("fire", "fire"), (), OptionError, "different"),
        ((), (), OptionError, "Got the schemes none"),
        (("mine/original.yaml",), (), OptionError, "none called 'native' or 'original'"),
        (("fire",), ("model=there",), OptionError, "model"),
        (("fire",), ("conversion.native=keep",), OptionError, "recipe of your own"),
        (("fire",), ("training.steps=3",), OptionError, "budget"),
        (("fire",), ("training.stepz=3",), RecipeError, "stepz"),
        (("fire",), ("adapter=scheme",), OptionError, "adapter=lora"),
    ],
)
def test_wrong_requests_are_refused(
    schemes: tuple[str, ...], overrides: tuple[str, ...], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        entered(*overrides, schemes=schemes)


def test_schemes_are_not_compared_for_a_model_that_has_one() -> None:
    converted = hf_posenc.patch(load_tiny_llama()[0], "alibi").config
    with pytest.raises(RecipeError, match=r"converted already, to alibi.*the original model"):
        entered(config=converted)


# -- rules -------------------------------------------------------------------------------------------------------------


def findings(
    name: str, near: float, far: float, noise: float = 0.01, time: float = 1.0, memory: float = 1.0
) -> Findings:
    """A model of some losses at 128 and 1,024 tokens, which windows share but for some noise of its own."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    windows = torch.linspace(-1, 1, 16, dtype=torch.float64)

    def around(loss: float) -> torch.Tensor:
        own = torch.randn(16, generator=generator, dtype=torch.float64)
        return loss + windows + noise * (own - own.mean()) / own.std()

    # Steps of different models are no pairs: slow ones do not come together.
    times = tuple(time * (1 + (ord(name[0]) + number) % 3 / 100) for number in range(3))
    price = Cost(times, memory, 0, 0)
    grid = Grid(PERPLEXITY, {"tokens read": (128, 1024)}, torch.stack([around(near), around(far)]))
    return Findings(name, Report((Section("perplexity", "Perplexity", "", {name: (grid,)}),)), price)


def test_leaders_are_the_best_and_those_that_do_not_differ() -> None:
    found = {
        each.name: each
        for each in (findings("a", 2.0, 2), findings("b", 2.002, 2), findings("c", 2.1, 2), findings("d", 1.999, 2))
    }
    assert leaders(found, 128) == ("d", "a", "b")


@pytest.mark.parametrize(
    ("others", "chosen", "said"),
    [
        (
            [("a", 1.999, 4.0), ("b", 2.3, 4.2)],
            (NATIVE, NATIVE, NATIVE),
            ["Keep the native encoding: nothing beats it up to 1,024 tokens.", "nothing is gained"],
        ),
        # The best beyond is taken for all where it costs little.
        (
            [("a", 2.015, 2.0), ("b", 2.2, 2.3)],
            (NATIVE, "a", "a"),
            ["Take a: a loss of at most 2% at the trained length of 128 tokens, and the best", "it reads longer texts"],
        ),
        # Two recommendations where length costs much: exp(0.1) and exp(2.5 - 4).
        (
            [("a", 2.1, 2.5)],
            (NATIVE, "a", None),
            ["even this model loses", "the perplexity of a is 110.", "22.3"],
        ),
        # A loss that could be chance is still a loss, and left open where chance explains it.
        ([("a", 2.1, 2.8, 2.0)], (NATIVE, "a", None), ["windows are too few to tell whether it loses on longer texts"]),
        ([("a", 2.1, 2.1, 1.0)], (NATIVE, "a", None), ["within noise"]),
        ([("a", 2.1, 2.05, 2.0)], (NATIVE, "a", None), ["windows are too few to tell whether it loses on longer"]),
        # Of leaders, the one with the cheapest step; of those with equal steps, the one with the least memory.
        (
            [
                ("a", 1.8, 2.0, 0.01, 1.5),
                ("b", 1.801, 2.001, 0.01, 1.2, 1.4),
                ("c", 1.802, 2.001, 0.01, 1.195, 1.1),
                ("d", 2.5, 3.0),
            ],
            ("c", "c", "c"),
            ["b and c are equal within noise. Of these, c has the cheapest"],
        ),
        ([("a", 1.0, math.nan), ("b", 2.5, 2.6)], ("a", "b", None), ["a cannot read 1,024 tokens"]),
    ],
)
def test_recommendations(others: list[Any], chosen: tuple[str, ...], said: list[str]) -> None:
    found = {each.name: each for each in (findings(NATIVE, 2.0, 4.0), *(findings(*other) for other in others))}
    given = judge(found, 128, 1024)
    assert (given.near, given.far, given.overall) == chosen
    assert given.recommended == ((given.near, given.far) if given.overall is None else (given.overall,))
    text = " ".join(given.sentences)
    assert all(part in text for part in said), text
    assert ("it reads longer texts" in text) == (found[given.far or NATIVE].growth(1024, 128).high <= 1.1)


def test_what_is_said_of_other_comparisons() -> None:
    """Schemes may have failed, or be unable to read a text; a training may be short, and a model masked."""
    native, a = findings(NATIVE, 2.0, math.nan), findings("a", 2.0, 3.0)
    (alone,) = judge({NATIVE: native}, 128, 1024).sentences
    assert "none was trained to its end" in alone
    lost = {NATIVE: findings(NATIVE, math.inf, math.inf), "a": findings("a", math.inf, math.inf)}
    (alone,) = judge(lost, 128, 1024).sentences
    assert "The native model diverged" in alone
    text = " ".join(judge({NATIVE: native, "a": a}, 128, 1024).sentences)
    assert "At 1,024 tokens a has the lowest perplexity. The perplexity of a" in text
    assert "With 1 comparison to" in text

    found = {NATIVE: findings(NATIVE, 2.0, 4.0), "a": findings("a", 1.8, 2.0)}
    long, short = (judge(found, 128, 1024, is_short=is_short) for is_short in (False, True))
    assert long.headline.startswith("Take a: ")
    assert short.headline == f"Provisional, after a short training: t{long.headline[1:]}"
    assert short.reasons[1:] == long.reasons

    for name, each in found.items():
        (grid,) = each.report["perplexity"].models[name]
        masked = Section("perplexity", "", "", {name: (dataclasses.replace(grid, quantity=MASKED_PERPLEXITY),)})
        found[name] = dataclasses.replace(each, report=Report((masked,)))
    words = " ".join(judge(found, 128, 1024).sentences)
    assert "has the lowest pseudo-perplexity" in words
    assert re.findall(r"(?<!pseudo-)perplexity", words) == []


def test_steps_are_told_apart_by_the_interval_of_their_difference() -> None:
    # Their own intervals overlap: [0.97, 1.07] and [1.05, 1.15].
    costs = {
        name: Cost(times, memory, 0, 0)
        for name, times, memory in (("a", (1.0, 1.02, 1.04), 1.2), ("b", (1.08, 1.10, 1.12), 1.0))
    }
    assert costs["b"].time.low < costs["a"].time.high
    assert verdict.cheapest(costs) == "a"
    # What is known of a single pair is its time.
    alone = {"a": Cost((1.0,), 1.2, 0, 0), "b": Cost((1.1,), 1.0, 0, 0), "c": Cost((1.0,), 1.0, 0, 0)}
    assert verdict.cheapest(alone) == "c"
    assert verdict.cheapest({"a": alone["a"], "b": alone["b"]}) == "a"


# -- cost ----------------------------------------------------------------------------------------------------


class Waits(nn.Module):
    """Takes its time, by the clock that is looked at."""

    def __init__(self, seconds: float, clock: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))
        self._seconds, self._clock = seconds, clock

    def forward(self, x: torch.Tensor, use_cache: bool) -> Any:
        self._clock[0] += self._seconds
        return SimpleNamespace(loss=(self.weight * x).exp().sum())


def test_steps_are_timed_in_turns_and_leave_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(examining.time, "perf_counter", lambda: clock[0])
    slow, fast = Waits(3.0, clock), Waits(2.0, clock)
    ratios = examining.step_ratios(slow, fast, {"x": torch.rand(10)}, rounds=4)
    assert ratios == pytest.approx([1.5] * 4)
    assert bool((slow.weight == 1).all())


def test_memory_is_what_the_backward_pass_needs_and_is_let_go() -> None:
    # The input of the product (its weight is there anyway), and the result of exp.
    assert examining.kept_bytes(Waits(0.0, [0.0]), {"x": torch.rand(10, requires_grad=True)}) == 80
    results = []

    class Keeps(nn.Module):
        """What it keeps for its backward is a result of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(10))

        def forward(self, use_cache: bool) -> Any:
            result = self.weight.exp()
            results.append(weakref.ref(result))
            return SimpleNamespace(loss=result.sum())

    assert examining.kept_bytes(Keeps(), {}) == 40
    gc.collect()
    assert [result() for result in results] == [None]


# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.mark.grid  # trains several models
def test_a_stopped_comparison_goes_on_and_reports_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: tiny-llama\nconversion: {scheme: nope}\nadapter: {kind: lora, targets: [nowhere]}\n")
    out = tmp_path / "out"
    text = tmp_path / "text.txt"
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text.write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages)[:60_000], encoding="utf-8")
    changes = ["training.batch_size=2", f"data.source={text}"]
    typed = ["compare", "tiny-llama", *changes, "--schemes", f"alibi,{broken}", "--budget", "2"]
    typed += ["--samples", "4", "--measures", "induction,generation", "--out", str(out)]

    def stop(*given: Any, **options: Any) -> None:
        other = CliRunner().invoke(cli.app, typed)
        assert "another process" in other.output
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(examining, "step_ratios", stop)
        patched.setattr("os._exit", sys.exit)
        stopped = CliRunner().invoke(cli.app, typed)
    assert stopped.exit_code == 128 + signal.SIGTERM, stopped.output
    assert "stopped; the same command goes on" in capfd.readouterr().err
    done = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert out / "runs" / NATIVE / "results.json" in done
    assert out / "runs" / "alibi" / "model" / "model.safetensors" in done
    assert not (out / "report.html").exists()

    found = CliRunner().invoke(cli.app, typed)
    assert found.exit_code == 1, found.output
    assert "broken failed" in found.output
    assert "adapter.targets has 'nowhere'" in found.output
    assert {path: path.stat().st_mtime_ns for path in done} == done

    record = json.loads((out / "runs" / "alibi" / "run.json").read_text(encoding="utf-8"))
    assert record["command"] == f"hf-posenc train {out / 'runs' / 'alibi' / 'recipe.yaml'} --out FOLDER"

    shown = (out / "report.html").read_text(encoding="utf-8")
    # Of each measure; and nothing else would be loaded.
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', shown)
    assert [base64.b64decode(picture)[:4] for picture in pictures] == [b"\x89PNG"] * 3
    assert len(re.findall(r"(?:src|href)=|<script|<link", shown)) == 3
    headings = ("Perplexity by context length", "Cost, length and start", "Failed", "Copying a random sequence")
    assert all(part in shown for part in (*headings, ORIGINAL))
    written = (out / "report.md").read_text(encoding="utf-8")
    native, alibi = (load(Findings, out / "runs" / name / "results.json", "") for name in (NATIVE, "alibi"))
    assert re.search(rf"^\| alibi +\|.* {re.escape(RATIO.write(alibi.ratio(128, native)))} ", written, re.M)
    assert "| broken" not in written
    assert "- broken: " in written
    assert all((out / name).is_file() for name in re.findall(r"\]\((.+?)\)", written))
    # A break that two steps do not mend.
    assert alibi.start_ratio is not None
    assert alibi.start_ratio > 1.5
    # Of what the original writes, which was measured before the stop.
    assert alibi.report["generation"].models["alibi"][0].at(64).mean < 1
    assert alibi.cost.cache_bytes == hf_posenc.plan(CONFIG, "alibi").cache_bytes_per_token

    # In another order it is the same comparison.
    (once, again) = (
        Path(path).stat().st_mtime_ns for path in (out / "comparison.json", out / "runs" / "alibi" / "run.json")
    )
    reordered = CliRunner().invoke(cli.app, [*typed[:2], *reversed(changes), *typed[4:]])
    assert "another comparison" not in reordered.output
    assert (out / "comparison.json").stat().st_mtime_ns == once
    assert (out / "runs" / "alibi" / "run.json").stat().st_mtime_ns == again

    # What a run records of its start may be lost.
    for name in ("run.json", "results.json"):
        (out / "runs" / "alibi" / name).unlink()
    without = CliRunner().invoke(cli.app, typed)
    assert "alibi failed" not in without.output
    assert load(Findings, out / "runs" / "alibi" / "results.json", "").start == ""

    other = CliRunner().invoke(cli.app, [*typed[:-1], str(tmp_path)])
    assert other.exit_code == 1
    assert "holds no comparison" in other.output
    more = CliRunner().invoke(
        cli.app, ["compare", "tiny-llama", "--schemes", "alibi", "--budget", "3", "--out", str(out)]
    )
    assert "another comparison: budget is 2 there and 3 here" in more.output


def section(table: Table, kind: Any = "markdown") -> str:
    parts = SimpleNamespace(title="<title>", note="a <\n b", tables=lambda: [table])
    return render("section", kind, section=parts)


def test_a_report_escapes_its_texts() -> None:
    table = Table(("", "a|b"), (("<fire>", Cell("1.02 [1, 2]", "good")),), ("<fire>",), "x < y:")
    head = "|        |               a\\|b |\n| ------ | -----------------: |"
    assert section(table) == f"## <title>\n\na < b\n\nx < y:\n\n{head}\n| <fire> | 1.02 [1, 2] (good) |\n"
    shown = section(table, "html")
    assert "<h2>&lt;title&gt;</h2>" in shown
    assert "<p>a &lt; b</p>" in shown
    assert '<tr class=marked><td>&lt;fire&gt;</td><td class=good title="good">1.02 <span' in shown


def test_a_wide_table_has_parts_that_fit() -> None:
    header = ["", *(f"{2**power:,}" for power in range(6, 12))]
    text = section(Table(header, [["native", *["1,234.5 [1,200.0, 1,270.0]"] * 6], ["kerple", *["99"] * 6]]))
    assert max(map(len, text.splitlines())) <= 100
    parts = text.partition("b\n\n")[2].split("\n\n")
    heads = [[cell.strip() for cell in part.splitlines()[0].split("|")[2:-1]] for part in parts]
    assert heads == [header[1:4], header[4:]]
    assert all(part.splitlines()[2].startswith("| native | 1,234.5") for part in parts)


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    refused = CliRunner().invoke(cli.app, ["compare", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")])
    assert refused.exit_code == 1
    assert "no directory" in refused.output
    assert not (tmp_path / "out").exists()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "comparison.json").write_text('{"model": "ti', encoding="utf-8")
    for folder, words in (
        (tmp_path / "damaged", "cannot be read (ValueError: Invalid JSON"),
        ("/proc/out", "cannot be written"),
    ):
        refused = CliRunner().invoke(cli.app, ["compare", "tiny-llama", "--out", str(folder)])
        assert refused.exit_code == 1
        assert words in refused.stderr
        assert refused.stderr.count("\n") == 1
