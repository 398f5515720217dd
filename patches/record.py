"""The record of a patch in a config: schemes, their options and their layers."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from transformers import PreTrainedConfig

from hf_posenc import __version__, registry
from hf_posenc.errors import CheckpointError, shown

# It rises when the previous release could not correctly read a checkpoint written now.
FORMAT_VERSION = 1

# A number is the share of a rotation's pairs that go on turning, from the fastest on; a dict has one for each type of
# layer.
NativeSetting = Literal["remove", "keep"] | float | dict[str, float]
# What a value of each type in a record is, for a message.
_EXPECTED = {
    dict: "a mapping that is not empty",
    list: "a list that is not empty",
    tuple: "a list",
    Literal: "one of a few words",
    Union: "'remove', 'keep', or a share from 0 to 1, for all layers or for each type of layer",
    str: "a text",
    int: "a whole number from 0",
    float: "a number from 0 to 1",
}


@dataclass(frozen=True)
class Part:
    """A group's share of one stack: the indices of its layers, sorted, and the scheme's options, resolved for it."""

    layers: tuple[int, ...]
    options: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers {list(self.layers)}")


@dataclass(frozen=True)
class Group:
    """The layers that one call of `patch` gave one scheme.

    Attributes:
        id: Number of the group, and name of its shared scheme in the state dict.
        scheme: Registry name.
        native: Whether the model's own encoding stays under the scheme, wholly or as a share of its rotary pairs.
        stacks: The group's share of each stack.
    """

    id: int
    scheme: str
    native: NativeSetting
    stacks: dict[str, Part]

    @property
    def keeps_native(self) -> bool:
        """Whether the model's own encoding stays under the scheme, be it in part."""
        return self.native != "remove"

    def places(self) -> set[tuple[str, int]]:
        return {(name, layer) for name, part in self.stacks.items() for layer in part.layers}


@dataclass(frozen=True)
class Strengths:
    """The strengths of a model's own encoding, where it is kept, and of its schemes: 1 is full, 0 is none."""

    native: float = 1.0
    scheme: float = 1.0


FULL = Strengths()


@dataclass(frozen=True)
class _Record:
    """The entry `posenc` as it is written."""

    format_version: int
    groups: list[Group]
    plugin_version: Any = None
    strengths: Strengths = FULL
    locked: Any = None
    modules: Any = None

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version {self.format_version}")
        places = [place for group in self.groups for place in group.places()]
        if len(set(places)) < len(places):
            raise ValueError("two schemes for one layer")
        if len({group.id for group in self.groups}) < len(self.groups):
            raise ValueError("two groups with one id")
        if self.strengths != FULL and not all(group.keeps_native for group in self.groups):
            raise ValueError("strengths with native='remove'")


_TYPES = {kind: get_type_hints(kind) for kind in (Part, Group, Strengths, _Record)}


def to_dict(groups: Sequence[Group], strengths: Strengths = FULL) -> dict[str, Any]:
    """Return the record, the entry `posenc` of a config, as plain data for JSON."""
    written = json.loads(json.dumps([asdict(group) for group in groups]))  # lists for tuples, as they are read
    found = {"format_version": FORMAT_VERSION, "plugin_version": __version__, "groups": written}
    modules = sorted({module for group in groups for module in registry.get(group.scheme).modules})
    if modules:
        found["modules"] = modules  # for the error where they are not imported
    return found if strengths == FULL else {**found, "strengths": asdict(strengths)}


def digest(posenc: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record, in hexadecimal, which binds it to the weights that are saved with it.

    The version of the plugin and the names of modules do not count: saving a checkpoint again with another release
    changes nothing.
    """
    bound = {key: value for key, value in posenc.items() if key not in ("plugin_version", "modules", "digest")}
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


def remedy(config: Any) -> str:
    """Return what to import before a checkpoint is loaded whose scheme is not registered."""
    modules = _read(config).modules
    if not isinstance(modules, list):
        return "import the module that registers the scheme before loading"
    words = " ".join(f"--import {module}" for module in modules)
    return f"import {', '.join(map(str, modules))} before loading (on the command line: hf-posenc {words} ...)"


def from_config(config: Any) -> list[Group]:
    """Read the groups from a config, none if it was never patched; raise `CheckpointError` for a damaged record."""
    return _read(config).groups


def converted(config: Any) -> list[Any]:
    """Return the configs that hold a record: the config itself, and those of the parts of a composite, in order."""
    found = [config] if getattr(config, "posenc", None) else []
    for _, value in sorted(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            found += converted(value)
    return found


def strengths_from_config(config: Any) -> Strengths:
    return _read(config).strengths


def _read(config: Any) -> _Record:
    record = getattr(config, "posenc", None)
    if not record:
        return _Record(FORMAT_VERSION, [])
    version = record.get("format_version") if isinstance(record, Mapping) else None
    if type(version) is int and version > FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint has posenc format {version}, written by hf_posenc {record.get('plugin_version', '?')}; "
            f"this release reads formats up to {FORMAT_VERSION}. Upgrade: pip install -U hf-posenc."
        )
    found: _Record = _entry(_Record, record, "")
    return found


def _entry(kind: type[Any], value: Any, place: str) -> Any:
    """Read an entry of the record: its keys are the fields of a class. `place` is the way to it, such as `groups.0`."""
    if not isinstance(value, Mapping):
        raise _damaged(place, f"expected a mapping, got {shown(value)}")
    types = _TYPES[kind]
    for key in [*(field.name for field in fields(kind) if field.default is MISSING), *value]:
        if key not in types or key not in value:
            raise _damaged(_within(place, key), "missing" if key in types else "unknown key")
    found = {key: _value(types[key], inner, _within(place, key)) for key, inner in value.items()}
    try:
        return kind(**found)
    except ValueError as error:
        raise _damaged(place, str(error)) from error


def _value(kind: Any, value: Any, place: str) -> Any:
    """Read a value as its type; a mapping or list of entries has at least one."""
    origin, items = get_origin(kind) or kind, get_args(kind)
    if kind is Any or (origin is Literal and value in items) or (kind is str and isinstance(value, str)):
        return value
    if origin in (Union, UnionType):
        for item in items:
            with contextlib.suppress(CheckpointError):
                return _value(item, value, place)
    if is_dataclass(kind):
        return _entry(kind, value, place)  # type: ignore[arg-type]
    if kind is int and type(value) is int and value >= 0:
        return value
    if kind is float and type(value) in (int, float) and 0 <= value <= 1:
        return float(value)
    if origin is dict and isinstance(value, Mapping) and (value or items[1] is Any):
        return {key: _value(items[1], inner, _within(place, key)) for key, inner in value.items()}
    if origin in (list, tuple) and isinstance(value, list | tuple) and (value or items[0] is int):
        return origin(_value(items[0], inner, _within(place, number)) for number, inner in enumerate(value))
    raise _damaged(place, f"expected {_EXPECTED[Union if origin is UnionType else origin]}, got {shown(value)}")


def _within(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)


def _damaged(place: str, fault: str) -> CheckpointError:
    return CheckpointError(
        f"The entry 'posenc' of config.json is damaged ({place + ': ' if place else ''}{fault}). Restore config.json "
        "from the original checkpoint, or convert the model again."
    )
