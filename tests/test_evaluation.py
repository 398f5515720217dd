"""Measures of any model: right against plain loops, 100 % for an oracle and chance for a random model."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from models import DIRECTORIES, checkpoint
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import CheckpointError, OptionError, PosencLoraConfig, PositionError, RecipeError, ShapeError, cli
from hf_posenc.recipes import intervals
from hf_posenc.recipes.data.sources import read_text
from hf_posenc.recipes.data.windows import token_ids
from hf_posenc.recipes.evaluation import (
    AssociativeRecall,
    ContextPerplexity,
    Grid,
    InductionCopy,
    context_curve,
)
from hf_posenc.recipes.evaluation.grid import PERPLEXITY, share, successes
from hf_posenc.recipes.evaluation.perplexity import spread_windows
from hf_posenc.recipes.evaluation.report import Report, Section, is_report
from hf_posenc.recipes.runs.request import Request, subjects
from hf_posenc.recipes.schema.recipe import Conversion, Data, Recipe
from hf_posenc.recipes.storage import load

VOCABULARY = 50
TOKENIZER = AutoTokenizer.from_pretrained(DIRECTORIES["llama"])


def small(kind: str = "llama", vocabulary: int = VOCABULARY) -> Any:
    """A small random model that can read 64 tokens, or any number."""
    if kind == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, initializer_range=0.3, **shape)).eval()
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def _quiet_datasets() -> None:
    # Commands say so to the environment, which `datasets` reads once.
    datasets.disable_progress_bars()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(2, VOCABULARY, (600,), generator=torch.Generator().manual_seed(1))


class Knows(nn.Module):
    """A causal model that knows the texts of some measures by heart."""

    def __init__(self, *measures: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=False)
        self.device = torch.device("cpu")
        self._whole = {tuple(torch.cat(row)[:-1].tolist()): torch.cat(row) for each in measures for row in each._rows}

    def forward(self, input_ids: Tensor, use_cache: bool, logits_to_keep: int) -> Any:
        rows = torch.stack([self._whole[tuple(ids)] for ids in input_ids.tolist()])
        return SimpleNamespace(logits=50.0 * nn.functional.one_hot(rows[:, -logits_to_keep:], VOCABULARY))


# -- perplexity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "scheme"), [("gpt2", None), ("llama", "fire")])
def test_perplexity_equals_a_plain_loop(kind: str, scheme: str | None, ids: Tensor) -> None:
    model = small(kind)
    if scheme:
        hf_posenc.patch(model, scheme)
    curve = context_curve(model, ids, (40, 64, 16), windows=5, targets=16, batch_size=2)
    (found,) = ContextPerplexity(ids, (40, 64, 16), windows=5, targets=16)(model)
    assert found.axes == curve.axes == {"tokens read": (16, 40, 64)}
    torch.testing.assert_close(curve.samples, found.samples)
    for row, window in enumerate(spread_windows(ids, 65, 5, targets=16)):
        for context in (16, 40, 64):
            with torch.no_grad():
                logits = model(input_ids=window[None, :-1][:, -context:]).logits[0, -16:]
            loss = nn.functional.cross_entropy(logits, window[-16:])
            assert found.values(context)[row].item() == pytest.approx(loss.item(), abs=1e-6)
    assert found.at(40).mean == pytest.approx(found.samples[1].mean().exp().item())


def test_perplexity_of_an_encoder_decoder_equals_a_plain_loop(ids: Tensor) -> None:
    model = hf_posenc.patch(checkpoint("t5"), "fire")
    corrupted: list[Tensor] = []

    def corrupt(rows: Tensor) -> Tensor:
        corrupted.append(rows.masked_fill(torch.rand(rows.shape) < 0.3, 1024))
        return corrupted[-1]

    curve = context_curve(model, ids, (16, 48), windows=5, targets=16, batch_size=2, corrupt=corrupt)
    # Each window is corrupted once: a longer context adds tokens, and changes none.
    read = torch.cat(corrupted)
    assert read.shape == (5, 48)
    for row, window in enumerate(spread_windows(ids, 49, 5, targets=16)):
        kept = read[row] != 1024
        assert torch.equal(read[row][kept], window[1:][kept])
        for context in (16, 48):
            labels = window[None, -context:].clone()
            labels[:, :-16] = -100
            # The decoder reads all labels, also those that are not scored.
            written = model.prepare_decoder_input_ids_from_labels(window[None, -context:])
            with torch.no_grad():
                loss = model(input_ids=read[None, row, -context:], decoder_input_ids=written, labels=labels).loss
            assert curve.values(context)[row].item() == pytest.approx(loss.item(), abs=1e-5)


def test_windows_overlap_in_no_target() -> None:
    ids = torch.arange(1000)
    apart = spread_windows(ids, 100, 10, targets=20)
    assert apart.unique().numel() == 1000
    # Without overlap there would be two.
    close = spread_windows(ids, 400, 31, targets=20)
    assert close.shape == (31, 400)
    assert (close.diff(dim=1) == 1).all()
    assert close[:, -20:].unique().numel() == 31 * 20
    assert (close[:, 0].diff() == 20).all()
    assert spread_windows(ids, 1000, 1, targets=20).tolist() == [ids.tolist()]


def curve(model: Any, ids: Tensor, *contexts: int, **options: Any) -> Callable[[], Any]:
    return lambda: context_curve(model, ids, contexts, windows=2, targets=16, **options)


def test_what_cannot_be_measured_is_refused(ids: Tensor) -> None:
    symbols, alike = torch.arange(30), "expected one or more, each once"
    copies = InductionCopy(symbols, (8,), samples=1)
    for make, error, message in (
        (curve(small("gpt2"), ids, 128), PositionError, "can read none of 128"),
        (curve(small("gpt2"), ids, 8, 32), ShapeError, "at least 16 tokens"),
        (curve(small(), ids + 10**6, 32), ShapeError, r"has the token \d+; the LlamaForCausalLM knows 0 to \d+"),
        (curve(checkpoint("t5"), ids, 32), OptionError, "encoder of T5ForConditionalGeneration must not read"),
        (curve(small(), ids, 32, corrupt=lambda rows: rows), OptionError, "LlamaForCausalLM has no encoder"),
        (lambda: spread_windows(ids, 400, 12, targets=20), ShapeError, r"12 windows .* take at least \[620\]"),
        (lambda: ContextPerplexity(ids, ()), OptionError, alike),
        (lambda: InductionCopy(symbols, (8, 8)), OptionError, alike),
        (lambda: InductionCopy(symbols, (15,)), ShapeError, "even numbers"),
        (lambda: AssociativeRecall(symbols, (60,)), ShapeError, "at least 64"),
        (lambda: AssociativeRecall(symbols[:16], (64,)), OptionError, "Got 16 symbols"),
        (lambda: hf_posenc.evaluate({}, [copies]), OptionError, "at least one model"),
        (lambda: hf_posenc.evaluate({"a": small()}, [copies, copies]), OptionError, "each can be given once"),
    ):
        with pytest.raises(error, match=message):
            make()


def test_a_context_begins_with_the_token_before_a_text(ids: Tensor) -> None:
    model, window = small("gpt2"), ids[:41]
    (found,) = ContextPerplexity(window, (16, 40), windows=1, targets=16, start=7)(model)
    for context in (16, 40):
        replaced = torch.cat((torch.tensor([7]), window[41 - context :]))
        (wanted,) = ContextPerplexity(replaced, (context,), windows=1, targets=16)(model)
        assert found.at(context).mean == pytest.approx(wanted.at(context).mean, rel=1e-6)
    (without,) = ContextPerplexity(window, (16, 40), windows=1, targets=16)(model)
    assert found.at(16).mean != pytest.approx(without.at(16).mean, rel=1e-4)
    for kind in (InductionCopy, AssociativeRecall):
        plain, begun = (kind(torch.arange(5, 40), (64,), samples=3, start=start).pieces()[0][1] for start in (None, 2))
        for (prompt, answer), (other, same) in zip(plain, begun, strict=True):
            assert other.tolist() == [2, *prompt.tolist()]
            assert torch.equal(answer, same)


def test_what_a_model_cannot_read_is_left_open(ids: Tensor) -> None:
    model = small("gpt2").train()
    (by_context,) = ContextPerplexity(ids, (32, 128), windows=3, targets=16)(model)
    assert model.training
    assert by_context.at(32).is_known
    assert not by_context.at(128).is_known
    assert by_context.write(128) == "-"
    with pytest.raises(ShapeError, match="measured were 32, 128"):
        by_context.at(64)
    # A model that diverged must not look the same.
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    assert context_curve(model, ids, (32,), windows=2, targets=16).write(32) == "inf"


# -- retrieval and induction -------------------------------------------------------------------------------------------


def test_an_oracle_is_right_and_a_model_that_guesses_is_measured_no_further() -> None:
    lengths, symbols = (64, 128, 192), torch.arange(5, 50)
    measures = [InductionCopy(symbols, lengths, samples=4), AssociativeRecall(symbols, lengths, samples=4)]
    read: list[int] = []
    lost = small()
    lost.register_forward_pre_hook(
        lambda module, args, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    found = hf_posenc.evaluate({"lost": lost, "oracle": Knows(*measures), "short": small("gpt2")}, measures)
    assert max(read) == 63  # with the answer but its last token, which is not read
    for section in found.sections:
        assert section.markdown().count("no better than guessing, longer texts are left out.") == 1
        (right,) = section.models["oracle"]
        assert (right.samples == 1).all()
        # Where no model was measured, no column and no picture goes on.
        alone = replace(section, models={name: section.models[name] for name in ("lost", "short")})
        assert [grids["lost"].points for grids in alone.quantities()] == [(64,)]
        assert [grids["lost"].points for grids in section.quantities()] == [lengths]
        (guessed,) = section.models["lost"]
        assert not guessed.at(128).is_known
        assert guessed.at(64).mean < 0.15


def test_what_is_asked_stands_earlier() -> None:
    for prompt, answer in AssociativeRecall(torch.arange(10, 50), (64, 100), samples=3)._rows:
        row = torch.cat([prompt, answer])
        pairs, asked = (part.view(16, 2).tolist() for part in (row[:32], row[-32:]))
        assert sorted(pairs) == sorted(asked)
        assert pairs != asked
        keys = {key for key, _ in pairs}
        assert len(keys) == 16
        assert not keys & {*row[32:-32].tolist(), *(value for _, value in pairs)}
        assert answer[::2].tolist() == [value for _, value in asked]
    for prompt, answer in InductionCopy(torch.arange(10, 40), (16, 32), samples=4)._rows:
        once, again = torch.cat([prompt, answer]).chunk(2)
        assert torch.equal(once, again)
        assert len(prompt) == len(once) + 1  # the first token of the second copy cannot be known


# -- intervals and report ----------------------------------------------------------------------------------------------


def test_intervals() -> None:
    # Student's quantiles from tables.
    for freedom, quantile in ((1, 12.7062), (3, 3.18245), (4, 2.77645), (5, 2.57058), (15, 2.13145), (100, 1.98397)):
        assert intervals._student(freedom) == pytest.approx(quantile, rel=2e-3)
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    found = intervals.of_mean(values)
    assert (found.mean, found.high - found.mean) == pytest.approx((2, 4.302653 / math.sqrt(3)))
    exponential = intervals.of_exponential(values)
    assert (exponential.mean, exponential.low) == pytest.approx((math.exp(2), math.exp(found.low)))
    # Wilson 1927: nothing of 16 is at most 19 %, and a half is from 28 % to 72 %.
    nothing, half = intervals.of_share(torch.zeros(16)), intervals.of_share(torch.tensor([0.0, 1.0] * 8))
    assert (nothing.low, nothing.high) == pytest.approx((0, 0.1936), abs=1e-4)
    assert (half.low, half.high) == pytest.approx((0.2800, 0.7200), abs=1e-4)
    for right in map(intervals.of_share, (torch.ones(n, dtype=torch.float64) for n in (4, 10, 50))):
        assert right.low <= right.mean <= right.high, "rounding must not put an end on the wrong side"
    assert math.isnan(intervals.of_mean(values[:1]).low)
    assert intervals.of_exponential(torch.tensor([1e9])).mean == math.inf
    # Numbers are written as precisely as they are known. One that diverged must not look like one not measured.
    for quantity, known, text in (
        (PERPLEXITY, (math.inf, math.nan, math.nan), "inf"),
        (PERPLEXITY, (5.1234, 4.9876, 5.2687), "5.12 [4.99, 5.27]"),
        (PERPLEXITY, (1234.5, 1000.0, 1500.0), "1,234 [1,000, 1,500]"),
        (PERPLEXITY, (5.1234, math.nan, math.nan), "5.123"),
        (PERPLEXITY, (3.8e31, 8.2e30, 1.7e32), "3.8e+31 [8.2e+30, 1.7e+32]"),
        (successes("right"), (0.5, 0.28, 0.72), "50 [28, 72]"),
    ):
        assert quantity.write(intervals.Interval(*known)) == text
    # No share lies beyond 0 and 1.
    few = intervals.of_mean_share(torch.tensor([0.4, 0.6], dtype=torch.float64))
    assert (few.mean, few.low, few.high) == pytest.approx((0.5, 0.0, 1.0))
    assert math.isnan(intervals.of_mean_share(values[:1]).low)
    assert share("rank").interval(values / 3) == intervals.of_mean_share(values / 3)


def test_paired_estimates() -> None:
    def grid(rows: list[list[float]]) -> Grid:
        return Grid(PERPLEXITY, {"tokens read": (8, 16)}, torch.tensor(rows, dtype=torch.float64))

    ours = grid([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]])
    theirs = grid([[1.5, 2.5, 3.5], [2.0, 2.0, 5.0]])
    half = 4.302653 / math.sqrt(3)
    perplexity = ours.at(8)
    assert (perplexity.mean, *perplexity.ends) == pytest.approx(
        (math.exp(2.0), math.exp(2.0 - half), math.exp(2.0 + half))
    )
    # Windows that differ by the same amount leave no doubt about it, however different they are.
    assert theirs.relative_to(ours).at(8).ends == pytest.approx((math.exp(0.5), math.exp(0.5)))
    assert theirs.relative_to(ours).at(16).ends == pytest.approx((math.exp(1 - 4.302653), math.exp(1 + 4.302653)))
    with pytest.raises(ShapeError, match="takes the same"):
        ours.relative_to(grid([[1.0], [2.0]]))
    with pytest.raises(ShapeError, match="measured were 8, 16"):
        ours.at(9)


def section(name: str, axes: dict[str, tuple[Any, ...]], quantity: Any) -> Section:
    shape = [len(points) for points in axes.values()]
    grids = {model: (Grid(quantity, axes, torch.rand(*shape, 4).double()),) for model in ("original", "fire")}
    first = grids["fire"][0].samples
    first[tuple(-1 for _ in shape)] = math.nan
    return Section(name, f"The {name}", "A note.", grids, (2.0, "trained on 2"))


def test_report_is_complete(tmp_path: Path) -> None:
    report = Report(
        (
            section("perplexity", {"tokens read": (1, 2, 4, 8)}, PERPLEXITY),
            section("generation", {"task": ("copy", "sort")}, successes("right answers", 0.1)),
        ),
        {"text": "mine.txt"},
    )
    report.write(tmp_path / "report")
    folder = tmp_path / "report"
    assert sorted(path.name for path in folder.iterdir()) == [
        "generation.png", "perplexity.png", "report.json", "report.md",
    ]  # fmt: skip
    assert is_report(folder)
    (folder / "mine.png").touch()
    assert not is_report(folder)
    content = json.loads((folder / "report.json").read_text())
    assert content["format_version"] == 2
    (grid,) = content["sections"][0]["models"]["fire"]
    estimates, samples = grid["estimates"], grid["samples"]
    assert estimates[0]["mean"] == pytest.approx(math.exp(sum(samples[0]) / 4))
    assert estimates[3] == {"tokens read": 8, "mean": None, "low": None, "high": None}
    assert samples[3] == [None] * 4
    # What is read is what was written, and every number of the table can be computed from it.
    again = load(Report, folder / "report.json", "Remove it.")
    assert again.markdown() == report.markdown()
    torch.testing.assert_close(
        *(each["generation"].models["fire"][0].samples for each in (again, report)), rtol=0, atol=0, equal_nan=True
    )
    (folder / "report.json").write_text(json.dumps(content | {"format_version": 3}))
    with pytest.raises(CheckpointError, match=r"format_version.*Remove it"):
        load(Report, folder / "report.json", "Remove it.")
    text = re.sub(" +", " ", (folder / "report.md").read_text())
    assert "| tokens read | 1 | 2 | 4 | 8 |" in text
    assert "Right answers (%) by task; guessing gives 10:" in text
    assert re.search(r"^\| fire \| .* \| - \|$", text, flags=re.M)
    grids = report["perplexity"].models
    paired = intervals.of_exponential(grids["fire"][0].samples[0] - grids["original"][0].samples[0])
    assert f"| fire | {grids['fire'][0].relative_to(grids['original'][0]).quantity.write(paired)}" in text
    with pytest.raises(ShapeError, match="on axes of"):
        Grid(PERPLEXITY, {"a": (1, 2)}, torch.zeros(3, 4))


# -- whole evaluations -------------------------------------------------------------------------------------------------


def test_command(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("The quick brown fox jumps over the lazy dog and goes home again.\n" * 60, encoding="utf-8")
    out = tmp_path / "report"
    arguments = [
        "eval", DIRECTORIES["llama"], f"{DIRECTORIES['llama']}:alibi", "--text", text, "--contexts", "64,128",
        "--samples", 2, "--measures", "perplexity,induction,mqar,generation", "--out", out,
    ]  # fmt: skip
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert "tiny_llama, alibi untrained: generation (100%" in result.stdout
    assert re.search(r"^ *tiny_llama +\d", result.stdout, re.M)
    assert "Tiny_llama, alibi untrained is significantly worse than tiny_llama" in result.stdout
    content = json.loads((out / "report.json").read_text())
    assert [part["name"] for part in content["sections"]] == arguments[10].split(",")
    ids = token_ids(read_text(str(text)), TOKENIZER)
    (expected,) = ContextPerplexity(ids, (64, 128), windows=2)(checkpoint("llama"))
    (grid,) = content["sections"][0]["models"]["tiny_llama"]
    assert torch.tensor(grid["samples"]).tolist() == expected.samples.float().tolist()
    assert f"{len(ids):,} tokens" in content["settings"]["text"]
    # A second one replaces the first; another folder is left alone.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    refused = CliRunner().invoke(cli.app, ["eval", str(DIRECTORIES["llama"]), "--out", str(tmp_path / "other")])
    assert refused.exit_code == 1
    assert "not empty" in refused.stderr
    named = ["--measures", "perplexity", "--out", str(out)]
    again = CliRunner().invoke(cli.app, [*map(str, arguments[:9]), *named, "--json"])
    assert json.loads(again.stdout)["sections"][0]["name"] == "perplexity"
    assert "perplexity (100%" in again.stderr


def test_subjects_are_checkpoints_adapters_runs_and_schemes(tmp_path: Path) -> None:
    from peft import get_peft_model

    ids = torch.arange(30, 50)[None]
    converted = hf_posenc.patch(checkpoint("llama"), "kerple")
    adapted = get_peft_model(converted, PosencLoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.peft_config["default"].base_model_name_or_path = str(DIRECTORIES["llama"])
    adapted.save_pretrained(tmp_path / "run" / "model")
    adapter, untrained, plain = subjects([str(tmp_path / "run"), f"{DIRECTORIES['llama']}:alibi", "tiny-llama"])
    assert [one.name for one in (adapter, untrained, plain)] == ["run", "tiny_llama, alibi untrained", "tiny-llama"]
    with torch.no_grad():
        loaded = adapter.load(torch.device("cpu"))
        torch.testing.assert_close(loaded(ids).logits, adapted.eval()(ids).logits, atol=1e-4, rtol=1e-4)
        assert not torch.equal(loaded(ids).logits, checkpoint("llama")(ids).logits)
        assert torch.equal(
            untrained.load(torch.device("cpu"))(ids).logits, hf_posenc.patch(checkpoint("llama"), "alibi")(ids).logits
        )
        assert torch.equal(plain.load(torch.device("cpu"))(ids).logits, checkpoint("llama")(ids).logits)
    assert adapter.tokenizer().get_vocab() == plain.tokenizer().get_vocab()


def test_a_text_that_a_run_has_trained_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("text/mine.txt", "text/apart.txt", "other.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("The quick brown fox jumps over the lazy dog.\n" * 40)
    data = Data(source=str(tmp_path / "text"), held_out=str(tmp_path / "text/apart.txt"))
    made_run(tmp_path / "run", data)
    (trained, plain) = subjects([str(tmp_path / "run"), "tiny-llama"])
    monkeypatch.chdir(tmp_path / "run" / "model")
    assert subjects(["."])[0].data == trained.data == data
    seen = {name: trained.has_trained_on(str(tmp_path / name)) for name in ("text", "text/mine.txt", "text/../text")}
    assert all(seen.values()), seen
    assert not any(map(trained.has_trained_on, ("builtin", str(tmp_path / "other.txt"), str(data.held_out))))
    assert not plain.has_trained_on(str(tmp_path / "text"))
    for name, models, knowing in (("text/mine.txt", ("run",), True), ("other.txt", ("run",), False)):
        request = Request(tuple(str(tmp_path / model) for model in models), text=str(tmp_path / name), samples=2)
        settings = replace(request, measures=("perplexity",), contexts=(64,)).run().settings
        assert ("training text of run. Give a text" in settings.get("caution", "")) == knowing


def made_run(folder: Path, data: Data) -> None:
    """Make the folder of a finished run, whose model is that of the tests."""
    folder.mkdir()
    shutil.copytree(DIRECTORIES["llama"], folder / "model")
    recipe = Recipe(model="tiny-llama", conversion=Conversion(scheme=None), data=data)
    (folder / "recipe.yaml").write_text(recipe.text())


def test_runs_are_measured_on_what_they_held_out_unless_they_differ(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("\n\n".join(f"Line {number} of the text." for number in range(400)))
    for name, part in (("one", 0.25), ("two", 0.25), ("three", 0.5)):
        made_run(tmp_path / name, Data(source=str(tmp_path / "mine.txt"), held_out_share=part))

    def read(*names: str) -> str:
        models = tuple(str(tmp_path / name) if name != "tiny-llama" else name for name in names)
        return Request(models, ("perplexity",), contexts=(64,), samples=2).run().settings["text"]

    quarter, half = read("one", "tiny-llama", "two"), read("three")
    held_out = f"held out by the runs from {tmp_path / 'mine.txt'}"
    assert all(text.startswith(held_out) for text in (quarter, half))
    assert read("tiny-llama").startswith("builtin, ")
    assert read("tiny-llama") == read("one", "tiny-llama", "three")
    with pytest.raises(OptionError, match=r"No text is named for .*one/model, .*three/model.*--text builtin"):
        read("one", "three")
    tokens = [int(text.split(", ")[-1].split()[0].replace(",", "")) for text in (quarter, half)]
    assert 1.9 < tokens[1] / tokens[0] < 2.1
    # Their column is known, so another one is for a text that was not given.
    with pytest.raises(RecipeError, match="column 'body' of the text is named, but built-in text"):
        Request((str(tmp_path / "one"),), ("perplexity",), column="body").run()


def test_evaluating_changes_neither_the_callers_random_numbers_nor_modes() -> None:
    request = Request(models=("tiny-llama:fire", "tiny-llama"), measures=("perplexity",), contexts=(64,), samples=2)
    reports = []
    for _ in range(2):
        torch.rand(1)
        drawn = torch.get_rng_state()
        reports.append(request.run().sections[0].markdown())
        assert torch.equal(torch.get_rng_state(), drawn)
    assert reports[0] == reports[1]
    model = checkpoint("llama").train()
    model.get_output_embeddings().eval()
    before = [module.training for module in model.modules()]
    hf_posenc.evaluate({"a": model}, [InductionCopy(torch.arange(30), (8,), samples=1)])
    context_curve(model, torch.arange(20, 300), (64,), windows=2, targets=16)
    assert [module.training for module in model.modules()] == before
