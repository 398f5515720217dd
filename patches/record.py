"""The record of a patch in a config: schemes, their options and their layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError, with_config
from transformers import PreTrainedConfig

from hf_posenc import __version__
from hf_posenc.errors import CheckpointError

# It rises when the previous release could not correctly read a checkpoint written now.
FORMAT_VERSION = 1

Native = Literal["remove", "keep"]
_Count = Annotated[int, Strict(), Field(ge=0)]
_Strength = Annotated[float, Strict(), Field(ge=0, le=1)]
# A record that is read has no other keys.
_NO_MORE = with_config(ConfigDict(extra="forbid"))


@_NO_MORE
@dataclass(frozen=True)
class Part:
    """A group's share of one stack: the indices of its layers, sorted, and the scheme's options, resolved for it."""

    layers: tuple[_Count, ...]
    options: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers {list(self.layers)}")


@_NO_MORE
@dataclass(frozen=True)
class Group:
    """The layers that one call of `patch` gave one scheme.

    Attributes:
        id: Number of the group, and name of its shared scheme in the state dict.
        scheme: Registry name.
        native: Whether the model's own encoding stays under the scheme.
        stacks: The group's share of each stack.
    """

    id: _Count
    scheme: str
    native: Native
    stacks: Annotated[dict[str, Part], Field(min_length=1)]

    def places(self) -> set[tuple[str, int]]:
        """Return the layers, each with the name of its stack."""
        return {(name, layer) for name, part in self.stacks.items() for layer in part.layers}


@_NO_MORE
@dataclass(frozen=True)
class Strengths:
    """The strengths of a model's own encoding, where it is kept, and of its schemes: 1 is full, 0 is none."""

    native: _Strength = 1.0
    scheme: _Strength = 1.0


FULL = Strengths()


@_NO_MORE
@dataclass(frozen=True)
class _Record:
    """The entry `posenc` as it is written."""

    format_version: Annotated[int, Strict()]
    groups: Annotated[list[Group], Field(min_length=1)]
    plugin_version: Any = None
    strengths: Strengths = FULL
    locked: Any = None

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version {self.format_version}")
        places = [place for group in self.groups for place in group.places()]
        if len(set(places)) < len(places):
            raise ValueError("two schemes for one layer")
        if len({group.id for group in self.groups}) < len(self.groups):
            raise ValueError("two groups with one id")
        if self.strengths != FULL and any(group.native == "remove" for group in self.groups):
            raise ValueError("strengths with native='remove'")


_RECORD = TypeAdapter(_Record)


def to_dict(groups: Sequence[Group], strengths: Strengths = FULL) -> dict[str, Any]:
    """Return the record, the entry `posenc` of a config, as plain data for JSON."""
    written = json.loads(json.dumps([asdict(group) for group in groups]))  # lists for tuples, as they are read
    found = {"format_version": FORMAT_VERSION, "plugin_version": __version__, "groups": written}
    return found if strengths == FULL else {**found, "strengths": asdict(strengths)}


def digest(posenc: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record, in hexadecimal, which binds it to the weights that are saved with it.

    The version of the plugin does not count: saving a checkpoint again with another release changes nothing.
    """
    bound = {key: value for key, value in posenc.items() if key not in ("plugin_version", "digest")}
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


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
    """Read the strengths from a config; full where it names none. Errors are those of `from_config`."""
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
    try:
        return _RECORD.validate_python(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        got = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r:.60}"
        raise CheckpointError(
            f"The entry 'posenc' of config.json is damaged ({place}: {first['msg']}{got}). Restore config.json "
            "from the original checkpoint, or convert the model again."
        ) from error
