"""Time of attention and of a training step with every scheme, in % of another checkout of the repository.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py ../before

A process for each checkout stays, and both take turns with each scheme, so that what else the machine does meets them
alike. Timed is the CPU time of one thread; figures are medians of ratios within a round. `attention` is forward and
backward of one layer (B = 1, 8 heads of 64, float32, causal), `step` those of a Llama with 4 layers, of half as many
tokens. Next to each stands this checkout against itself, in a third process: what differs there is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from memory import causal_schemes, machine
from rich.progress import track

HERE = Path(__file__).resolve().parent
WORKER = """
import json, sys, time
import torch, hf_posenc
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
sizes = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=1024)
geometry = hf_posenc.Geometry(heads=8, kv_heads=8, head_dim=64, hidden_size=512, max_positions=8192)
made = None
for line in sys.stdin:
    what, scheme, length = json.loads(line)
    torch.manual_seed(0)
    if line == made:
        pass
    elif what == "attention":
        built = hf_posenc.build(scheme, geometry)
        operands = [torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3)]
        hidden, places = torch.randn(1, length, 512), torch.arange(length)[None]
        def call():
            given = dict(query_positions=places, key_positions=places, hidden=hidden)
            hf_posenc.attend(built, *operands, **given).sum().backward()
    else:
        model = hf_posenc.patch(LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=length)), scheme)
        ids = torch.randint(1024, (1, length))
        def call():
            model(ids, labels=ids, use_cache=False).loss.backward()
    if line != made:
        call()
    made = line
    begin = time.process_time()
    call()
    print(json.dumps(time.process_time() - begin), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of the other checkout")
    parser.add_argument("--schemes", nargs="+", help="default all")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "before_after.md")
    arguments = parser.parse_args()
    trees = {"before": arguments.before.resolve(), "after": HERE.parent, "again": HERE.parent}
    workers = {name: _worker(tree) for name, tree in trees.items()}
    rows = {}
    for scheme in track(arguments.schemes or causal_schemes(), "schemes", transient=True):
        rows[scheme] = [
            _ratios(workers, [what, scheme, length], arguments.rounds)
            for what, length in (("attention", arguments.length), ("step", arguments.length // 2))
        ]
    lines = [
        "# Time before and after a change of the code",
        "",
        "CPU time of one thread in % of that before: median (smallest to largest of the rounds), and next to it this "
        "checkout against itself, which is noise.",
        "",
        "| scheme | attention | against itself | training step | against itself |",
        "|---|---:|---:|---:|---:|",
        *(f"| {scheme} | {' | '.join(cell for pair in found for cell in pair)} |" for scheme, found in rows.items()),
        "",
        f"{machine()}. {arguments.length:,} tokens (step: {arguments.length // 2:,}), {arguments.rounds} rounds. "
        f"Before: {_commit(trees['before'])}; "
        f"after: {_commit(trees['after'])}.",
        "",
        f"Command: `python benchmarks/before_after.py BEFORE --length {arguments.length} --rounds {arguments.rounds}`",
        "",
    ]
    arguments.output.write_text("\n".join(lines), encoding="utf-8")
    sys.stdout.write("\n".join(lines))


def _worker(tree: Path) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _ratios(workers: dict[str, Any], job: list[Any], rounds: int) -> list[str]:
    """Return the time after in % of that before, and that of this checkout in % of itself."""
    found: list[dict[str, float]] = []
    for number in range(rounds):
        times = {}
        for name in list(workers)[:: 1 if number % 2 else -1]:
            workers[name].stdin.write(json.dumps(job) + "\n")
            workers[name].stdin.flush()
            times[name] = json.loads(workers[name].stdout.readline())
        found.append(times)
    return [
        f"{statistics.median(ratios):.1f} ({min(ratios):.0f} to {max(ratios):.0f})"
        for name, base in (("after", "before"), ("again", "after"))
        for ratios in [[100 * times[name] / times[base] for times in found]]
    ]


def _commit(tree: Path) -> str:
    return subprocess.check_output(["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], text=True).strip()


if __name__ == "__main__":
    main()
