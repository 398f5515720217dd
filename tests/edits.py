"""Every small edit of a JSON document: values replaced, dropped, renamed and doubled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of everything in nested data."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def edits(data: Any, others: Callable[[Any, Any], list[Any]]) -> Iterator[tuple[str, Any]]:
    """Return copies with one edit, and what it is; `others` gives the values that replace that of a key."""
    for path in places(data):
        *above, last = path

        def edited() -> tuple[Any, Any]:
            whole = holder = copy.deepcopy(data)
            for key in above:  # noqa: B023 - called at once
                holder = holder[key]
            return whole, holder

        value = edited()[1][last]
        for other in others(last, value):
            whole, holder = edited()
            holder[last] = other
            yield f"{path} = {other!r}", whole
        whole, holder = edited()
        del holder[last]
        yield f"{path} dropped", whole
        whole, holder = edited()
        if isinstance(last, int):
            holder.append(copy.deepcopy(value))
        else:
            holder[f"{last}_too"] = holder.pop(last)
        yield f"{path} doubled or renamed", whole
