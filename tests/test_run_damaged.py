"""A stopped run of which a file is damaged goes on to the same weights, or says in one line what is wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_recipe_files import one_line, strict_json
from test_run import BASE, Stop, stop_after, text_file, weights

from hf_posenc import PosencError
from hf_posenc.recipes import storage
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.runs import files, run

pytestmark = [pytest.mark.grid, pytest.mark.usefixtures("plain_pictures")]

# Checkpoints after which a run stops: in the attention transfer, which has two steps, or in the training.
STOPS = {"transfer": 1, "training": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Path]:
    """Runs of one recipe: those that stopped, by their stage, and the weights of one that did not."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    (folder / "recipe.yaml").write_text(BASE, encoding="utf-8")
    keys = [f"data.source={text_file()}", "transfer.steps=2", "training.steps=3", "saving={every: 1}"]
    recipe = read_recipe(folder / "recipe.yaml", keys)
    for stage, saves in STOPS.items():
        with pytest.MonkeyPatch.context() as patch:
            stop_after(patch, saves)
            with pytest.raises(Stop):
                run.train(recipe, folder / stage)
        found[stage] = folder / stage
    return found, run.train(recipe, folder / "whole").model


def test_a_finished_run_has_strict_json_and_no_transfer(runs: tuple[dict[str, Path], Path]) -> None:
    stopped, model = runs
    assert (stopped["training"] / storage.CHECKPOINTS / "transfer" / files.TRANSFERRED).is_file()
    assert not (model.parent / storage.CHECKPOINTS / "transfer").exists()
    for path in [*model.parent.glob("*.json"), *model.parent.rglob(files.MARKER)]:
        strict_json(path.read_text(encoding="utf-8"))


def places(value: Any, depth: int = 3) -> Iterator[list[Any]]:
    """Paths of the keys and entries in JSON, of long lists the first."""
    entries = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, inner in entries if depth else ():
        yield [key]
        yield from ([key, *rest] for rest in places(inner, depth - 1))


def with_another(content: bytes, path: list[Any], value: Any) -> bytes:
    """JSON with another value in a place; `...` takes the key out."""
    whole = json.loads(content)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(whole).encode()


Damage = Callable[[bytes], bytes | None]
WHOLE: dict[str, Damage] = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"\n}",
    "garbage": lambda content: os.urandom(len(content) + 1),
    "zeros": lambda content: bytes(len(content)),
    "one byte": lambda content: content[:-9] + bytes([content[-9] ^ 64]) + content[-8:] if len(content) > 9 else b"x",
    "a list": lambda content: b"[]",
    "a word": lambda content: b'"x"',
    "null": lambda content: b"null",
    "no keys": lambda content: b"{}",
    "deep": lambda content: b"[" * 100_000,
    "not UTF-8": lambda content: b'{"a": "\xff"}',
    "pickled": lambda content: b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
}
WRONG = (None, "x", [], {}, -1, 2.5, True, 10**400, ...)


def damages(path: Path) -> Iterator[tuple[str, Damage]]:
    """Ways to damage a file, by name: as a whole, and a wrong value for each key of JSON in turn."""
    yield from WHOLE.items()
    for turn, place in enumerate(places(json.loads(path.read_bytes())) if path.suffix == ".json" else ()):
        value = WRONG[turn % len(WRONG)]
        yield f"{place} = {str(value)[:9]}", partial(with_another, path=place, value=value)


def spoil(path: Path, damage: Damage) -> None:
    content = damage(path.read_bytes())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


@pytest.mark.parametrize("stage", STOPS)
def test_a_checkpoint_with_a_damaged_file_counts_as_none(
    stage: str, runs: tuple[dict[str, Path], Path], tmp_path: Path
) -> None:
    folder = runs[0][stage] / storage.CHECKPOINTS / ("transfer" if stage == "transfer" else ".")
    last = files.last(folder)
    assert last is not None
    shutil.copytree(last, tmp_path / last.name)
    for path in files_of(tmp_path / last.name):
        before = path.read_bytes()
        for name, damage in damages(path):
            spoil(path, damage)
            assert files.last(tmp_path) is None or path.read_bytes() == before, f"{path.name}, {name}"
            path.write_bytes(before)
    assert files.last(tmp_path) == tmp_path / last.name


def resumed(folder: Path) -> Iterator[tuple[Path, str, Damage]]:
    """Damages after which to resume a run: one of each file."""
    for number, path in enumerate(files_of(folder)):
        ways = list(damages(path))
        yield path, *ways[number % len(ways)]


# In the grid a run is resumed with a damage of each ninth file.
SAMPLES = [(stage, 9, 4) for stage in STOPS] + [pytest.param(stage, 1, 0, marks=pytest.mark.slow) for stage in STOPS]


@pytest.mark.parametrize(("stage", "every", "first"), SAMPLES)
def test_a_run_with_a_damaged_file_ends_with_the_same_weights_or_an_error(
    stage: str, every: int, first: int, runs: tuple[dict[str, Path], Path], tmp_path: Path
) -> None:
    stopped, whole = runs
    wanted = weights(whole)
    for path, name, damage in list(resumed(stopped[stage]))[first::every]:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(stopped[stage], out)
        there = out / path.relative_to(stopped[stage])
        spoil(there, damage)
        try:
            found = weights(run.resume(out).model)
        except PosencError as error:
            one_line(error)
        except BaseException as error:
            raise AssertionError(f"{there}, {name}: {type(error).__name__}: {error}") from error
        else:
            assert found.keys() == wanted.keys(), (there, name)
            assert all(tensor.equal(wanted[key]) for key, tensor in found.items()), (there, name)
