"""Saves that are killed, that meet in one folder, or find something in their way: the old, the new, or a refusal."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from grid import once
from huggingface_hub import ModelCard
from models import tiny
from peft import LoraConfig, PeftModel, get_peft_model
from test_full_disk import content, files_of_at_most
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import cli
from hf_posenc.errors import CheckpointError, PosencError, StorageError
from hf_posenc.patches import model_card
from hf_posenc.patches.atomic_files import UNFINISHED, whole_directory

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "shutil.rmtree")


def llama(scheme: str | None, change: float = 0.0) -> Any:
    """Return a small Llama whose weights all differ from those of another change."""
    model = tiny("llama")
    torch.manual_seed(0)
    if scheme is not None:
        hf_posenc.patch(model, scheme)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(change)
    return model


def adapter(change: float = 0.0) -> Any:
    """Return a Llama with LoRA."""
    model = get_peft_model(llama("fire"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.fill_(change)
    return model


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def load_adapter(folder: Path) -> Any:
    return PeftModel.from_pretrained(llama("fire"), folder)


def are_same(one: Any, other: Any) -> bool:
    wanted = other.state_dict()
    return type(one) is type(other) and all(torch.equal(wanted[name], x) for name, x in one.state_dict().items())


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.startswith(UNFINISHED)]


def killed(work: Callable[[], Any], folder: Path, at: int) -> bool:
    """Do some work in a process that is killed before it changes a folder for the nth time; return whether it was."""
    process = os.fork()
    if process:
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert code in (0, 9)
        return code == 9
    count = itertools.count()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        is_change = writes or event in CHANGES
        if is_change and any(str(argument).startswith(str(folder)) for argument in arguments) and next(count) == at:
            os._exit(9)

    try:
        sys.addaudithook(watch)
        work()
        os._exit(0)
    finally:
        os._exit(1)


# What is saved over what: the old model or adapter, the new one, whether in shards, and how it is loaded.
KILLED: dict[str, tuple[Callable[[], Any] | None, Callable[[], Any], bool, Callable[[Path], Any]]] = {
    f"{what}, {'shards' if many else 'one file'}": (old, lambda: llama("fire", 0.5), many, load)
    for many in (True, False)
    for what, old in {
        "the same record": lambda: llama("fire"),
        "another record": lambda: llama("kerple"),
        "a stock model": lambda: llama(None),
        "nothing": None,
    }.items()
} | {
    "an adapter": (lambda: adapter(0.1), lambda: adapter(0.2), False, load_adapter),
    "no adapter": (None, lambda: adapter(0.2), False, load_adapter),
}
# By default the first, with the grid these; the others are kills between the same files.
FIRST = ("another record, one file", "the same record, shards", "nothing, one file", "an adapter")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("case", once([*FIRST, *(case for case in KILLED if case not in FIRST)], more=len(FIRST) - 1))
def test_a_killed_save_leaves_the_old_or_the_new_or_what_is_refused(case: str, tmp_path: Path) -> None:
    make, build, many, read = KILLED[case]
    new, old, size = build(), None if make is None else make(), {"max_shard_size": "20KB"} if many else {}
    if old is not None:
        old.save_pretrained(tmp_path / "old", **size)
        assert (len(list((tmp_path / "old").glob("*.safetensors"))) > 2) == many
    seen, folder = [], tmp_path / "killed"
    for at in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        if old is not None:
            shutil.copytree(tmp_path / "old", folder)
        if not killed(lambda: new.save_pretrained(folder, **size), folder, at):
            break
        found = None
        with contextlib.suppress(OSError, ValueError):
            found = read(folder)
        seen.append(
            "refused" if found is None
            else "new" if are_same(found, new)
            else "old" if old is not None and are_same(found, old)
            else "mixed"
        )  # fmt: skip
        if at % 4 == 0:  # The next save is as any other, and nothing of the killed one is left.
            new.save_pretrained(folder, **size)
            assert not hidden(folder)
            assert are_same(read(folder), new)
    assert are_same(read(folder), new)
    assert len(seen) > 8
    assert set(seen) <= {"old" if old is not None else "refused", "refused", "new"}, seen


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_directory_is_whole_and_the_next_one_clears_up(many: bool, is_there: bool, tmp_path: Path) -> None:
    out, names = tmp_path / "place" / "out", {"config.json", "x/y"} if many else {"x"}

    def write() -> None:
        with whole_directory(out) as folder:
            for name in names:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text("new", encoding="utf-8")

    for at in itertools.count():
        shutil.rmtree(out.parent, ignore_errors=True)
        (out if is_there else out.parent).mkdir(parents=True)
        was_killed = killed(write, out.parent, at)
        found = set(content(out)) if out.is_dir() else set()
        assert {name for name in found if UNFINISHED not in name} in (set(), names, names - {"config.json"})
        if not was_killed:
            assert found == names
            break
        if not out.is_dir() or all(path.name.startswith(UNFINISHED) for path in out.iterdir()):
            write()
            assert set(content(out.parent)) == {f"out/{name}" for name in names}


def test_shards_of_two_saves_never_load(tmp_path: Path) -> None:
    for name, change in (("one", 0.0), ("two", 0.5)):
        llama("fire", change).save_pretrained(tmp_path / name, max_shard_size="20KB")
    shards = sorted(path.name for path in (tmp_path / "one").glob("model[-.]*"))
    for name in shards:
        shutil.copytree(tmp_path / "one", tmp_path / "mixed", dirs_exist_ok=True)
        shutil.copyfile(tmp_path / "two" / name, tmp_path / "mixed" / name)
        with pytest.raises(CheckpointError, match="are of two saves"):
            load(tmp_path / "mixed")
    # Equal models give equal files.
    llama("fire").save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert content(tmp_path / "again") == content(tmp_path / "one")


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_threads_save_one_model_while_another_runs_it(size: str, tmp_path: Path) -> None:
    model, ids, stop, wrong = llama("fire"), torch.arange(40)[None], threading.Event(), []
    wanted = model(ids).logits
    model.save_pretrained(tmp_path / "alone", max_shard_size=size)

    def forward() -> None:
        while not stop.is_set():
            wrong.extend([] if torch.equal(model(ids).logits, wanted) else ["forward"])

    def save(*names: str) -> None:
        try:
            for name in names:
                model.save_pretrained(tmp_path / name, max_shard_size=size)
        except BaseException as error:
            wrong.append(repr(error))

    savers = [threading.Thread(target=save, args=("shared", f"own {n}", "shared")) for n in range(3)]
    runner = threading.Thread(target=forward)
    for thread in (runner, *savers):
        thread.start()
    for thread in savers:
        thread.join()
    stop.set()
    runner.join()
    assert wrong == []
    assert not hasattr(model, "hf_quantizer")
    for name in ("shared", "own 0", "own 1", "own 2"):
        assert content(tmp_path / name) == content(tmp_path / "alone")


# -- in the way --------------------------------------------------------------------------------------------------------


SAVES: dict[str, Callable[[Path], Any]] = {
    "model": lambda folder: llama("fire").save_pretrained(folder),
    "shards": lambda folder: llama("fire").save_pretrained(folder, max_shard_size="20KB"),
    "adapter": lambda folder: adapter().save_pretrained(str(folder)),
}
# Files that a save writes, as folders.
TAKEN = {
    "model": ("config.json", "model.safetensors", "generation_config.json", "modeling_hf_posenc.py"),
    "shards": ("config.json", "model-00001-of-00005.safetensors", "model.safetensors.index.json"),
    "adapter": ("adapter_config.json", "adapter_model.safetensors"),
}


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, names in TAKEN.items() for name in names])
def test_a_folder_in_the_way_is_one_line(what: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name / "mine").mkdir(parents=True)
    with pytest.raises(PosencError, match=r"is in the way|cannot be read") as raised:
        SAVES[what](tmp_path)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def broken(folder: Path) -> None:
    """Put files of others into a folder: damaged, or not even files."""
    for number, data in enumerate(
        (b"", b"\xff" * 100, (2**60).to_bytes(8, "little") + b'{"__metadata__":{}}', b"{}" * 9)
    ):
        (folder / f"x{number}.safetensors").write_bytes(data)
    (folder / "y.safetensors").mkdir()
    (folder / "z.safetensors").symlink_to(folder / "nowhere")


@pytest.mark.parametrize("what", SAVES)
def test_files_of_others_stay(what: str, tmp_path: Path) -> None:
    broken(tmp_path)
    before = content(tmp_path)
    SAVES[what](tmp_path)
    assert content(tmp_path).items() > before.items()


CARDS = (
    b"---\na: [\n---\n", b"---\n- a\n---\n", b"\xff\xfe", b"---\ntags: 5\n---\n", b"---\ntags: [[a], {b: c}]\n---\n",
    b"---\ntags: {a: b}\n---\n", b"---\n!!timestamp x\n---\n", b"---\na: !!python/object:os.system {}\n---\n",
)  # fmt: skip


@pytest.mark.parametrize("what", ["model", "adapter"])
def test_a_card_that_cannot_be_read_is_left_alone(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    readme = tmp_path / "README.md"
    for text in CARDS:
        readme.write_bytes(text)
        SAVES[what](tmp_path)
        assert readme.read_bytes() == text
    readme.unlink()
    readme.mkdir()
    SAVES[what](tmp_path)
    assert caplog.text.count("README.md is left as it is") == len(CARDS) + 1
    assert caplog.text.count("\n") == len(CARDS) + 1


def read_only(folder: Path) -> Path:
    """Return a folder that not even the superuser can write to."""
    return Path("/proc/sys/kernel") / folder.name


def dangling(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "nowhere")
    return folder / "link"


def under_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "out"


PLACES = {
    "read-only": read_only,
    "below a read-only one": lambda folder: read_only(folder) / "sub",
    "a link to nothing": dangling,
    "below a file": under_a_file,
    "a long name": lambda folder: folder / (300 * "x"),
    "NUL": lambda folder: folder / "a\0b",
}


@pytest.mark.parametrize("what", ["model", "adapter", "directory"])
@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_cannot_be_written_is_one_line(place: str, what: str, tmp_path: Path) -> None:
    def save(folder: Path) -> None:
        with whole_directory(folder):
            pass

    if what == "directory" and place == "a link to nothing":
        return  # It is made where the link leads.
    target = PLACES[place](tmp_path)
    before = content(tmp_path)
    with pytest.raises(PosencError) as raised:
        SAVES.get(what, save)(target)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    assert content(tmp_path) == before


@pytest.mark.parametrize("what", SAVES)
@pytest.mark.parametrize("over", [False, True])
def test_a_full_disk_changes_nothing(what: str, over: bool, tmp_path: Path) -> None:
    if over:
        SAVES[what](tmp_path / "deep" / "new")
    before, paths = content(tmp_path), set(tmp_path.rglob("*"))
    # Of these, one is too large after the other.
    sizes = sorted({path.stat().st_size for path in saved_files(what, tmp_path)})
    for size in sizes:
        with files_of_at_most(size - 1), pytest.raises(StorageError, match=r"cannot be written: .* MB free") as raised:
            SAVES[what](tmp_path / "deep" / "new")
        assert "\n" not in str(raised.value)
        assert content(tmp_path) == before
        assert set(tmp_path.rglob("*")) == paths


def saved_files(what: str, folder: Path) -> list[Path]:
    """Return the files that a save writes, in a place of their own."""
    other = folder.parent / f"{folder.name} files"
    SAVES[what](other)
    return list(other.iterdir())


# -- cards -------------------------------------------------------------------------------------------------------------


MINE = "# Mine\n\nText ünïcode.\n\n---\n\nA rule above.\n"
METADATA = (
    "",
    "---\nlicense: mit  # mine\ntags:\n- mine  # a comment\n- fire\n# more\nlanguage: [en]\n---\n\n",
    "---\ntags: [mine]\nlicense: mit\n---\n",
    "---\n  license: mit\n  tags:\n    - mine\n---\n",
    "---\n{license: mit, tags: mine}\n---\n",
    "---\ntags:\nlicense: mit\n---\n",
    "---\n---\n",
)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("metadata", METADATA)
def test_a_card_keeps_all_that_the_user_wrote(metadata: str, end: str) -> None:
    model = llama("fire")

    def renewed(text: str) -> str:
        return model_card.card(text, model.config, "LlamaForCausalLM", [("the encoding", "")])

    given = (metadata + MINE).replace("\n", end)
    once = renewed(given)
    assert renewed(once) == once
    assert MINE.replace("\n", end).rstrip() in once
    data, before = (
        yaml.safe_load(text.split("---")[1]) or {} if metadata or text is once else {} for text in (once, given)
    )
    assert {"hf_posenc", "fire"} <= set(data["tags"])
    assert (data["pipeline_tag"], data["library_name"]) == ("text-generation", "transformers")
    assert {key: data[key] for key in before if key != "tags" and before[key]} == {
        key: value for key, value in before.items() if key != "tags" and value
    }
    if metadata:
        assert ("mine" in data["tags"]) == ("mine" in str(before.get("tags")))
    # Between two sections, around them, and after a beginning without an end, all text stays.
    section = model_card.encoding_section(once)
    parts = [f"{n} of mine." for n in range(4)]
    joined = f"{parts[0]}\n{section}\n{parts[1]}\n{section}\n{parts[2]}\n{section.splitlines()[0]}\n{parts[3]}\n"
    twice = renewed(joined)
    assert all(part in twice for part in parts)
    assert twice.count("## Positional encoding") == 1
    assert renewed(twice) == twice


def converted_card(base: Path, out: Path) -> None:
    assert cli.app(["convert", str(base), "alibi", str(out)], standalone_mode=False) is None


def saved_card(base: Path, out: Path) -> None:
    hf_posenc.patch(load(base), "alibi").save_pretrained(out)


def resaved_card(base: Path, out: Path) -> None:
    saved_card(base, base.parent / "middle")
    load(base.parent / "middle").save_pretrained(out)


def adapter_card(base: Path, out: Path) -> None:
    model = hf_posenc.patch(load(base), "alibi")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(str(out))


WAYS = {"convert": converted_card, "save": saved_card, "load and save": resaved_card, "adapter": adapter_card}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_card_names_base_licence_and_task_and_no_local_path(way: str, known: bool, tmp_path: Path) -> None:
    base = tmp_path / "private" / "base"
    llama(None).save_pretrained(base)
    if known:
        card = "---\nlicense: apache-2.0\nbase_model: org/base\n---\n# Base\n"
        (base / "README.md").write_text(card, encoding="utf-8")
    WAYS[way](base, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert not any(part in card for part in ("private", str(tmp_path), "unsaved", str(Path.home())))
    data = ModelCard(card).data
    assert (data.base_model, data.license) == (("org/base", "apache-2.0") if known else (None, None))
    assert data.pipeline_tag == "text-generation"
    assert "hf_posenc" in (data.tags or [])
