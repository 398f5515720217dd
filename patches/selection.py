"""The stacks and layers that a call of `patch` selects, and their division between calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from hf_posenc.errors import LayerSelectionError
from hf_posenc.patches.architecture import Architecture
from hf_posenc.patches.record import Group

# A selection of layers: indices, a slice, "every:N" (the last of each N), or a predicate on the index.
Layers = Sequence[int] | slice | str | Callable[[int], bool] | None


def choose_stacks(
    architecture: Architecture, model: nn.Module, stacks: str | Sequence[str] | None
) -> dict[str, nn.Module]:
    """Return the chosen bodies by stack name."""
    bodies = architecture.stacks(model)
    if stacks is None:
        return bodies
    wanted = [stacks] if isinstance(stacks, str) or not isinstance(stacks, Iterable) else list(stacks)
    unknown = [name for name in wanted if name not in bodies]
    if unknown or not wanted:
        raise LayerSelectionError(
            f"stacks={stacks!r}: a {type(model).__name__} has the stacks {', '.join(bodies)}. Choose among these."
        )
    return {name: body for name, body in bodies.items() if name in wanted}


def choose_layers(layers: Layers, count: int) -> tuple[int, ...]:
    """Turn a selector into sorted layer indices.

    Raises:
        LayerSelectionError: It is malformed, out of range, or matches nothing.
    """
    everything = range(count)
    expected = "a list of indices, a slice, 'every:N' or a function of the index"
    if layers is None:
        return tuple(everything)
    if isinstance(layers, slice):
        try:
            chosen = set(everything[layers])
        except (TypeError, ValueError):
            raise LayerSelectionError(f"layers={layers!r}: expected {expected}.") from None
    elif isinstance(layers, str):
        kind, _, step = layers.partition(":")
        if kind != "every" or not step.isdecimal() or int(step) < 1:
            raise LayerSelectionError(f"layers={layers!r}: expected {expected}.")
        chosen = set(everything[int(step) - 1 :: int(step)])
    elif callable(layers):
        chosen = {index for index in everything if layers(index)}
    else:
        try:
            named = list(layers)
        except TypeError:
            raise LayerSelectionError(f"layers={layers!r}: expected {expected}.") from None
        indices = [_index(name) for name in named]
        for name, index in zip(named, indices, strict=True):
            if index is None or not -count <= index < count:
                raise LayerSelectionError(
                    f"layers={layers!r}: {name!r} is no layer; the stack has layers 0 to {count - 1}."
                )
        chosen = {index % count for index in indices if index is not None}
        if len(chosen) < len(indices):
            raise LayerSelectionError(f"layers={layers!r} names a layer twice.")
    if not chosen:
        raise LayerSelectionError(f"layers={layers!r} matches none of the {count} layers.")
    return tuple(sorted(chosen))


def _index(value: object) -> int | None:
    """Return a whole number of any library (numpy, torch) as one of Python's; `None` for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def divide(groups: Sequence[Group], chosen: dict[str, tuple[int, ...]]) -> tuple[list[Group], list[Group]]:
    """Return the earlier groups that stay and those that are replaced.

    Raises:
        LayerSelectionError: A group would lose some of its layers but not all.
    """
    kept, replaced = [], []
    for group in groups:
        theirs = {(name, layer) for name, part in group.stacks.items() for layer in part.layers}
        ours = {(name, layer) for name, part in chosen.items() for layer in part}
        if not theirs & ours:
            kept.append(group)
        elif theirs <= ours:
            replaced.append(group)
        else:
            name, layer = sorted(theirs & ours)[0]
            raise LayerSelectionError(
                f"Layer {layer} of the {name} already has the scheme {group.scheme!r}, from a patch that also covers "
                "layers outside this selection. Select all of its layers or none of them, or unpatch first."
            )
    return kept, replaced


def free_id(kept: Sequence[Group]) -> int:
    """Return the smallest number that no kept group has."""
    taken = {group.id for group in kept}
    return next(number for number in range(len(taken) + 1) if number not in taken)
