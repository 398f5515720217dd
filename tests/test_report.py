"""What a run leaves to read: table, picture and model card."""

from __future__ import annotations

import base64
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from models import stock
from peft import get_peft_model
from test_display import FACTS, facts_with

import hf_posenc
from hf_posenc.recipes.evaluation.grid import PERPLEXITY, Grid
from hf_posenc.recipes.runs import report
from hf_posenc.recipes.runs.measurements import NATIVE, Measurements
from hf_posenc.recipes.runs.progress import Pace
from hf_posenc.recipes.runs.report import Results

PACE = Pace(0.25, 8192.0, 300 * 2**20, 199)
LOG = [{"step": 1, "loss": 4.5, "learning_rate": 1e-3}, {"step": 200, "loss": 2.25}, {"step": 200, "train_loss": 3.0}]
PNG = b"\x89PNG"


def losses(*rows: tuple[float, float]) -> Grid:
    return Grid(PERPLEXITY, {"tokens read": (64, 128, 1024)}, torch.tensor(rows, dtype=torch.float64))


def measured(course: bool = False) -> Measurements:
    """The native model cannot read 1,024 tokens; the trained one is worse by 0.1 and 0.3 nats at 128."""
    measurements = Measurements()
    measurements.record(NATIVE, losses((2.0, 3.0), (1.0, 2.0), (math.nan, math.nan)))
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
    assert list(perplexity) == ["tokens read", "---", "native", "fire, before training", "fire, after 200 steps"]
    assert perplexity["tokens read"] == ["64", "128", "1,024"]
    # Two windows have one degree of freedom: the interval reaches 12.7 standard errors of the loss to each side.
    assert perplexity["native"] == ["12 [0, 6,996]", "4 [0, 2,574]", "-"]
    ratio = rows_under(text, "In % of the perplexity of native")
    # 0.2 nats with a standard error of 0.1, paired by window.
    assert ratio["fire, after 200 steps"] == ["100.000 [100.000, 100.000]", "122 [34, 435]", "-"]
    assert "native" not in ratio
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


def test_tables_of_other_runs(tmp_path: Path) -> None:
    def written(measurements: Measurements, facts: Any = FACTS, log: Any = LOG) -> str:
        report.write(tmp_path, Results(measurements, facts, log=log))
        return (tmp_path / report.TABLE).read_text(encoding="utf-8")

    nothing = written(Measurements())
    assert "Nothing was measured." in nothing
    assert not (tmp_path / report.PICTURE).exists()
    course = written(measured(course=True), log=())
    assert list(rows_under(course, "Perplexity by optimizer step"))[2:] == ["0", "100", "200"]
    assert "Speed: not measured" in course
    assert "logged" not in course
    control = written(measured(), facts_with(conversion={"scheme": None}))
    assert control.startswith("# tiny-llama trained as it is: ")
    assert list(rows_under(control, "Perplexity per token"))[2:] == ["native", "native, after 200 steps"]
    diverged = measured()
    diverged.record(200, losses((math.inf, math.inf), (1.1, math.inf), (1.2, 2.2)))
    cells = rows_under(written(diverged, log=[{"step": 1, "loss": math.nan}]), "Perplexity per token")
    assert cells["fire, after 200 steps"][:2] == ["inf", "inf"]


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
    assert course.level == (pytest.approx(math.exp(1.5)), "the native model")
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
    assert rows_under(text, "In % of the perplexity of native")["fire, after 200 steps"][1] == "122 [34, 435]"
    assert "0.25 s per step" in text
    assert "```bash\nhf-posenc train swap --out run\n```" in text
    assert "Versions: hf-posenc 0.1.0, python 3.11.7." in text
    written = text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(written) == dataclasses.asdict(facts.recipe)
    readme.write_text(text, encoding="utf-8")
    model.save_pretrained(tmp_path)
    assert readme.read_text(encoding="utf-8") == text


def test_card_of_an_adapter(tmp_path: Path) -> None:
    model = hf_posenc.patch(stock("llama"), "fire")
    model.name_or_path = model.config._name_or_path = "/home/me/models/tiny"
    get_peft_model(model, hf_posenc.PosencLoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(
        str(tmp_path), save_embedding_layers=False
    )
    existing = (tmp_path / "README.md").read_text(encoding="utf-8")
    text = report.model_card(Results(measured(), facts_with(adapter={"kind": "lora", "rank": 2})), existing)
    card = ModelCard(text)
    assert card.data.library_name == "peft"
    assert card.data.base_model is None
    assert {"hf_posenc", "fire", "lora"} <= set(card.data.tags or [])
    assert "/home/me" in existing
    assert "/home/me" not in text
    assert "More Information Needed" not in text
    assert 'base = AutoModelForCausalLM.from_pretrained("path/of/tiny-llama")' in text
    assert "import hf_posenc" in text
    hub = report.model_card(Results(measured(), facts_with(adapter={"kind": "scheme"}, model="meta/llama")))
    assert 'from_pretrained("meta/llama")' in hub
    assert ModelCard(hub).data.base_model == "meta/llama"


def test_card_of_a_control_and_of_a_local_text(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("text")
    facts = facts_with(conversion={"scheme": None}, data={"source": str(tmp_path / "my.txt")})
    facts = dataclasses.replace(facts, architecture="t5", command="")
    text = report.model_card(Results(Measurements(), facts))
    assert "tokens of `my.txt`: all weights" in text
    assert "import hf_posenc" not in text
    assert 'AutoModelForSeq2SeqLM.from_pretrained("path/or/repo")' in text
    assert ModelCard(text).data.datasets is None
    assert "The command" not in text
    assert "Nothing was measured." in text


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


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert report.on_the_hub("meta/llama-1.0")
    for name in ("tiny-llama", "a/b/c", "/a/b", "", "a b/c"):
        assert not report.on_the_hub(name)
    Path("meta/llama-1.0").mkdir(parents=True)
    assert not report.on_the_hub("meta/llama-1.0")
