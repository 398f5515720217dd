"""Measure a GPU in parts of at most three minutes each, the most valuable part first.

    python benchmarks/on_gpu.py --out benchmarks/results/on_gpu
    python benchmarks/on_gpu.py --out /tmp/tried --device cpu       # small sizes, to see that all parts run

Each part is a process, and is written as soon as it ends: a line in OUT/parts.jsonl, its output in OUT/PART.log, and
the tables of `speed.py` in OUT/PART.md and OUT/PART.json. Another run goes on where this one ended: a part that has
ended well is left out. `--minutes` begins no part that may end later.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from common import RESULTS, add_record, records

ROOT = Path(__file__).resolve().parents[1]
# Seconds of a part. Measurements end by themselves before, and give what they have.
LIMIT, MEASURED = 180, 110
# Schemes for which the project has goals on a GPU, one for each kernel first.
WANTED = "kerple fire fox cope stick_breaking rope alibi grape_a t5 sandwich"
# About 130 million parameters.
LARGE = "--hidden 640 --layers 28"
SMALL = "--lengths 64 --schemes kerple t5 --rounds 1 --hidden 256 --layers 2"
SPEED, TESTS = "benchmarks/speed.py", "-m pytest -q -p no:cacheprovider -m gpu"
# By name, in the order of what they are worth: the command after `python`, which says what is measured.
PARTS = {
    "kernels": f"{TESTS} tests/test_gpu_executors.py",
    "op_16384": f"{SPEED} op --lengths 16384 --schemes {WANTED}",
    "step_1024": f"{SPEED} step --lengths 1024 --schemes {WANTED} {LARGE}",
    "op_4096": f"{SPEED} op --lengths 4096 --schemes {WANTED}",
    "op_1024": f"{SPEED} op --lengths 1024 --schemes {WANTED}",
    "step_8192": f"{SPEED} step --lengths 8192 --schemes {WANTED} {LARGE}",
    "decode_2048": f"{SPEED} decode --lengths 2048 --schemes {WANTED} {LARGE}",
    "op_32768": f"{SPEED} op --lengths 32768 --schemes {WANTED}",
    "peers_4096": f"{SPEED} peers --lengths 4096 --schemes {WANTED}",
    # The other schemes may have no kernel: blocks at the lengths above would take longer than a part may.
    "op_all": f"{SPEED} op --lengths 2048",
    "models": f"{TESTS} tests/test_gpu_models.py",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "on_gpu")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of all parts of this run together")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * given.minutes
    done = {record["part"] for record in records(given.out / "parts.jsonl") if record["end"] == "well"}
    for name in given.parts:
        if name in done:
            continue
        if time.monotonic() + LIMIT > end:
            sys.stdout.write(f"{name}: no time is left for it\n")
            break
        record = run(name, command(name, given), given.out / f"{name}.log")
        add_record(given.out / "parts.jsonl", record)
        sys.stdout.write(f"{name}: {record['end']} after {record['seconds']} s\n")
        sys.stdout.flush()


def command(name: str, given: argparse.Namespace) -> list[str]:
    """Return the command of a part; the later of two options of small sizes counts."""
    small, words = given.device == "cpu", PARTS[name].split()
    if words[0] != SPEED:
        return [*words, "-m", "not slow and not gpu", "-k", "kerple and sinks"] if small else words
    words += ["--device", given.device, "--output", str(given.out.resolve() / name)]
    if small:
        return [*words, *SMALL.split()]
    return [*words, "--seconds", str(MEASURED)]


def run(name: str, words: list[str], log: Path) -> dict[str, object]:
    """Run a part in a process group of its own, which ends with it, and return its record."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            # 5: pytest has no test for a CPU.
            end = "well" if process.wait(LIMIT) in (0, 5) else f"with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            end = f"by the limit of {LIMIT} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = round(time.monotonic() - begin)
    return {"part": name, "end": end, "seconds": seconds, "command": f"python {' '.join(words)}"}


if __name__ == "__main__":
    main()
