"""YAML of recipes, overrides `section.key=value`, and validation by pydantic.

All scalars of the YAML but null are text, to which pydantic gives the type of their key: `no` may be a name, `1e-3` is
a number. There are no aliases and no tags, and a key may not be there twice.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from hf_posenc.errors import RecipeError, cut, shown, suggest

T = TypeVar("T")
Path = tuple[str, ...]

# Characters of a recipe.
LARGEST_TEXT = 2**18
# A short way to options of the scheme.
_SHORT = {"scheme": ("conversion", "options")}


def build(kind: type[T], content: Any, *, where: str, overrides: Sequence[str] = ()) -> T:
    """Validate nested mappings and return them as a dataclass, whose fields that are dataclasses are sections.

    Overrides `section.key=value` are applied in place. A `RecipeError` begins with `where`.
    """
    override(kind, content, overrides)
    hashable: Any = kind  # mypy takes no class of a type variable for it
    try:
        found: T = _adapter(hashable).validate_python(content)
        return found
    except ValidationError as error:
        raise RecipeError(f"{where}: {_message(kind, error)}") from error


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the validator of a class; making one takes a tenth of a second."""
    return TypeAdapter(kind)


def override(kind: type[Any], content: dict[str, Any], pairs: Sequence[str]) -> dict[Path, str]:
    """Apply overrides to nested mappings in place, and return them by key path."""
    given: dict[Path, str] = {}
    for pair in pairs:
        dotted, equals, text = pair.partition("=")
        if not equals or not all(dotted.split(".")):
            raise RecipeError(f"{shown(pair)}: expected KEY=VALUE, for instance training.steps=500.")
        value = parse(text, shown(pair))
        path = _path(kind, tuple(dotted.split(".")), value)
        if any(path[: len(other)] == other[: len(path)] for other in given):
            raise RecipeError(f"{shown(pair)}: {'.'.join(path)} is given twice. Give each key once.")
        given[path], place = pair, content
        for section in path[:-1]:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise RecipeError(f"{shown(pair)}: {section} is {shown(place)}, which has no keys.")
        place[path[-1]] = value
    return given


def _path(kind: type[Any], path: Path, value: Any) -> Path:
    """Return a whole path: a key may lack its section, and a section that is given one value means its first key."""
    name, sections = path[0], _sections(kind)
    if len(path) > 1 and name in _SHORT:
        return (*_SHORT[name], *path[1:])
    if name in sections:
        return path if len(path) > 1 or isinstance(value, dict) else (name, sections[name][0])
    owners = [section for section, keys in sections.items() if name in keys]
    if "training" in owners:  # Other stages have keys of the same names.
        owners = ["training"]
    if len(owners) > 1:
        raise RecipeError(f"{name}={shown(value)}: expected {' or '.join(f'{owner}.{name}' for owner in owners)}.")
    return (*owners, *path)


def _sections(kind: type[Any]) -> dict[str, list[str]]:
    hints = typing.get_type_hints(kind)
    return {name: _keys(hint) for name, hint in hints.items() if dataclasses.is_dataclass(hint)}


def _keys(kind: Any) -> list[str]:
    return [entry.name for entry in dataclasses.fields(kind)]


def _message(kind: type[Any], error: ValidationError) -> str:
    """Return the first error of pydantic in words; each member of a union has one for the same key."""
    sections, errors = _sections(kind), error.errors(include_url=False)
    paths = [tuple(map(str, each["loc"][: 2 if set(each["loc"][:1]) & set(sections) else 1])) for each in errors]
    first, path, key = errors[0], paths[0], ".".join(paths[0])
    if first["type"] == "missing":
        return f"{shown(key)} is missing; it has no default, so give it."
    if first["type"] == "unexpected_keyword_argument":
        known = (
            sections[path[0]] if len(path) > 1 else [*_keys(kind), *(key for keys in sections.values() for key in keys)]
        )
        return f"there is no key {shown(key)}. {_elsewhere(path[-1])}{suggest(path[-1], set(known))}"
    expected = dict.fromkeys(each["msg"] for each, other in zip(errors, paths, strict=True) if other == path)
    return f"{key or 'the recipe'} is {shown(first['input'])}: {'; or: '.join(expected)}."


def _elsewhere(name: str) -> str:
    """Return where a key is known that recipes lack."""
    from hf_posenc import registry

    options = (registry.describe(scheme).options for scheme in registry.schemes())
    is_option = any(option.name == name for found in options for option in found)
    return f"Options of a scheme are given as scheme.{name}=VALUE. " if is_option else ""


def typed(value: Any) -> Any:
    """Return a value of YAML whose key has no type, such as an option of a scheme, with its words as numbers."""
    if isinstance(value, list):
        return [typed(each) for each in value]
    if isinstance(value, dict):
        return {name: typed(each) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    # Plans and errors name values as in Python.
    words = {"true": True, "false": False, "True": True, "False": False, "None": None, "null": None}
    if value in words:
        return words[value]
    if re.fullmatch(r"[-+]?\d{1,300}", value):
        return int(value)
    is_number = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|nan)", value)
    return float(re.sub(r"\.(?=[in])", "", value)) if is_number else value


# -- YAML ----------------------------------------------------------------------------------------------------------


def parse(text: str, what: str) -> Any:
    """Read one YAML document; raise `RecipeError`, which names it, if it is no YAML of a recipe, or huge."""
    if len(text) > LARGEST_TEXT:
        raise RecipeError(f"{what} has more than {LARGEST_TEXT:,} characters; expected the YAML of a recipe.")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise RecipeError(f"{what} is not a recipe's YAML: {cut(str(error.problem))}{place}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{what} is not a recipe's YAML: {' '.join(str(error).split())}.") from error


def write(content: Any) -> str:
    """Return a YAML document that `parse` and other readers read alike; raise `RecipeError` if there is none."""
    try:
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    except yaml.representer.RepresenterError as error:
        value = error.args[-1]
        raise RecipeError(
            f"A recipe has {shown(value)}, of type {type(value).__name__}; expected what YAML can say: text, numbers, "
            "lists and keys with values."
        ) from error


class _Loader(yaml.BaseLoader):
    """Loader of text, lists and mappings."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node; raise for aliases, by which a few lines could stand for gigabytes, and for tags."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) or event.anchor:
            problem = "a recipe has no tags, anchors and aliases"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a dict; raise for duplicate keys, of which PyYAML would take the last."""
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            names = [key.value for key, _ in node.value]
            twice, mark = next((key.value, key.start_mark) for key, _ in node.value[::-1] if names.count(key.value) > 1)
            problem = f"the key {shown(twice)} is there twice"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=mark)
        return found


_NULL = "tag:yaml.org,2002:null"
_Loader.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_constructor(_NULL, lambda loader, node: None)
