"""Check the English of the tree: openings of attribute lines, filler words, and lines of more than 120 characters.

Each count may only go down. Print what is found with `python .ci/check_prose.py --show KIND`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
WIDTH = 120
# What is left of each kind. Lower a number when you have mended some; none may rise.
ALLOWED = {"openings": 0, "fillers": 0, "long": 0}

_OPENING = re.compile(r"^\s+\**\w+(?:, \w+)*: (?:Of|Whose|Which|How|As|What|Those)\b")
_FILLER = re.compile(r"\b(?:beside|anew|in place of)\b", re.IGNORECASE)
# Addresses cannot be broken, and a row of a table is one line.
_UNBREAKABLE = re.compile(r"https?://|^\s*\|")


def files() -> list[Path]:
    """Return the sources and pages that git tracks, without results, data and this script."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    left_out = ("benchmarks/results/", "docs/schemes/", "hf_posenc/tiny_llama/", ".ci/check_prose.py")
    return [ROOT / name for name in listed if not name.startswith(left_out)]


def findings() -> Iterator[tuple[str, str]]:
    """Yield each finding: its kind, and where it is with the line itself."""
    for path in files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            where = f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            if path.suffix == ".py" and _OPENING.search(line):
                yield "openings", where
            if _FILLER.search(line):
                yield "fillers", where
            if len(line) > WIDTH and not _UNBREAKABLE.search(line):
                yield "long", where


def main() -> int:
    """Print the counts, and return 1 where one has risen."""
    found: dict[str, list[str]] = {kind: [] for kind in ALLOWED}
    for kind, where in findings():
        found[kind].append(where)
    if sys.argv[1:2] == ["--show"]:
        sys.stdout.write("".join(f"{place}\n" for place in found[sys.argv[2]]))
        return 0
    for kind, places in found.items():
        sys.stdout.write(f"{kind}: {len(places)} (at most {ALLOWED[kind]})\n")
    return int(any(len(places) > ALLOWED[kind] for kind, places in found.items()))


if __name__ == "__main__":
    sys.exit(main())
