"""What benchmarks/adaptation.py would run: recipes that read, which nobody wants to find out hours into a table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hf_posenc.recipes.schema.recipe import Recipe

ROOT = Path(__file__).parents[1]
CHECKPOINTS = {"llama": "hf_posenc/tiny_llama", "gpt2": "tests/checkpoints/gpt2", "t5": "tests/checkpoints/t5"}
# A learned table of positions is no bias that one could be fitted to.
NOWHERE = {"gpt2": {"no fit"}}


@pytest.fixture(scope="module")
def adaptation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("adaptation_benchmark", ROOT / "benchmarks" / "adaptation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look their annotations up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# A benchmark of hours is started by hand, and so is this.
@pytest.mark.slow
@pytest.mark.parametrize(("what", "architecture"), [("schemes", "llama"), ("levers", "gpt2"), ("levers", "t5")])
def test_every_run_has_a_recipe_that_reads(adaptation: ModuleType, what: str, architecture: str) -> None:
    # Windows of the length that the models were made for.
    options = ["--seeds", "0", "1", "--length", "64", "--set", "training.micro_batch_size=4"]
    arguments = adaptation.parser().parse_args([what, str(ROOT / CHECKPOINTS[architecture]), "builtin", *options])
    runs = list(adaptation.planned(arguments))
    # The runs of another seed have the same recipes.
    for run in runs[len(runs) // 2 :]:
        recipe = Recipe.read("swap", run.changes)
        assert recipe.training.seed == run.seed
        assert (recipe.conversion.scheme is None) == run.row.startswith("native")
    assert len({run.folder for run in runs}) == len(runs)
    # And a table of all of them can be written.
    record = adaptation.Record(None)
    record.near["budget"] = {run.row: {"0": {"64": 1.0}} for run in runs}
    record.far["budget"] = {}
    written = adaptation.table_of("budget", record, 64)
    assert all(any(line.startswith(f"| {run.row} |") for line in written) for run in runs)
    if what == "levers":
        # One that no recipe has any more changes nothing, and is no lever.
        planned = {run.row.split(", ", 1)[1] for run in runs if run.row != adaptation.NATIVE}
        assert set(adaptation.LEVERS) - planned == NOWHERE.get(architecture, set())
