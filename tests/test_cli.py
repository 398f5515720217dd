"""Every command of `hf-posenc`, and the one line that each kind of bad input ends in."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import cli

TINY_LLAMA = Path(hf_posenc.__file__).parent / "tiny_llama"
IDS = torch.arange(2, 26).view(2, 12)

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4, decoder_start_token_id=0)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random checkpoint of each architecture, without tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, build in MODELS.items():
        build().save_pretrained(folder / name)
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped Llama, converted; not to be changed."""
    out = tmp_path_factory.mktemp("converted") / "llama-fire"
    assert run("convert", TINY_LLAMA, "fire", out).exit_code == 0
    return out


def run(*arguments: object) -> Any:
    """Run a command in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def run_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does."""
    command = [sys.executable, "-c", "from hf_posenc.cli import app; app()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def logits(model: Any) -> torch.Tensor:
    """The model's predictions on fixed tokens."""
    extra = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=IDS, **extra).logits  # type: ignore[no-any-return]


# -- what commands say -------------------------------------------------------------------------------------------------


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"hf-posenc {hf_posenc.__version__}\n")


def test_schemes_lists_every_scheme_with_a_whole_sentence() -> None:
    result = run("schemes")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    for name, info in hf_posenc.schemes().items():
        assert info.family in rows[name]
        assert info.paper in rows[name]
    assert "et al. 2024" in result.stdout


def test_info_describes_a_scheme() -> None:
    assert run("info", "fire").stdout == f"{hf_posenc.describe('fire')}\n"


def test_plan_reads_the_config_alone(tmp_path: Path) -> None:
    shutil.copy(TINY_LLAMA / "config.json", tmp_path)
    result = run("plan", tmp_path, "fire", "--layers", "every:2", "--option", "width=16", "-o", "init=zero")
    assert result.exit_code == 0
    assert "2: 1, 3" in result.stdout
    assert "width=16" in result.stdout
    assert "init='zero'" in result.stdout
    assert not result.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0,2", "2: 0, 2"), ("-1", "1: 3"), ("0:3", "3: 0, 1, 2"), (":3:2", "2: 0, 2"), ("every:4", "1: 3")],
)
def test_selections_of_layers(text: str, expected: str, checkpoints: dict[str, Path]) -> None:
    assert expected in run("plan", checkpoints["llama"], "alibi", "--layers", text).stdout


def test_native_and_stacks_reach_the_plan(checkpoints: dict[str, Path]) -> None:
    result = run("plan", checkpoints["t5"], "fire", "--native", "keep", "--stacks", "decoder")
    assert "exact with native kept" in result.stdout
    assert "layers (decoder)" in result.stdout
    assert "layers (encoder)" not in result.stdout


# -- conversion --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "auto"),
    [("llama", AutoModelForCausalLM), ("gpt2", AutoModelForCausalLM), ("t5", AutoModelForSeq2SeqLM)],
)
def test_convert_verify_load(name: str, auto: Any, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("convert", checkpoints[name], "kerple", out, "--native", "keep", "-o", "gate=true")
    assert result.exit_code == 0, result.stderr
    assert f'{auto.__name__}.from_pretrained("{out}")' in result.stdout
    assert "has no tokenizer" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert run("verify", out).stdout.startswith("active: kerple on ")
    # This start is exact, so the conversion must have kept every weight.
    torch.testing.assert_close(logits(auto.from_pretrained(out)), logits(auto.from_pretrained(checkpoints[name])))


def test_tokenizer_and_permissions_come_along(converted: Path) -> None:
    text = "Return a new list."
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (converted, TINY_LLAMA))
    assert ours(text).input_ids == theirs(text).input_ids
    assert {path.stat().st_mode & 0o777 for path in converted.iterdir()} == {0o644}


def test_dtype(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    assert run("convert", checkpoints["llama"], "fire", tmp_path / "out", "--dtype", "bfloat16").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.layers[0].self_attn.hf_posenc.c.dtype == torch.float32


def test_convert_keeps_the_class_that_the_checkpoint_names(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    LlamaForSequenceClassification(LlamaForCausalLM.from_pretrained(checkpoints["llama"]).config).save_pretrained(
        tmp_path / "in"
    )
    result = run("convert", tmp_path / "in", "alibi", tmp_path / "out")
    assert "AutoModelForSequenceClassification" in result.stdout


def test_convert_a_converted_checkpoint(converted: Path, tmp_path: Path) -> None:
    result = run("convert", converted, "alibi", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "active: alibi on 4 layers" in run("verify", tmp_path / "out").stdout


def test_convert_into_an_empty_directory(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run("convert", checkpoints["llama"], "alibi", tmp_path / "out").exit_code == 0


def test_failed_convert_leaves_nothing_behind(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    # The weights are written by then, the companions are not.
    monkeypatch.setattr("hf_posenc.checkpoint.write_companions", full)
    result = run("convert", checkpoints["llama"], "fire", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr == "hf-posenc: [Errno 28] No space left on device\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_convert_leaves_nothing_behind(number: int, tmp_path: Path) -> None:
    program = (
        "import pathlib, time\nfrom hf_posenc.cli import whole_directory\n"
        f"with whole_directory(pathlib.Path({str(tmp_path / 'out')!r})) as folder:\n"
        "    (folder / 'weights').write_text('half')\n    print('writing', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


# -- bad input ---------------------------------------------------------------------------------------------------------

# What is typed, in terms of a good checkpoint {llama}, a converted one {converted} and an empty directory {empty};
# words of the line that answers.
BAD = {
    "unknown scheme": ("plan {llama} fyre", ["'fyre'", "Did you mean 'fire'?"]),
    "unknown scheme, info": ("info kerpel", ["Did you mean 'kerple'?"]),
    "unknown scheme, demo": ("demo --scheme fyre --out {empty}/demo", ["Did you mean 'fire'?"]),
    "unknown option": ("plan {llama} fire -o widht=3", ["no option 'widht'", "Did you mean 'width'?"]),
    "option of patch": ("plan {llama} fire -o native=keep", ["fire has no option 'native'"]),
    "option without value": ("plan {llama} fire -o width", ["NAME=VALUE"]),
    "option without name": ("plan {llama} fire -o =3", ["NAME=VALUE"]),
    "option twice": ("plan {llama} fire -o width=3 -o width=4", ["width is given twice"]),
    "option of wrong type": ("plan {llama} fire -o width=wide", ["width='wide'", "expected int"]),
    "option out of range": ("plan {llama} fire -o width=0", ["width=0", "at least 1"]),
    "layers": ("plan {llama} fire --layers first", ["--layers 'first'", "every:4"]),
    "layers, slice": ("plan {llama} fire --layers 1:2:3:4", ["--layers '1:2:3:4'"]),
    "layers, every": ("plan {llama} fire --layers every:x", ["every:x"]),
    "layers out of range": ("plan {llama} fire --layers 9", ["layers 0 to 3"]),
    "stacks": ("plan {llama} fire --stacks encoder", ["has the stacks decoder"]),
    "missing directory": ("plan {empty}/nowhere fire", ["There is no directory", "nowhere"]),
    "no config": ("plan {empty} fire", ["no config.json"]),
    "config that is no JSON": ("plan {broken} fire", ["config", "cannot be read"]),
    "other architecture": ("plan {bert} fire", ["bert"]),
    "other head": ("convert {headless} fire {empty}/out", ["LlamaForDreams", "cannot be patched"]),
    "no weights": ("convert {weightless} fire {empty}/out", ["weights", "cannot be read"]),
    "truncated weights": ("convert {truncated} fire {empty}/out", ["weights", "cannot be read"]),
    "truncated, converted": ("verify {cut}", ["truncated or damaged"]),
    "out exists": ("convert {llama} fire {converted}", ["exists and is not empty"]),
    "out is a file": ("convert {llama} fire {llama}/config.json", ["is a file"]),
    "out in nowhere": ("convert {llama} fire {empty}/no/out", ["There is no directory"]),
    "demo out exists": ("demo --out {llama}", ["exists and is not empty"]),
    "verify, not converted": ("verify {llama}", ["is not a converted checkpoint"]),
    "verify, missing": ("verify {empty}/nowhere", ["There is no directory"]),
}


@pytest.fixture(scope="module")
def places(checkpoints: dict[str, Path], converted: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories with something wrong."""
    folder = tmp_path_factory.mktemp("places")
    config = json.loads((TINY_LLAMA / "config.json").read_text(encoding="utf-8"))

    def make(name: str, text: str) -> Path:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(text, encoding="utf-8")
        return folder / name

    def cut(name: str, source: Path) -> Path:
        shutil.copytree(source, folder / name)
        weights = folder / name / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        return folder / name

    (folder / "empty").mkdir()
    return {
        "llama": checkpoints["llama"],
        "converted": converted,
        "empty": folder / "empty",
        "broken": make("broken", "{"),
        "bert": make("bert", json.dumps({"model_type": "bert"})),
        "headless": make("headless", json.dumps({**config, "architectures": ["LlamaForDreams"]})),
        "weightless": make("weightless", json.dumps(config)),
        "truncated": cut("truncated", TINY_LLAMA),
        "cut": cut("cut", converted),
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


def test_bad_usage_exits_with_2(checkpoints: dict[str, Path]) -> None:
    for arguments in (("plan",), ("dance",), ("plan", checkpoints["llama"], "fire", "--native", "some")):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


# -- as a process ------------------------------------------------------------------------------------------------------


def test_help_and_schemes_import_no_model_code() -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_posenc.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\nassert 'torch' not in sys.modules\n"
        "assert CliRunner().invoke(app, ['schemes']).exit_code == 0\nassert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_process_prints_to_the_right_places(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    good = run_process("convert", checkpoints["llama"], "nope", tmp_path / "out")
    assert (good.returncode, good.stderr) == (0, "")
    bad = run_process("verify", checkpoints["llama"])
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (1, "", 1)


def test_terminated_process_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from hf_posenc.cli import app; app()", "demo", "--out", str(tmp_path / "demo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
