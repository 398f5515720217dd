"""The record of a patch in a config: schemes, their options and their layers."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_posenc.errors import CheckpointError

# It rises when the previous release could not correctly read a checkpoint written now.
FORMAT_VERSION = 1

Native = Literal["remove", "keep"]


@dataclass(frozen=True)
class Part:
    """A group's share of one stack.

    Attributes:
        layers: Indices, sorted.
        options: The scheme's options, resolved for this stack.
    """

    layers: tuple[int, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """The layers that one call of `patch` gave one scheme.

    Attributes:
        id: Number of the group, and name of its shared scheme in the state dict.
        scheme: Registry name.
        native: Whether the model's own encoding stays under the scheme.
        stacks: The group's share of each stack.
    """

    id: int
    scheme: str
    native: Native
    stacks: Mapping[str, Part]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "id": self.id,
            "scheme": self.scheme,
            "native": self.native,
            "stacks": {
                name: {"layers": list(part.layers), "options": dict(part.options)} for name, part in self.stacks.items()
            },
        }


@dataclass(frozen=True)
class Strengths:
    """The strengths of a model's own encoding and of its schemes.

    Attributes:
        native: Strength of the model's own encoding, where it is kept: 1 is full, 0 is none.
        scheme: Strength of the schemes: 1 is full, 0 is none.
    """

    native: float = 1.0
    scheme: float = 1.0


FULL = Strengths()


def to_dict(groups: Sequence[Group], strengths: Strengths = FULL) -> dict[str, Any]:
    """Return the record, the entry `posenc` of a config."""
    from hf_posenc import __version__

    found = {
        "format_version": FORMAT_VERSION,
        "plugin_version": __version__,
        "groups": [group.to_dict() for group in groups],
    }
    if strengths != FULL:
        found["strengths"] = {"native": strengths.native, "scheme": strengths.scheme}
    return found


def digest(posenc: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record, in hexadecimal, which binds it to the weights that are saved with it.

    The version of the plugin does not count: saving a checkpoint again with another release changes nothing.
    """
    bound = {key: value for key, value in posenc.items() if key not in ("plugin_version", "digest")}
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


def strengths_from_config(config: Any) -> Strengths:
    """Read the strengths from a config; full where it names none.

    Raises:
        CheckpointError: They are no numbers from 0 to 1, or the native encoding that they need was removed.
    """
    record = getattr(config, "posenc", None) or {}
    with _reading("The strengths in the entry 'posenc' of config.json are"):
        given = record.get("strengths", {})
        _check_keys(given, optional=("native", "scheme"))
        for name, value in given.items():
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r}")
        found = Strengths(**{name: float(value) for name, value in given.items()})
        if found != FULL and any(group.native == "remove" for group in from_config(config)):
            raise ValueError(f"{given} with native='remove'")
    return found


def from_config(config: Any) -> list[Group]:
    """Read the groups from a config; none if it was never patched.

    Raises:
        CheckpointError: The record is of a newer format, or damaged.
    """
    record = getattr(config, "posenc", None)
    if not record:
        return []
    version = record.get("format_version") if isinstance(record, Mapping) else None
    if type(version) is int and version > FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint has posenc format {version}, written by hf_posenc {record.get('plugin_version', '?')}; "
            f"this release reads formats up to {FORMAT_VERSION}. Upgrade: pip install -U hf-posenc."
        )
    with _reading("The entry 'posenc' of config.json is"):
        if type(version) is not int or version != FORMAT_VERSION:
            raise KeyError("format_version")
        _check_keys(record, ("format_version", "groups"), ("plugin_version", "strengths", "locked"))
        groups = [_group(entry) for entry in record["groups"]]
        _check(groups)
    return groups


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn what damaged data raises into one error."""
    try:
        yield
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{what} damaged ({error!r}). Restore config.json from the original checkpoint, or convert the model again."
        ) from error


def _group(entry: Mapping[str, Any]) -> Group:
    """Read one group; anything that is not as `Group.to_dict` writes it raises."""
    _check_keys(entry, ("id", "scheme", "native", "stacks"))
    stacks = {}
    for name, part in entry["stacks"].items():
        _check_keys(part, ("layers", "options"))
        stacks[name] = Part(tuple(part["layers"]), dict(part["options"].items()))
    return Group(id=entry["id"], scheme=entry["scheme"], native=entry["native"], stacks=stacks)


def _check_keys(data: Mapping[str, Any], required: Sequence[str] = (), optional: Sequence[str] = ()) -> None:
    """Raise `KeyError` unless a part of the record has the keys that it needs, and no others."""
    wrong = set(required) - set(data) or set(data) - {*required, *optional}
    if wrong:
        raise KeyError(*sorted(wrong))


def _check(groups: Sequence[Group]) -> None:
    """Raise `ValueError` unless the fields make sense, each and together."""
    taken: set[tuple[str, int]] = set()
    for group in groups:
        if type(group.id) is not int or group.id < 0:
            raise ValueError(f"id {group.id!r}")
        if not isinstance(group.scheme, str):
            raise ValueError(f"scheme {group.scheme!r}")
        if group.native not in ("remove", "keep"):
            raise ValueError(f"native {group.native!r}")
        for name, part in group.stacks.items():
            for layer in part.layers:
                if type(layer) is not int or layer < 0:
                    raise ValueError(f"layer {layer!r}")
                if (name, layer) in taken:
                    raise ValueError(f"two schemes for layer {layer} of the {name}")
                taken.add((name, layer))
            if not part.layers or list(part.layers) != sorted(part.layers):
                raise ValueError(f"layers {list(part.layers)}")
        if not group.stacks:
            raise ValueError(f"no stack for the scheme {group.scheme!r}")
    if not groups or len({group.id for group in groups}) < len(groups):
        raise ValueError("two groups with one id" if groups else "no groups")
