"""Estimates of time: what they time, what they say, and that they leave no trace."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_posenc import cli
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import run
from hf_posenc.recipes.runs.case import Case
from hf_posenc.recipes.runs.forecast import seconds_for

pytestmark = pytest.mark.usefixtures("plain_pictures")
SMALL = (
    *("training.length=32", "batch_size=2", "evaluation.contexts=[64]", "windows=4", "data.limit=400"),
    *("steps=2", "saving.every=1"),
)


@pytest.mark.grid
def test_an_estimate_names_every_stage_and_leaves_the_run_as_it_would_be(tmp_path: Path) -> None:
    """The weights of a run with an estimate are those of a silent one, which has none."""
    recipe = read_recipe("swap", ["scheme=kerple", "transfer.steps=2", "native=remove", "fit=null", *SMALL])
    out = io.StringIO()
    told = run.train(recipe, tmp_path / "told", console=Console(file=out, width=200))
    (line,) = (line for line in out.getvalue().splitlines() if line.startswith("time "))
    for stage in recipe.stages():
        assert f"{stage} " in line, line
    assert "measuring " in line
    silent = run.train(recipe, tmp_path / "silent")
    (file,) = (path.name for path in told.model.glob("*.safetensors"))
    found, expected = (load_file(each.model / file) for each in (told, silent))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    dry = seconds_for(recipe, Case.of(recipe, reads_all=False).texts)
    assert list(dry) == [*recipe.stages(), "measuring"]
    assert all(seconds > 0 for seconds in dry.values())


def test_a_stopped_run_is_estimated_from_where_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, int]] = []

    def done(case: Any, trained: Any, work: Any, context: Any) -> dict[str, float]:
        said.append({stage.section: stage.done(context) for stage in trained})
        return {}

    monkeypatch.setattr(run, "seconds_of", done)

    def stop(*given: Any, **known: Any) -> None:
        raise KeyboardInterrupt

    recipe, quiet = read_recipe("swap", ["scheme=fire", *SMALL]), Console(file=io.StringIO())
    with monkeypatch.context() as patching:
        patching.setattr(run.report, "write", stop)
        patching.setattr(run.report, "judge", stop)
        with pytest.raises(KeyboardInterrupt):
            run.train(recipe, tmp_path / "out", console=quiet)
    run.resume(tmp_path / "out", console=quiet)
    assert said == [{"training": 0}, {"training": 1}]


@pytest.mark.grid
def test_eval_says_its_lengths_and_its_time_and_compare_and_layers_too(tmp_path: Path) -> None:
    given = [
        "eval",
        "tiny-llama",
        "tiny-llama:alibi",
        "--contexts",
        "128,64",
        "--samples",
        "2",
        "--measures",
        "perplexity",
    ]
    lines = CliRunner().invoke(cli.app, [*given, "--out", str(tmp_path / "out")]).stdout.splitlines()
    assert lines[0] == "measuring perplexity at 64, 128 tokens, 2 samples each"
    assert lines[1].startswith("time: about ")
    assert "for 2 models as fast as tiny-llama" in " ".join(lines[1:3])
    told = CliRunner().invoke(cli.app, ["layers", "tiny-llama", "kerple", "--steps", "2", "--length", "32"])
    assert "for 2 steps and 4 layers" in told.stderr
    shown = CliRunner().invoke(cli.app, ["train", "swap", "scheme=fire", *SMALL, "--dry-run"]).stdout
    assert "time       about" in shown
    assert "(training " in shown
