"""What a run leaves to read: table, picture, model card, and a verdict; nothing is offered after a bad one."""

from __future__ import annotations

import base64
import dataclasses
import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from models import stock
from test_display import FACTS, facts_with

import hf_posenc
from hf_posenc.cli import evaluate as evaluating
from hf_posenc.cli import train as command
from hf_posenc.recipes import storage
from hf_posenc.recipes.evaluation import verdict
from hf_posenc.recipes.evaluation.grid import PERPLEXITY, Grid
from hf_posenc.recipes.evaluation.grid import successes as shares
from hf_posenc.recipes.evaluation.recall import RECALLS
from hf_posenc.recipes.evaluation.verdict import ORIGINAL, VERBS
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import report
from hf_posenc.recipes.runs.measurements import Measurements
from hf_posenc.recipes.runs.progress import Pace
from hf_posenc.recipes.runs.report import Results, control_of, judge
from hf_posenc.recipes.runs.request import Request
from hf_posenc.recipes.training import layers

PACE = Pace(0.25, 8192.0, 300 * 2**20, 199)
LOG = [{"step": 1, "loss": 4.5, "learning_rate": 1e-3}, {"step": 200, "loss": 2.25}, {"step": 200, "train_loss": 3.0}]
PNG = b"\x89PNG"


def losses(*rows: tuple[float, float]) -> dict[str, Grid]:
    grid = Grid(PERPLEXITY, {"tokens read": (64, 128, 1024)}, torch.tensor(rows, dtype=torch.float64))
    return {"perplexity": grid}


def measured(course: bool = False) -> Measurements:
    """The native model cannot read 1,024 tokens; the trained one is worse by 0.1 and 0.3 nats at 128."""
    measurements = Measurements()
    measurements.record(ORIGINAL, losses((2.0, 3.0), (1.0, 2.0), (math.nan, math.nan)))
    measurements.record(0, losses((5.0, 6.0), (4.0, 6.0), (5.0, 7.0)))
    if course:
        measurements.record(100, losses((2.5, 3.5), (1.5, 2.5), (1.5, 2.5)))
    measurements.record(200, losses((2.0, 3.0), (1.1, 2.3), (1.2, 2.2)))
    return measurements


def rows_under(text: str, heading: str) -> dict[str, list[str]]:
    """Return the cells of the table that follows a line, by the first of their row."""
    lines = text[text.index(heading) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    found = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip(" -") or cell.strip()[:3] for cell in line.strip("|").split("|"))
        found[first] = cells
    return found


# -- the table ---------------------------------------------------------------------------------------------------------


def test_table_and_page(tmp_path: Path) -> None:
    facts = dataclasses.replace(FACTS, command="hf-posenc train swap 'data=<here>'", stages=("one", "two"))
    report.write(tmp_path, Results(measured(), facts, log=LOG, pace=PACE))
    text = (tmp_path / report.TABLE).read_text(encoding="utf-8")
    assert text.startswith("# tiny-llama with fire: perplexity on held-out text\n")
    perplexity = rows_under(text, "Perplexity per token")
    assert list(perplexity) == ["tokens read", "---", "original", "fire, before training", "fire, after 200 steps"]
    assert perplexity["tokens read"] == ["64", "128", "1,024"]
    # Two windows have one degree of freedom: the interval reaches 12.7 standard errors of the loss to each side.
    assert perplexity["original"] == ["12 [0, 6,996]", "4 [0, 2,574]", "-"]
    ratio = rows_under(text, "In % of the perplexity of original")
    # 0.2 nats with a standard error of 0.1, paired by window. Nothing compares with a native model that cannot read.
    assert ratio["fire, after 200 steps"] == ["100.000 [100.000, 100.000]", "122 [34, 435]"]
    assert "original" not in ratio
    assert "2 held-out windows" in text
    assert "A dash marks texts that are longer than the positions of the model." in text
    assert "first and last logged: 4.5000 and 2.2500" in text
    assert (
        "Speed on the machine of this run (2 x CPU with 2 threads, bfloat16), over 199 steps: 0.25 s per step" in text
    )
    assert "8,192 tokens/s, 300 MiB" in text
    assert "by optimizer step" not in text
    assert (tmp_path / report.PICTURE).read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.iterdir()) == [report.PICTURE, report.PAGE, report.TABLE]
    page = (tmp_path / report.PAGE).read_text(encoding="utf-8")
    assert '4 <span class="interval">[0, 2,574]</span>' in page
    assert base64.b64encode((tmp_path / report.PICTURE).read_bytes()).decode() in page
    for made in ("command: hf-posenc train swap &#39;data=&lt;here&gt;&#39;", "stage: one", "stage: two", "versions: "):
        assert f"<li>{made}" in page


@pytest.mark.parametrize("native", ["remove", "handover"])
def test_the_picture_shows_the_course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: Any) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(report, "lines_figure", lambda title, panels: (drawn.extend(panels), Figure(figsize=(1, 1)))[1])
    facts = facts_with(conversion={"native": native, "handover": 0.5})
    # With a teacher, the loss is a mixture: it begins with the distance from the teacher alone.
    log = [{"step": 1, "loss": 0.5, "text_loss": 4.5}, *LOG[1:]]
    report.write(tmp_path, Results(measured(course=True), facts, log=log))
    lengths, losses, course = drawn
    name = "fire, after 200 steps"
    assert [(step, loss.mean) for step, loss in losses.lines[name]] == [(1, 4.5), (200, 2.25)]
    assert "first and last logged: 4.5000 and 2.2500" in (tmp_path / report.TABLE).read_text(encoding="utf-8")
    assert lengths.mark == (128, "trained on 128 tokens")
    assert course.y == "perplexity at 128 tokens"
    assert [step for step, _ in course.lines[name]] == [0, 100, 200]
    assert course.lines[name][1][1].mean == pytest.approx(math.exp(2.0))
    assert course.level == (pytest.approx(math.exp(1.5)), "the original")
    assert losses.mark == course.mark == (None if native == "remove" else (100, "the native encoding is gone"))


# -- the model card ----------------------------------------------------------------------------------------------------


def test_card_of_a_converted_model(tmp_path: Path) -> None:
    """It goes around the part that saving writes, which says how to load, and saving again leaves it."""
    model = hf_posenc.patch(stock("llama"), "fire")
    model.save_pretrained(tmp_path)
    readme = tmp_path / "README.md"
    facts = facts_with(data={"source": "roneneldan/TinyStories"}, model="meta/some-llama")
    text = report.model_card(Results(measured(), facts, LOG, PACE), readme.read_text(encoding="utf-8"))
    card = ModelCard(text)
    data = card.data
    assert (data.library_name, data.base_model, data.license) == ("transformers", "meta/some-llama", None)
    assert (data.datasets, data.tags) == (["roneneldan/TinyStories"], ["hf_posenc", "fire"])
    assert (data.pipeline_tag, data.metrics) == ("text-generation", ["perplexity"])
    shown = [(each.dataset_type, each.metric_name, each.metric_value) for each in card.data.eval_results]
    assert shown[1] == ("roneneldan/TinyStories", "perplexity at 128 tokens", pytest.approx(math.exp(1.7), abs=1e-4))
    assert len(shown) == 3
    headings = [line.strip("# ") for line in card.text.splitlines() if line.startswith("#")]
    assert headings == ["meta/some-llama with fire", "Positional encoding", "Results", "How it was made"]
    assert "`fire` instead of its rotary encoding (RoPE)" in text
    assert "409,600 tokens of `roneneldan/TinyStories`: all weights (468,600 parameters, 792 of them new)." in text
    assert "Distilled from the original (loss weight 0.5)." in text
    assert text.count("from_pretrained(") == 1
    assert rows_under(text, "In % of the perplexity of original")["fire, after 200 steps"][1] == "122 [34, 435]"
    assert "0.25 s per step" in text
    assert "```bash\nhf-posenc train swap --out run\n```" in text
    assert "Versions: hf-posenc 0.1.0, python 3.11.7." in text
    written = text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(written) == dataclasses.asdict(facts.recipe)
    readme.write_text(text, encoding="utf-8")
    model.save_pretrained(tmp_path)
    assert readme.read_text(encoding="utf-8") == text


def test_no_local_path_is_on_a_card_and_the_licence_is_that_of_the_base(tmp_path: Path) -> None:
    base, text = tmp_path / "base", tmp_path / "corpus" / "my.txt"
    for path in (base / "README.md", text):
        path.parent.mkdir()
        path.write_text("---\nlicense: apache-2.0\n---\n")
    data, taught = {"source": str(text), "held_out": str(text)}, {"teacher": str(tmp_path / "teacher")}
    command = f"hf-posenc train swap model={base} data.source={text} --out {tmp_path / 'run'}"
    facts = facts_with(dataclasses.replace(FACTS, command=command), model=str(base), data=data, distillation=taught)
    written = report.model_card(Results(measured(), facts))
    assert str(tmp_path) not in written
    assert "hf-posenc train swap model=base data.source=my.txt --out run" in written
    assert "Distilled from teacher (loss weight 0.5)." in written
    card = ModelCard(written)
    assert card.data.license == "apache-2.0"
    assert card.data.eval_results[0].dataset_name == "my.txt, held out"
    assert ModelCard(report.model_card(Results(Measurements(), facts))).data.eval_results is None
    # What the user has chosen stays.
    mine = written.replace("license: apache-2.0", "license: mit")
    assert ModelCard(report.model_card(Results(measured(), facts), mine)).data.license == "mit"


# -- the verdict -------------------------------------------------------------------------------------------------------


def two_models(native: float, after: float, *, far: float = 3.0, noise: float = 0.001, count: int = 32) -> Measurements:
    """Return losses at 128 and 1,024 tokens in some windows that are hard and easy for both models."""
    windows = torch.linspace(0, 1, count, dtype=torch.float64)
    wobble = noise * (-1.0) ** torch.arange(count)
    found = Measurements()
    axes = {"tokens read": (128, 1024)}
    for key, rows in ((ORIGINAL, [native, 5.0]), (200, [after + wobble, far])):
        found.record(key, {"perplexity": Grid(PERPLEXITY, axes, torch.stack([windows + row for row in rows]))})
    return found


@pytest.mark.parametrize(
    ("after", "noise", "grade", "is_bad", "said"),
    [
        (1.95, 0.001, "better", False, "Fire is significantly better than the original: at 128 tokens"),
        (2.0, 0.1, "as good", False, "Fire is as good as the original: at"),
        (2.0, 1.0, "as good", False, "Fire is as good as the original, as far as 32 windows can tell: at"),
        (2.05, 0.001, "worse", False, "Fire is significantly worse"),
        (2.5, 0.001, "worse", True, "not ready for use. Train it longer (steps), or convert fewer layers"),
        # Too few windows to be sure do not make a bad model a good one.
        (2.5, 2.0, "worse", True, "Fire is worse than"),
        (math.inf, 0.001, "worse", True, "The training diverged."),
    ],
)
def test_grades(after: float, noise: float, grade: str, is_bad: bool, said: str) -> None:
    verdict = judge(two_models(2.0, after, noise=noise), FACTS)
    assert verdict is not None
    assert (verdict.grade, verdict.is_bad) == (grade, is_bad)
    assert said in str(verdict)
    if math.isfinite(after):
        assert "At 1,024 tokens its perplexity is 13.534 % [13.534, 13.534] of that one's, and" in str(verdict)


def able(found: Measurements, name: str, key: str | int, share: float, count: int = 32) -> None:
    """Record what a model copies or recalls: a share of the tokens of sequences that are hard and easy."""
    samples = (share + torch.linspace(-0.1, 0.1, count, dtype=torch.float64)).clamp(0, 1)[None]
    length = {"tokens read": (128,)}
    found.record(key, found.results(key) | {name: Grid(shares("right tokens", 1 / 64), length, samples)})


@pytest.mark.parametrize("name", list(RECALLS))
@pytest.mark.parametrize("after", [1.9, 2.0])
@pytest.mark.parametrize(
    ("native", "kept", "grade", "is_bad"),
    [(0.8, 0.0, "worse", True), (0.8, 0.4, "worse", True), (0.8, 0.7, "worse", False), (0.8, 0.9, None, False)],
)
def test_a_model_that_copies_or_recalls_less_is_never_as_good(
    name: str, after: float, native: float, kept: float, grade: str | None, is_bad: bool
) -> None:
    plain = judge(two_models(2.0, after), FACTS)
    found = two_models(2.0, after)
    able(found, name, ORIGINAL, native)
    able(found, name, 200, kept)
    verdict = judge(found, FACTS)
    assert (verdict.grade, verdict.is_bad) == (grade or plain.grade, is_bad)
    said = rf"{'But it' if grade else 'It'} {VERBS[name]} {100 * kept:.0f}?.* % .*of random tokens, and that one 8"
    assert re.search(said, str(verdict))
    assert ("not ready for use" in str(verdict)) == is_bad
    # The control, which may have lost as much, is the measure.
    control = two_models(2.0, after)
    able(control, name, 200, kept)
    assert judge(found, FACTS, control).grade != "worse"


def test_what_is_copied_is_compared_where_the_other_model_copies() -> None:
    """Of a weak model only short sequences tell; of a model that was measured by perplexity alone, nothing does."""
    found = two_models(2.0, 2.0)
    for key, kept in ((ORIGINAL, 0.8), (200, 0.1)):
        able(found, "copy", key, kept)
        own = found.results(key)["copy"]
        far = torch.full_like(own.samples, math.nan)
        longer = Grid(own.quantity, {"tokens read": (32, 128)}, torch.cat([own.samples, far]))
        found.record(key, found.results(key) | {"copy": longer})
    assert judge(found, FACTS).grade == "worse"
    assert "But it copies" in str(judge(found, FACTS))
    assert "which were not measured" in str(judge(two_models(2.0, 2.0), FACTS))
    assert "which were not measured" not in str(judge(found, FACTS))


def test_a_verdict_needs_32_windows_or_says_so() -> None:
    assert read_recipe("swap", ["scheme=fire"]).evaluation.windows == Request(()).samples == verdict.LEAST == 32
    assert inspect.signature(evaluating.evaluate).parameters["samples"].default == verdict.LEAST
    assert inspect.signature(evaluating.compare).parameters["samples"].default == verdict.LEAST
    assert layers.WINDOWS == verdict.LEAST
    few, many = (str(judge(two_models(2.0, 1.9, count=count), FACTS)) for count in (4, 32))
    assert "as far as 4 windows can tell" in few
    assert "windows can tell" not in many


def test_the_control_is_the_measure_where_there_is_one() -> None:
    """Against the model that was not trained at all, the same figures look like a gain."""
    good, control = two_models(2.0, 1.9), two_models(2.0, 1.8)
    assert judge(good, FACTS).grade == "better"
    verdict = judge(good, FACTS, control)
    assert verdict.grade == "worse"
    assert "worse than the control" in str(verdict)
    assert "train a control" in str(judge(good, FACTS))
    assert "train a control" not in str(verdict) + str(judge(good, facts_with(conversion={"scheme": None})))
    assert judge(good, facts_with(conversion={"scheme": None, "rope": {"rope_type": "yarn"}})).wants_control
    # Where only the scheme's weights are trained, the native model is the control.
    small = dataclasses.replace(FACTS, trained_parameters=FACTS.new_parameters)
    assert not judge(good, small).wants_control
    assert "Train more weights (adapter=lora)" in str(judge(two_models(2.0, 2.5), small))


def test_the_control_is_found_beside_the_run(tmp_path: Path) -> None:
    recipe, control = read_recipe("swap", ["scheme=fire"]), read_recipe("control")
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
        (tmp_path / name / storage.MODEL).mkdir(parents=True)
        (tmp_path / name / storage.RECIPE).write_text(each.text(), encoding="utf-8")
        written = Measurements(tmp_path / name / storage.MEASUREMENTS)
        written.record(ORIGINAL, two_models(len(name), 2.0).results(ORIGINAL))
    own = Measurements()
    found = control_of(tmp_path / "fire", recipe, own)
    assert torch.equal(found.curve(ORIGINAL).samples, two_models(len("z-control"), 2.0).curve(ORIGINAL).samples)
    assert control_of(tmp_path / "b-yarn", recipes["b-yarn"], own) is not None
    assert control_of(tmp_path / "z-control", control, own) is None
    assert control_of(tmp_path / "fire", recipe, two_models(2.0, 1.8)) is None  # not the same windows
    (tmp_path / "fire" / storage.RUN).write_text('{"text": "one"}', encoding="utf-8")
    record = tmp_path / "z-control" / storage.RUN
    record.write_text('{"text": "another"}', encoding="utf-8")
    assert control_of(tmp_path / "fire", recipe, own) is None
    record.unlink()
    (tmp_path / "z-control" / storage.MODEL).rmdir()
    assert control_of(tmp_path / "fire", recipe, own) is None


def test_a_bad_run_is_not_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_model.safetensors").write_bytes(bytes(1234))
    for after, offered in ((2.5, False), (1.95, True)):
        verdict = judge(two_models(2.0, after), FACTS)
        outcome = SimpleNamespace(folder=tmp_path, already=False, verdict=verdict)
        command._follow(tmp_path, lambda console, outcome=outcome: outcome)
        out = capsys.readouterr().out
        assert str(verdict) in out
        assert ("hf-posenc push" in out, "hf-posenc eval" in out) == (offered, offered)
        assert "take 1.2 KB" in out
