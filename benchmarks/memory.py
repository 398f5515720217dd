"""Peak memory of one attention layer, forward and backward, by executor: each case in a fresh process.

python benchmarks/memory.py --output benchmarks/results/memory.md
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import subprocess
import sys
from pathlib import Path

HEADS, HEAD_DIM = 8, 64
LIMIT_GIB = 16
# What runs when nobody asks for another.
CHOSEN = "chosen"


def peak(scheme: str, executor: str, length: int) -> float:
    """Return the growth of this process's peak memory over one forward and backward, in MiB."""
    import torch

    import hf_posenc

    torch.set_num_threads(1)
    # The dense form would take the machine down with it.
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_GIB * 2**30, LIMIT_GIB * 2**30))
    geometry = hf_posenc.Geometry(
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        hidden_size=HEADS * HEAD_DIM,
        max_positions=length,
        last=False,
    )
    module = hf_posenc.build(scheme, geometry)

    def step(size: int) -> None:
        q, k, v = (torch.randn(1, HEADS, size, HEAD_DIM, requires_grad=True) for _ in range(3))
        hidden = torch.randn(1, size, HEADS * HEAD_DIM, requires_grad=True)
        places = torch.arange(size)[None]
        at = {"query_positions": places, "key_positions": places, "hidden": hidden}
        output = hf_posenc.attend(module, q, k, v, executor=None if executor == CHOSEN else executor, **at)
        output.sum().backward()

    step(64)  # loads what torch loads on first use
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(length)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", help="default: all")
    parser.add_argument(
        "--executors", nargs="+", default=[CHOSEN], help="chosen, or by name: dense, blocks, fused, ..."
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        scheme, executor, length = arguments.case
        sys.stdout.write(json.dumps(peak(scheme, executor, int(length))))
        return
    lines = [
        "# Peak memory of attention",
        "",
        f"Peak memory of one layer, B = 1, H = {HEADS}, D = {HEAD_DIM}, float32, causal, forward and backward, MiB "
        "above the",
        "process before it; each case in a fresh process.",
        "",
        "| scheme | executor | " + " | ".join(f"S = {length}" for length in arguments.lengths) + " |",
        "|---|---|" + "---:|" * len(arguments.lengths),
    ]
    for scheme in arguments.schemes or causal_schemes():
        for executor in arguments.executors:
            cells = []
            for length in arguments.lengths:
                command = [sys.executable, __file__, "--case", scheme, executor, str(length)]
                result = subprocess.run(command, capture_output=True, text=True, check=False)
                cells.append(f"{json.loads(result.stdout):.0f}" if result.returncode == 0 else f"over {LIMIT_GIB} GiB")
                sys.stderr.write(f"{scheme} {executor} {length}: {cells[-1]}\n")
            lines.append(f"| {scheme} | {executor} | " + " | ".join(cells) + " |")
    lines += ["", machine(), "", f"Command: `python {' '.join(sys.argv)}`"]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


def causal_schemes() -> list[str]:
    """Return the names of the schemes that decoders can have."""
    import hf_posenc

    return [name for name, info in hf_posenc.schemes().items() if "causal" in info.directions]


def machine() -> str:
    """Describe where and with what this was measured."""
    from importlib.metadata import version

    import torch

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    where = f"{torch.cuda.get_device_name()}, {cpu}" if torch.cuda.is_available() else cpu
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{where}, Python {platform.python_version()}, {packages}, {datetime.date.today()}"


if __name__ == "__main__":
    main()
