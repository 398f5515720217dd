"""Sentence embeddings under another scheme: what they learn, what is written, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DIRECTORIES, moved, text_file
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import cli
from hf_posenc.errors import CheckpointError, NotPatchedError, OptionError
from hf_posenc.recipes.training.embeddings import Embedder, distil_embeddings
from hf_posenc.recipes.training.features import FeaturesResult
from hf_posenc.recipes.training.rates import rates

TRAINED, LONGER = 48, 150


def bert(vocabulary: int) -> BertModel:
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=vocabulary, max_position_embeddings=TRAINED, initializer_range=0.1, **size)
    return BertModel(config, add_pooling_layer=False).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as sentence-transformers writes it, with special tokens around a text; not to be changed."""
    found = tmp_path_factory.mktemp("original")
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORIES["llama"])
    tokenizer.add_special_tokens({"cls_token": "<cls>", "sep_token": "<sep>"})
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<cls> $A <sep>",
        special_tokens=[("<cls>", tokenizer.cls_token_id), ("<sep>", tokenizer.sep_token_id)],
    )
    tokenizer.model_max_length = TRAINED
    tokenizer.save_pretrained(found)
    bert(len(tokenizer)).save_pretrained(found)
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (found / "1_Pooling").mkdir()
    for name, content in {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": {"max_seq_length": TRAINED, "do_lower_case": False},
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
    }.items():
        (found / name).write_text(json.dumps(content))
    return found


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["embed", *map(str, arguments)])


def embedder_of(folder: Path) -> Embedder:
    model = AutoModel.from_pretrained(folder)
    return Embedder.of(folder, AutoTokenizer.from_pretrained(folder), model.config)


def test_a_text_is_read_as_it_is_and_a_long_one_in_pieces(folder: Path) -> None:
    model, embedder = AutoModel.from_pretrained(folder).eval(), embedder_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (embedder.length, embedder.room, embedder.pooling) == (TRAINED, TRAINED - 2, "mean")
    assert embedder.before == (tokenizer.cls_token_id,)
    text = "Once upon a time there was a text."
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        want = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
    found, states = embedder.read_in_pieces(model, ids)
    torch.testing.assert_close(found, want.mean(1))
    torch.testing.assert_close(states[-1], want[:, 1:-1])
    # Two pieces of 40 and 39 tokens: each as a text of its own, and the mean by their tokens.
    ids = torch.randint(20, 900, (3, 79), generator=torch.Generator().manual_seed(0))
    whole, states = embedder.read_in_pieces(model, ids)
    with torch.no_grad():
        (one, first), (two, second) = embedder.read(model, ids[:, :40]), embedder.read(model, ids[:, 40:])
    torch.testing.assert_close(whole, (40 * one + 39 * two) / 79)
    for layer, parts in enumerate(zip(first, second, strict=True)):
        torch.testing.assert_close(states[layer], torch.cat(parts, dim=1))


@pytest.mark.parametrize(("pooling", "place"), [("cls", 0), ("lasttoken", -1)])
def test_other_poolings(folder: Path, tmp_path: Path, pooling: str, place: int) -> None:
    shutil.copytree(folder, tmp_path / "it")
    (tmp_path / "it/1_Pooling/config.json").write_text(json.dumps({"pooling_mode": pooling}))
    embedder, model, ids = (
        embedder_of(tmp_path / "it"),
        AutoModel.from_pretrained(folder).eval(),
        torch.tensor([[5, 6]]),
    )
    whole = torch.tensor([[*embedder.before, 5, 6, *embedder.after]])
    torch.testing.assert_close(embedder.read(model, ids)[0], model(whole).last_hidden_state[:, place])


def test_a_longer_table_keeps_what_it_begins_with(folder: Path) -> None:
    embedder, ids = embedder_of(folder), torch.randint(20, 900, (8, 100), generator=torch.Generator().manual_seed(0))

    def agreement(rate: float | None) -> tuple[float, float]:
        torch.manual_seed(0)
        model = hf_posenc.patch(AutoModel.from_pretrained(folder), "learned", num_positions=102)
        own = distil_embeddings(model, ids, embedder, steps=10, learning_rate=rate).rows[0]
        return own.before["embedding"], own.after["embedding"]

    # The second rate is the usual one, for a start that is not exact.
    (before, after), (_, hasty) = agreement(None), agreement(rates(bert(1000), "training").model)
    assert before == pytest.approx(1)
    # It was half as far; equal rates would make no difference.
    assert 1 - after < 0.6 * (1 - hasty)


def test_the_command_writes_a_folder_that_agrees_with_the_original(folder: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "longer", text_file(40_000)
    asked = ("kerple", out, "--text", text, "--length", LONGER, "--steps", 40, "--json")
    done = run(folder, *asked)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["tokens"] for row in rows] == [TRAINED - 2, 2 * (TRAINED - 2), LONGER - 2]
    for row in rows:
        assert 0 < row["embedding, before"] < row["embedding, after"] <= 1
        assert row["embedding, after"] > 0.9
    # The original says of a text of its own length what it says, and cuts longer ones.
    assert rows[0]["embedding, original"] == pytest.approx(1)
    assert rows[-1]["embedding, original"] < rows[-1]["embedding, after"]
    # Loaded again, the model agrees as the command says, and by the definition.
    model, embedder = AutoModel.from_pretrained(out).eval(), embedder_of(folder)
    original, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(out)
    assert type(model).__name__ == "PosencBertModel"
    assert model.config.posenc
    assert tokenizer.model_max_length == LONGER
    ids = torch.randint(20, 900, (1, LONGER - 2), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        pair = embedder.read(model, ids)[0], embedder.read_in_pieces(original, ids)[0]
    assert float(F.cosine_similarity(*pair)) > 0.8
    assert json.loads((out / "sentence_bert_config.json").read_text()) == {
        "max_seq_length": LONGER,
        "do_lower_case": False,
    }
    for name in ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    # What was converted has lost the encoding that a second original would need.
    again = run(out, *asked[:1], tmp_path / "again", *asked[2:])
    assert again.exit_code == 1
    assert "is converted already" in again.output


def test_what_does_not_learn_stays_and_is_not_written(folder: Path, tmp_path: Path) -> None:
    embedder = embedder_of(folder)
    model = moved(hf_posenc.patch(AutoModel.from_pretrained(folder), "kerple"), 0.2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = torch.randint(20, 900, (8, 64), generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    found = distil_embeddings(model, ids, embedder, steps=2, learning_rate=30.0, scheme_learning_rate=30.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not found.accepted
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(math.isfinite(row.before["embedding"]) for row in found.rows)
    distil_embeddings(model, ids, embedder, steps=30)
    assert not all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_result_that_is_no_nearer_is_not_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = FeaturesResult((), False, "distillation: the start was not changed.")
    monkeypatch.setattr("hf_posenc.recipes.training.embeddings.distil_embeddings", lambda *_, **__: found)
    done = run(folder, "kerple", tmp_path / "out", "--text", text_file(40_000), "--length", 64)
    assert done.exit_code == 1
    assert "Nothing is written" in done.output
    assert not list(tmp_path.iterdir())


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    # Its masked language model would have a random head.
    swap = ["swap", "scheme=kerple", f"model={folder}", f"data={text_file(40_000)}", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(cli.app, ["train", *swap])
    assert done.exit_code == 1
    assert "hf-posenc embed" in done.output
    ids, embedder = torch.zeros(8, 64, dtype=torch.long), embedder_of(folder)
    with pytest.raises(NotPatchedError):
        distil_embeddings(AutoModel.from_pretrained(folder), ids, embedder)
    model = hf_posenc.patch(AutoModel.from_pretrained(folder), "kerple")
    with pytest.raises(OptionError, match="got 3 samples; expected 4"):
        distil_embeddings(model, ids[:3], embedder)
    with pytest.raises(OptionError, match="steps=0"):
        distil_embeddings(model, ids, embedder, steps=0)
    with pytest.raises(CheckpointError, match=r"no modules\.json"):
        Embedder.of(DIRECTORIES["llama"], None, None)
    for name, content, expected in (
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "pools by 'weightedmean'"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "pools by"),
        ("modules.json", [{"idx": 0, "path": "0_Transformer", "type": "x.Transformer"}], "has the modules Transformer"),
    ):
        place = tmp_path / "wrong"
        shutil.copytree(folder, place)
        (place / name).write_text(json.dumps(content))
        with pytest.raises(OptionError, match=expected):
            embedder_of(place)
        shutil.rmtree(place)
