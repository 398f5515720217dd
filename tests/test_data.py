"""Data of a recipe: sources of text, what is held out, windows, the cache, and inputs of encoder-decoders."""

from __future__ import annotations

import bz2
import glob
import gzip
import json
import lzma
import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from grid import once
from hypothesis import given, settings
from hypothesis import strategies as st
from models import DIRECTORIES, SAME, stock
from test_recipe_files import one_line
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, T5Config, default_data_collator

import hf_posenc
from hf_posenc import RecipeError
from hf_posenc.recipes.data import sources
from hf_posenc.recipes.data import windows as preparation
from hf_posenc.recipes.data.collation import Denoising
from hf_posenc.recipes.data.text import builtin_documents
from hf_posenc.recipes.data.windows import Prepared, load_data
from hf_posenc.recipes.schema.recipe import Data

few_examples = settings(max_examples=50, deadline=None, derandomize=True)

# Each about forty tokens; no two share a line.
DOCUMENTS = [f"Document {number}.\n\n" + f"It is about the number {number * 37 % 101}. " * 4 for number in range(20)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps what `datasets` stores away from the user's home."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", folder / "downloads")
    monkeypatch.setattr(datasets.config, "EXTRACTED_DATASETS_PATH", folder / "downloads" / "extracted")
    return folder


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DIRECTORIES["llama"])


@pytest.fixture
def t5_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DIRECTORIES["t5"])


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is tokenised."""
    seen: list[str] = []
    encode = preparation.encode

    def spy(tokenizer: Any, texts: list[str]) -> list[list[int]]:
        seen.extend(texts)
        return encode(tokenizer, texts)

    monkeypatch.setattr(preparation, "encode", spy)
    return seen


def write(path: Path, documents: list[Any], column: str = "text") -> Path:
    """Write documents to a file of the kind that its name says."""
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind == ".parquet":
        datasets.Dataset.from_dict({column: documents, "other": list(range(len(documents)))}).to_parquet(path)
        return path
    rows = [{column: document, "other": 1} for document in documents]
    text = {
        ".txt": "".join(map(str, documents)),
        ".json": json.dumps(rows),
        ".jsonl": "\n".join(map(json.dumps, rows)),
    }[kind]
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def stream(tokenizer: Any, documents: list[str]) -> list[int]:
    """Documents as one row of tokens."""
    return [
        token
        for document in documents
        for token in [*tokenizer(document, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ]


def rows(prepared: Prepared, column: str = "input_ids") -> list[list[int]]:
    return [example[column].tolist() for example in prepared.train]


# -- sources -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "column"), [("a.jsonl", "text"), ("a.json", "body"), ("a.parquet", "body"), ("a.jsonl.gz", "text")]
)
def test_rows_are_documents(name: str, column: str, tmp_path: Path, tokenizer: Any) -> None:
    # A row without text is no document.
    path = write(tmp_path / name, [None, *DOCUMENTS], column)
    prepared = load_data(Data(source=str(path), column=column, held_out_share=0.2), tokenizer, length=32)
    expected = stream(tokenizer, DOCUMENTS[:16])
    assert rows(prepared) == [expected[start : start + 32] for start in range(0, len(expected) - 31, 32)]
    assert rows(prepared, "labels") == rows(prepared)
    assert prepared.held_out.tolist() == stream(tokenizer, DOCUMENTS[16:])
    assert prepared.held_out.dtype == prepared.train[0]["input_ids"].dtype == torch.int64
    assert prepared.tokens == 32 * len(prepared.train)
    assert (prepared.collate, prepared.corrupt) == (None, None)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_file_is_one_document_cut_at_a_blank_line(name: str, tmp_path: Path, tokenizer: Any) -> None:
    parts = [f"Part {number}.\nIt is about {number * 37 % 101}, and no other number.\n\n" for number in range(50)]
    path = write(tmp_path / name, parts)
    prepared = load_data(Data(source=str(path), held_out_share=0.15), tokenizer, length=16)
    held_out = tokenizer.decode(prepared.held_out[:-1])
    assert held_out == "".join(parts[42:])
    # One end of sequence, at the very end.
    assert (prepared.held_out == tokenizer.eos_token_id).nonzero().tolist() == [[len(prepared.held_out) - 1]]
    trained = tokenizer.decode([token for row in rows(prepared) for token in row])
    assert "".join(parts[:42]).startswith(trained)


def test_a_folder_of_text_files_holds_a_document_each(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    for number, document in enumerate(DOCUMENTS):
        (folder / ("deeper" if number % 2 else ".") / f"{number:02}.txt").write_text(document, encoding="utf-8")
    (folder / "README.md").write_text("About the texts.", encoding="utf-8")
    (folder / ".drafts").mkdir()
    for hidden in (".00.txt", ".drafts/00.txt"):
        (folder / hidden).write_text("A draft.", encoding="utf-8")
    in_order = DOCUMENTS[::2] + DOCUMENTS[1::2]
    prepared = load_data(Data(source=str(folder), held_out_share=0.25), tokenizer, length=32)
    assert prepared.held_out.tolist() == stream(tokenizer, in_order[15:])
    assert rows(prepared)[0] == stream(tokenizer, in_order)[:32]


def test_the_builtin_text(tokenizer: Any) -> None:
    prepared = load_data(Data(limit=4), tokenizer, length=64)
    expected = stream(tokenizer, builtin_documents("train")[:4])
    assert rows(prepared)[-1] == expected[len(prepared.train) * 64 - 64 : len(prepared.train) * 64]
    assert len(expected) - len(prepared.train) * 64 < 64
    assert prepared.held_out.tolist() == stream(tokenizer, builtin_documents("heldout"))


def test_a_held_out_file_and_a_limit(tmp_path: Path, tokenizer: Any) -> None:
    train = write(tmp_path / "train.jsonl", DOCUMENTS[:15])
    held_out = write(tmp_path / "held_out.parquet", DOCUMENTS[15:])
    prepared = load_data(Data(source=str(train), held_out=str(held_out), limit=3), tokenizer, length=16)
    assert prepared.held_out.tolist() == stream(tokenizer, DOCUMENTS[15:])
    assert len(prepared.train) == len(stream(tokenizer, DOCUMENTS[:3])) // 16


def test_copies_of_held_out_documents_are_not_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.jsonl", [*DOCUMENTS, DOCUMENTS[3], DOCUMENTS[7]])
    some, others = write(tmp_path / "b.jsonl", DOCUMENTS[:2]), write(tmp_path / "c.jsonl", DOCUMENTS[:4])
    data = (Data(source=str(path), held_out=str(file)) for file in (some, others))
    first, second = (rows(load_data(one, tokenizer, length=16))[0] for one in data)
    assert (first, second) == (stream(tokenizer, DOCUMENTS[2:])[:16], stream(tokenizer, DOCUMENTS[4:])[:16])
    prepared = load_data(Data(source=str(path), held_out_share=0.1), tokenizer, length=16)
    kept = [document for number, document in enumerate(DOCUMENTS) if number not in (3, 7)]
    assert prepared.held_out.tolist() == stream(tokenizer, [DOCUMENTS[3], DOCUMENTS[7]])
    assert len(prepared.train) == len(stream(tokenizer, kept)) // 16
    again = write(tmp_path / "again.jsonl", DOCUMENTS)
    with pytest.raises(RecipeError, match=r"too few tokens .* copies of them"):
        load_data(Data(source=str(path), held_out=str(again)), tokenizer, length=16)


# Names that are patterns, and another file that each would match.
PATTERNS = {
    "run [1].txt": "run 1.txt", "a*.jsonl": "ab.jsonl", "q?.json": "qq.json", "[!a].txt": "b.txt", "**.txt": "c.txt",
    "{a,b}.txt": "a.txt", "d [1]/f.txt": "d 1/f.txt", "d*/f.parquet": "d1/f.parquet",
    "new\nline.txt": "newline.txt", "h#1.txt": "h.txt", "p%20q.txt": "p q.txt", "back\\slash.txt": "slash.txt",
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("whole", once([True, False]), ids=["file", "folder"])
def test_a_name_is_no_pattern(name: str, whole: bool, tmp_path: Path) -> None:
    for each, text in ((PATTERNS[name], "other"), (name, "own")):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        write(tmp_path / each, [f"The {text} text."])
    path = tmp_path / name if whole or "/" not in name else (tmp_path / name).parent
    if not whole and "/" not in name:  # A folder of that name.
        path = tmp_path / "folders" / name
        path.mkdir(parents=True)
        write(path / f"x{''.join(Path(name).suffixes[-2:])}", ["The own text."])
    for streaming in (False, True):
        held_out = write(tmp_path / "held_out.jsonl", ["Held out."])
        read, _ = sources.read(Data(source=str(path), held_out=str(held_out), streaming=streaming))
        assert [row["text"] for row in read] == ["The own text."]
    _, read = sources.read(Data(source=str(held_out), held_out=str(path)))
    assert [row["text"] for row in read] == ["The own text."]
    if glob.has_magic(PATTERNS[name] + name):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(RecipeError, match=r"no file or folder .* Patterns are not expanded"):
            sources.read_text(str(path))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.json.gz", "a.txt", "a.jsonl", "a.json", "a.parquet"])
@pytest.mark.parametrize("streaming", once([False, True]))
def test_a_damaged_file_is_one_error(name: str, streaming: bool, tmp_path: Path, tokenizer: Any) -> None:
    whole = write(tmp_path / name, [f"A text about {number}.\n" for number in range(300)]).read_bytes()
    rows = write(tmp_path / "held_out.jsonl", DOCUMENTS)
    for damaged in (
        whole[: len(whole) // 2],
        whole[:-9],
        b"\x1f\x8b" + whole[2:],
        whole[:99] + b"\xff\0" + whole[101:],
    ):
        (tmp_path / name).write_bytes(damaged)
        data = Data(source=str(tmp_path / name), held_out=str(rows), streaming=streaming)
        try:
            load_data(data, tokenizer, length=16, checks=True)
        except RecipeError as error:
            one_line(error)


def test_a_little_file_that_unpacks_to_a_lot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST_ROW", 2**21)
    monkeypatch.setattr(sources, "LARGEST_FILE", 2**22)
    for name, text, said in (
        ("row.jsonl", json.dumps({"text": "x" * 2**23}), "unpack to a row of more than 2 MB, [34] MB so far"),
        ("text.txt", "x" * 2**23, "unpack to too much, 5 MB so far"),
        ("array.json", json.dumps([{"text": "x"}] * 2**19), "unpack to too much, 5 MB so far"),
        ("rows.jsonl", '{"text": "x"}\n' * 2**20, "unpack to too much, 5 MB so far"),
    ):
        # The name does not matter.
        for each in (name, f"{name}.gz"):
            (tmp_path / each).write_bytes(gzip.compress(text.encode()))
            with pytest.raises(RecipeError, match=rf"{name}.* cannot be read .*its 0\.0 MB {said}; cut the text"):
                sources.read_text(str(tmp_path / each))
    for name, pack in (("a.jsonl", lzma.compress), ("a.txt.gz", bz2.compress)):
        (tmp_path / name).write_bytes(pack(b'{"text": "A text."}'))
        with pytest.raises(RecipeError, match="packed file of another kind than gzip; unpack it first"):
            sources.read_text(str(tmp_path / name))
    rows = [json.dumps({"text": os.urandom(900).hex()}) for _ in range(3_000)]  # Text that does not pack so well.
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    assert len(sources.read_text(str(tmp_path / "b.jsonl.gz"))) == 3_000


@pytest.mark.parametrize("link", ["same", "relative", "symbolic", "hard", "folder", "link to folder", "in a folder"])
def test_what_is_trained_on_is_not_held_out(link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    path, other = write(folder / "a.jsonl", DOCUMENTS), tmp_path / "b.jsonl"
    source, held_out = path, path
    if link == "relative":
        monkeypatch.chdir(tmp_path)
        held_out = Path("texts/../texts/a.jsonl")
    elif link in ("symbolic", "hard"):
        held_out = other
        (held_out.symlink_to if link == "symbolic" else held_out.hardlink_to)(path)
    elif link == "folder":
        held_out = folder
    elif link == "link to folder":
        held_out = tmp_path / "linked"
        held_out.symlink_to(folder)
    elif link == "in a folder":
        source, held_out = folder, tmp_path / "b.jsonl"
        held_out.hardlink_to(path)
    with pytest.raises(RecipeError, match=r"data\.held_out is .*, which has .*, the file that is trained on"):
        sources.read(Data(source=str(source), held_out=str(held_out)))
    assert sources.read(Data(source=str(source), held_out=str(write(tmp_path / "c.jsonl", DOCUMENTS[:2]))))


@pytest.mark.parametrize(
    ("split", "held_out", "is_shared"),
    [
        ("train", "train", True),
        ("train", "train[90%:]", True),
        ("train[:90%]", "train[:90%]", True),
        ("train[:]", "train", True),
        ("train+extra", "extra[:5]", True),
        ("train[:90%]", "train[90%:]", False),
        ("train", "test", False),
        ("train+test[:50%]", "test[50%:]", False),
    ],
)
def test_a_split_that_is_trained_on_is_not_held_out(split: str, held_out: str, is_shared: bool) -> None:
    assert bool(sources._shared_splits(split, held_out)) == is_shared


def test_the_hub_is_asked_for_configuration_and_splits(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, encoded: list[str]
) -> None:
    (tmp_path / "test").mkdir()  # No folder is taken for a split.
    monkeypatch.chdir(tmp_path)
    asked: list[dict[str, Any]] = []

    def pretend(**arguments: Any) -> Any:
        asked.append(arguments)
        return datasets.Dataset.from_dict({"body": DOCUMENTS[15:] if arguments["split"] == "test" else DOCUMENTS[:15]})

    monkeypatch.setattr(datasets, "load_dataset", pretend)
    data = Data(source="someone/texts", config="en", split="train", column="body", held_out="test")
    assert load_data(data, tokenizer, length=16).held_out.tolist() == stream(tokenizer, DOCUMENTS[15:])
    shared = {"path": "someone/texts", "name": "en", "streaming": False}
    assert asked == [shared | {"split": "test"}, shared | {"split": "train"}]
    assert len(encoded) == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "missing.txt"}, r"There is no file or folder .*missing\.txt"),
        ({"source": "a.jsonl", "column": "body"}, "no column 'body'.* as data.column in .* It has: text, other"),
        ({"source": "a.jsonl", "column": "other"}, "column 'other' holds int; expected text"),
        ({"source": "zeros.txt"}, r"zeros\.txt holds no text.*UTF-8, without NUL bytes"),
        ({"source": "number.jsonl"}, "A row of the text holds the int 5; expected text"),
        ({"source": "latin.txt"}, r"latin\.txt cannot be read .*; save it in UTF-8\)\."),
        ({"source": "mixed"}, "files of 2 kinds, json, text"),
        ({"source": "a.jsonl", "split": "test"}, r"local text has neither, and data\.source is '.*a\.jsonl'"),
        ({"source": "a.jsonl", "held_out": "validation"}, "no such file or folder"),
        ({"source": "someone/texts", "held_out": "train"}, "the split that is trained on"),
        ({"source": "a.jsonl", "held_out_share": 0.01}, "held-out text has .* expected more than a window, 64"),
        ({"source": "a.jsonl", "held_out_share": 0.99}, "too few tokens for one window"),
        ({"column": "body"}, "built-in text and .txt files have none"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str, tmp_path: Path, tokenizer: Any) -> None:
    write(tmp_path / "a.jsonl", DOCUMENTS)
    write(tmp_path / "number.jsonl", [*DOCUMENTS, 5])
    for name, content in {
        "empty.txt": b"",
        "blank.jsonl": b"\n",
        "zeros.txt": bytes(3000),
        "latin.txt": "A café. ".encode("latin-1"),
        "zeros.jsonl": b'{"text": "\\u0000\\u0000"}\n{"text": ""}\n{"text": ""}\n',
        "broken.jsonl": b'{"text": "a"}\n{"text": ',
    }.items():
        (tmp_path / name).write_bytes(content)
    for folder in ("mixed", "none"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "mixed" / "a.jsonl", DOCUMENTS)
    write(tmp_path / "mixed" / "b.txt", DOCUMENTS)
    there = {"b.txt", "missing.txt", *(path.name for path in tmp_path.iterdir())}
    placed = {key: str(tmp_path / value) if value in there else value for key, value in changes.items()}
    with pytest.raises(RecipeError, match=message):
        load_data(Data(**placed), tokenizer, length=64)


def test_what_a_tokenizer_lacks(tokenizer: Any, t5_tokenizer: Any) -> None:
    with pytest.raises(RecipeError, match="has no token <extra_id_0>"):
        load_data(Data(limit=4), tokenizer, length=16, config=T5Config())
    with pytest.raises(RecipeError, match="cannot tell apart"):
        load_data(Data(packing="documents", limit=4), t5_tokenizer, length=16, config=T5Config())
    tokenizer.eos_token = None
    with pytest.raises(RecipeError, match="no end-of-sequence token"):
        load_data(Data(limit=4), tokenizer, length=64)


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_special_tokens_in_a_text_are_text(tmp_path: Path, tokenizer: Any) -> None:
    documents = [f"{number} <|endoftext|> and <pad> are words here." for number in range(10)]
    path = write(tmp_path / "a.jsonl", documents)
    prepared = load_data(Data(source=str(path), held_out_share=0.2), tokenizer, length=16)
    special = torch.tensor(tokenizer.all_special_ids)
    assert torch.isin(prepared.held_out, special).sum() == 2
    assert tokenizer.decode(prepared.held_out).startswith(documents[8])


# -- packing -----------------------------------------------------------------------------------------------------------

documents_of_ids = st.lists(st.lists(st.integers(1, 99), max_size=20), max_size=30)


@few_examples
@given(documents_of_ids, st.integers(2, 16), st.sampled_from([None, 0]))
def test_windows_are_the_stream(documents: list[list[int]], length: int, start: int | None) -> None:
    found = [window["input_ids"] for window in preparation.cut_windows(documents, length, start)]
    whole, first = [token for ids in documents for token in ids], [] if start is None else [start]
    assert all(len(window) == length and window[: len(first)] == first for window in found)
    flat = [token for window in found for token in window[len(first) :]]
    assert flat == whole[: len(flat)]
    assert len(whole) - len(flat) < length - len(first)


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_texts_begin_as_the_tokenizer_begins_them(packing: str, tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"bos_token": "<start>"})
    assert preparation.start_token(tokenizer) is None
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<start> $A", special_tokens=[("<start>", start)])
    assert preparation.start_token(tokenizer) == start
    path = write(tmp_path / "a.jsonl", [f"This is story {number} of a dog. " * 5 for number in range(9)])
    data = Data(source=str(path), held_out_share=0.2, packing=packing)
    prepared = load_data(data, tokenizer, length=32)
    rows = [row["input_ids"].tolist() for row in prepared.train]
    assert not bool((prepared.held_out == start).any())
    if packing == "windows":
        assert all(row[0] == start and start not in row[1:] for row in rows)
    else:
        flat, end = [token for row in rows for token in row], tokenizer.eos_token_id
        assert [flat[at + 1] for at, token in enumerate(flat[:-1]) if token == end] == [start] * (flat[:-1].count(end))
    # One token may begin and end texts. Between packed documents it stands once, or it would be a document.
    tokenizer.bos_token = name = tokenizer.eos_token
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{name} $A", special_tokens=[(name, end)])
    rows = [row["input_ids"] for row in load_data(data, tokenizer, length=32).train]
    if packing == "windows":
        assert all(row[0] == end for row in rows)
    else:
        flat = torch.cat(rows)
        assert not bool(((flat[1:] == end) & (flat[:-1] == end)).any())


@few_examples
@given(documents_of_ids, st.integers(1, 16))
def test_positions_restart_at_each_document(documents: list[list[int]], length: int) -> None:
    ended = [[*ids, 0] for ids in documents]
    # Token and position in its document, or in the window if the document began before it.
    stream = [(token, place) for ids in ended for place, token in enumerate(ids)]
    for number, window in enumerate(preparation.cut_windows(ended, length)):
        part = stream[number * length : (number + 1) * length]
        wanted = [min(place, slot) for slot, (_, place) in enumerate(part)]
        found = preparation.restarting(window, end=0)
        assert found["input_ids"] == [token for token, _ in part]
        assert found["position_ids"] == wanted
        assert found["labels"] == [token if place else -100 for (token, _), place in zip(part, wanted, strict=True)]


@pytest.mark.parametrize(("architecture", "scheme"), [("llama", None), ("gpt2", "fire")])
def test_packed_documents_do_not_see_each_other(
    architecture: str, scheme: str | None, tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path / "a.jsonl", [document[:60] for document in DOCUMENTS])
    data = Data(source=str(path), held_out_share=0.3, packing="documents")
    prepared = load_data(data, tokenizer, length=96)
    model = stock(architecture)
    if scheme:
        hf_posenc.patch(model, scheme)
    # As a trainer calls it: without a cache.
    batch = default_data_collator([prepared.train[0]])
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) >= 3
    with torch.no_grad():
        packed = model(**batch, use_cache=False)
        for start, end in zip(starts, [*starts[1:], 96], strict=True):
            alone = model(input_ids=batch["input_ids"][:, start:end], use_cache=False).logits
            torch.testing.assert_close(packed.logits[:, start:end], alone, **SAME)
        # The first token of the second document is no label, or the document before would have to foresee it.
        other = batch["labels"].clone()
        assert other[0, starts[1]] == -100
        other[0, starts[1]] = 5
        assert model(**batch | {"labels": other}, use_cache=False).loss > packed.loss


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", ["windows", "documents"])
def test_a_stream_is_the_same_text_in_seeded_order(packed: Any, tmp_path: Path, tokenizer: Any) -> None:
    train = write(tmp_path / "train.jsonl", DOCUMENTS[:15])
    held_out = write(tmp_path / "held_out.jsonl", DOCUMENTS[15:])
    data = {"source": str(train), "held_out": str(held_out), "packing": packed}
    stored = load_data(Data(**data), tokenizer, length=16)
    first, again, other = (load_data(Data(**data, streaming=True), tokenizer, length=16, seed=s) for s in (1, 1, 2))
    assert first.tokens is None
    assert first.held_out.tolist() == stored.held_out.tolist()
    assert rows(first) == rows(again) != rows(other)
    assert sorted(rows(first)) == sorted(rows(stored))
    assert first.train.column_names == stored.train.column_names
    first.train.set_epoch(1)
    assert rows(first) != rows(again)


# -- cache -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_text_is_tokenised_once(name: str, tmp_path: Path, tokenizer: Any, encoded: list[str]) -> None:
    path = write(tmp_path / name, DOCUMENTS)
    data = Data(source=str(path), held_out_share=0.2)
    first = rows(load_data(data, tokenizer, length=16))
    count = len(encoded)
    assert count == (20 if name == "a.jsonl" else 2)
    # A tokenizer that has been used is another one to `datasets`.
    tokenizer("some text", truncation=True, max_length=4, padding="max_length")
    assert rows(load_data(data, tokenizer, length=16)) == first
    fresh = AutoTokenizer.from_pretrained(DIRECTORIES["llama"])
    assert rows(load_data(data, fresh, length=16)) == first
    # Other windows are cut of the same tokens.
    assert len(rows(load_data(data, tokenizer, length=32))[0]) == 32
    load_data(Data(source=str(path), held_out_share=0.2, packing="documents"), tokenizer, length=32)
    assert len(encoded) == count


def test_another_text_or_tokenizer_is_tokenised_anew(tmp_path: Path, tokenizer: Any, encoded: list[str]) -> None:
    path = write(tmp_path / "a.jsonl", DOCUMENTS)
    data = Data(source=str(path), held_out_share=0.2)
    first = rows(load_data(data, tokenizer, length=16))
    tokenizer.add_tokens(["number"])
    assert rows(load_data(data, tokenizer, length=16)) != first
    assert len(encoded) == 40
    write(path, DOCUMENTS[::-1])
    os.utime(path, ns=(10**18, 10**18))
    assert rows(load_data(data, tokenizer, length=16))[0] == stream(tokenizer, DOCUMENTS[::-1])[:16]


# -- encoder-decoders --------------------------------------------------------------------------------------------------


def test_denoising_replaces_a_share_and_keeps_the_labels(t5_tokenizer: Any) -> None:
    ids = torch.randint(20, 900, (50, 100))
    collate = Denoising(t5_tokenizer, seed=1)
    batch = collate([{"input_ids": row, "labels": row} for row in ids])
    sentinel = t5_tokenizer.convert_tokens_to_ids("<extra_id_0>")
    replaced = batch["input_ids"] == sentinel
    assert replaced.float().mean().item() == pytest.approx(0.15, abs=0.02)
    assert torch.equal(batch["input_ids"][~replaced], ids[~replaced])
    assert torch.equal(batch["labels"], ids)
    # The same for a window, whatever is next to it; another for another seed.
    assert torch.equal(collate.corrupt(ids[7:9]), batch["input_ids"][7:9])
    assert not torch.equal(Denoising(t5_tokenizer, seed=2).corrupt(ids), batch["input_ids"])
    prepared = load_data(Data(limit=4), t5_tokenizer, length=32, seed=3, config=T5Config())
    assert prepared.corrupt is not None
    assert torch.equal(prepared.corrupt(ids), Denoising(t5_tokenizer, seed=3).corrupt(ids))
