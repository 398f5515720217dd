"""A run of a recipe, and its folder: what is in it, and that a stopped run ends as one that was not."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from models import DIRECTORIES, text_file
from peft import AutoPeftModelForCausalLM
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posenc
from hf_posenc import CheckpointError, PosencError, RecipeError
from hf_posenc.recipes import storage
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.loading import place
from hf_posenc.recipes.runs import files, run, stages
from hf_posenc.recipes.runs.case import Case
from hf_posenc.recipes.runs.files import STOP
from hf_posenc.recipes.runs.forecast import forecast
from hf_posenc.recipes.schema.recipe import Recipe, Training
from hf_posenc.recipes.training import trainer as adapt
from hf_posenc.recipes.training.trainer import divide_batch, whole_batches

pytestmark = pytest.mark.usefixtures("plain_pictures")

BASE = """
model: tiny-llama
conversion: {scheme: fire, options: {threshold: 64.0}}
training: {steps: 6, length: 32, batch_size: 4, learning_rate: 1e-3}
evaluation: {contexts: [64], windows: 2}
saving: {every: 2}
"""


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """A function that makes a tiny recipe with overrides."""

    def make(*overrides: str) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(BASE, encoding="utf-8")
        return read_recipe(path, [f"data.source={text_file()}", *overrides])

    return make


class Stop(Exception):
    """What stops a run in these tests."""


def stop_after(monkeypatch: pytest.MonkeyPatch, saves: int) -> None:
    """Have the next run stop after so many checkpoints."""
    on_save, left = files.WholeCheckpoints.on_save, [saves]

    def stopping(self: Any, *args: Any, **kwargs: Any) -> None:
        on_save(self, *args, **kwargs)
        left[0] -= 1
        if not left[0]:
            monkeypatch.setattr(files.WholeCheckpoints, "on_save", on_save)
            raise Stop

    monkeypatch.setattr(files.WholeCheckpoints, "on_save", stopping)


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """A recipe with a text of its own, and its run, stopped after the first checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "recipe.yaml").write_text(BASE, encoding="utf-8")
    recipe = read_recipe(folder / "recipe.yaml", [f"data.source={shutil.copy(text_file(), folder / 'mine.txt')}"])
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stop):
            run.train(recipe, folder / "out")
    return recipe, folder / "out"


@pytest.fixture
def stopped(stopped_once: tuple[Recipe, Path], tmp_path: Path) -> tuple[Recipe, Path]:
    """The same recipe, and a run that may be changed."""
    recipe, out = stopped_once
    return recipe, shutil.copytree(out, tmp_path / "out")


def changed(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    new = {name: dataclasses.replace(getattr(recipe, name), **keys) for name, keys in sections.items()}
    return dataclasses.replace(recipe, **new)


def weights(folder: Path) -> dict[str, Tensor]:
    [path] = [*folder.glob("*.safetensors")]
    return load_file(path)


def curves(folder: Path) -> Any:
    return json.loads((folder / "measurements.json").read_text(encoding="utf-8"))


def test_the_folder_of_a_run(read: Any, tmp_path: Path) -> None:
    out, recipe = tmp_path / "out", read("saving.keep=1")
    outcome = run.train(recipe, out, command="hf-posenc train it")
    assert {path.name for path in out.iterdir()} == {
        "checkpoints",
        "measurements.json",
        "model",
        "perplexity.png",
        "recipe.yaml",
        "report.html",
        "run.json",
        "table.md",
    }
    assert {path.name for path in (out / "checkpoints").iterdir()} == {".lock", "checkpoint-4"}
    assert read_recipe(out / "recipe.yaml") == recipe
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert record["command"] == "hf-posenc train it"
    assert [start["step"] for start in record["starts"]] == [0]
    assert (outcome.folder, outcome.model, outcome.already) == (out, out / "model", False)
    native, before, after = (outcome.measurements.curve(name) for name in ("original", "before", "after"))
    assert native.at(64).mean < after.at(64).mean < before.at(64).mean
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert model.config.use_cache
    assert hf_posenc.verify(model).groups[0][0] == "fire"
    assert len(AutoTokenizer.from_pretrained(out / "model")) == model.config.vocab_size
    assert "hf-posenc train it" in (out / "model" / "README.md").read_text(encoding="utf-8")
    assert AutoModelForCausalLM.from_pretrained(out / "checkpoints" / "checkpoint-4").config.use_cache
    # Once finished, it is left alone.
    written = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with Console().capture() as _, (tmp_path / "screen").open("w", encoding="utf-8") as screen:
        again = run.train(recipe, out, console=Console(file=screen, width=300))
        resumed = run.resume(out)
    assert (again.already, resumed.already) == (True, True)
    assert "finished" in (tmp_path / "screen").read_text(encoding="utf-8")
    assert written == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_layers_with_the_native_encoding_may_see_a_window(read: Any, tmp_path: Path) -> None:
    keys = ["conversion={scheme: nope, layers: 'every:4', window: 16}", "training.steps=1"]
    model = AutoModelForCausalLM.from_pretrained(run.train(read(*keys), tmp_path / "out").model)
    ids = torch.randint(9, 99, (1, 64))
    changed = ids.clone()
    changed[0, 0] += 1
    # After the three local layers the last token knows of 46 tokens; after the global one of all.
    near, far = (model(x, output_hidden_states=True) for x in (ids, changed))
    assert torch.equal(near.hidden_states[3][0, -1], far.hidden_states[3][0, -1])
    assert not torch.equal(near.logits[0, -1], far.logits[0, -1])
    with pytest.raises(RecipeError, match=r"window is 16, which does nothing without conversion\.layers"):
        read("conversion.window=16")


def test_a_recipe_that_was_changed_since_is_not_resumed(stopped: tuple[Recipe, Path]) -> None:
    recipe, out = stopped
    path = out / storage.RECIPE
    path.write_text(recipe.text().replace("learning_rate: 0.001", "learning_rate: 0.002"), encoding="utf-8")
    with pytest.raises(
        RecipeError,
        match=r"began with another recipe: training\.learning_rate was 0\.001 and is 0\.002\. .* recipe\.yaml",
    ):
        run.resume(out)
    with pytest.raises(RecipeError, match=r"options was .* and is .*; training\.steps was 6 and is 7"):
        run.train(changed(recipe, conversion={"options": {}}, training={"steps": 7}), out)
    # One that is cut short is YAML still.
    path.write_text(recipe.text().partition("evaluation:")[0], encoding="utf-8")
    with pytest.raises(RecipeError, match=r"evaluation\.contexts was \[64\] and is None"):
        run.resume(out)
    # The recipe itself goes on, also with a tuple where its file has a list, and is put back.
    path.write_text(recipe.text(), encoding="utf-8")
    assert run.train(changed(recipe, evaluation={"contexts": (64,)}), out).model.is_dir()
    assert read_recipe(path) == recipe


def _another_weight(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    found["model.layers.1.mlp.up_proj.weight"] += 0.5
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def _another_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["rms_norm_eps"] = 1e-3
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _another_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"][-1]["lstrip"] ^= True
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def _another_text(folder: Path) -> None:
    text = (folder / "mine.txt").read_text(encoding="utf-8")
    (folder / "mine.txt").write_text(text[:9].swapcase() + text[9:], encoding="utf-8")


CHANGED = {
    "weights": (_another_weight, "mine", "its weights have changed"),
    "config": (_another_config, "mine", r"rms_norm_eps of its config was 1e-06 and is 0\.001"),
    "tokenizer": (_another_tokenizer, "mine", "its tokenizer has changed"),
    "teacher": (_another_weight, "teacher", "The teacher .* its weights have changed"),
    "text": (_another_text, ".", "has other tokens than when the run"),
}


@pytest.fixture(scope="module")
def stopped_with_own_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a teacher, a text, and a run of these that stopped after its first checkpoint."""
    folder = tmp_path_factory.mktemp("own")
    for name in ("mine", "teacher"):
        shutil.copytree(place("tiny-llama"), folder / name)
    shutil.copy(text_file(), folder / "mine.txt")
    (folder / "recipe.yaml").write_text(BASE, encoding="utf-8")
    keys = [f"data.source={folder / 'mine.txt'}", f"model={folder / 'mine'}", "distillation.share=0.5"]
    recipe = read_recipe(folder / "recipe.yaml", [*keys, f"distillation.teacher={folder / 'teacher'}"])
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stop):
            run.train(recipe, folder / "out")
    return folder


@pytest.mark.parametrize("what", CHANGED)
def test_what_a_run_reads_must_not_change_under_it(what: str, stopped_with_own_files: Path) -> None:
    folder = stopped_with_own_files
    change, place_of, said = CHANGED[what]
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "out" not in path.parts}
    change(folder / place_of)
    try:
        with pytest.raises(RecipeError, match=said):
            run.resume(folder / "out")
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def test_a_run_is_resumed_in_any_directory(read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths stay those of the directory where the run began; here another one has files of the same names."""
    given = read("distillation.share=0.5")
    shutil.copytree(place(given.model), tmp_path / "mine")
    text = Path(given.data.source).read_text(encoding="utf-8")
    (tmp_path / "mine.txt").write_text(text, encoding="utf-8")
    (tmp_path / "held.txt").write_text(text[: len(text) // 4], encoding="utf-8")
    texts = {"source": "mine.txt", "held_out": "held.txt"}
    relative = dataclasses.replace(changed(given, data=texts, distillation={"teacher": "mine"}), model="mine")
    monkeypatch.chdir(tmp_path)
    stop_after(monkeypatch, 1)
    with pytest.raises(Stop):
        run.train(relative, Path("out"))
    other = tmp_path / "other"
    other.mkdir()
    for name in ("mine.txt", "held.txt", "mine"):
        (other / name).touch()
    monkeypatch.chdir(other)
    assert run.resume(tmp_path / "out").model.is_dir()
    monkeypatch.chdir(tmp_path)
    assert run.train(relative, Path("out")).already


def test_a_damaged_record_is_an_error(stopped: tuple[Recipe, Path]) -> None:
    recipe, out = stopped
    for content in (b'{"command": "hf-po', b"[]", b'{"starts": 5}', b"\xff"):
        (out / storage.RUN).write_bytes(content)
        for call in (lambda: run.resume(out), lambda: run.train(recipe, out)):
            with pytest.raises(
                CheckpointError, match=r"run\.json cannot be read .*\. Remove the file to go on without"
            ):
                call()
    (out / storage.RUN).unlink()
    with pytest.raises(RecipeError, match=r"training\.steps was 6 and is 7"):
        run.train(changed(recipe, training={"steps": 7}), out)
    assert run.resume(out).model.is_dir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("saving.loggers=[wandb]", "loggers has 'wandb', which is not installed. Run pip install wandb"),
        ("training.batch_size=3", "training.batch_size is 3, which 2 processes cannot share"),
        ("lengthen={steps: 1, batch_size: 1}", "lengthen.batch_size is 1, which 2 processes cannot share"),
    ],
)
def test_what_the_trainer_would_refuse_is_refused_before_anything_is_loaded(
    change: str, message: str, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load", None)
    monkeypatch.setattr(adapt, "get_available_reporting_integrations", list)
    monkeypatch.setattr(run.processes(), "num_processes", 2)
    with pytest.raises(RecipeError, match=message):
        run.train(read(change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_is_noticed_first(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "load", None)
    for out in (Path("/proc/out"), Path("/proc/self")):
        with pytest.raises(RecipeError, match=r"^/proc/\w+ (cannot be written|exists, and holds no run)"):
            run.train(read(), out)


def test_targets_that_are_not_there_are_named(read: Any, tmp_path: Path) -> None:
    # A module that is no layer of its own gets no LoRA either.
    for target, words in (
        ("v_porj", r"has 'v_porj'; .* Did you mean 'v_proj'\? Known: down_proj, "),
        ("mlp", "has 'mlp'"),
    ):
        with pytest.raises(RecipeError, match=words):
            run.train(read("adapter.kind=lora", f"adapter.targets=[q_proj, {target}]"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_folders_are_refused(read: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(RecipeError, match="holds no run"):
        run.train(read(), tmp_path / "mine")
    with pytest.raises(RecipeError, match="is a file"):
        run.train(read(), tmp_path / "mine" / "notes.txt")
    with pytest.raises(RecipeError, match="Make it first"):
        run.train(read(), tmp_path / "nowhere" / "out")
    with pytest.raises(RecipeError, match=r"no recipe\.yaml"):
        run.resume(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


VARIANTS = {
    "handover": ["conversion.native=handover", "conversion.handover=0.7"],
    "a teacher": ["distillation.share=0.5", "distillation.hidden=0.1", "distillation.until=0.8"],
    "skipping": ["training.skip_to=200", "conversion.scheme=kerple", "conversion.options={}", "conversion.fit=native"],
    "lora": [
        "adapter.kind=lora",
        "adapter.dropout=0.3",
        "conversion.native=handover",
        "conversion.handover=1.0",
        "distillation.share=0.5",
    ],
    "documents, scheme alone": ["data.packing=documents", "adapter.kind=scheme"],
    "t5": [
        f"model={DIRECTORIES['t5']}",
        "conversion.scheme=kerple",
        "conversion.options={}",
        "distillation.share=1",
        "distillation.hidden=2",
    ],
    "gpt2": [f"model={DIRECTORIES['gpt2']}", "conversion.scheme=rope", "conversion.options={}", "evaluation.every=3"],
    "control": [
        "conversion.scheme=null",
        "conversion.options={}",
        "distillation.share=0.5",
        "training.micro_batch_size=2",
    ],
}


# test_stages.py stops a run by default.
CASES = [
    pytest.param(overrides, id=name, marks=pytest.mark.grid if name in ("handover", "lora", "t5") else pytest.mark.slow)
    for name, overrides in VARIANTS.items()
]


@pytest.mark.parametrize("overrides", CASES)
def test_a_stopped_run_ends_with_the_same_weights(
    overrides: list[str], read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read(*overrides)
    whole = run.train(recipe, tmp_path / "whole")
    stop_after(monkeypatch, 2)
    with pytest.raises(Stop):
        run.train(recipe, tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "model").exists()
    # Whatever was drawn since then must not matter.
    torch.manual_seed(99)
    resumed = run.resume(tmp_path / "stopped")
    record = json.loads((tmp_path / "stopped" / "run.json").read_text(encoding="utf-8"))
    assert [start["step"] for start in record["starts"]] == [0, 4]
    assert resumed.loss == whole.loss
    one, other = weights(whole.model), weights(resumed.model)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert curves(tmp_path / "whole") == curves(tmp_path / "stopped")
    if recipe.adapter.kind == "lora":
        model = AutoPeftModelForCausalLM.from_pretrained(whole.model)
        assert hf_posenc.verify(model.merge_and_unload()).groups[0][0] == "fire"


@pytest.mark.grid
def test_a_run_that_is_asked_to_stop_saves_its_step(read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read("saving.every=1000", "transfer.steps=4")
    whole = run.train(recipe, tmp_path / "whole")
    step, answers = adapt.AdaptationTrainer.training_step, []

    def then() -> None:
        raise Stop

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        if len(answers) < 2 and self.state.global_step == 1:
            answers.extend([STOP.ask(then), STOP.ask(then)])
            with monkeypatch.context() as later:
                later.setattr(files, "_ONCE", 0.0)
                answers.append(STOP.ask(then))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(adapt.AdaptationTrainer, "training_step", training_step)
    for stage in ("transfer", "."):
        with pytest.raises(Stop):
            run.train(recipe, tmp_path / "stopped")
        assert not STOP.ask(then), "what failed is trained no more"
        assert [path.name for path in (tmp_path / "stopped" / "checkpoints" / stage).glob("check*")] == ["checkpoint-2"]
        assert answers == [True, True, False]
        answers.clear()
    answers[:] = [True] * 3
    resumed = run.train(recipe, tmp_path / "stopped")
    assert not STOP.ask(then)
    one, other = weights(whole.model), weights(resumed.model)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_batches_are_divided() -> None:
    assert divide_batch(Training(batch_size=8), 2) == (4, 1)
    assert divide_batch(Training(batch_size=8, micro_batch_size=2), 2) == (2, 2)
    with pytest.raises(RecipeError, match="3 processes cannot share"):
        divide_batch(Training(batch_size=8), 3)
    with pytest.raises(RecipeError, match="divisor of 4"):
        divide_batch(Training(batch_size=8, micro_batch_size=3), 2)
    assert len(whole_batches(list(range(10)), 4)) == 8
    with pytest.raises(RecipeError, match="has 3 windows"):
        whole_batches(list(range(3)), 4)


def test_only_complete_checkpoints_count_and_leftovers_alone_are_removed(tmp_path: Path) -> None:
    for step in (2, 9, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
            (folder / name).write_bytes(b"x" * 5)
        storage.save(files._marks(folder), folder / files.MARKER)
    for other in ("checkpoint-12", "checkpoint-other", ".unfinished/checkpoint-3"):
        (tmp_path / other).mkdir(parents=True)
    assert [path.name for path in files.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-9", "checkpoint-10"]
    assert files.last(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_bytes(b"x" * 4 + b"y")
    assert files.last(tmp_path) == tmp_path / "checkpoint-9"
    before = {path.name for path in tmp_path.iterdir()}
    (tmp_path / ".unfinished-run.json").write_text("{", encoding="utf-8")
    files.clear(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before - {".unfinished"}


LENGTHS: dict[str, tuple[str, list[str], str]] = {
    "nothing to skip": ("llama-nope", ["skip_to=128"], "expected more than training.length = 128.*=1024"),
    "skipping in T5": ("t5-kerple", ["length=64", "skip_to=99"], "skip_to is 99: it is for texts that go on"),
    "table, handover": (
        *("gpt2-fire", ["length=64", "skip_to=512"]),
        "skip_to is 512, and the model's own table, which conversion.native=handover.* Give conversion.native=remove",
    ),
    "table of the control": (
        *("gpt2", ["length=256"]),
        "length is 256, and the model's own table has 128 positions. Give at most as many",
    ),
    "table of the scheme": (
        *("llama-learned", ["length=256"]),
        "length is 256, and the scheme knows 128 positions.*conversion.options",
    ),
    "transfer beyond the original": (
        *("llama-nope", ["length=64", "transfer={steps: 1, skip_to: 99999}"]),
        r"transfer\.skip_to is 99999; expected at most 128, the trained length",
    ),
    "repeating in T5": (
        *("t5-kerple", ["length=64", "transfer={steps: 1, repeat: 0.5}"]),
        r"transfer\.repeat is 0\.5: it is for texts that go on, and t5 models",
    ),
    "long windows, table": (
        *("gpt2", ["length=64", "lengthen={steps: 1, length: 512}"]),
        r"lengthen\.length is 512, and the model's own table has 128 positions",
    ),
    "long windows, skipping in T5": (
        *("t5", ["length=64", "lengthen={steps: 1, skip_to: 256}"]),
        r"lengthen\.skip_to is 256: it is for texts that go on, and t5 models",
    ),
    "long windows, short ones in T5": (
        *("t5", ["length=64", "lengthen={steps: 1, length: 128, short: 0.3}"]),
        r"lengthen\.short is 0\.3: it is for texts that go on, and t5 models",
    ),
    "long windows, text": (
        *("llama", ["length=64", "lengthen={steps: 1, length: 300_000}"]),
        "held-out text has|too few tokens for one window",
    ),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_a_run_refuses_lengths_before_it_measures_as_a_dry_run_does(case: str, tmp_path: Path) -> None:
    name, changes, said = LENGTHS[case]
    architecture, _, scheme = name.partition("-")
    pairs = [f"model={DIRECTORIES[architecture]}", "data=builtin", "training.steps=1"]
    pairs += [key if key.startswith(("lengthen", "transfer")) else f"training.{key}" for key in changes]
    recipe = read_recipe(*(("swap", [f"scheme={scheme}", *pairs]) if scheme else ("control", pairs)))
    for refuses in (
        lambda: forecast(Case.of(recipe, reads_all=False)),
        lambda: run.train(recipe, tmp_path / "out"),
    ):
        with pytest.raises(RecipeError, match=said):
            refuses()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["scheme=kerple", f"model={DIRECTORIES['gpt2']}", "native=remove", "fit=native"], "added to the inputs"),
        (["scheme=kerple", f"model={DIRECTORIES['gpt2']}", "native=remove", "transfer.steps=1"], "its own encoding"),
        (["scheme=kerple", "training.batch_size=100000"], "batch_size is 100000"),
        (["scheme=cope", "native=remove", "fit=native"], "cope adds no bias"),
        (["scheme=alibi", "scheme.learned_slopes=false", "native=remove", "fit=native"], "alibi has no parameters"),
        (["scheme=learned", "native=remove", "fit=transfer"], "acts on the inputs"),
        (["scheme=nope", "native=keep", "adapter=scheme"], "nope' has no parameters"),
    ],
    ids=["fit", "transfer", "batch", "bias", "weights", "inputs", "adapter"],
)
def test_each_stage_refuses_before_a_model_is_loaded(
    changes: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load", None)
    with pytest.raises(PosencError, match=said):
        run.train(read_recipe("swap", [*changes, f"data.source={text_file()}", "training.length=32"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.grid
def test_a_training_that_diverges_says_so(read: Any, tmp_path: Path) -> None:
    rates = ("training.learning_rate=1e12", "training.scheme_learning_rate=1e12", "training.max_grad_norm=1e12")
    with pytest.raises(RecipeError, match="the training diverged"):
        run.train(read(*rates, "training.steps=12", "saving.every=1"), tmp_path / "out")


def test_the_teacher_of_an_extended_model_has_its_own_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []

    def caught(*args: Any, teacher: Any, **kwargs: Any) -> None:
        found.append(teacher.model.config.rope_parameters["rope_theta"])
        raise Stop

    monkeypatch.setattr(stages, "adaptation_trainer", caught)
    changes = ["by=base", "distillation.share=1.0", "training.steps=1", "windows=2", "evaluation.contexts=[64]"]
    with pytest.raises(Stop):
        run.train(read_recipe("extend", changes), tmp_path / "out")
    assert found == [10_000]


def test_a_folder_is_written_by_one_process(stopped: tuple[Recipe, Path]) -> None:
    _, out = stopped

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in out.rglob("*") if path != out / files.LOCK}

    before = times()
    with FileLock(out / files.LOCK), pytest.raises(RecipeError, match="is being written by another process"):
        run.resume(out)
    assert times() == before


def test_of_two_new_runs_the_second_to_begin_gives_way(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, claim = tmp_path / "out", run._claim

    def late(*given: Any) -> None:
        (out / storage.CHECKPOINTS).mkdir(parents=True)
        with FileLock(out / files.LOCK):
            claim(*given)

    monkeypatch.setattr(run, "_claim", late)
    with pytest.raises(RecipeError, match="is being written by another process"):
        run.train(read(), out)
    assert not (out / storage.RECIPE).exists()


@pytest.mark.grid
def test_a_converted_model_is_trained_on_as_it_is_or_not_at_all(read: Any, tmp_path: Path) -> None:
    first = run.train(read(), tmp_path / "first")
    scheme = next(iter(json.loads((first.model / "config.json").read_text())["posenc"]["groups"]))["scheme"]
    with pytest.raises(RecipeError, match=rf"is converted already, to {scheme}: an untrained {scheme} would replace"):
        run.train(read(f"model={first.model}"), tmp_path / "again")
    assert not (tmp_path / "again").exists()
    on = ["conversion={scheme: null}", "distillation={}"]
    on += [f"training.{rate}=1e-9" for rate in ("learning_rate", "scheme_learning_rate")]
    console = Console(record=True, width=120)
    second = run.train(read(f"model={first.model}", *on), tmp_path / "on", console=console)
    assert f"{scheme}, trained on as the model has it" in console.export_text()
    pairs = ((first, "after"), (second, "original"), (second, "after"))
    ends = [each.measurements.curve(which).at(64).mean for each, which in pairs]
    assert ends == pytest.approx([ends[0]] * 3, rel=1e-5)
