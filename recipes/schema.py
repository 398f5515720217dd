"""Nested dataclasses as the schema of a YAML file: unknown keys, wrong types and overrides."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

import yaml

from hf_posenc.errors import RecipeError, suggest

T = TypeVar("T")

# What the same thing is called elsewhere.
_ELSEWHERE = {
    "accumulation": "micro_batch_size",
    "dataset": "source",
    "gradient_accumulation_steps": "micro_batch_size",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lr": "learning_rate",
    "lr_scheduler_type": "schedule",
    "max_length": "length",
    "max_steps": "steps",
    "name": "scheme",
    "per_device_train_batch_size": "batch_size",
    "r": "rank",
    "report_to": "loggers",
    "save_steps": "every",
    "save_total_limit": "keep",
    "sequence_length": "length",
    "target_modules": "targets",
    "text_column": "column",
    "warmup_ratio": "warmup",
}


def build(kind: type[T], content: Any, *, where: str, key: str = "") -> T:
    """Make a dataclass of nested mappings, all of it checked.

    Args:
        kind: A dataclass; fields that are dataclasses are sections.
        content: What was read.
        where: The file, for errors.
        key: The section, for errors.

    Raises:
        RecipeError: A key is unknown or missing, or a value is of another type.
    """
    if not isinstance(content, dict):
        raise RecipeError(f"{where}: {key or 'the recipe'} is {content!r}; expected keys: {', '.join(_fields(kind))}.")
    known = _fields(kind)
    hints = typing.get_type_hints(kind)
    for name in content:
        if name not in known:
            raise RecipeError(f"{where}: there is no key {_dotted(key, name)!r}. {_hint(str(name), known)}")
    missing = [name for name, entry in known.items() if _is_required(entry) and name not in content]
    if missing:
        raise RecipeError(f"{where}: {_dotted(key, missing[0])!r} is missing; it has no default.")
    values = {
        name: build(hints[name], value, where=where, key=_dotted(key, name))
        if dataclasses.is_dataclass(hints[name])
        else _checked(hints[name], value, where, _dotted(key, name))
        for name, value in content.items()
    }
    return kind(**values)


def override(content: dict[str, Any], pair: str) -> None:
    """Put `section.key=value` into nested mappings, in place; `build` checks the result.

    Raises:
        RecipeError: It is not of that form, or the value is not YAML.
    """
    path, equals, text = pair.partition("=")
    if not (path and equals):
        raise RecipeError(f"{pair!r}: expected KEY=VALUE, for instance training.steps=500.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{pair!r}: the value is not YAML: {' '.join(str(error).split())}") from error
    *sections, last = path.split(".")
    place = content
    for section in sections:
        inner = place.setdefault(section, {})
        if inner is None:
            inner = place[section] = {}
        if not isinstance(inner, dict):
            raise RecipeError(f"{pair!r}: {section!r} is {inner!r}, which has no keys.")
        place = inner
    place[last] = value


def _fields(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    return {entry.name: entry for entry in dataclasses.fields(kind)}


def _is_required(entry: dataclasses.Field[Any]) -> bool:
    return entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING


def _dotted(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _hint(name: str, known: dict[str, Any]) -> str:
    renamed = _ELSEWHERE.get(name)
    return f"It is called {renamed!r} here." if renamed in known else suggest(name, known)


def _checked(hint: Any, value: Any, where: str, key: str) -> Any:
    found = _converted(hint, value)
    if found is _NO:
        raise RecipeError(f"{where}: {key} is {value!r}; expected {_words(hint)}.")
    return found


_NO = object()


def _converted(hint: Any, value: Any) -> Any:
    """Return a value as of a type, or `_NO`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return next((found for part in inner if (found := _converted(part, value)) is not _NO), _NO)
    if origin is typing.Literal:
        return value if value in inner and type(value) in map(type, inner) else _NO
    if origin is list:
        items = [_converted(inner[0], item) for item in value] if isinstance(value, list) else [_NO]
        return _NO if any(item is _NO for item in items) else items
    if origin is dict:
        return value if isinstance(value, dict) and all(isinstance(name, str) for name in value) else _NO
    if hint is type(None):
        return None if value is None else _NO
    if hint is float and isinstance(value, str):
        # YAML 1.1 reads 1e-3 as a string, since it has no point.
        try:
            return float(value)
        except ValueError:
            return _NO
    if hint is float and type(value) is int:
        return float(value)
    return value if type(value) is hint else _NO


def _words(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in inner)
    if origin is typing.Literal:
        return " or ".join(map(str, inner))
    if origin is list:
        return f"a list of {_words(inner[0])}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return "keys with values" if origin is dict else names[hint]
