"""A comparison: all under one budget, what fails is said, what is done is not done again, and rules decide."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DIRECTORIES
from transformers import AutoConfig
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import OptionError, RecipeError, UnknownSchemeError, cli
from hf_posenc.recipes import comparison
from hf_posenc.recipes.comparison import contestants, recommend
from hf_posenc.recipes.evaluation.grid import PERPLEXITY, Grid, share
from hf_posenc.recipes.evaluation.report import Report
from hf_posenc.recipes.evaluation.verdict import CONTROL, ORIGINAL, Results
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.loading import load_tiny_llama
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


def test_all_have_one_budget_and_one_training(tmp_path: Path) -> None:
    """A recipe that is named itself is what was asked for."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: tiny-llama\nconversion: {scheme: rope}\ntraining: {skip_to: 512}\n")
    found = entered("training.batch_size=4", schemes=("fire", "cope", "rope", str(mine)))
    assert list(found) == [CONTROL, "fire", "cope", "rope", "mine"]
    for name, each in found.items():
        training = each.training
        assert (each.model, training.steps, training.batch_size, training.length) == ("here", 7, 4, 128)
        assert training.skip_to == (512 if name == "mine" else None)
        assert (each.distillation.share > 0) == (name not in (CONTROL, "mine"))
    # The goal of this scheme skips positions.
    assert found["rope"].distillation == found["fire"].distillation
    assert found["fire"].conversion == read_recipe("swap", ["scheme=fire"]).conversion
    assert found[CONTROL].conversion.scheme is None
    # Shorter windows are measured where the last tokens of a text have room.
    short = entered("training.length=32")[CONTROL]
    assert (short.training.length, short.evaluation.contexts, short.evaluation.windows) == (32, [64], 2)
    mine.write_text(
        "model: tiny-llama\nconversion: {scheme: fire}\ndata: {source: docs.jsonl}\ntraining: {batch_size: 16}\n"
    )
    changes = ("data.source=docs.jsonl", "training.batch_size=16")
    for given, said in (
        ((), r"mine has data.source='docs.jsonl', and control 'builtin'.*data.source=docs.jsonl"),
        (changes[:1], r"mine has training.batch_size=16, and control 8"),
    ):
        with pytest.raises(RecipeError, match=said):
            entered(*given, schemes=(str(mine), "rope"), model="tiny-llama")
    assert {each.training.batch_size for each in entered(*changes, schemes=(str(mine), "rope")).values()} == {16}


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
def test_the_usual_schemes_fit_each_architecture(architecture: str) -> None:
    config = AutoConfig.from_pretrained(DIRECTORIES[architecture])
    found = entered("training.length=128", schemes=None, config=config)
    assert len(found) >= 8
    assert all(name == CONTROL or hf_posenc.schemes()[name].usual for name in found)
    # The control is the same whatever is named first, so that a comparison can be extended.
    (name, *_) = (name for name in reversed(found) if name != CONTROL)
    assert entered("training.length=128", schemes=(name,), config=config)[CONTROL] == found[CONTROL]


@pytest.mark.parametrize(
    ("schemes", "overrides", "error", "said"),
    [
        (("fir",), (), UnknownSchemeError, "fir"),
        (("sinusoid.yaml",), (), RecipeError, "no file"),
        (("fire", "fire"), (), OptionError, "different"),
        ((), (), OptionError, "Got the schemes none"),
        (("mine/original.yaml",), (), OptionError, "none called 'control' or 'original'"),
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


def findings(name: str, near: float, far: float, noise: float = 0.01, copies: float = 0.9) -> Results:
    """A model of some losses at 128 and 1,024 tokens, which windows share but for some noise of its own."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    windows = torch.linspace(-1, 1, 32, dtype=torch.float64)

    def around(loss: float) -> torch.Tensor:
        own = torch.randn(32, generator=generator, dtype=torch.float64)
        return loss + windows + noise * (own - own.mean()) / own.std()

    grid = Grid(PERPLEXITY, {"tokens read": (128, 1024)}, torch.stack([around(near), around(far)]))
    shares = torch.full((1, 32), copies, dtype=torch.float64)
    copy = Grid(share("right tokens", 1 / 64), {"tokens in both copies": (128,)}, shares)
    return {"perplexity": grid, "induction": copy}


@pytest.mark.parametrize(
    ("others", "chosen", "said"),
    [
        (
            [("a", 1.999, 4.0), ("b", 2.3, 4.2)],
            (CONTROL, CONTROL, CONTROL),
            [
                "Keep the native encoding: nothing beats it up to 1,024 tokens.",
                "do not differ from the control",
                ": a.",
            ],
        ),
        # The best beyond is taken for all where it costs little.
        (
            [("a", 2.015, 2.0)],
            (CONTROL, "a", "a"),
            ["Take a: a loss of at most 2% at the trained length of 128 tokens"],
        ),
        # Two recommendations where length costs much: exp(0.08) and exp(2.5 - 4).
        ([("a", 2.08, 2.5)], (CONTROL, "a", None), ["tokens, take a.", "its perplexity is 108.", "22.3"]),
        ([("a", 2.2, 2.5)], (CONTROL, "a", None), ["a is the best, and not ready for use"]),
        # A loss that could be chance is still a loss.
        ([("a", 2.08, 2.1, 1.0)], (CONTROL, "a", None), ["A is as good as the control, as far as 32 windows can tell"]),
        ([("a", 1.8, 2.0), ("b", 1.801, 2.001), ("d", 2.5, 3.0)], ("a", "a", "a"), ["differ from a significantly: b."]),
        ([("a", 1.0, math.nan), ("b", 2.5, 2.6)], ("a", "b", None), ["a cannot read 1,024 tokens."]),
        # What loses copying is neither better nor suits both, whatever its perplexity.
        ([("a", 1.8, 4.0, 0.01, 0.8)], (CONTROL, CONTROL, CONTROL), ["But it copies 80"]),
        (
            [("a", 2.0, 2.0, 0.01, 0.2)],
            (CONTROL, "a", None),
            ["But it copies 20", "a is the best, and not ready for use"],
        ),
    ],
)
def test_rules_choose_a_model_up_to_the_trained_length_and_beyond(
    others: list[Any], chosen: tuple[str, ...], said: list[str]
) -> None:
    found = {each[0]: findings(*each) for each in ((CONTROL, 2.0, 4.0001), *others)}
    given = recommend(found, 128, 1024)
    assert (given.near, given.far, given.overall) == chosen
    assert set(given.verdicts) == set(found) - {CONTROL}
    text = " ".join((*given.sentences, *map(str, given.verdicts.values())))
    assert all(part in text for part in said), text


def test_nothing_is_recommended_without_a_scheme_or_a_control_and_short_trainings_are_provisional() -> None:
    for control, others, words in (
        (findings(CONTROL, 2.0, math.nan), {}, "No scheme was trained to its end"),
        (findings(CONTROL, math.inf, math.inf), {"a": findings("a", math.inf, math.inf)}, "The control diverged"),
    ):
        (alone,) = recommend({CONTROL: control, **others}, 128, 1024).sentences
        assert words in alone
    found = {CONTROL: findings(CONTROL, 2.0, math.nan), "a": findings("a", 1.8, 2.0)}
    long, short = (recommend(found, 128, 1024, is_short=is_short) for is_short in (False, True))
    assert long.headline.startswith("Take a: ")
    assert "control cannot read 1,024 tokens." in long.reasons
    assert short.headline == f"Provisional, after a short training: t{long.headline[1:]}"
    assert short.reasons[1:] == long.reasons


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

    load_model = comparison.Subject.load

    def stop(subject: Any, *given: Any, **named: Any) -> Any:
        if subject.name in (CONTROL, ORIGINAL):
            return load_model(subject, *given, **named)
        other = CliRunner().invoke(cli.app, typed)
        assert "another process" in other.output
        return os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(comparison.Subject, "load", stop)
        patched.setattr("os._exit", sys.exit)
        stopped = CliRunner().invoke(cli.app, typed)
    assert stopped.exit_code == 128 + signal.SIGTERM, stopped.output
    assert "stopped; the same command goes on" in capfd.readouterr().err
    done = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert out / "runs" / CONTROL / "results.json" in done
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
    headings = ("Perplexity by context length", "Start and cost", "Failed", "Copying a random sequence")
    assert all(part in shown for part in (*headings, ORIGINAL))
    written = (out / "report.md").read_text(encoding="utf-8")
    control, alibi = (load(Report, out / "runs" / name / "results.json", "") for name in (CONTROL, "alibi"))
    curves = [each.results(name)["perplexity"] for each, name in ((alibi, "alibi"), (control, CONTROL))]
    ratio = curves[0].relative_to(curves[1]).write(128)
    assert re.search(rf"^\| alibi +\|.* {re.escape(ratio)} ", written, re.M)
    assert "| broken" not in written
    assert "- broken: " in written
    assert all((out / name).is_file() for name in re.findall(r"\]\((.+?)\)", written))
    # Of what the original writes, which was measured before the stop.
    assert alibi["generation"].models["alibi"][0].at(64).mean < 1
    cache = hf_posenc.plan(CONFIG, "alibi").cache_bytes_per_token
    (added,) = (
        line.split("|")[2:5] for line in written[written.index("new parameters") :].splitlines() if "| alibi" in line
    )
    assert int(added[1]) == cache
    assert float(added[2]) > 1.5  # a break that two steps do not mend

    other = CliRunner().invoke(cli.app, [*typed[:-1], str(tmp_path)])
    assert other.exit_code == 1
    assert "holds no comparison" in other.output
    more = CliRunner().invoke(
        cli.app, ["compare", "tiny-llama", "--schemes", "alibi", "--budget", "3", "--out", str(out)]
    )
    assert "another comparison: budget is 2 there and 3 here" in more.output
