"""What models write: greedy continuations compared with the original's, and answers that the prompt holds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DIRECTORIES, stock
from transformers import AutoTokenizer

import hf_posenc
from hf_posenc.recipes.data.collation import corruptor
from hf_posenc.recipes.data.text import builtin_text
from hf_posenc.recipes.evaluation import Generation, generation
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import run

pytestmark = pytest.mark.usefixtures("plain_pictures")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORIES["llama"])
    return torch.tensor(tokenizer(builtin_text("heldout")[:6_000])["input_ids"])


def measure(ids: torch.Tensor, architecture: str, monkeypatch: pytest.MonkeyPatch, samples: int = 2) -> Any:
    monkeypatch.setattr(generation, "_WRITTEN", 8)
    monkeypatch.setattr(generation, "_UP_TO", (4, 8))
    model = stock(architecture)
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORIES[architecture])
    hiding = corruptor(model.config, tokenizer)
    return Generation(ids, tokenizer, samples=samples, corrupt=None if hiding is None else hiding.corrupt), model


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "t5"])
def test_agreement_with_the_original(ids: torch.Tensor, architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generates, model = measure(ids % 300, architecture, monkeypatch, samples=4)
    original = generates(model)
    assert [grid.quantity.name for grid in original][:2] == ["agreement", "tokens before the first other one"]
    assert (original[0].samples == 1).all()
    assert original[1].at(8).mean == 8
    assert len(original) == (3 if architecture == "t5" else 4)
    # Greedy is without the penalty that a checkpoint may ask for.
    model.generation_config.repetition_penalty = 9.0
    assert torch.equal(generates(model)[0].samples, original[0].samples)
    # Another model is compared with the first, not with itself.
    with torch.no_grad():
        model.get_output_embeddings().weight[: len(ids)] *= -1
    other = generates(model)
    assert other[0].at(8).mean < 0.9
    assert other[1].at(8).mean < 8
    # Nothing is said of a model whose table of positions is too short.
    generates._first = generates._first * math.nan
    assert [grid.write(8) for grid in generates(model)[:2]] == ["-", "-"]


def test_padding_at_the_left_changes_nothing(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    generates, model = measure(ids, "llama", monkeypatch)
    hf_posenc.patch(model, "fox")
    windows, lengths = ids[: 2 * 48].view(2, 48), torch.tensor([32, 48])
    with torch.no_grad():
        together = generates._continued(model.eval(), windows, lengths)
        for row, length in enumerate(lengths.tolist()):
            alone = generates._continued(model, windows[row : row + 1], torch.tensor([length]))
            assert torch.equal(together[row : row + 1], alone)


@pytest.mark.grid  # it trains and writes with two models
def test_a_run_says_what_its_model_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_WRITTEN", 8)
    monkeypatch.setattr(generation, "_UP_TO", (4, 8))
    changes = ["scheme=kerple", *(f"training.{key}" for key in ("steps=1", "length=32", "batch_size=2"))]
    changes += ["evaluation.contexts=[64]", "evaluation.windows=2", "evaluation.prompts=2", "transfer.steps=0"]
    recipe = read_recipe("swap", [*changes, "model=tiny-llama", "conversion.fit=null"])
    folder = run.train(recipe, tmp_path / "run").folder
    for page in ("table.md", "model/README.md"):
        assert "2 prompts of 24 to 48 tokens" in (folder / page).read_text(encoding="utf-8")
