"""Every command of `hf-posenc`, and the one line that each kind of bad input ends in."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from hub import Hub, serving
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
from hf_posenc.cli.application import print_json
from hf_posenc.recipes import library
from hf_posenc.recipes.evaluation.verdict import Verdict
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import run as runs
from hf_posenc.recipes.runs.measurements import Measurements

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


def test_json_has_no_number_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [math.nan, 1.5, (math.inf,)], "b": "nan"})
    assert strict_json(capsys.readouterr().out) == {"a": [None, 1.5, [None]], "b": "nan"}


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


def test_a_shell_completes_commands_and_schemes() -> None:
    def completed(*typed: str) -> list[str]:
        variables = {"COMP_WORDS": " ".join(typed), "COMP_CWORD": str(len(typed) - 1)}
        variables["_HF_POSENC_COMPLETE"] = "complete_bash"
        result = CliRunner().invoke(cli.app, [], env=variables, prog_name="hf-posenc")
        return result.stdout.split()

    assert completed("hf-posenc", "ver") == ["verify"]
    assert completed("hf-posenc", "info", "fox") == ["fox", "fox_pro"]


def test_the_model_that_comes_along_has_a_name(tmp_path: Path) -> None:
    assert run("plan", "tiny-llama", "alibi").stdout == run("plan", TINY_LLAMA, "alibi").stdout
    assert run("convert", "tiny-llama", "alibi", tmp_path / "out").exit_code == 0
    assert run("verify", tmp_path / "out").stdout.startswith("active: alibi on 4 layers")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    drawn = run("plot", "tiny-llama", "--what", "decay", "--out", tmp_path / "pictures")
    assert drawn.exit_code == 0, drawn.stderr


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_convert_leaves_nothing_behind(number: int, tmp_path: Path) -> None:
    program = (
        "import pathlib, signal, time\nfrom hf_posenc.cli import app\n"
        "from hf_posenc.patches.atomic_files import whole_directory\n"
        # A shell that starts the tests in the background has them ignore interrupts.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "@app.command()\ndef slow(out: pathlib.Path):\n    with whole_directory(out) as folder:\n"
        "        (folder / 'weights').touch()\n        print('writing', flush=True)\n        time.sleep(60)\n"
        f"app(['slow', {str(tmp_path / 'out')!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        process.communicate(timeout=120)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_recipes_lists_goals_and_recommends_at_most_five(checkpoints: dict[str, Path]) -> None:
    listed = run("recipes").stdout
    assert all(name in listed for name in library.names())
    best, every = (run("recipes", "--for", checkpoints["gpt2"], *more).stdout for more in ((), ("--all",)))
    assert best.count("swap scheme=") + best.count("extend") - 1 <= 5  # the last line repeats the first recipe
    assert every.count("swap scheme=") > 20
    assert f"hf-posenc train swap scheme=fire model={checkpoints['gpt2']} data=TEXT --out DIR" in best


def test_show_prints_a_file_with_every_key_after_overrides(tmp_path: Path) -> None:
    overrides = ["scheme=fire", "training.steps=7", "conversion.options.threshold=32"]
    shown, wanted = run("recipes", "show", "swap", *overrides).stdout, read_recipe("swap", overrides)
    assert shown == wanted.text()
    (tmp_path / "mine.yaml").write_text(shown, encoding="utf-8")
    assert read_recipe(tmp_path / "mine.yaml") == wanted


@pytest.mark.parametrize("name", ["one", "ddp", "fsdp2", "deepspeed"])
def test_configs_are_those_of_accelerate(name: str) -> None:
    path = Path(run("recipes", "config", name).stdout.strip())
    config = load_config_from_file(str(path))
    assert config.to_dict().keys() >= yaml.safe_load(path.read_text(encoding="utf-8")).keys()


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


def test_train_and_resume_run_what_was_typed(calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    out = tmp_path / "a run"
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run("train", "swap", "scheme=fire", "training.steps=7", "--out", out, "data.limit=3").exit_code == 0
    assert run("resume", out).exit_code == 0
    recipe = read_recipe("swap", ["scheme=fire", "training.steps=7", "data.limit=3"])
    command = f"hf-posenc train swap scheme=fire training.steps=7 --out '{out}' data.limit=3"
    assert calls == [(recipe, out, command), (out,)]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_dry_run_says_what_would_be_done(calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    result = run("train", "remove", "training.steps=10", "--out", tmp_path / "out", "--dry-run")
    assert result.exit_code == 0, result.stderr
    for part in ("tiny-llama", "nope", "faded out", "10,240 (10 steps x 8 windows x 128 tokens)", "builtin", "GiB"):
        assert part in result.stdout
    assert calls == []
    assert list(tmp_path.iterdir()) == []


def test_the_control_that_a_run_proposes_skips_no_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["scheme=alibi", "training.skip_to=512", "lengthen={steps: 1, skip_to: 512}"]
    (tmp_path / "recipe.yaml").write_text(read_recipe("swap", keys).text(), encoding="utf-8")
    verdict = Verdict("as good", False, (), "", wants_control=True)
    outcome = runs.Outcome(tmp_path, tmp_path / "model", Measurements(), None, verdict=verdict)
    monkeypatch.setattr(runs, "train", lambda *given, **known: outcome)
    shown = run("train", "swap", *keys, "--out", tmp_path).stdout
    words = shlex.split(next(line for line in shown.splitlines() if line.endswith("-control")))
    control = read_recipe(words[2], words[3 : words.index("--out")])
    assert control.conversion.scheme is control.training.skip_to is control.lengthen.skip_to is None


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


def test_a_text_that_is_read_again_and_again_is_said_before(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 400, encoding="utf-8")
    keys = ("training.length=64", "batch_size=1", f"data={tmp_path / 'text.txt'}")
    often, once = (run("train", "control", f"steps={n}", *keys, "--dry-run").stdout for n in (1000, 10))
    (times,) = re.findall(r"The text is read ([\d.]+) times: it has ([\d,]+) tokens", often)
    assert 0.8 < 64_000 / (float(times[0]) * int(times[1].replace(",", ""))) < 1.2
    assert "The text is read" not in once


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


SMALL = ["training.steps=4", "training.batch_size=2", "data.limit=400", "evaluation={windows: 2, contexts: [64]}"]


def test_a_run_from_recipe_to_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    typed = ["train", "swap", "scheme=kerple", *SMALL, "--out", str(out)]
    done = run(*typed)
    assert done.exit_code == 0, done.stderr
    assert f"wrote {out}: " in done.stdout
    assert json.loads((out / "run.json").read_text(encoding="utf-8"))["command"] == shlex.join(["hf-posenc", *typed])
    assert read_recipe(out / "recipe.yaml") == read_recipe("swap", ["scheme=kerple", *SMALL])
    assert run("verify", out / "model").stdout.startswith("active: kerple")
    again = run("resume", out)
    assert (again.exit_code, "finished" in again.stdout) == (0, True)


@pytest.mark.grid
@pytest.mark.parametrize(("begun", "number"), [(True, signal.SIGINT), (False, signal.SIGTERM)])
def test_stopped_run_says_how_to_go_on(begun: bool, number: int, tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    program = (
        "import pathlib, time\nfrom hf_posenc.cli.train import _follow\n"
        "def wait(console):\n    print('running', flush=True)\n    time.sleep(60)\n"
        f"_follow(pathlib.Path({str(folder)!r}), wait)"
    )
    if begun:
        (folder / "recipe.yaml").touch()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    rest = f"; hf-posenc resume '{folder}' goes on." if begun else " before there was anything to go on with."
    assert (process.returncode, errors.decode()) == (128 + number, f"hf-posenc: stopped{rest}\n")


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


def test_push_that_is_refused_is_one_line(hub: Hub, finished: Path) -> None:
    for repo, arguments, words in (("me/public", ["--private"], "is public already"), ("me//mine", [], "me//mine")):
        done = run("push", finished, repo, *arguments)
        assert done.exit_code == 1
        assert done.stderr.startswith(f"hf-posenc: Pushing to {repo} failed: ")
        assert (done.stderr.count("\n"), words in done.stderr) == (1, True)
    assert hub.commits == []


# -- bad input ---------------------------------------------------------------------------------------------------------

# What is typed, in terms of a good checkpoint {llama}, a converted one {converted} and an empty directory {empty};
# words of the line that answers.
BAD = {
    "unknown scheme": ("plan {llama} fyre", ["'fyre'", "Did you mean 'fire'?"]),
    "unknown option": ("plan {llama} fire -o widht=3", ["no option 'widht'", "Did you mean 'width'?"]),
    "option of patch": ("plan {llama} fire -o native=keep", ["'native' is no option", "give --native keep"]),
    "key of patch": ("convert {llama} fire {empty}/out layers=0", ["'layers' is no option", "give --layers 0"]),
    "key of a recipe": ("plan {llama} fire training.steps=3", ["'training.steps=3'", "hf-posenc train"]),
    "option without value": ("plan {llama} fire -o width", ["NAME=VALUE"]),
    "option without its section": ("train swap scheme=fire width=3 --dry-run", ["given as scheme.width=VALUE"]),
    "option twice": ("plan {llama} fire -o width=3 -o width=4", ["width is given twice"]),
    "layers": ("plan {llama} fire --layers first", ["layers='first'", "every:N"]),
    "missing directory": ("plan {empty}/nowhere fire", ["There is no directory", "nowhere"]),
    "no config": ("plan {empty} fire", ["no config.json"]),
    "config that is no JSON": ("plan {broken} fire", ["config", "cannot be read"]),
    "other head": ("convert {headless} fire {empty}/out", ["LlamaForDreams", "cannot be patched"]),
    "no weights": ("convert {weightless} fire {empty}/out", ["weights", "cannot be read"]),
    "truncated, converted": ("verify {cut}", ["truncated or damaged"]),
    "out exists": ("convert {llama} fire {converted}", ["exists and is not empty"]),
    # Its temporary name is longer than names may be.
    "out that cannot be made": ("convert {llama} fire {empty}/" + 300 * "x", ["xxx cannot be written: "]),
    "verify, not converted": ("verify {llama}", ["is not a converted checkpoint"]),
    "unknown recipe": ("recipes show swp", ["'swp'", "Did you mean 'swap'?"]),
    "rope type": ("plan {llama} yarn", ["hf-posenc train extend by=yarn"]),
    "no such file": ("train {empty}/mine.yaml --out {empty}/out", ["There is no file", "mine.yaml"]),
    "unknown key": (
        "train swap scheme=fire training.stpes=3 --out {empty}/out",
        ["no key 'training.stpes'", "'steps'"],
    ),
    "no such model": ("train swap scheme=fire model=./no --dry-run", ["no directory"]),
    "dry run of a transfer that cannot be": (
        "train swap scheme=sinusoidal native=remove transfer.steps=2 --dry-run",
        ["sinusoidal acts on the inputs"],
    ),
    "dry run on a converted model": (
        "train swap scheme=kerple model={converted} data=builtin --dry-run",
        ["is converted already"],
    ),
    "recipes for a model of images": ("recipes --for {images}", ["is a vit, which writes no text"]),
    "plan of a run that trained an adapter": ("plan {adapted} fire", ["The run trained an adapter"]),
    "extending a converted model": (
        "train extend model={converted} data=builtin --dry-run",
        ["its own rotation is gone"],
    ),
    "recipe over something else": ("train swap scheme=fire --out {llama}", ["exists, and holds no run"]),
    "unknown config": ("recipes config dpp", ["no config 'dpp'", "Did you mean 'ddp'?"]),
    "resume what is no run": ("resume {empty}", ["There is no recipe.yaml"]),
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
        ("plan", checkpoints["llama"], "fire", "--native", "some"),
        ("train", "swap", "scheme=fire"),
        ("recipes", "dance"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


# -- as a process ------------------------------------------------------------------------------------------------------


def test_help_and_schemes_import_no_model_code() -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_posenc.cli import app\n"
        "for command in ('--help', 'train --help', 'recipes --help', 'recipes', 'recipes config one'):\n"
        "    assert CliRunner().invoke(app, command.split()).exit_code == 0\nassert 'torch' not in sys.modules\n"
        "assert CliRunner().invoke(app, ['schemes']).exit_code == 0\nassert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
