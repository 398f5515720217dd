"""Helpers of all scripts in this folder: the machine in words, Markdown tables, whole files, separate processes."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """Describe where and with what this was measured."""
    import torch

    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.split(":")[1].strip() for line in facts if "model name" in line), platform.processor())
    where = f"{torch.cuda.get_device_name()}, {cpu}" if torch.cuda.is_available() else cpu
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{where}, Python {platform.python_version()}, {packages}, {datetime.date.today()}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], rule: str = "---") -> str:
    """Return a Markdown table with the names of its rows on the left, and this rule below the other columns."""
    rules = "|".join(["", "---", *[rule] * (len(header) - 1), ""])
    return "\n".join([_line(header), rules, *map(_line, rows)])


def _line(cells: Sequence[object]) -> str:
    return "".join(("|", *(f" {cell} |" if cell != "" else " |" for cell in cells)))


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def in_a_process(function: Callable[..., Any], *given: Any, start: str = "spawn") -> Any:
    """Return what a function returns in a process of its own; `fork` makes it a copy of this one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(start)) as pool:
        return pool.submit(function, *given).result()
