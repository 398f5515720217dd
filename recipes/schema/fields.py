"""YAML of recipes, validated against dataclasses by pydantic, with overrides `section.key=value` (or `key=value`).

The YAML is the core schema of version 1.2: `1e-3` is a number, `no`, `0:8` and `2024-01-01` are text. A key may not be
there twice.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hf_posenc.errors import RecipeError, cut, shown, suggest

T = TypeVar("T")
Path = tuple[str, ...]

# Names of the same keys in other libraries.
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

# Plain words for pydantic's error types; other types keep pydantic's message.
_WORDS = {
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "bool_type": "true or false",
    "dict_type": "keys with values",
    "none_required": "null",
    "too_short": "at least one entry",
    "string_pattern_mismatch": "a pattern such as 'every:4'",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
}


def build(kind: type[T], content: Any, *, where: str, overrides: Sequence[str] = ()) -> T:
    """Validate nested mappings and return them as a dataclass, whose fields that are dataclasses are sections.

    Overrides `section.key=value` are applied in place. A `RecipeError` names the override at fault, or else `where`.
    """
    given = override(kind, content, overrides)
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        # pydantic reports each member of a union; these errors share the path of the key.
        found = [(_path(kind, entry["loc"]), entry) for entry in error.errors(include_url=False)]
        path = found[0][0]
        # Blame an override that gave the value, a part of it, or its section.
        blamed = (shown(pair) for keys, pair in given.items() if all(a == b for a, b in zip(keys, path, strict=False)))
        source = next(blamed, where)
        same = [entry for other, entry in found if other == path]
        raise RecipeError(f"{source}: {_message(kind, path, same)}") from error


def override(kind: type[Any], content: dict[str, Any], pairs: Sequence[str]) -> dict[Path, str]:
    """Apply overrides to nested mappings in place, and return them by key path."""
    given: dict[Path, str] = {}
    for pair in pairs:
        dotted, equals, text = pair.partition("=")
        path = tuple(dotted.split("."))
        if not (equals and all(path)):
            raise RecipeError(f"{shown(pair)}: expected KEY=VALUE, for instance training.steps=500.")
        value = parse(text, shown(pair))
        if len(path) == 1 or path[0] not in _known(kind, ()):
            path = (*_whole_path(kind, path[0], value), *path[1:])
        if any(path[: len(other)] == other[: len(path)] for other in given):
            raise RecipeError(f"{shown(pair)}: {'.'.join(path)} is given twice. Give each key once.")
        given[path] = pair
        place = content
        for depth, section in enumerate(path[:-1], start=1):
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):
                key = ".".join(path[:depth])
                raise RecipeError(
                    f"{shown(pair)}: the recipe has {key}: {shown(inner)}, which has no keys. Give {key}=VALUE."
                )
            place = inner
        place[path[-1]] = value
    return given


def _whole_path(kind: type[Any], name: str, value: Any) -> Path:
    """Return the path of a key without its section, and of a section that is given one value, for its first key."""
    own = _known(kind, ())
    sections = {key: _known(kind, (key,)) for key in own if dataclasses.is_dataclass(_hint(kind, (key,)))}
    if name in sections and not isinstance(value, dict):
        return (name, sections[name][0])
    owners = [key for key, names in sections.items() if name in names]
    if name in own or not owners:
        return (name,)
    if len(owners) > 1 and "training" not in owners:
        raise RecipeError(f"{name}={shown(value)}: expected {' or '.join(f'{owner}.{name}' for owner in owners)}.")
    return ("training" if "training" in owners else owners[0], name)


def _path(kind: Any, place: tuple[int | str, ...]) -> Path:
    """Return the key path of a pydantic location, without union members and list indices."""
    is_section = bool(place) and dataclasses.is_dataclass(typing.get_type_hints(kind).get(str(place[0])))
    return tuple(map(str, place[: 2 if is_section else 1]))


def _message(kind: Any, path: Path, errors: list[ErrorDetails]) -> str:
    key, first = ".".join(path), errors[0]
    if first["type"] == "missing":
        return f"{shown(key)} is missing; it has no default, so give it."
    if first["type"] in ("unexpected_keyword_argument", "invalid_key"):
        known = _known(kind, path[:-1])
        if len(path) == 1:  # Overrides may leave out the section.
            inner = (_known(kind, (name,)) for name in known if dataclasses.is_dataclass(_hint(kind, (name,))))
            known = list(dict.fromkeys(itertools.chain(known, *inner)))
        renamed = _ELSEWHERE.get(path[-1])
        hint = f"It is called {shown(renamed)} here." if renamed in known else suggest(path[-1], known)
        return f"there is no key {shown(key)}. {hint}"
    if first["type"] == "dataclass_type":
        return (
            f"{key or 'the recipe'} is {shown(first['input'])}; expected keys such as {', '.join(_known(kind, path))}."
        )
    words = list(dict.fromkeys(map(_expected, errors)))
    if type(None) in typing.get_args(_hint(kind, path)):
        words.append("null")
    is_word = any(entry["type"] == "string_type" for entry in errors) and isinstance(first["input"], (int, float))
    verb = "has" if any(isinstance(part, int) for part in first["loc"]) else "is"
    quotes = " Put it in quotes." * is_word
    return f"{key} {verb} {shown(first['input'])}; expected {' or '.join(words)}.{quotes}"


def _known(kind: Any, path: Path) -> list[str]:
    return [entry.name for entry in dataclasses.fields(_hint(kind, path))]


def _hint(kind: Any, path: Path) -> Any:
    for name in path:
        kind = typing.get_type_hints(kind)[name]
    return kind


def _expected(error: ErrorDetails) -> str:
    words = _WORDS.get(error["type"])
    return words.format(**error.get("ctx", {})) if words else error["msg"].removeprefix("Input should be ")


# -- YAML ----------------------------------------------------------------------------------------------------------

_TAG = "tag:yaml.org,2002:"
_WHOLE = r"[-+]?(?:0|[1-9][0-9_]*)"
_FLOAT = re.compile(
    rf"{_WHOLE}(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?$|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_FIRST_OF_NUMBER = list("-+.0123456789")
# Tags of scalars that their text must bear out, with others that say as much.
_SAID_BY_VALUE = {f"{_TAG}{name}": () for name in ("null", "bool", "int")} | {f"{_TAG}float": (f"{_TAG}int",)}
# Characters of a recipe, and entries of a value with all its aliases.
LARGEST_TEXT, _LARGEST_COUNT = 2**18, 10_000


def parse(text: str, what: str) -> Any:
    """Read one YAML document; raise `RecipeError`, which names it, if it is not YAML, has a key twice, or is huge."""
    if len(text) > LARGEST_TEXT:
        raise RecipeError(
            f"{what} has {len(text):,} characters; expected the YAML of a recipe, of at most {LARGEST_TEXT:,}."
        )
    is_no_yaml = f"{what} is not a recipe's YAML"
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise RecipeError(f"{is_no_yaml}: {cut(str(error.problem))}{place}.") from error
    # The parser's own errors, too many levels or digits, and what its constructors raise.
    except Exception as error:
        raise RecipeError(f"{is_no_yaml}: {' '.join(str(error).split())}.") from error


def write(content: Any) -> str:
    """Return a YAML document that `parse` and YAML 1.1 readers read alike; raise `RecipeError` if there is none."""
    try:
        return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    except yaml.representer.RepresenterError as error:
        value = error.args[-1]
        raise RecipeError(
            f"A recipe has {shown(value)}, of type {type(value).__name__}; expected what YAML can say: text, numbers, "
            "lists and keys with values."
        ) from error


class _Loader(yaml.SafeLoader):
    """Loader with the core schema of YAML 1.2."""

    yaml_implicit_resolvers = {}
    yaml_constructors = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def construct_document(self, node: yaml.Node) -> Any:
        """Return the content of a document; raise if its aliases stand for more entries than a recipe has."""
        self._entries(node, {})
        return super().construct_document(node)

    def _entries(self, node: yaml.Node, known: dict[yaml.Node, int | None]) -> int:
        """Return the entries that a node stands for; raise if they are too many, endless, or not as their tags say."""
        if node not in known:
            known[node] = None
            if isinstance(node, yaml.ScalarNode):
                # PyYAML has no types.
                plain = self.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
                if node.tag in _SAID_BY_VALUE and plain not in (node.tag, *_SAID_BY_VALUE[node.tag]):
                    kind = node.tag.removeprefix(_TAG)
                    raise yaml.constructor.ConstructorError(
                        problem=f"{shown(node.value)} is no {kind}", problem_mark=node.start_mark
                    )
                parts = []
            else:
                parts = [part for entry in node.value for part in (entry if isinstance(entry, tuple) else (entry,))]
            known[node] = 1 + sum(self._entries(part, known) for part in parts)
        found = known[node]
        if found is None or found > _LARGEST_COUNT:
            what = "contains itself" if found is None else f"has {found:,} entries, with those that aliases repeat"
            raise yaml.constructor.ConstructorError(problem=f"a value {what}", problem_mark=node.start_mark)
        return found

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a dict; raise for duplicate keys, of which PyYAML would take the last."""
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {shown(key.value)} is there twice"
                    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which YAML 1.1 or 1.2 would read as something else."""


_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"{_WHOLE}$"), _FIRST_OF_NUMBER)
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FIRST_OF_NUMBER)
_Dumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, _FIRST_OF_NUMBER)
