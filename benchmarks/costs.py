"""Memory and speed of each stage of a conversion, by precision and by what is trained, each in a process of its own.

    python benchmarks/costs.py --model MODEL --train TRAIN

MODEL is the folder of a checkpoint, such as that of `benchmarks/smollm2.py`. Linux only: it reads the peak of the
memory in `/proc`. Other work on the machine changes the speeds, so those of one round are taken one after the other,
and the table has the median of all rounds.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from memory import machine

PLAIN = ["distillation={}"]
BY_KL = ["distillation={share: 1.0}", "transfer={}"]
LORA = ["adapter.kind=lora", "adapter.rank=8"]
SPARING = ["training.gradient_checkpointing=true"]
# The recipe of each row and what is changed in it.
ROWS: dict[str, tuple[str, list[str]]] = {
    "the original, on text": ("control", PLAIN),
    "the original, on text, gradient checkpointing": ("control", [*PLAIN, *SPARING]),
    "attention transfer": ("swap", ["transfer.steps={steps}", "transfer.batch_size={batch}"]),
    "distillation, all weights": ("swap", BY_KL),
    "distillation, all weights, gradient checkpointing": ("swap", [*BY_KL, *SPARING]),
    "distillation, LoRA of rank 8 and the scheme": ("swap", [*BY_KL, *LORA]),
}
PRECISIONS = ("bfloat16", "float32")
RESULT = Path(__file__).parent / "results" / "costs.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--scheme", default="kerple")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="steps of a stage; the first is not counted")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for _ in range(arguments.rounds):
        for name in ROWS:
            for precision in PRECISIONS:
                found.setdefault((name, precision), []).append(cost(name, precision, arguments))
                sys.stderr.write(f"{name}, {precision}: {found[name, precision][-1]}\n")
    RESULT.write_text("\n".join(lines(found, arguments)) + "\n", encoding="utf-8")


def cost(name: str, precision: str, arguments: argparse.Namespace) -> tuple[int, float]:
    """Return tokens per second of a stage, and its peak of memory in GiB. What comes after the stage is not run."""
    recipe, own = ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "model": arguments.model,
            "data.source": arguments.train,
            "data.limit": 100,
            "training.steps": arguments.steps,
            "training.length": arguments.length,
            "training.batch_size": arguments.batch,
            "training.micro_batch_size": arguments.batch,
            "training.precision": precision,
            "evaluation.contexts": [arguments.length],
            "evaluation.windows": 2,
        }
        if recipe == "swap":
            changes |= {"scheme": arguments.scheme, "conversion.fit": "null"}
        given = [f"{key}={value}" for key, value in changes.items()]
        given += [
            change.replace("{steps}", str(arguments.steps)).replace("{batch}", str(arguments.batch)) for change in own
        ]
        program = [sys.executable, "-c", "from hf_posenc.cli import app; app()", "train", recipe, *given]
        said = []
        with subprocess.Popen(
            [*program, "--out", f"{folder}/run"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run:
            assert run.stdout is not None
            for line in run.stdout:
                said.append(line)
                speed = re.search(rf"step {arguments.steps}/{arguments.steps}\b.* ([\d,]+) tokens/s", line)
                if speed:
                    status = Path(f"/proc/{run.pid}/status").read_text(encoding="utf-8")
                    run.kill()
                    peak = re.search(r"VmHWM:\s+(\d+)", status)
                    assert peak is not None
                    return int(speed[1].replace(",", "")), int(peak[1]) / 2**20
        sys.exit(f"{name}: no speed was said.\n{''.join(said)}")


def lines(found: dict[tuple[str, str], list[tuple[int, float]]], arguments: argparse.Namespace) -> list[str]:
    """Return the lines of the table."""
    first = next(iter(ROWS)), PRECISIONS[0]
    level = statistics.median(speed for speed, _ in found[first])
    rows = [
        "| " + " | ".join([name, *(cell(found[name, precision], level) for precision in PRECISIONS)]) + " |"
        for name in ROWS
    ]
    return [
        "# Cost of the stages of a conversion",
        "",
        f"Tokens per second in % of the first row in {PRECISIONS[0]}, and the largest memory of the process. "
        f"{arguments.scheme} replaces the native encoding in all layers; {arguments.batch} windows of "
        f"{arguments.length} tokens a step. A distillation reads every text with the original, too.",
        "",
        f"| | {' | '.join(PRECISIONS)} |",
        "|---|" + "---:|" * len(PRECISIONS),
        *rows,
        "",
        f"{machine()}. Medians of {arguments.rounds} rounds of {arguments.steps - 1} steps.",
        "",
        "Command: `python benchmarks/costs.py --model MODEL --train TRAIN`",
    ]


def cell(costs: list[tuple[int, float]], level: float) -> str:
    speeds, peaks = zip(*costs, strict=True)
    return f"{100 * statistics.median(speeds) / level:.0f} %, {max(peaks):.1f} GiB"


if __name__ == "__main__":
    main()
