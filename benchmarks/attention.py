"""Speed of attention with every scheme, relative to plain attention.

    python benchmarks/attention.py op --output benchmarks/results/attention_op
    python benchmarks/attention.py model --output benchmarks/results/attention_model
    python benchmarks/attention.py decode --output benchmarks/results/attention_decode
    python benchmarks/attention.py decode --window 1024 --hidden 1024 --schemes alibi kerple fox rope
    python benchmarks/attention.py peers --output benchmarks/results/attention_peers
    python benchmarks/attention.py op --device cuda

`op` is one layer's attention (B = 1, 8 heads of 64, float32, causal): torch's scaled dot-product attention alone is 1.
Next to the schemes stand the same with a float mask S x S, which a user writes today for a custom bias, the textbook
form ("eager"), and three yardsticks: copies of queries and keys alone, which a rotation has to write; transformers' own
rotation; and the kernel under torch's attention with a bias that costs nothing to make and learns nothing, a view of a
table.
`model` is a training step of a Llama with 4 layers, `decode` one more token with a full cache; there 1 is the stock
model. With `--window`, they are of a Mistral, whose layers see so many tokens. `peers` is `op` for schemes that other
packages have, and what these take (x-transformers where it is installed).

All cases take turns, so that what else the machine does meets them alike; figures are medians of ratios within a
round. One thread is timed by its own CPU time, several by the clock, a GPU by its own events: there the default is
bfloat16, lengths up to 16,384, and the schemes that have kernels. Written are OUTPUT.json, OUTPUT.md and OUTPUT.png.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from memory import causal_schemes, machine
from peers import Operands, peers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import hf_posenc
import hf_posenc.attention
from hf_posenc.attention.cpu import kernel

HEADS, HEAD_DIM = 8, 64
HIDDEN = HEADS * HEAD_DIM
PLAIN, MASKED, LEARNED_MASK, EAGER = "plain", "with a mask", "with a learned mask", "eager"
# What no form of a scheme can be faster than, and what a stock Llama does.
COPIES, ROTATED, VIEW = "q and k copied", "rotated as in transformers", "bias at hand, by blocks"
FREQUENCIES = (10000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)).float()
# The materialised forms keep several tensors S x S x heads.
LONGEST_MATERIALISED = 2048
VOCABULARY = 1024
# A case returns seconds by what was timed.
Case = Callable[[], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["op", "model", "decode", "peers"])
    parser.add_argument("--schemes", nargs="+", help="default all; on a GPU those with kernels")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        help="default 1024 2048 4096 (GPU: 1024 4096 16384); model 1024; decode 4096; peers 1024 2048",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="width of the model; heads have 64 channels")
    parser.add_argument("--window", type=int, help="of a Mistral; default a Llama, whose layers see all tokens")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default float32; bfloat16 on a GPU")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    config = model_config(arguments.hidden, arguments.window)
    makers = {
        "op": operations,
        "model": partial(training_steps, config),
        "decode": partial(decoding_steps, config),
        "peers": beside_peers,
    }
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        # Elsewhere this would send every call of torch through Python, which schemes of many calls pay for.
        torch.set_default_device(arguments.device)
    usual = [1024, 4096, 16384] if on_gpu else [1024, 2048, 4096]
    lengths = (
        arguments.lengths or {"op": usual, "model": [1024], "decode": [4096], "peers": [1024, 2048]}[arguments.what]
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
            results[f"S = {length}{setting}"] = measured(cases, arguments.rounds)
    command = f"python {' '.join(sys.argv)}"
    text = table(arguments.what, config, results, f"{where}, {precision}, {arguments.rounds} rounds", command)
    sys.stdout.write(text)
    if arguments.output:
        record = {"command": command, "machine": where, "dtype": precision, "ratios": results}
        arguments.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        arguments.output.with_suffix(".md").write_text(text, encoding="utf-8")
        picture(results).savefig(arguments.output.with_suffix(".png"), dpi=110)


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
    if q.device.type == "cpu":
        cases[VIEW] = with_a_view(*(x.detach() for x in (q, k, v)), grad)
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


def with_a_view(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Case:
    """Return attention by blocks of rows, with a bias of each that is a view of one table."""
    length, rows, scale = q.shape[2], 256, HEAD_DIM**-0.5
    table = torch.randn(HEADS, 2 * length)
    table[:, length:] = -math.inf

    def blocks() -> Iterator[tuple[slice, slice, Tensor]]:
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            shape, strides = (1, HEADS, stop - start, stop), (0, 2 * length, 1, 1)
            yield slice(start, stop), slice(stop), table.as_strided(shape, strides, length - stop)

    def forward() -> tuple[Tensor, Tensor]:
        output, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for here, keys, bias in blocks():
            found = kernel.forward(q[:, :, here].flip(2), k[:, :, keys], v[:, :, keys], bias, scale)
            output[:, :, here], lse[:, :, here] = (x.flip(2) for x in found)
        return output, lse

    def both() -> tuple[Tensor, ...]:
        of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        output, lse = forward()
        for here, keys, bias in blocks():
            of_rows, q_rows, out_rows, lse_rows = (x[:, :, here].flip(2) for x in (grad, q, output, lse))
            done = (q_rows, k[:, :, keys], v[:, :, keys], out_rows, lse_rows)
            found = kernel.backward(of_rows, done, bias, scale)
            of_q[:, :, here] = found[0].flip(2)
            of_k[:, :, keys] += found[1]
            of_v[:, :, keys] += found[2]
        return of_q, of_k, of_v

    return lambda: {"forward": seconds(forward), "forward + backward": seconds(both)}


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


def model_config(hidden: int, window: int | None) -> PreTrainedConfig:
    """Return the config of a small Llama, or of a Mistral with a window."""
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_hidden_layers": 4,
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
    return not {"sdpa", "flex", "triton"}.isdisjoint(known)


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


def measured(cases: dict[str, Case], rounds: int) -> dict[str, dict[str, float]]:
    """Return the ratio of each case to the first by what was timed, after one round that does not count."""
    ratios: dict[str, dict[str, list[float]]] = {name: {} for name in cases}
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=(rounds + 1) * len(cases))
        for number in range(rounds + 1):
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
    of_model = f"{model} with 4 layers (hidden {config.hidden_size}, {heads} heads on {heads // 2} kv heads)"
    subject = {
        "peers": "Attention of one layer (B = 1, 8 heads of 64, causal), here and in other packages; 1 is torch's "
        "own without positions.",
        "op": "Attention of one layer (B = 1, 8 heads of 64, causal); 1 is torch's own without positions.",
        "model": f"A training step of a {of_model}; 1 is the stock model.",
        "decode": f"One more token of a {of_model} after S others; 1 is the stock model.",
    }[what]
    title = {"op": "attention", "peers": "attention, compared with other packages", "model": "a training step"}
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


def picture(results: dict[str, Any]) -> Figure:
    """Draw the ratios of every case, a panel for each kind of time."""
    first = next(iter(results.values()))
    kinds = list(first[PLAIN])
    names = [name for name in dict.fromkeys(n for found in results.values() for n in found) if name != PLAIN]
    last = list(results.values())[-1]
    names.sort(key=lambda name: last.get(name, first.get(name, {})).get(kinds[-1], 0.0))
    figure = Figure(figsize=(5.5 * len(kinds), 0.28 * len(names) + 1.4), layout="constrained")
    markers = "os^DvP*X"
    for index, kind in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), index + 1)
        for marker, (setting, found) in zip(markers, results.items(), strict=False):
            known = [(row, found[name][kind]) for row, name in enumerate(names) if name in found]
            axes.scatter(
                [x for _, x in known], [row for row, _ in known], marker=marker, s=30, alpha=0.8, label=setting
            )
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_xlabel(f"{kind}, times plain attention")
        axes.set_yticks(range(len(names)), names if not index else [])
        axes.grid(axis="x", alpha=0.3)
    figure.axes[0].legend(fontsize=8, loc="lower right")
    return figure


if __name__ == "__main__":
    main()
