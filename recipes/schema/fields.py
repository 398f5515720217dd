"""Nested dataclasses as the schema of a YAML file: unknown keys, wrong types, values out of range, and overrides."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hf_posenc.errors import RecipeError, suggest
from hf_posenc.recipes.schema import plain_yaml

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


@dataclasses.dataclass(frozen=True)
class Such:
    """What a value of a type must be besides, for `Annotated`.

    Attributes:
        words: It, to be put after the words for the type.
        holds: Whether it is.
    """

    words: str
    holds: Callable[[Any], bool]


def build(kind: type[T], content: Any, *, where: str, key: str = "") -> T:
    """Make a dataclass of nested mappings, all of it checked.

    Args:
        kind: A dataclass; fields that are dataclasses are sections.
        content: What was read.
        where: The file, for errors.
        key: The section, for errors.

    Raises:
        RecipeError: A key is unknown or missing, or a value is of another type or out of range.
    """
    known = _fields(kind)
    if not isinstance(content, dict):
        raise RecipeError(f"{where}: {key or 'the recipe'} is {content!r}; expected keys such as {', '.join(known)}.")
    for name in content:
        _look_up(kind, name, where, key)
    missing = [name for name, entry in known.items() if _is_required(entry) and name not in content]
    if missing:
        raise RecipeError(f"{where}: {_dotted(key, missing[0])!r} is missing; it has no default, so give it.")
    hints = _hints(kind)
    values = {
        name: build(hints[name], value, where=where, key=_dotted(key, name))
        if dataclasses.is_dataclass(hints[name])
        else _checked(hints[name], value, where, _dotted(key, name))
        for name, value in content.items()
    }
    return kind(**values)


def override(kind: type, content: dict[str, Any], pairs: Sequence[str]) -> None:
    """Put each `section.key=value` into nested mappings, in place.

    Args:
        kind: The dataclass that the mappings are to become.
        content: The mappings.
        pairs: The overrides; the values are YAML.

    Raises:
        RecipeError: An override is not of that form, names no key or one that another has given, or its value is wrong.
    """
    given: list[tuple[str, ...]] = []
    for pair in pairs:
        dotted, equals, text = pair.partition("=")
        path = tuple(dotted.split("."))
        if not (equals and all(path)):
            raise RecipeError(f"{pair!r}: expected KEY=VALUE, for instance training.steps=500.")
        if any(path[: len(other)] == other[: len(path)] for other in given):
            raise RecipeError(f"{pair!r}: {dotted} is given twice. Give each key once.")
        given.append(path)
        value = plain_yaml.parse(text, repr(pair))
        _check_path(kind, path, value, where=repr(pair))
        _put(content, path, value, where=repr(pair))


def default(entry: dataclasses.Field[Any]) -> Any:
    """Return the default of a field that has one."""
    return entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()


def _check_path(kind: Any, path: tuple[str, ...], value: Any, where: str) -> None:
    """Raise unless there is a key at a path and, where it is a single value, the value is one for it."""
    hint = kind
    for depth, name in enumerate(path):
        if dataclasses.is_dataclass(hint):
            above = ".".join(path[:depth])
            _look_up(hint, name, where, above)
            hint = _hints(hint)[name]
        elif _takes_any_keys(hint):
            return
        else:
            key = ".".join(path[:depth])
            raise RecipeError(f"{where}: {key} has no keys; it is {_words(hint)}. Give {key}=VALUE.")
    if dataclasses.is_dataclass(hint):
        build(typing.cast(type, hint), value, where=where, key=".".join(path))
    else:
        _checked(hint, value, where, ".".join(path))


def _put(content: dict[str, Any], path: tuple[str, ...], value: Any, where: str) -> None:
    place = content
    for depth, section in enumerate(path[:-1], start=1):
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            key = ".".join(path[:depth])
            raise RecipeError(f"{where}: the recipe has {key}: {inner!r}, which has no keys. Correct it there.")
        place = inner
    place[path[-1]] = value


def _look_up(kind: Any, name: Any, where: str, key: str) -> None:
    known = _fields(kind)
    if name not in known:
        raise RecipeError(f"{where}: there is no key {_dotted(key, name)!r}. {_hint(str(name), known)}")


def _fields(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    return {entry.name: entry for entry in dataclasses.fields(kind)}


def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _is_required(entry: dataclasses.Field[Any]) -> bool:
    return entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING


def _dotted(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _hint(name: str, known: dict[str, Any]) -> str:
    renamed = _ELSEWHERE.get(name)
    return f"It is called {renamed!r} here." if renamed in known else suggest(name, known)


# -- values ------------------------------------------------------------------------------------------------------------


def _checked(hint: Any, value: Any, where: str, key: str) -> Any:
    found = _converted(hint, value)
    if found is _NO:
        is_word = isinstance(value, (int, float)) and _converted(hint, str(value)) is not _NO
        raise RecipeError(
            f"{where}: {key} is {value!r}; expected {_words(hint)}.{' Put it in quotes.' if is_word else ''}"
        )
    return found


_NO = object()


def _converted(hint: Any, value: Any) -> Any:
    """Return a value as of a type, or `_NO`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        found = _converted(inner[0], value)
        return found if found is not _NO and all(such.holds(found) for such in inner[1:]) else _NO
    if origin in (typing.Union, types.UnionType):
        return next((found for part in inner if (found := _converted(part, value)) is not _NO), _NO)
    if origin is typing.Literal:
        return value if isinstance(value, str) and value in inner else _NO
    if origin is list:
        items = [_converted(inner[0], item) for item in value] if isinstance(value, list) else [_NO]
        return _NO if any(item is _NO for item in items) else items
    if origin is dict:
        return value if isinstance(value, dict) and all(isinstance(name, str) for name in value) else _NO
    if hint is type(None):
        return None if value is None else _NO
    if hint is float:
        # Neither nan nor infinity is at most the largest number.
        return float(value) if type(value) in (int, float) and abs(value) <= sys.float_info.max else _NO
    return value if type(value) is hint else _NO


def _takes_any_keys(hint: Any) -> bool:
    return typing.get_origin(hint) is dict


def _words(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return " ".join([_words(inner[0]), *(such.words for such in inner[1:])])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in inner)
    if origin is typing.Literal:
        return " or ".join(map(str, inner))
    if origin is list:
        return f"a list, each {_words(inner[0])}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return "keys with values" if origin is dict else names[hint]
