"""The end of a run says whether it was worth it, and nothing is offered after a bad one."""

from __future__ import annotations

import dataclasses
import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_display import FACTS, facts_with

from hf_posenc.cli import train as command
from hf_posenc.recipes.evaluation.grid import PERPLEXITY, Grid
from hf_posenc.recipes.runs import files, verdict
from hf_posenc.recipes.runs.measurements import NATIVE, Measurements
from hf_posenc.recipes.runs.verdict import judge
from hf_posenc.recipes.schema.recipe import Recipe


def measured(native: float, after: float, *, far: float = 3.0, noise: float = 0.001, count: int = 8) -> Measurements:
    """Return losses at 128 and 1,024 tokens in some windows that are hard and easy for both models."""
    windows = torch.linspace(0, 1, count, dtype=torch.float64)
    wobble = noise * (-1.0) ** torch.arange(count)
    found = Measurements()
    axes = {"tokens read": (128, 1024)}
    found.record(NATIVE, Grid(PERPLEXITY, axes, torch.stack([windows + native, windows + 5.0])))
    found.record(200, Grid(PERPLEXITY, axes, torch.stack([windows + after + wobble, windows + far])))
    return found


@pytest.mark.parametrize(
    ("after", "noise", "grade", "is_bad", "said"),
    [
        (1.95, 0.001, "better", False, "Fire is significantly better than the native model: at 128 tokens"),
        (2.0, 0.1, "as good", False, "Fire is as good as the native model: at"),
        (2.0, 1.0, "as good", False, "Fire is as good as the native model, as far as 8 windows can tell: at"),
        (2.05, 0.001, "worse", False, "Fire is significantly worse"),
        (2.5, 0.001, "worse", True, "not ready for use. Train it longer (steps=800), or with the native"),
        # Too few windows to be sure do not make a bad model a good one.
        (2.5, 2.0, "worse", True, "Fire is worse than"),
        (math.inf, 0.001, "worse", True, "The training diverged."),
    ],
)
def test_grades(after: float, noise: float, grade: str, is_bad: bool, said: str) -> None:
    verdict = judge(measured(2.0, after, noise=noise), FACTS)
    assert verdict is not None
    assert (verdict.grade, verdict.is_bad) == (grade, is_bad)
    assert said in str(verdict)
    if math.isfinite(after):
        assert "At 1,024 tokens its perplexity is 13.534 % [13.534, 13.534] of that one's, and" in str(verdict)


def test_what_was_not_measured_and_what_is_worse_at_a_shorter_length_is_said() -> None:
    found, far = measured(2.0, 2.0), dataclasses.replace(FACTS, trained_length=1024)
    assert "was measured beyond" not in str(judge(found, facts_with(training={"skip_to": 1024})))
    for facts in (facts_with(training={"skip_to": 4096}), dataclasses.replace(FACTS, trained_length=4096)):
        said = "nothing was measured beyond 1,024 (evaluation.contexts=[4096] does)."
        assert said in str(judge(found, facts))
    # A config may state a longer text than a model can read.
    found = measured(2.0, 2.3)
    assert "But at 128 tokens its perplexity is 134.99 % [134.87, 135.11] of that one" in str(judge(found, far))
    assert "But at" not in str(judge(found, FACTS))


def test_the_control_is_the_measure_where_there_is_one() -> None:
    """Against the model that was not trained at all, the same figures look like a gain."""
    good, control = measured(2.0, 1.9), measured(2.0, 1.8)
    assert judge(good, FACTS).grade == "better"
    verdict = judge(good, FACTS, control)
    assert verdict.grade == "worse"
    assert "worse than the control" in str(verdict)
    assert "than the native model" in str(judge(good, FACTS, measured(2.0, 1.8, count=7)))  # not the same windows
    assert "train a control" in str(judge(good, FACTS))
    assert "train a control" not in str(verdict) + str(judge(good, facts_with(conversion={"scheme": None})))
    assert judge(good, facts_with(conversion={"scheme": None, "rope": {"rope_type": "yarn"}})).wants_control
    # Where only the scheme's weights are trained, the native model is the control.
    small = dataclasses.replace(FACTS, trained_parameters=FACTS.new_parameters)
    assert not judge(good, small).wants_control
    assert "Train more weights (adapter=lora)" in str(judge(measured(2.0, 2.5), small))


def test_the_control_is_found_beside_the_run(tmp_path: Path) -> None:
    recipe, control = Recipe.read("swap", ["scheme=fire"]), Recipe.read("control")
    training, adapter, conversion = control.training, control.adapter, control.conversion
    recipes = {
        "a-shorter": dataclasses.replace(control, training=dataclasses.replace(training, steps=7)),
        "b-yarn": dataclasses.replace(control, conversion=dataclasses.replace(conversion, rope={"rope_type": "yarn"})),
        "c-slow": dataclasses.replace(control, training=dataclasses.replace(training, learning_rate=1e-9)),
        "d-lora": dataclasses.replace(control, adapter=dataclasses.replace(adapter, kind="lora")),
        "fire": recipe,
        "z-control": control,
    }
    for name, each in recipes.items():
        (tmp_path / name / files.MODEL).mkdir(parents=True)
        (tmp_path / name / files.RECIPE).write_text(each.text(), encoding="utf-8")
        written = Measurements(tmp_path / name / files.MEASUREMENTS)
        written.record(NATIVE, measured(len(name), 2.0).at(NATIVE))
    found = verdict.control_of(tmp_path / "fire", recipe, "it")
    assert torch.equal(found.at(NATIVE).samples, measured(len("z-control"), 2.0).at(NATIVE).samples)
    assert verdict.control_of(tmp_path / "b-yarn", recipes["b-yarn"], "it") is not None
    assert verdict.control_of(tmp_path / "z-control", control, "it") is None
    record = tmp_path / "z-control" / files.RUN
    record.write_text('{"text": "another"}', encoding="utf-8")
    assert verdict.control_of(tmp_path / "fire", recipe, "it") is None
    record.unlink()
    (tmp_path / "z-control" / files.MODEL).rmdir()
    assert verdict.control_of(tmp_path / "fire", recipe, "it") is None


def test_a_bad_run_is_not_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_model.safetensors").write_bytes(bytes(1234))
    for after, offered in ((2.5, False), (1.95, True)):
        verdict = judge(measured(2.0, after), FACTS)
        command._say_what_is_there(SimpleNamespace(folder=tmp_path, already=False, verdict=verdict))
        out = capsys.readouterr().out
        assert str(verdict) in out
        assert ("hf-posenc push" in out, "hf-posenc eval" in out) == (offered, offered)
        assert "take 1.2 KB" in out


@pytest.mark.parametrize("words", [["swap", "scheme=kerple"], ["swap", "scheme=fire", "adapter=lora"], ["extend"]])
def test_the_offered_control_is_a_recipe_that_is_found(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = Recipe.read(words[0], words[1:]), tmp_path / "a run"
    folder.mkdir()
    (folder / files.RECIPE).write_text(recipe.text(), encoding="utf-8")
    command._say_what_is_there(SimpleNamespace(folder=folder, already=False, verdict=judge(measured(2.0, 1.9), FACTS)))
    offered = next(line for line in capsys.readouterr().out.splitlines() if "hf-posenc train" in line)
    _, _, source, *changes, _, out = shlex.split(offered)
    control = Recipe.read(source, changes)
    (Path(out) / files.MODEL).mkdir(parents=True)
    (Path(out) / files.RECIPE).write_text(control.text(), encoding="utf-8")
    assert verdict.control_of(folder, recipe, "it") is not None
