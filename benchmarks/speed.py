"""Speed and memory of attention with every scheme, relative to plain attention.

    python benchmarks/speed.py op --output benchmarks/results/speed_op
    python benchmarks/speed.py step --output benchmarks/results/speed_step
    python benchmarks/speed.py decode --output benchmarks/results/speed_decode
    python benchmarks/speed.py peers --output benchmarks/results/speed_peers
    python benchmarks/speed.py memory --schemes alibi fire --executors chosen dense
    python benchmarks/speed.py before --other ../before       # a git worktree of another commit
    python benchmarks/speed.py op --device cuda

`op` is one layer's attention (B = 1, 8 heads of 64, float32, causal): torch's scaled dot-product attention alone is 1.
Next to the schemes stand the same with a float mask S x S, which a user writes today for a custom bias, the textbook
form ("eager"), and two yardsticks: copies of queries and keys alone, which a rotation has to write, and transformers'
own rotation. `step` is a training step of a Llama with 4 layers, `decode` one more token with a full cache; there 1 is
the stock model. With `--window`, they are of a Mistral, whose layers see so many tokens. `peers` is `op` for schemes
that other packages have, and for these packages (x-transformers where it is installed).

All cases take turns, so that what else the machine does meets them alike; figures are medians of ratios within a
round. One thread is timed by its own CPU time, several by the clock, a GPU by its own events: there the default is
bfloat16, lengths up to 16,384, and the schemes that have kernels. Written are OUTPUT.json and OUTPUT.md.

`memory` is the peak of one layer, forward and backward, above the process before it, each case in a fresh process.
`before` times attention and a training step in this checkout and in another one, which take turns; next to each stands
this checkout against itself, which is noise.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peers import Operands, peers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import hf_posenc
import hf_posenc.attention

ROOT = Path(__file__).resolve().parent.parent
HEADS, HEAD_DIM = 8, 64
HIDDEN = HEADS * HEAD_DIM
PLAIN, MASKED, LEARNED_MASK, EAGER = "plain", "with a mask", "with a learned mask", "eager"
# What no form of a scheme can be faster than, and what a stock Llama does.
COPIES, ROTATED = "q and k copied", "rotated as in transformers"
FREQUENCIES = (10000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)).float()
# The materialised forms keep several tensors S x S x heads.
LONGEST_MATERIALISED = 2048
VOCABULARY = 1024
# What runs when nobody asks for another executor, and the memory that a process may take.
CHOSEN, LIMIT_GIB = "chosen", 16
# A case returns seconds by what was timed.
Case = Callable[[], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["op", "step", "decode", "peers", "memory", "before"])
    parser.add_argument("--schemes", nargs="+", help="default all; on a GPU those with kernels")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        help="default 1024 2048 4096 (GPU: 1024 4096 16384); step 1024; decode 4096; peers 1024 2048",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no round begins later, but the first two")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="width of the model; heads have 64 channels")
    parser.add_argument("--window", type=int, help="of a Mistral; default a Llama, whose layers see all tokens")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default float32; bfloat16 on a GPU")
    parser.add_argument(
        "--executors", nargs="+", default=[CHOSEN], help="of `memory`: chosen, dense, blocks, fused ..."
    )
    parser.add_argument("--other", type=Path, help="of `before`: folder of the other checkout")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.what in ("memory", "before"):
        lines = list((peaks if arguments.what == "memory" else before)(arguments))
        sys.stdout.write("\n".join([*lines, "", machine(), ""]))
        return
    config = model_config(arguments.hidden, arguments.window, arguments.layers)
    makers = {
        "op": operations,
        "step": partial(training_steps, config),
        "decode": partial(decoding_steps, config),
        "peers": beside_peers,
    }
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        # Elsewhere this would send every call of torch through Python, which schemes of many calls pay for.
        torch.set_default_device(arguments.device)
    usual = [1024, 4096, 16384] if on_gpu else [1024, 2048, 4096]
    lengths = (
        arguments.lengths or {"op": usual, "step": [1024], "decode": [4096], "peers": [1024, 2048]}[arguments.what]
    )
    precision = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    dtype, where = getattr(torch, precision), machine()
    schemes = arguments.schemes or [name for name in causal_schemes() if not on_gpu or has_kernels(name)]

    results: dict[str, Any] = {}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for length in lengths:
            torch.manual_seed(0)
            cases = makers[arguments.what](schemes, length, dtype)
            setting = "" if on_gpu else f", {threads} thread{'s' * (threads > 1)}"
            results[f"S = {length}{setting}"] = measured(cases, arguments.rounds, arguments.seconds)
    command = f"python {' '.join(sys.argv)}"
    text = table(arguments.what, config, results, f"{where}, {precision}, {arguments.rounds} rounds", command)
    sys.stdout.write(text)
    if arguments.output:
        record = {"command": command, "machine": where, "dtype": precision, "ratios": results}
        arguments.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        arguments.output.with_suffix(".md").write_text(text, encoding="utf-8")


# -- cases -------------------------------------------------------------------------------------------------------------


def operations(schemes: list[str], length: int, dtype: torch.dtype) -> dict[str, Case]:
    """Return the attention of one layer, with nothing, with a mask, and with each scheme."""
    of, grad = operands(length, dtype)
    q, k, v = of.q, of.k, of.v
    places = torch.arange(length)[None]

    def case(function: Callable[[], Tensor], parameters: list[Tensor]) -> Case:
        return both_ways(function, [q, k, v, *parameters], grad)

    cases = {PLAIN: case(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [])}
    if length <= LONGEST_MATERIALISED:
        hidden_keys = torch.full((length, length), -math.inf).triu(1).to(dtype)
        mask = hidden_keys + torch.zeros(HEADS, length, length, dtype=dtype)
        bias = mask.clone().requires_grad_()
        cases[MASKED] = case(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None]), [])
        cases[LEARNED_MASK] = case(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]), [bias])
        scale = HEAD_DIM**-0.5
        cases[EAGER] = case(lambda: (q @ k.mT * scale + mask).softmax(-1) @ v, [])
    cases[COPIES] = case(lambda: F.scaled_dot_product_attention(q.clone(), k.clone(), v, is_causal=True), [])
    angles = places[0, :, None] * FREQUENCIES.to(places.device).repeat(2)
    cos, sin = (x[None].to(dtype) for x in (angles.cos(), angles.sin()))
    cases[ROTATED] = case(
        lambda: F.scaled_dot_product_attention(*apply_rotary_pos_emb(q, k, cos, sin), v, is_causal=True), []
    )
    for name in schemes:
        module = scheme(name, length)
        cases[name] = case(attending(module, of), list(module.parameters()))
    return cases


def beside_peers(schemes: list[str], length: int, dtype: torch.dtype) -> dict[str, Case]:
    """Return the attention of one layer, with each scheme that another package has, here and in that package."""
    of, grad = operands(length, dtype)
    qkv = [of.q, of.k, of.v]
    plain = both_ways(lambda: F.scaled_dot_product_attention(*qkv, is_causal=True), qkv, grad)
    cases = {PLAIN: plain}
    for peer in sorted(peers(of), key=lambda peer: peer.scheme):
        if peer.scheme in schemes:
            with_options = "".join(f", {name}={value!r}" for name, value in peer.options.items())
            module = scheme(peer.scheme, length, **peer.options)
            cases[peer.scheme + with_options] = both_ways(attending(module, of), [*qkv, *module.parameters()], grad)
            cases[f"{peer.scheme}, {peer.package}"] = both_ways(peer.run, [*qkv, *peer.parameters], grad)
    return cases


def operands(length: int, dtype: torch.dtype) -> tuple[Operands, Tensor]:
    """Return those of one layer, and a gradient of its output."""
    q, k, v = (torch.randn(1, HEADS, length, HEAD_DIM, dtype=dtype, requires_grad=True) for _ in range(3))
    return Operands(q, k, v, torch.randn(1, length, HIDDEN, dtype=dtype)), torch.randn_like(q)


def both_ways(function: Callable[[], Tensor], targets: list[Tensor], grad: Tensor) -> Case:
    """Return the case of a function, and of it with the gradients of these tensors."""

    def run() -> dict[str, float]:
        with torch.no_grad():
            forward = seconds(function)
        both = seconds(lambda: torch.autograd.grad(function(), targets, grad, allow_unused=True))
        return {"forward": forward, "forward + backward": both}

    return run


def attending(module: hf_posenc.Scheme, of: Operands) -> Callable[[], Tensor]:
    places = torch.arange(of.length)[None]

    def call() -> Tensor:
        output = hf_posenc.attend(
            module, of.q, of.k, of.v, query_positions=places, key_positions=places, hidden=of.hidden
        )
        assert isinstance(output, Tensor)
        return output

    return call


def scheme(name: str, length: int, **options: Any) -> hf_posenc.Scheme:
    """Build a scheme as on a Llama of this length, with its parameters away from where they start."""
    geometry = hf_posenc.Geometry(
        heads=HEADS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        hidden_size=HIDDEN,
        inv_freq=FREQUENCIES,
        max_positions=length,
        last=False,
    )
    module = hf_posenc.build(name, geometry, **options)
    disturb(module)
    return module


def disturb(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def model_config(hidden: int, window: int | None, layers: int) -> PreTrainedConfig:
    """Return the config of a small Llama, or of a Mistral with a window."""
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM // 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
    }
    return LlamaConfig(**shape) if window is None else MistralConfig(**shape, sliding_window=window)


def models(config: PreTrainedConfig, schemes: list[str]) -> dict[str, PreTrainedModel]:
    """Return the stock model, and one with each scheme."""
    found = {}
    for name in (PLAIN, *schemes):
        torch.manual_seed(0)
        found[name] = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
        if name != PLAIN:
            hf_posenc.patch(found[name], name)
            for module in found[name].modules():
                if isinstance(module, hf_posenc.Scheme):
                    disturb(module)
    return found


def training_steps(config: PreTrainedConfig, schemes: list[str], length: int, dtype: torch.dtype) -> dict[str, Case]:
    """Return training steps of a small model, without the optimizer."""
    ids = torch.randint(VOCABULARY, (1, length))

    def case(model: PreTrainedModel) -> Case:
        def step() -> None:
            model.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        return lambda: {"training step": seconds(step)}

    return {name: case(model.to(dtype).train()) for name, model in models(config, schemes).items()}


def decoding_steps(config: PreTrainedConfig, schemes: list[str], length: int, dtype: torch.dtype) -> dict[str, Case]:
    """Return eight more tokens after `length` of them."""
    ids = torch.randint(VOCABULARY, (1, length))

    def case(model: PreTrainedModel) -> Case:
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).past_key_values

        def tokens() -> None:
            # They stay in the cache: one with a window gives no tokens back.
            with torch.no_grad():
                for _ in range(8):
                    model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)

        return lambda: {"one token": seconds(tokens) / 8}

    return {name: case(model.to(dtype).eval()) for name, model in models(config, schemes).items()}


# -- measuring ---------------------------------------------------------------------------------------------------------


def has_kernels(name: str) -> bool:
    """Whether plain attention or a kernel computes a scheme on this GPU."""
    known = hf_posenc.attention.executors(scheme(name, length=8), torch.device("cuda"))
    return not {"sdpa", "channels", "triton"}.isdisjoint(known)


def seconds(function: Callable[[], object]) -> float:
    if torch.get_default_device().type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


def measured(cases: dict[str, Case], rounds: int, limit: float) -> dict[str, dict[str, float]]:
    """Return the ratio of each case to the first by what was timed, after one round that does not count."""
    ratios: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    end = time.monotonic() + limit
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=(rounds + 1) * len(cases))
        for number in range(rounds + 1):
            if number > 1 and time.monotonic() > end:
                break
            base: dict[str, float] = {}
            for name, case in cases.items():
                progress.update(task, description=name)
                times = case()
                base = base or times
                for what, value in times.items() if number else ():
                    ratios[name].setdefault(what, []).append(value / base[what])
                progress.advance(task)
    return {
        name: {what: round(statistics.median(values), 3) for what, values in found.items()}
        for name, found in ratios.items()
    }


def table(what: str, config: PreTrainedConfig, results: dict[str, Any], setting: str, command: str) -> str:
    """Return the ratios as a Markdown table, one column per length, threads and kind of time."""
    first = next(iter(results.values()))
    kinds = list(first[PLAIN])
    window, heads = getattr(config, "sliding_window", None), config.num_attention_heads
    model = "Llama" if window is None else f"Mistral that sees {window:,} tokens,"
    of_heads = f"{heads} heads on {heads // 2} kv heads"
    of_model = f"{model} with {config.num_hidden_layers} layers (hidden {config.hidden_size}, {of_heads})"
    subject = {
        "peers": "Attention of one layer (B = 1, 8 heads of 64, causal), here and in other packages; 1 is torch's "
        "own without positions.",
        "op": "Attention of one layer (B = 1, 8 heads of 64, causal); 1 is torch's own without positions.",
        "step": f"A training step of a {of_model}; 1 is the stock model.",
        "decode": f"One more token of a {of_model} after S others; 1 is the stock model.",
    }[what]
    title = {"op": "attention", "peers": "attention, compared with other packages", "step": "a training step"}
    lines = [
        f"# Speed of {title.get(what, 'decoding')}, {setting.partition(', Python')[0]}",
        "",
        f"{subject} Medians of interleaved rounds. {setting}.",
        "",
        "| | " + " | ".join(f"{name}: {kind}" for name in results for kind in kinds) + " |",
        "|---|" + "---:|" * (len(results) * len(kinds)),
    ]
    for name in dict.fromkeys(name for found in results.values() for name in found):
        cells = [f"{found[name][kind]:.2f}" if name in found else "" for found in results.values() for kind in kinds]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Command: `{command}`"]) + "\n"


# -- other processes ---------------------------------------------------------------------------------------------------

# Reads jobs, one JSON line each, and answers with the seconds of the job, or with its peak memory in MiB.
WORKER = """
import json, resource, sys, time
import torch, hf_posenc
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
sizes = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=1024)
geometry = hf_posenc.Geometry(heads=8, kv_heads=8, head_dim=64, hidden_size=512, max_positions=8192, last=False)

def attention(scheme, length, executor=None):
    built = hf_posenc.build(scheme, geometry)
    operands = [torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3)]
    hidden, places = torch.randn(1, length, 512, requires_grad=True), torch.arange(length)[None]
    given = dict(query_positions=places, key_positions=places, hidden=hidden, executor=executor)
    return lambda: hf_posenc.attend(built, *operands, **given).sum().backward()

def step(scheme, length):
    model = hf_posenc.patch(LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=length)), scheme)
    ids = torch.randint(1024, (1, length))
    return lambda: model(ids, labels=ids, use_cache=False).loss.backward()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

made = None
for line in sys.stdin:
    what, *job = json.loads(line)
    torch.manual_seed(0)
    if what == "memory":
        limit = GIB_AT_MOST * 2**30  # the dense form would take the machine down with it
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        attention(job[0], 64, job[2])()  # loads what torch loads on first use
        before = peak()
        attention(*job)()
        answer = peak() - before
    else:
        if line != made:
            call, made = (attention if what == "attention" else step)(*job), line
            call()
        begin = time.process_time()
        call()
        answer = time.process_time() - begin
    print(json.dumps(answer), flush=True)
""".replace("GIB_AT_MOST", str(LIMIT_GIB))


def worker(tree: Path) -> Any:
    """Start a process that imports the package from a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", WORKER]
    # From its own folder, which comes before PYTHONPATH.
    return subprocess.Popen(
        command, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def answer(process: Any, job: list[Any]) -> float:
    """Return the answer of a worker, infinity if it died."""
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    return float(json.loads(line)) if line else math.inf


def peaks(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the table of the peak memory of one layer, in MiB."""
    lengths = arguments.lengths or [2048, 4096, 8192]
    yield "| scheme | executor | " + " | ".join(f"S = {length}" for length in lengths) + " |"
    yield "|---|---|" + "---:|" * len(lengths)
    for name, executor in itertools.product(arguments.schemes or causal_schemes(), arguments.executors):
        found = []
        for length in lengths:
            process = worker(ROOT)
            found.append(answer(process, ["memory", name, length, None if executor == CHOSEN else executor]))
            process.kill()
        cells = (f"{peak:.0f}" if peak < math.inf else f"over {LIMIT_GIB} GiB" for peak in found)
        yield f"| {name} | {executor} | {' | '.join(cells)} |"


def before(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the table of CPU time in this checkout, in % of the other: median (smallest to largest of the rounds)."""
    trees = {"before": arguments.other.resolve(), "after": ROOT, "again": ROOT}
    workers = {name: worker(tree) for name, tree in trees.items()}
    (length,) = arguments.lengths or [1024]
    yield f"| scheme | attention, {length:,} tokens | against itself | step, {length // 2:,} | against itself |"
    yield "|---|---:|---:|---:|---:|"
    for name in arguments.schemes or causal_schemes():
        cells = []
        for job in (["attention", name, length], ["step", name, length // 2]):
            rounds = [
                {which: answer(workers[which], job) for which in list(workers)[:: 1 if number % 2 else -1]}
                for number in range(arguments.rounds)
            ]
            for which, base in (("after", "before"), ("again", "after")):
                ratios = [100 * times[which] / times[base] for times in rounds]
                cells.append(f"{statistics.median(ratios):.1f} ({min(ratios):.0f} to {max(ratios):.0f})")
        yield f"| {name} | {' | '.join(cells)} |"
    for process in workers.values():
        process.kill()


def causal_schemes() -> list[str]:
    """Return the names of the schemes that decoders can have."""
    return [name for name, info in hf_posenc.schemes().items() if "causal" in info.directions]


def machine() -> str:
    """Describe where and with what this was measured."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    where = f"{torch.cuda.get_device_name()}, {cpu}" if torch.cuda.is_available() else cpu
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{where}, Python {platform.python_version()}, {packages}, {datetime.date.today()}"


if __name__ == "__main__":
    main()
