"""Every command of `hf-posenc`, and the one line that each kind of bad input ends in."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hub import Hub, serving
from models import text_file
from test_recipe_files import strict_json
from tiny import TEXTS, outputs, stock
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    LlamaForSequenceClassification,
    ViTConfig,
)
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import cli
from hf_posenc.recipes import library
from hf_posenc.recipes.goals import read_recipe

TINY_LLAMA = Path(hf_posenc.__file__).parent / "tiny_llama"


def small(name: str) -> Any:
    """A random model of four layers."""
    layers = {"llama": "num_hidden_layers", "gpt2": "n_layer", "t5": "num_layers"}
    return stock(name, **{layers[name]: 4})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random checkpoint of each architecture, without tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in TEXTS:
        small(name).save_pretrained(folder / name)
    return {name: folder / name for name in TEXTS}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped Llama, converted; not to be changed."""
    out = tmp_path_factory.mktemp("converted") / "llama-fire"
    assert run("convert", TINY_LLAMA, "fire", out).exit_code == 0
    return out


def run(*arguments: object) -> Any:
    """Run a command in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


# -- what commands say -------------------------------------------------------------------------------------------------


def test_version_schemes_and_info() -> None:
    assert run("--version").stdout == f"hf-posenc {hf_posenc.__version__}\n"
    assert run("info", "fire").stdout == f"{hf_posenc.describe('fire')}\n"
    rows = {line.split()[0]: line for line in run("schemes").stdout.splitlines() if line.strip()}
    for name, info in hf_posenc.schemes().items():
        assert info.family in rows[name]
        assert info.paper in rows[name]
    assert "et al. 2024" in str(rows)


def test_plan_reads_the_config_alone(tmp_path: Path) -> None:
    shutil.copy(TINY_LLAMA / "config.json", tmp_path)
    result = run("plan", tmp_path, "fire", "--layers", "every:2", "--option", "width=16", "-o", "init=zero")
    assert result.exit_code == 0
    assert "2: 1, 3" in result.stdout
    assert "width=16" in result.stdout
    assert "init='zero'" in result.stdout
    assert not result.stderr


def test_results_are_read_by_programs_and_notebooks(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    planned = strict_json(run("plan", checkpoints["llama"], "kerple", "--json").stdout)
    assert (planned["scheme"], planned["layers"]) == ("kerple", {"decoder": [0, 1, 2, 3]})
    model = hf_posenc.patch(small("llama"), "kerple")
    assert planned == hf_posenc.plan(small("llama"), "kerple").to_dict()
    model.save_pretrained(tmp_path)
    verified = json.loads(run("verify", tmp_path, "--json").stdout)
    assert verified["groups"] == [["kerple", "remove", 4]]
    explained = json.loads(run("explain", tmp_path, "--length", 32, "--json").stdout)
    assert explained == hf_posenc.explain(model, length=32).to_dict()
    assert [layer["scheme"] for layer in explained["layers"]] == ["kerple"] * 4
    assert "one more token" in run("explain", tmp_path).stdout
    listed = json.loads(run("schemes", "--json").stdout)
    assert [each["name"] for each in listed] == list(hf_posenc.schemes())
    assert {"swap", "control"} < {each["name"] for each in json.loads(run("recipes", "--json").stdout)}
    suiting = strict_json(run("recipes", "--for", checkpoints["llama"], "--json", "--all").stdout)
    assert len(suiting) > 5
    assert {type(each[name]) for each in suiting for name in ("quality", "far")} == {float, type(None)}
    assert {"recipe", "quality", "far", "measured on"} == set(suiting[0])


def test_options_of_a_scheme_are_given_in_one_way(checkpoints: dict[str, Path]) -> None:
    for pair in ("threshold=32", "init=zero", "gate=True", "width=16"):
        for words in (("plan", checkpoints["llama"], "fire"), ("recipes", "show", "swap", "scheme=fire")):
            one, other = run(*words, f"scheme.{pair}"), run(*words, "-o", pair)
            assert one.stdout == other.stdout
            assert one.stdout != run(*words).stdout, (words, pair)
    assert read_recipe("swap", ["scheme=fire", "scheme.init=zero"]).conversion.options["init"] == "zero"


# -- conversion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "auto"),
    [("llama", AutoModelForCausalLM), ("gpt2", AutoModelForCausalLM), ("t5", AutoModelForSeq2SeqLM)],
)
def test_convert_verify_load(name: str, auto: Any, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("convert", checkpoints[name], "kerple", out, "--native", "keep", "-o", "gate=True")
    assert result.exit_code == 0, result.stderr
    assert f'{auto.__name__}.from_pretrained("{out}")' in result.stdout
    assert "has no tokenizer" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert run("verify", out).stdout.startswith("active: kerple on ")
    # This start is exact, so the conversion must have kept every weight.
    torch.testing.assert_close(
        outputs(auto.from_pretrained(out))[0], outputs(auto.from_pretrained(checkpoints[name]))[0]
    )


def test_what_convert_keeps(checkpoints: dict[str, Path], converted: Path, tmp_path: Path) -> None:
    """Tokenizer, dtype, the class that the checkpoint names, and of a converted one all but its scheme."""
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (converted, TINY_LLAMA))
    assert ours("Return a new list.").input_ids == theirs("Return a new list.").input_ids
    assert {path.stat().st_mode & 0o777 for path in converted.iterdir()} == {0o644}
    assert run("convert", checkpoints["llama"], "fire", tmp_path / "half", "--dtype", "bfloat16").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.layers[0].self_attn.hf_posenc.c.dtype == torch.float32
    stock("llama", LlamaForSequenceClassification).save_pretrained(tmp_path / "in")
    result = run("convert", tmp_path / "in", "alibi", tmp_path / "out")
    assert "AutoModelForSequenceClassification" in result.stdout
    assert run("convert", converted, "alibi", tmp_path / "again").exit_code == 0
    assert "active: alibi on 4 layers" in run("verify", tmp_path / "again").stdout


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_recipes_lists_goals_and_recommends_at_most_five(checkpoints: dict[str, Path]) -> None:
    listed = run("recipes").stdout
    assert all(name in listed for name in library.names())
    best, every = (run("recipes", "--for", checkpoints["gpt2"], *more).stdout for more in ((), ("--all",)))
    assert best.count("swap scheme=") + best.count("extend") - 1 <= 5  # the last line repeats the first recipe
    assert every.count("swap scheme=") > 20
    assert f"hf-posenc train swap scheme=fire model={checkpoints['gpt2']} data=TEXT --out DIR" in best


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the runner of recipes was called with; it does nothing."""
    made: list[tuple[Any, ...]] = []

    def done(*given: Any, console: Any, **keywords: Any) -> Any:
        made.append((*given, *keywords.values()))
        return SimpleNamespace(folder=given[-1], already=True)

    monkeypatch.setattr("hf_posenc.recipes.runs.run.train", done)
    monkeypatch.setattr("hf_posenc.recipes.runs.run.resume", done)
    return made


@pytest.mark.grid
def test_dry_run_says_what_would_be_done(calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    result = run("train", "remove", "training.steps=10", "data.limit=400", "--out", tmp_path / "out", "--dry-run")
    assert result.exit_code == 0, result.stderr
    for part in ("tiny-llama", "nope", "faded out", "10,240 (10 steps x 8 windows x 128 tokens)", "builtin", "GiB"):
        assert part in result.stdout
    assert calls == []
    assert list(tmp_path.iterdir()) == []


# What reads a text, with the words that name one; `fit` and `transfer` are stages of a recipe.
READERS = {
    "train swap scheme=kerple transfer.steps=2": "data=",
    "train control": "data=",
    "recipes show swap scheme=kerple fit=native": "data=",
    "compare MODEL --schemes kerple": "data=",
    "eval MODEL MODEL:kerple": "--text",
    "layers MODEL kerple": "--text",
}


@pytest.mark.parametrize("words", READERS)
def test_a_text_is_asked_for_unless_the_model_is_the_built_in_one(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The same model, but nobody knows what it has read.
    shutil.copytree(TINY_LLAMA, tmp_path / "mine")
    given = shlex.split(words.replace("MODEL", "mine"))
    given += ["model=mine"] * ("MODEL" not in words) + ["--out", "out"] * (given[0] == "train")
    result = run(*given)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("hf-posenc: ")
    assert "o text is named for" in line
    assert "mine" in line
    assert f"Give {READERS[words]}" in line
    assert f"{READERS[words].replace('--text', '--text ')}builtin takes" in line
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_dry_run_reads_the_text(tmp_path: Path) -> None:
    def answer() -> tuple[int, str]:
        result = run("train", "control", f"data={tmp_path / 'text.txt'}", "--dry-run")
        return result.exit_code, (result.stderr.splitlines() or [""])[-1]

    assert "There is no file or folder" in answer()[1]
    for content, words in (
        ("", "is empty; expected text"),
        ("\0" * 9, "There is no text"),
        ("Once upon a time.\n" * 9, "The held-out text has"),
    ):
        (tmp_path / "text.txt").write_text(content, encoding="utf-8")
        code, said = answer()
        assert (code, words in said) == (1, True)
    (tmp_path / "text.txt").write_text("word " * 999, encoding="utf-8")
    assert answer()[0] == 0


SMALL = ["training.steps=4", "training.batch_size=2", "evaluation={windows: 2, contexts: [64]}"]


def test_a_run_from_recipe_to_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    small = [f"data.source={text_file()}", *SMALL]
    typed = ["train", "swap", "scheme=kerple", *small, "--out", str(out)]
    done = run(*typed)
    assert done.exit_code == 0, done.stderr
    assert f"wrote {out}: " in done.stdout
    assert json.loads((out / "run.json").read_text(encoding="utf-8"))["command"] == shlex.join(["hf-posenc", *typed])
    assert read_recipe(out / "recipe.yaml") == read_recipe("swap", ["scheme=kerple", *small])
    assert run("verify", out / "model").stdout.startswith("active: kerple")
    again = run("resume", out)
    assert (again.exit_code, "finished" in again.stdout) == (0, True)


# -- pushing -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serving(Hub(), tmp_path / "home") as hub:
        yield hub


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """What a finished run looks like."""
    folder = tmp_path / "run"
    shutil.copytree(TINY_LLAMA, folder / "model")
    for name in ("recipe.yaml", "run.json", "table.md", "perplexity.png"):
        (folder / name).write_text(name, encoding="utf-8")
    (folder / "checkpoints").mkdir()
    return folder


def test_push_commits_model_table_and_picture_at_once(hub: Hub, finished: Path) -> None:
    done = run("push", finished, "me/mine", "--private", "--revision", "dev")
    assert done.exit_code == 0, done.stderr
    assert (hub.unknown, hub.commits) == ([], [("me/mine", "dev", "Adapt with hf_posenc")])
    assert done.stdout.startswith("pushed to http://hub/me/mine/commit/")
    model = {path.name for path in TINY_LLAMA.iterdir()}
    assert set(hub.files["me/mine"]) == model | {"table.md", "perplexity.png"}
    assert hub.files["me/mine"]["model.safetensors"] == (TINY_LLAMA / "model.safetensors").read_bytes()


# -- bad input ---------------------------------------------------------------------------------------------------------

# What is typed, in terms of a good checkpoint {llama}, a converted one {converted} and an empty directory {empty};
# words of the line that answers.
BAD = {
    "unknown scheme": ("plan {llama} fyre", ["'fyre'", "Did you mean 'fire'?"]),
    "unknown option": ("plan {llama} fire -o widht=3", ["no option 'widht'", "Did you mean 'width'?"]),
    "option of patch": ("plan {llama} fire -o native=keep", ["'native' is no option", "give --native keep"]),
    "key of patch": ("convert {llama} fire {empty}/out layers=0", ["'layers' is no option", "give --layers 0"]),
    "key of a recipe": ("plan {llama} fire training.steps=3", ["'training.steps=3'", "hf-posenc train"]),
    "option without value": ("plan {llama} fire -o width", ["scheme.width", "KEY=VALUE"]),
    "option without its section": ("train swap scheme=fire width=3 --dry-run", ["given as scheme.width=VALUE"]),
    "no fate": ("plan {llama} fire --native some", ["native='some'", "expected 'remove'", "0.375"]),
    "missing directory": ("plan {empty}/nowhere fire", ["There is no directory", "nowhere"]),
    "no config": ("plan {empty} fire", ["no config.json"]),
    "no weights": ("convert {weightless} fire {empty}/out", ["weights", "cannot be read"]),
    "out exists": ("convert {llama} fire {converted}", ["exists and is not empty"]),
    # Its temporary name is longer than names may be.
    "verify, not converted": ("verify {llama}", ["is not a converted checkpoint"]),
    "rope type": ("plan {llama} yarn", ["hf-posenc train extend by=yarn"]),
    "dry run of a transfer that cannot be": (
        "train swap scheme=sinusoidal native=remove transfer.steps=2 --dry-run",
        ["sinusoidal acts on the inputs"],
    ),
    "dry run on a converted model": (
        "train swap scheme=kerple model={converted} data=builtin --dry-run",
        ["is converted already"],
    ),
    "plan of a run that trained an adapter": ("plan {adapted} fire", ["The run trained an adapter"]),
    "extending a converted model": (
        "train extend model={converted} data=builtin --dry-run",
        ["its own rotation is gone"],
    ),
    "recipe over something else": ("train swap scheme=fire --out {llama}", ["exists, and holds no run"]),
    "push too early": ("push {started} me/mine", ["is not finished", "hf-posenc resume"]),
    "verify, a run": ("verify {finished}", ["no config.json", "The model is in", "finished/model: give that."]),
    "eval, a run that was stopped": ("eval {started} --out {empty}/out", ["is not finished", "hf-posenc resume"]),
}


@pytest.fixture(scope="module")
def places(checkpoints: dict[str, Path], converted: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories with something wrong."""
    folder = tmp_path_factory.mktemp("places")
    config = json.loads((TINY_LLAMA / "config.json").read_text(encoding="utf-8"))

    def make(name: str, text: str) -> Path:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(text, encoding="utf-8")
        return folder / name

    shutil.copytree(converted, folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (folder / "empty").mkdir()
    (folder / "started").mkdir()
    for path in (folder / "started" / "recipe.yaml", folder / "mine.yaml"):
        path.write_text(read_recipe("swap", ["scheme=fire"]).text(), encoding="utf-8")
    adapted = folder / "adapted"
    (adapted / "model").mkdir(parents=True)
    shutil.copy(folder / "mine.yaml", adapted / "recipe.yaml")
    (adapted / "model" / "adapter_config.json").write_text("{}", encoding="utf-8")
    return {
        "started": folder / "started",
        "finished": make("finished/model", json.dumps(config)).parent,
        "mine": folder / "mine.yaml",
        "llama": checkpoints["llama"],
        "converted": converted,
        "empty": folder / "empty",
        "broken": make("broken", "{"),
        "headless": make("headless", json.dumps({**config, "architectures": ["LlamaForDreams"]})),
        "weightless": make("weightless", json.dumps(config)),
        "cut": folder / "cut",
        "images": make("images", ViTConfig().to_json_string()),
        "adapted": adapted,
    }


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, places: dict[str, Path]) -> None:
    command, words = BAD[case]
    result = run(*(argument.format(**places) for argument in command.split()))
    assert result.exit_code == 1
    assert result.stderr.startswith("hf-posenc: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr
    assert list(places["empty"].iterdir()) == []


def test_a_mistyped_directory_is_refused_at_once_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(url: str) -> None:
        raise ConnectionError(f"no way to {url}.")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    # Whoever else asked would ask for half a minute.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for command in (
        "plan gfire fire",
        "eval tiny-llama gfire --out OUT",
        "train swap scheme=fire model=gfire --out OUT",
    ):
        result = run(*command.replace("OUT", str(tmp_path / "out")).split())
        assert (result.exit_code, len(result.stderr.strip().splitlines())) == (1, 1)
        assert "hf-posenc: There is no directory gfire, and the hub" in result.stderr
    assert not (tmp_path / "out").exists()


def test_bad_usage_exits_with_2(checkpoints: dict[str, Path]) -> None:
    for arguments in (
        ("plan",),
        ("dance",),
        ("train", "swap", "scheme=fire"),
        ("recipes", "dance"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


# -- as a process ------------------------------------------------------------------------------------------------------


@pytest.mark.grid
def test_help_and_schemes_import_no_model_code() -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_posenc.cli import app\n"
        "for command in ('--help', 'train --help', 'recipes --help', 'recipes', 'recipes config one'):\n"
        "    assert CliRunner().invoke(app, command.split()).exit_code == 0\nassert 'torch' not in sys.modules\n"
        "assert CliRunner().invoke(app, ['schemes']).exit_code == 0\nassert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
