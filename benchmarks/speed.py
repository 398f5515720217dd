"""Time and memory of attention with every scheme, relative to plain attention.

    python benchmarks/speed.py op --output benchmarks/results/speed_op.json
    python benchmarks/speed.py step --output benchmarks/results/speed_step.json
    python benchmarks/speed.py decode --output benchmarks/results/speed_decode.json
    python benchmarks/speed.py memory --schemes alibi fire --executor dense
    python benchmarks/speed.py op --device cuda

`op` is one layer's attention (B = 1, 8 heads of 64, float32, causal): torch's scaled dot-product attention alone is 1.
Next to the schemes stand the same with a float mask S x S, which a user writes today for a custom bias, and the
textbook form ("eager"). `step` is a training step of a Llama with 4 layers, `decode` one more token with a full cache;
there 1 is the stock model.

All cases take turns, so that what else the machine does meets them alike; figures are medians of ratios within a
round. One thread is timed by its own CPU time, several by the clock, a GPU by its own events: there the default is
bfloat16, lengths up to 16,384, and the schemes that have kernels.

`memory` is the peak of one layer in MiB, forward and backward, above the process before it, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from common import in_a_process, machine, table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import hf_posenc
import hf_posenc.attention

HEADS, HEAD_DIM = 8, 64
PLAIN, MASKED, LEARNED_MASK, EAGER = "plain", "with a mask", "with a learned mask", "eager"
FREQUENCIES = (10000.0 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)).float()
# The materialised forms keep several tensors S x S x heads.
LONGEST_MATERIALISED = 2048
VOCABULARY = 1024
# The memory that a process may take.
LIMIT_GIB = 16
# Tokens by what is measured; "gpu" is `op` there.
LENGTHS = {
    "op": [1024, 2048, 4096],
    "gpu": [1024, 4096, 16384],
    "step": [1024],
    "decode": [4096],
    "memory": [2048, 4096, 8192],
}
# A case returns seconds by what was timed.
Case = Callable[[], dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*MAKERS, "memory"])
    parser.add_argument("--schemes", nargs="+", help="default all; on a GPU those with kernels")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no round begins later, but the first two")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model; heads have 64 channels")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default float32; bfloat16 on a GPU")
    parser.add_argument("--executor", help="of `memory`: dense, blocks, fused; default what a call chooses")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    causal = [name for name, info in hf_posenc.schemes().items() if "causal" in info.directions]
    on_gpu = given.device == "cuda"
    lengths = given.lengths or LENGTHS["gpu" if on_gpu and given.what == "op" else given.what]
    if given.what == "memory":
        rows = ([name, *(peak(name, length, given.executor) for length in lengths)] for name in given.schemes or causal)
        sys.stdout.write(f"{table(['', *map(str, lengths)], rows, '---:')}\n\n{machine()}\n")
        return
    if on_gpu:
        # Elsewhere this would send every call of torch through Python, which schemes of many calls pay for.
        torch.set_default_device(given.device)
        causal = [name for name in causal if has_kernels(name)]
    torch.set_num_threads(given.threads)
    given.dtype = given.dtype or ("bfloat16" if on_gpu else "float32")
    setting = "" if on_gpu else f", {given.threads} thread{'s' * (given.threads > 1)}"
    results = {}
    for length in lengths:
        torch.manual_seed(0)
        cases = MAKERS[given.what](given.schemes or causal, length, given)
        results[f"S = {length}{setting}"] = measured(cases, given.rounds, given.seconds)
    publish(results, given)


# -- cases -------------------------------------------------------------------------------------------------------------


class Layer:
    """Operands of one layer's causal attention.

    Attributes:
        q, k, v: Queries, keys and values, `[1, HEADS, length, HEAD_DIM]`.
        hidden: Hidden states, which some schemes read, `[1, length, HEADS * HEAD_DIM]`.
    """

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        shape = (1, HEADS, length, HEAD_DIM)
        self.q, self.k, self.v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
        self.hidden = torch.randn(1, length, HEADS * HEAD_DIM, dtype=dtype)
        self._gradient, self._places = torch.randn_like(self.q), torch.arange(length)[None]

    def plain(self, mask: Tensor | None = None) -> Tensor:
        """Return torch's attention, with an added mask if there is one."""
        return scaled_dot_product_attention(self.q, self.k, self.v, mask, is_causal=mask is None)

    def case(self, function: Callable[[], Tensor], parameters: Iterable[Tensor] = ()) -> Case:
        """Return the case of a function, and of it with the gradients of operands and parameters."""
        targets = [self.q, self.k, self.v, *parameters]

        def backward() -> None:
            torch.autograd.grad(function(), targets, self._gradient, allow_unused=True)

        def run() -> dict[str, float]:
            with torch.no_grad():
                forward = seconds(function)
            return {"forward": forward, "forward + backward": seconds(backward)}

        return run

    def attention(self, scheme: hf_posenc.Scheme, executor: str | None = None) -> Callable[[], Any]:
        """Return a function that computes attention with a scheme."""
        places = {"query_positions": self._places, "key_positions": self._places}
        return lambda: hf_posenc.attend(scheme, self.q, self.k, self.v, hidden=self.hidden, executor=executor, **places)


def geometry(length: int) -> hf_posenc.Geometry:
    """Return the geometry of a layer of a Llama."""
    shape = {"heads": HEADS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "hidden_size": HEADS * HEAD_DIM}
    return hf_posenc.Geometry(**shape, inv_freq=FREQUENCIES, max_positions=length, last=False)


def disturbed(module: Any) -> Any:
    """Return a module with its parameters away from where they start."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def operations(schemes: list[str], length: int, given: argparse.Namespace) -> dict[str, Case]:
    """Return the attention of one layer, with nothing, with a mask, and with each scheme."""
    layer = Layer(length, getattr(torch, given.dtype))
    cases = {PLAIN: layer.case(layer.plain)}
    if length <= LONGEST_MATERIALISED:
        mask = torch.full((1, HEADS, length, length), -math.inf).triu(1).to(layer.q)
        bias = mask.clone().requires_grad_()
        cases[MASKED] = layer.case(lambda: layer.plain(mask))
        cases[LEARNED_MASK] = layer.case(lambda: layer.plain(bias), [bias])
        cases[EAGER] = layer.case(lambda: (layer.q @ layer.k.mT * HEAD_DIM**-0.5 + mask).softmax(-1) @ layer.v)
    for name in schemes:
        scheme = disturbed(hf_posenc.build(name, geometry(length)))
        cases[name] = layer.case(layer.attention(scheme), scheme.parameters())
    return cases


def models(schemes: list[str], given: argparse.Namespace) -> dict[str, PreTrainedModel]:
    """Return the stock model, a small Llama, and one with each scheme."""
    heads = given.hidden // HEAD_DIM
    shape = {"hidden_size": given.hidden, "intermediate_size": 11 * given.hidden // 4, "vocab_size": VOCABULARY}
    shape |= {"num_hidden_layers": given.layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2}
    found = {}
    for name in (PLAIN, *schemes):
        torch.manual_seed(0)
        config = LlamaConfig(**shape, max_position_embeddings=8192)
        found[name] = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        if name != PLAIN:
            hf_posenc.patch(found[name], name)
            for module in found[name].modules():
                if isinstance(module, hf_posenc.Scheme):
                    disturbed(module)
        found[name].to(getattr(torch, given.dtype))
    return found


def training_steps(schemes: list[str], length: int, given: argparse.Namespace) -> dict[str, Case]:
    """Return training steps of a small model, without the optimizer."""
    ids = torch.randint(VOCABULARY, (1, length))

    def case(model: PreTrainedModel) -> Case:
        def step() -> None:
            model.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        return lambda: {"training step": seconds(step)}

    return {name: case(model.train()) for name, model in models(schemes, given).items()}


def decoding_steps(schemes: list[str], length: int, given: argparse.Namespace) -> dict[str, Case]:
    """Return eight more tokens after `length` of them."""
    ids = torch.randint(VOCABULARY, (1, length))

    def case(model: PreTrainedModel) -> Case:
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).past_key_values

        def tokens() -> None:
            with torch.no_grad():
                for _ in range(8):
                    model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)

        return lambda: {"one token": seconds(tokens) / 8}

    return {name: case(model.eval()) for name, model in models(schemes, given).items()}


MAKERS = {"op": operations, "step": training_steps, "decode": decoding_steps}


# -- measuring ---------------------------------------------------------------------------------------------------------


def has_kernels(name: str) -> bool:
    """Whether plain attention or a kernel computes a scheme on this GPU."""
    known = hf_posenc.attention.executors(hf_posenc.build(name, geometry(8)), torch.device("cuda"))
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
    end, taken = time.monotonic() + limit, []
    for number in tqdm(range(rounds + 1)):
        if number < 2 or time.monotonic() < end:
            taken.append({name: case() for name, case in cases.items()})
    return {
        name: {
            what: round(statistics.median(times[name][what] / times[PLAIN][what] for times in taken[1:]), 3)
            for what in taken[0][name]
        }
        for name in cases
    }


def publish(results: dict[str, dict[str, dict[str, float]]], given: argparse.Namespace) -> None:
    """Show the ratios, one column per length and kind of time, and write them where the user asked to."""
    where, command = machine(), f"python {' '.join(sys.argv)}"
    columns = [(setting, kind) for setting, found in results.items() for kind in found[PLAIN]]
    names = dict.fromkeys(name for found in results.values() for name in found)
    rows = (
        [
            name,
            *(f"{results[setting][name][kind]:.2f}" if name in results[setting] else "" for setting, kind in columns),
        ]
        for name in names
    )
    made = table(["", *map(": ".join, columns)], rows, "---:")
    sys.stdout.write(f"{made}\n\n{where}, {given.dtype}, {given.rounds} rounds. Command: `{command}`\n")
    if given.output:
        record = {"command": command, "machine": where, "dtype": given.dtype, "ratios": results}
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def peak(name: str, length: int, executor: str | None) -> str:
    """Return the peak memory of one layer in MiB."""
    try:
        return f"{in_a_process(_peak, name, length, executor):.0f}"
    except (BrokenProcessPool, MemoryError, RuntimeError):
        return f"over {LIMIT_GIB} GiB"


def _peak(name: str, length: int, executor: str | None) -> float:
    torch.set_num_threads(1)
    # The dense form would take the machine down with it.
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_GIB * 2**30, LIMIT_GIB * 2**30))
    found = []
    for size in (64, length):  # the short one loads what torch loads on first use
        Layer(size, torch.float32).attention(hf_posenc.build(name, geometry(8192)), executor)().sum().backward()
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return found[1] - found[0]


if __name__ == "__main__":
    main()
