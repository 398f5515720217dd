"""Measure a GPU in parts of at most three minutes each, the most valuable part first.

    python benchmarks/on_gpu.py --out benchmarks/results/on_gpu
    python benchmarks/on_gpu.py --out /tmp/tried --device cpu       # small sizes, to see that all parts run

Each part is a process, and is written as soon as it ends: a line in OUT/parts.jsonl, its output in OUT/PART.log, and
the tables of `speed.py` in OUT/PART.md and OUT/PART.json. OUT/README.md has all tables so far. Another run goes on
where this one ended: a part that has ended well is left out. `--minutes` begins no part that may end later.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# Seconds of a part. Measurements end by themselves before, and give what they have.
LIMIT, MEASURED = 180, 110
# Schemes for which the project has goals on a GPU, one for each kernel first.
WANTED = ["kerple", "fire", "fox", "cope", "stick_breaking", "rope", "alibi", "grape_a", "t5", "sandwich"]
# About 130 million parameters.
LARGE = ["--hidden", "640", "--layers", "28"]


class Part(NamedTuple):
    """A name, what it answers, and its command after `python`; `SPEED` stands for options of all measurements."""

    name: str
    question: str
    command: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "on_gpu")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of all parts of this run together")
    parser.add_argument("--parts", nargs="+", help="names of parts; default all")
    arguments = parser.parse_args()
    offered = parts(arguments.device)
    unknown = set(arguments.parts or ()) - {part.name for part in offered}
    if unknown:
        parser.error(f"got --parts {' '.join(sorted(unknown))}; expected some of {' '.join(p.name for p in offered)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * arguments.minutes
    for part in offered:
        if part.name in done(arguments.out) or part.name not in (arguments.parts or [part.name]):
            continue
        if time.monotonic() + LIMIT > end:
            sys.stdout.write(f"{part.name}: no time is left for it\n")
            break
        record = run(part, arguments.out)
        with (arguments.out / "parts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        summary(arguments.out, offered)
        sys.stdout.write(f"{part.name}: {record['end']} after {record['seconds']} s\n")
        sys.stdout.flush()


def parts(device: str) -> list[Part]:
    """Return all parts, the one that is worth most first; on a CPU of small sizes."""
    small = device == "cpu"
    some = ["kerple", "rope"] if small else WANTED
    rounds = ["--rounds", "1"] if small else ["--rounds", "7", "--seconds", str(MEASURED)]
    common = ["--device", device, *rounds]

    def tests(name: str, question: str, file: str, *chosen: str) -> Part:
        marker = ["-k", "kerple and sinks"] if small else ["-m", "gpu"]
        return Part(name, question, ["-m", "pytest", "-q", "-p", "no:cacheprovider", file, *marker, *chosen])

    def speed(name: str, question: str, what: str, length: int, schemes: list[str] | None, *others: str) -> Part:
        length = min(length, 64) if small else length
        named = ["--schemes", *schemes] if schemes else []
        return Part(
            name,
            question,
            ["benchmarks/speed.py", what, "--lengths", str(length), *common, *named, *([] if small else others)],
        )

    kernels = "tests/test_gpu_executors.py"
    found = [
        tests("kernels", "Do compiled kernels equal the dense reference?", kernels),
        speed("op_16384", "How fast are they at length?", "op", 16384, some),
        speed("step_1024", "How fast is a training step of a Llama?", "step", 1024, some, *LARGE),
        speed("op_4096", "How fast are they at a usual length?", "op", 4096, some),
        speed("op_1024", "What does Python cost?", "op", 1024, some),
        speed("step_8192", "And of long windows?", "step", 8192, some, *LARGE),
        speed("decode_2048", "How fast is the next token?", "decode", 2048, some, *LARGE),
        speed("op_32768", "How fast are they at the longest length?", "op", 32768, some),
        speed("peers_4096", "How fast are others?", "peers", 4096, some),
        # The other schemes may have no kernel: blocks at the lengths above would take longer than a part may.
        speed("op_all", "How fast are all other schemes?", "op", 2048, some if small else None),
    ]
    if not small:
        found.append(tests("models", "Do models with schemes work?", "tests/test_gpu_models.py"))
    return found


def done(out: Path) -> set[str]:
    """Return the names of the parts that have ended well."""
    return {record["part"] for record in records(out) if record["end"] == "well"}


def records(out: Path) -> list[dict[str, object]]:
    path = out / "parts.jsonl"
    # A run that was killed while it wrote leaves half of a line.
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            sys.stderr.write(f"{path}: a line that is cut off was left out\n")
    return found


def run(part: Part, out: Path) -> dict[str, object]:
    """Run a part in a process group of its own, which ends with it, and return its record."""
    command = [*part.command]
    if command[0].endswith("speed.py"):
        command += ["--output", str(out.resolve() / part.name)]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    begin = time.monotonic()
    with (out / f"{part.name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=where,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = "well" if process.wait(LIMIT) == 0 else f"with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            end = f"by the limit of {LIMIT} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return {
        "part": part.name,
        "end": end,
        "seconds": round(time.monotonic() - begin),
        "command": " ".join(["python", *part.command]),
    }


def summary(out: Path, offered: list[Part]) -> None:
    """Write the tables of all parts so far into one page."""
    last = {record["part"]: record for record in records(out)}
    lines = ["# On a GPU", "", "| part | ended | seconds |", "|---|---|---:|"]
    lines += [f"| {name} | {record['end']} | {record['seconds']} |" for name, record in last.items()]
    for part in offered:
        if part.name not in last:
            continue
        lines += ["", f"## {part.name}: {part.question}", ""]
        table, log = out / f"{part.name}.md", out / f"{part.name}.log"
        if table.exists():
            # Their titles are one level below.
            lines += [line.replace("# ", "### ", 1) if line.startswith("# ") else line for line in _lines(table)]
        else:
            lines += ["```text", *_lines(log)[-15:], "```"]
    (out / "README.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


if __name__ == "__main__":
    main()
