"""Recipes: the schema, overrides, and what each wrong recipe says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from grid import once
from hypothesis import given, settings
from hypothesis import strategies as st
from models import DIRECTORIES
from transformers import AutoConfig, get_scheduler

import hf_posenc
from hf_posenc import RecipeError
from hf_posenc.recipes import library
from hf_posenc.recipes.goals import read_recipe
from hf_posenc.recipes.schema import fields
from hf_posenc.recipes.schema.recipe import Conversion, Data, Recipe, Schedule, Training

PLAIN = "model: tiny-llama\nconversion:\n  scheme: fire\n"


def read(folder: Path, text: str | bytes, *overrides: str) -> Recipe:
    """Read a recipe with this text."""
    path = folder / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_recipe(path, overrides)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    assert read(tmp_path, PLAIN) == Recipe(model="tiny-llama", conversion=Conversion(scheme="fire"))


def test_overrides_win_over_the_file_and_reach_keys_that_it_lacks(tmp_path: Path) -> None:
    recipe = read(
        tmp_path,
        PLAIN + "training: {steps: 5}\n",
        "training.steps=7",
        "conversion.options.threshold=32",
        "conversion.layers=[0, 2]",
        "data.held_out=null",
        "model=a=b",
        "data=builtin",
        "saving={every: 3, loggers: [wandb]}",
    )
    assert (recipe.training.steps, recipe.conversion.options, recipe.model) == (7, {"threshold": 32}, "a=b")
    assert recipe.conversion.layers == [0, 2]
    assert (recipe.saving.every, recipe.saving.keep, recipe.saving.loggers) == (3, 2, ["wandb"])


@pytest.mark.parametrize(("text", "value"), [("1e-3", 0.001), ("2E5", 200000.0), ("1", 1.0), (".5", 0.5), ("1.", 1.0)])
def test_a_number_is_read_as_yaml_1_2_has_it(text: str, value: float, tmp_path: Path) -> None:
    recipe = read(tmp_path, PLAIN, f"training.learning_rate={text}", f"scheme.init_c={text}")
    assert recipe.training.learning_rate == recipe.conversion.options["init_c"] == value


@pytest.mark.parametrize("word", ["no", "on", "off", "yes", "y", "0:8", "12:30", "2024-01-01", "<<", "=", "012", "1e"])
def test_words_are_words(word: str, tmp_path: Path) -> None:
    recipe = read(tmp_path, PLAIN + "data: {source: wikipedia}", f"data.config={word}")
    assert recipe.data.config == word
    assert yaml.safe_load(recipe.text())["data"]["config"] == word


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1) | st.sampled_from(
    ["1e-3", "no", "012", "null", "~", "1:30", "- x", "a: b", "#", "'", '"', "&a", "*a", "!t", ".nan", "0x1f", "1_0"]
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    summary=words,
    model=words,
    rate=st.floats(0, 1e12),
    steps=st.integers(2, 2**31 - 1),
    init_c=st.floats(1e-12, 1e12),
    loggers=st.lists(st.sampled_from(["tensorboard", "trackio", "wandb"]), max_size=2),
    targets=st.none() | st.lists(words, min_size=1, max_size=3),
)
def test_text_reads_as_the_recipe(
    tmp_path_factory: pytest.TempPathFactory,
    summary: str,
    model: str,
    rate: float,
    steps: int,
    init_c: float,
    loggers: list[Any],
    targets: list[str] | None,
) -> None:
    plain = Recipe(
        model=model,
        summary=summary,
        conversion=Conversion(scheme="fire", options={"init_c": init_c}),
        data=Data(source="builtin"),
    )
    recipe = dataclasses.replace(
        plain,
        training=Training(learning_rate=rate, steps=steps),
        saving=dataclasses.replace(plain.saving, loggers=loggers),
        adapter=dataclasses.replace(plain.adapter, kind="lora", targets=targets),
    )
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(recipe.text(), encoding="utf-8")
    assert read_recipe(path) == recipe
    # And other readers of YAML see the same.
    assert yaml.safe_load(recipe.text()) == dataclasses.asdict(recipe)


def test_a_recipe_of_python_is_what_its_file_says() -> None:
    layers: Any = (0, 1)
    recipe = Recipe(
        model="x",
        conversion=Conversion(scheme="fire", layers=layers),
        training=Training(learning_rate=1),
        data=Data(source="builtin"),
    )
    assert yaml.safe_load(recipe.text()) == dataclasses.asdict(recipe.checked())
    unsaid = dataclasses.replace(recipe, conversion=Conversion(scheme="fire", options={"init_c": np.float64(1.0)}))
    with pytest.raises(RecipeError, match="float64"):
        unsaid.checked()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.text(st.characters(codec="utf-8")) | st.text("abk:-{}[]&*!|>'\"%@`,?# \n\t01.~"),
    st.text("modelcnvrsi.=xy {}[]:1", max_size=30) | st.text(),
)
def test_any_text_and_any_override_is_read_or_refused(text: str, pair: str) -> None:
    plain: dict[str, Any] = {"model": "tiny-llama", "conversion": {"scheme": "fire"}}
    for content, overrides in ((text, []), (plain, [pair])):
        with contextlib.suppress(RecipeError):
            there = fields.parse(content, "mine.yaml") if isinstance(content, str) else content
            assert isinstance(fields.build(Recipe, there, where="mine.yaml", overrides=overrides), Recipe)


# -- what wrong recipes say --------------------------------------------------------------------------------------------

# The text after the plain recipe, or the whole text if it is bytes; overrides; words of the error.
WRONG: dict[str, tuple[str | bytes, list[str], list[str]]] = {
    # The file.
    "empty": (b"", [], ["is empty", "model and conversion"]),
    "tab": (b"model: x\nconversion:\n\tscheme: fire\n", [], ["cannot start any token", "line 3"]),
    "not UTF-8": ("model: é\n".encode("latin-1"), [], ["cannot be read", "utf-8"]),
    "key twice": ("model: other\n", [], ["the key 'model' is there twice", "line 4"]),
    "deep": (b"[" * 5000, [], ["is not a recipe's YAML"]),
    "a megabyte": (b"model: " + b"x" * 2**20, [], ["has more than 262,144 characters"]),
    "endless number": ("training: {steps: " + "9" * 5000 + "}", [], ["training.steps is", "exceeded maximum size"]),
    # Keys.
    "unknown key": ("training: {stpes: 5}\n", [], ["no key 'training.stpes'", "Did you mean 'steps'?"]),
    "option without its section": ("", ["threshold=5"], ["no key 'threshold'", "given as scheme.threshold=VALUE"]),
    "missing key": (b"model: x\n", [], ["'conversion' is missing"]),
    # Values.
    "text for a number": ("training: {steps: many}\n", [], ["training.steps is 'many'", "a valid integer"]),
    "layers": (PLAIN.encode() + b"  layers: every:0\n", [], ["layers is 'every:0'", "a valid list", "every:"]),
    "stacks": (PLAIN.encode() + b"  stacks: [middle]\n", [], ["stacks is 'middle'", "'encoder' or 'decoder'"]),
    # The scheme.
    "unknown scheme": ("", ["conversion.scheme=fyre"], ["conversion.scheme", "'fyre'", "Did you mean 'fire'?"]),
    "unknown option": ("", ["conversion.options.widht=3"], ["no option 'widht'", "Did you mean 'width'?"]),
    "type of an option": ("", ["conversion.options.width=wide"], ["width='wide'", "expected int"]),
    "fit where attention is what it was": ("", ["fit=transfer", "native=handover"], ["native is 'handover'"]),
    # Keys that do nothing.
    "handover without handover": ("", ["conversion.handover=0.5"], ["without conversion.native: handover"]),
    "share of the built-in text": ("", ["held_out_share=0.2"], ["held_out_share is 0.2", "another data.source"]),
    # Keys that contradict each other.
    "streaming the built-in text": ("", ["data.streaming=true"], ["the builtin text is there at once"]),
    "a step at rate 0": ("", ["training.steps=1", "training.warmup=0.6"], ["warmup is 0.6", "the only step"]),
    "windows in a handover": (
        "",
        ["layers=every:2", "native=handover", "window=8"],
        ["window is 8", "would fade, too"],
    ),
    "repeating in documents": (
        "",
        ["transfer={steps: 1, repeat: 0.5}", "data.packing=documents"],
        ["data.packing is 'documents', which do not see each other"],
    ),
    "skipping in documents": ("", ["training.skip_to=512", "data.packing=documents"], ["data.packing is 'documents'"]),
    # Overrides.
    "no equals": ("", ["training.steps"], ["'training.steps': expected KEY=VALUE"]),
    "section as a value": ("", ["training=[5]"], ["training.steps is ['5']"]),
    "override twice": ("", ["training.steps=5", "training.steps=6"], ["training.steps is given twice"]),
}


# Values that fit no key, or few.
HOSTILE = [
    *("1" + "0" * 309, "1" + "0" * 23, "-1" + "0" * 23, "9" * 5000, ".nan", ".inf", "1e308", "1e-320", "-1", "0", "''"),
    *("x", "[]", "{}", "[[]]", "{a: b}", "{1: 2}", "{a: {b: {c: {}}}}", "true", "[.nan]", "[-1]", "y" * 5_000),
    *("!!bool x", "!!int ''", "!!float x", "!!null x", "!!timestamp x", "!!binary x", "!!set {a}", "&a [*a]", "? {}"),
]
KEYS = [key for key in Recipe(model="x", conversion=Conversion(scheme="fire")).flat() if not key.endswith("summary")]


def one_line(error: Exception) -> str:
    """What an error says, which is one line that can be read."""
    said = str(error)
    assert "\n" not in said
    assert len(said) <= 1200
    return said


def strict_json(text: str) -> Any:
    """The content of JSON, in which every number is one, and none is of those that JSON lacks."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    def walk(value: Any) -> None:
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(each)
        assert not (isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d+)?(e[-+]?\d+)?|-?inf(inity)?", value)), value

    found = json.loads(text, parse_constant=refuse)
    walk(found)
    return found


@pytest.mark.parametrize(("name", "turns"), once([("extend", 9), *((name, 1) for name in library.names())]))
def test_every_key_takes_or_refuses_every_value(name: str, turns: int) -> None:
    config = AutoConfig.from_pretrained(DIRECTORIES["llama"])
    scheme = ["scheme=fire"] if name == "swap" else []
    for turn, key in enumerate([*(["factor", "by"] if name == "extend" else []), *KEYS]):
        # A sample gives each key some of the values in turn.
        for value in HOSTILE[turn % turns :: turns]:
            given = [pair for pair in scheme if key != "conversion.scheme"]
            try:
                read_recipe(name, [*given, f"{key}={value}"], config=config)
            except hf_posenc.PosencError as error:
                one_line(error)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_recipe_is_one_error(case: str, tmp_path: Path) -> None:
    text, overrides, expected = WRONG[case]
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, text if isinstance(text, bytes) else PLAIN + text, *overrides)
    message = str(caught.value)
    for part in expected:
        assert part in message
    assert "\n" not in message
    assert message.endswith((".", "?"))


@pytest.mark.parametrize("schedule", typing.get_args(Schedule))
@pytest.mark.parametrize("override", ["learning_rate=0", "learning_rate=1e-7", "warmup=1"])
def test_a_schedule_runs_or_is_refused(schedule: str, override: str, tmp_path: Path) -> None:
    try:
        training = read(tmp_path, PLAIN, "training.steps=4", f"schedule={schedule}", override).training
    except RecipeError:
        return
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate or 0.0)
    rates = get_scheduler(schedule, optimizer, num_warmup_steps=training.warmup_steps, num_training_steps=4)
    for _ in range(4):
        optimizer.step()
        rates.step()


def test_there_is_no_such_recipe(tmp_path: Path) -> None:
    for source, expected in {
        "swp": "Did you mean 'swap'?",
        str(tmp_path / "none.yaml"): "There is no file",
        str(tmp_path): "There is no recipe",
    }.items():
        with pytest.raises(RecipeError, match=re.escape(expected)):
            read_recipe(source)


@pytest.mark.parametrize("kind", [hint for hint in typing.get_type_hints(Recipe).values()] + [Recipe])
def test_every_key_is_documented(kind: Any) -> None:
    if dataclasses.is_dataclass(kind):
        for entry in dataclasses.fields(kind):
            assert f"\n        {entry.name}: " in f"{kind.__doc__}"
