"""A full disk is one error that says so; nothing is left half written, and what was there before is as it was.

A limit on the size of files stands for the disk: it stops the same writes, in this process alone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from models import DIRECTORIES, checkpoint, text_file
from safetensors import SafetensorError
from typer.testing import CliRunner

import hf_posenc
from hf_posenc import cli
from hf_posenc.errors import RecipeError, StorageError
from hf_posenc.patches.atomic_files import storing
from hf_posenc.recipes.data import sources
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import files, run

pytestmark = pytest.mark.usefixtures("plain_pictures")

resource = pytest.importorskip("resource", reason="Windows has no limit on files")

RECIPE = """
model: tiny-llama
conversion: {{scheme: fire, options: {{threshold: 64.0}}}}
data: {{source: {text}}}
training: {{steps: 3, length: 32, batch_size: 2}}
evaluation: {{contexts: [64], windows: 2, every: 100}}
saving: {{every: 1}}
"""


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def content(folder: Path) -> dict[str, str]:
    """Return a digest of every file in a folder, hidden ones too."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def wrapped() -> Exception:
    error = RuntimeError("could not write")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


def fail(error: Exception) -> None:
    raise error


FULL, LARGE = "the disk is full", "a file would be larger than the limit on files"
# What writing to a folder raises, and what it comes to: a reason, or the error itself.
WRITES: list[tuple[Callable[[Path], object], str | None]] = [
    (lambda folder: fail(OSError(errno.ENOSPC, "No space left on device")), FULL),
    (lambda folder: fail(OSError(errno.EDQUOT, "Disk quota exceeded")), "the quota is used up"),
    (lambda folder: fail(SafetensorError("Error while serializing: I/O error: No space (os error 28)")), FULL),
    (lambda folder: fail(RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")), FULL),
    (lambda folder: fail(wrapped()), FULL),
    (lambda folder: torch.save(torch.zeros(10**5), folder / "x"), FULL),
    (lambda folder: (folder / "x").write_bytes(bytes(10**5)), LARGE),
    (lambda folder: fail(OSError(errno.EACCES, "Permission denied")), None),
    (lambda folder: fail(RuntimeError("out of memory")), None),
    (lambda folder: fail(RecipeError("No")), None),
    (lambda folder: fail(SafetensorError("os error 5")), None),
]


@pytest.mark.parametrize(("write", "reason"), WRITES)
def test_what_a_full_disk_raises(write: Callable[[Path], object], reason: str | None, tmp_path: Path) -> None:
    with files_of_at_most(10**4), pytest.raises(Exception) as raised, storing(tmp_path / "place"):  # noqa: PT011
        write(tmp_path)
    # Who catches what a write raises catches it.
    if reason is not None:
        assert isinstance(raised.value, StorageError)
        assert isinstance(raised.value, OSError)
        raised.match(rf"/place cannot be written: {reason}.* \([\d,.]+ MB free\)\. Make room")
    else:
        with pytest.raises(type(raised.value)) as plain:
            write(tmp_path)
        assert (type(raised.value), raised.value.args) == (type(plain.value), plain.value.args)


@pytest.mark.grid
def test_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(text=text_file(40_000)), encoding="utf-8")
    recipe = read_recipe(tmp_path / "recipe.yaml")
    run.train(recipe, tmp_path / "other")
    folder, publish, room = tmp_path / "run", files.publish, contextlib.ExitStack()

    def publish_and_fill(unfinished: Path, final: Path) -> None:
        publish(unfinished, final)
        if final.name == "checkpoint-1":
            room.enter_context(files_of_at_most(10**6))

    monkeypatch.setattr(files, "publish", publish_and_fill)
    with room, pytest.raises(StorageError, match=f"cannot be written: .* hf-posenc resume {folder} goes on"):
        run.train(recipe, folder)
    monkeypatch.undo()
    assert [path.name for path in files.checkpoints(folder / "checkpoints")] == ["checkpoint-1"]
    assert not list(folder.rglob(f"{files.UNFINISHED}*"))
    run.resume(folder)
    assert content(folder / "model")["model.safetensors"] == content(tmp_path / "other" / "model")["model.safetensors"]
    # Before there is a recipe in the folder, there is nothing to go on with.
    with files_of_at_most(100), pytest.raises(StorageError, match=r"recipe\.yaml cannot be written") as raised:
        run.train(recipe, tmp_path / "new")
    assert "resume" not in str(raised.value)
    assert set(content(tmp_path / "new")) == {files.LOCK}


@pytest.mark.parametrize(
    "command",
    [
        f"convert {DIRECTORIES['llama']} alibi OUT",
        "export CONVERTED OUT",
        f"eval {DIRECTORIES['llama']} --measures perplexity --contexts 64 --out OUT",
        "plot CONVERTED --what attention --out OUT",
    ],
    ids=lambda command: command.partition(" ")[0],
)
def test_commands_say_it_in_one_line(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "builtin_documents", lambda split: [topics["assert"] * 20])
    hf_posenc.patch(checkpoint("llama"), "rope").save_pretrained(tmp_path / "converted")
    arguments = command.replace("CONVERTED", str(tmp_path / "converted")).replace("OUT", str(tmp_path / "out"))
    with files_of_at_most(500):
        done = CliRunner().invoke(cli.app, arguments.split())
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith(f"hf-posenc: {tmp_path / 'out'}")
    assert "cannot be written: a file would be larger than the limit on files (ulimit -f)" in line
    assert "Traceback" not in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"converted"}
