"""Estimates of how long something takes: one real unit of it is timed, and multiplied by their number."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

# A unit is timed at most so often.
_TIMES = 3


def timed(unit: Callable[[], Any], *, until: float = 0.1) -> float:
    """Return the seconds that a unit of work takes, timed again `until` so many seconds are spent.

    The first time, kernels are loaded and memory is allocated. The caller's random numbers do not change.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        found = [_once(unit)]
        while sum(found) < until and len(found) < _TIMES:
            found.append(_once(unit))
    # What is done once, and other programs, disturb the fastest least.
    return min(found)


def _once(unit: Callable[[], Any]) -> float:
    _wait()
    begun = time.perf_counter()
    unit()
    _wait()
    return time.perf_counter() - begun


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def words(seconds: float) -> str:
    """Return a duration in words, as exact as an estimate is."""
    for size, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 1.5 * size:
            return f"about {float(f'{seconds / size:.2g}'):g} {name}s"
    count = max(1, math.ceil(seconds))
    return f"about {count} second{'s' * (count != 1)}"


def listed(parts: Mapping[str, float]) -> str:
    """Return a duration in words with those of its parts, if any is known."""
    if not parts:
        return "unknown until the first steps are done"
    each = ", ".join(f"{name} {words(seconds).removeprefix('about ')}" for name, seconds in parts.items())
    return f"{words(sum(parts.values()))} ({each})"
