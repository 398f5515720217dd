"""Recipes on masked language models: what is masked, trained and measured, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grid import once
from models import DIRECTORIES, text_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, ModernBertConfig, RobertaConfig

from hf_posenc.errors import OptionError, RecipeError, ShapeError
from hf_posenc.recipes.data.collation import Masking
from hf_posenc.recipes.data.windows import load_data
from hf_posenc.recipes.evaluation.perplexity import context_curve
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import run
from hf_posenc.recipes.runs.request import Request
from hf_posenc.recipes.schema.checks import lengths
from hf_posenc.recipes.schema.recipe import Data, Recipe
from hf_posenc.recipes.training import distillation

pytestmark = pytest.mark.usefixtures("plain_pictures")

SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer of a BERT: a mask token, and a separator where others have an end of sequence."""
    found = AutoTokenizer.from_pretrained(DIRECTORIES["llama"])
    found.add_special_tokens({"mask_token": "<mask>", "sep_token": found.eos_token})
    found.eos_token = None
    return found


@pytest.fixture(scope="module")
def folders(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of random models."""
    folder, size = tmp_path_factory.mktemp("encoders"), {**SIZE, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    local = {**SPECIAL, "local_attention": 8, "global_attn_every_n_layers": 2}
    for name, config in {
        "bert": BertConfig(**size, max_position_embeddings=64),
        "roberta": RobertaConfig(**size, max_position_embeddings=66),
        "modernbert": ModernBertConfig(**size, **local, max_position_embeddings=64),
    }.items():
        AutoModelForMaskedLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {path.name: path for path in folder.iterdir()}


def recipe(folders: dict[str, Path], name: str, *overrides: str) -> Recipe:
    tiny = [f"training.{pair}" for pair in ("steps=3", "length=64", "batch_size=4", "learning_rate=1e-3")]
    sources = (f"model={folders[name]}", f"data.source={text_file(40_000)}")
    return read_recipe(
        "swap", ["scheme=kerple", *tiny, *sources, "evaluation={contexts: [64], windows: 2}", *overrides]
    )


def windows(tokenizer: Any, count: int = 40, length: int = 64) -> Tensor:
    ids = torch.randint(20, 1000, (count, length), generator=torch.Generator().manual_seed(0))
    ids[:, 10] = tokenizer.sep_token_id
    return ids


def test_masking_hides_a_share_and_nothing_else(tokenizer: Any) -> None:
    ids = windows(tokenizer)
    read = Masking(tokenizer, seed=1).corrupt(ids)
    hidden = read != ids
    assert bool((read[hidden] == tokenizer.mask_token_id).all())
    assert not bool(hidden[:, 10].any())
    assert hidden.float().mean().item() == pytest.approx(0.15, abs=0.02)
    # The same for a window, whatever is next to it; another for another seed.
    assert torch.equal(Masking(tokenizer, seed=1).corrupt(ids[7:9]), read[7:9])
    assert not torch.equal(Masking(tokenizer, seed=2).corrupt(ids), read)
    batch = Masking(tokenizer, seed=1)([{"input_ids": row, "labels": row} for row in ids])
    assert torch.equal(batch["labels"], torch.where(hidden, ids, -100))
    assert torch.equal(batch["input_ids"][~hidden], ids[~hidden])
    share = (batch["input_ids"] == tokenizer.mask_token_id)[hidden].float().mean().item()
    assert share == pytest.approx(0.8, abs=0.06)
    # Of most windows of two tokens none is drawn; the last one is masked then.
    few = Masking(tokenizer)([{"input_ids": row} for row in ids[:, :2]])
    assert bool((few["labels"] != -100).any(1).all())


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_the_scored_tokens_are_the_masked_ones_at_every_length(
    name: str, tokenizer: Any, folders: dict[str, Path]
) -> None:
    model = AutoModelForMaskedLM.from_pretrained(folders[name]).eval()
    ids, corrupt = windows(tokenizer, 1, 400)[0], Masking(tokenizer, seed=3).corrupt
    found = context_curve(model, ids, [32, 64], windows=3, targets=32, corrupt=corrupt)
    stride = min(len(ids) // 3, (len(ids) - 65) // 2)
    for window in range(3):
        text = ids[None, window * stride + 1 : window * stride + 65]
        read = corrupt(text)
        for length in (32, 64):
            with torch.no_grad():
                logits = model(input_ids=read[:, -length:]).logits[0, -32:]
            labels = torch.where(read == text, -100, text)[0, -32:]
            expected = F.cross_entropy(logits.double(), labels)
            torch.testing.assert_close(found.values(length)[window], expected, rtol=1e-6, atol=0)
    assert found.quantity.name == "pseudo-perplexity of masked tokens"
    if name != "modernbert":  # a table of 64 positions, which are 66 rows in RoBERTa
        longer = context_curve(model, ids, [64, 65], windows=2, targets=32, corrupt=corrupt)
        assert bool(longer.values(65).isnan().all())
        assert bool(longer.values(64).isfinite().all())
        assert lengths(recipe(folders, name), model.config) == (64, 64)


@pytest.mark.parametrize("name", once(["bert", "modernbert"]))
def test_a_run_trains_saves_and_loads(
    name: str, tokenizer: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor | None] = []
    divergence = distillation.divergence

    def watched(logits: Tensor, wanted: Tensor, keep: Tensor | None = None) -> Tensor:
        seen.append(keep)
        return divergence(logits, wanted, keep)

    monkeypatch.setattr(distillation, "divergence", watched)
    wanted = recipe(folders, name, "conversion.fit=null", "training.micro_batch_size=2")
    outcome = run.train(wanted, tmp_path / "run")
    # Only the masked tokens are learned from the teacher, which is there for four fifths of the steps.
    assert [keep is not None and 0 < keep.float().mean() < 0.5 for keep in seen] == 6 * [True]
    card = (outcome.model / "README.md").read_text(encoding="utf-8")
    assert "Pseudo-perplexity of masked tokens" in card
    assert "AutoModelForMaskedLM" in card
    loaded = AutoModelForMaskedLM.from_pretrained(outcome.model).eval()
    data = load_data(wanted.data, tokenizer, length=64, seed=wanted.training.seed, config=loaded.config)
    found = context_curve(loaded, data.held_out, [64], windows=2, corrupt=data.corrupt)
    before, after = (outcome.measurements.curve(which) for which in ("before", "after"))
    assert before is not None
    assert after is not None
    assert not torch.equal(before.samples, after.samples)
    torch.testing.assert_close(found.samples, after.samples)
    report = Request((str(tmp_path / "run"),), text=str(text_file(40_000)), contexts=(64,), samples=2).run()
    (section,) = report.sections
    assert "Pseudo-perplexity of masked tokens by tokens read:" in section.markdown()


def test_what_masked_language_models_cannot_do_is_refused(
    tokenizer: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = BertConfig()
    with pytest.raises(RecipeError, match="has no mask token"):
        load_data(Data(), AutoTokenizer.from_pretrained(DIRECTORIES["llama"]), length=16, config=config)
    with pytest.raises(RecipeError, match="cannot tell apart"):
        load_data(Data(packing="documents"), tokenizer, length=16, config=config)
    with pytest.raises(RecipeError, match=r"training\.skip_to is 128: it is for texts that go on"):
        run.train(recipe(folders, "bert", "training.skip_to=128", "conversion.fit=null"), tmp_path / "run")
    for measure in ("mqar", "induction", "generation"):
        request = Request((str(folders["bert"]),), (measure,), str(text_file(40_000)), contexts=(64,), samples=2)
        with pytest.raises(OptionError, match=f"{measure!r} is not defined for BertForMaskedLM"):
            request.run()
    model, ids = AutoModelForMaskedLM.from_pretrained(folders["bert"]), windows(tokenizer, 1, 400)[0]
    with pytest.raises(OptionError, match="corrupt=None"):
        context_curve(model, ids, [64], windows=2)
    with pytest.raises(ShapeError, match="nothing to score"):
        context_curve(model, ids, [64], windows=2, corrupt=lambda read: read)
    with pytest.raises(OptionError, match="of two kinds"):
        Request((str(folders["bert"]), "tiny-llama"), text=str(text_file(40_000)), samples=2).run()
