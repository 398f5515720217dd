"""Cost of learned rotations relative to stock RoPE: building those of one layer, and a training step of a small Llama.

    python benchmarks/rotations.py --output benchmarks/results/rotations.md

All cases take turns, so that what else the machine does meets them alike; each is compared with stock RoPE of the
same round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from memory import machine
from transformers import LlamaConfig, LlamaForCausalLM

import hf_posenc
from hf_posenc.operands import Positions, Tokens
from hf_posenc.schemes.families.block_rotary import BlockRotary

CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
}
STOCK = "stock RoPE"
CASES: dict[str, tuple[str, dict[str, int]]] = {"rope": ("rope", {})}
for _name in ("liere", "comrope_ap", "comrope_ld"):
    for _size in (2, 4, 8, 16, 64):
        CASES[f"{_name}, blocks of {_size}"] = (_name, {"block_size": _size})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), help="cases to measure next to stock RoPE")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    cases = [STOCK, *arguments.only]
    models = {case: model_of(case, arguments.layers) for case in cases}
    ids = torch.randint(CONFIG["vocab_size"], (1, arguments.length))
    building = measure({c: builder(models[c], arguments.length) for c in cases}, 3 * arguments.rounds)
    turning = measure({c: turner(models[c], arguments.length) for c in cases}, 3 * arguments.rounds)
    training = measure({c: trainer(models[c], ids) for c in cases}, arguments.rounds)
    lines = [
        "# Speed of learned rotations",
        "",
        f"A Llama with {arguments.layers} layers, hidden size {CONFIG['hidden_size']}, "
        f"{CONFIG['num_attention_heads']} heads on "
        f"{CONFIG['num_key_value_heads']} kv heads, S = {arguments.length}, batch 1, float32, {arguments.threads} "
        "thread(s), from "
        "the pretrained start. Medians of interleaved rounds; in brackets the middle half of the ratios to stock "
        "RoPE of the "
        "same round.",
        "",
        "Times are CPU time of the process, which other work on the machine disturbs least. Building: the tables or "
        "planes of one layer, with gradients. Building and turning: the same, with queries and keys "
        "turned, forward and backward. Step: forward, backward and AdamW of the whole model. (Stock RoPE builds once "
        "for all "
        "layers, the others in each.)",
        "",
        "| | building, ms | building and turning, ms | step, ms | step / stock RoPE |",
        "|---|---:|---:|---:|---:|",
    ]
    for case in cases:
        ratios = [own / stock for own, stock in zip(training[case], training[STOCK], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = [f"{1e3 * statistics.median(times[case]):.2f}" for times in (building, turning)]
        row += [f"{1e3 * statistics.median(training[case]):.0f}", f"{middle:.3f} ({low:.3f} to {high:.3f})"]
        lines.append(f"| {case} | " + " | ".join(row) + " |")
    lines += ["", machine(), "", f"Command: `python {' '.join(sys.argv)}`"]
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


def model_of(case: str, layers: int) -> LlamaForCausalLM:
    """Return a model in training mode, the same weights for every case."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, num_hidden_layers=layers))
    if case != STOCK:
        scheme, options = CASES[case]
        hf_posenc.patch(model, scheme, **options)
    return model.train()


def builder(model: LlamaForCausalLM, length: int) -> Callable[[], object]:
    """Return what makes the rotations of the first layer."""
    places, like = torch.arange(length)[None], torch.zeros(1)
    scheme = getattr(model.model.layers[0].self_attn, "hf_posenc", None)
    if scheme is None:
        return lambda: model.model.rotary_emb(like, places)
    if scheme is not None and not isinstance(scheme, BlockRotary):
        return lambda: scheme.cos_sin(places, torch.float32)
    return lambda: scheme.rotation(places, None, like)


def turner(model: LlamaForCausalLM, length: int) -> Callable[[], object]:
    """Return what turns queries and keys of the first layer, there and back."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    places = torch.arange(length)[None]
    # As projections leave them: [B, S, H, D], seen as [B, H, S, D].
    q = torch.randn(1, length, 8, 64).transpose(1, 2).requires_grad_()
    k = torch.randn(1, length, 4, 64).transpose(1, 2).requires_grad_()
    scheme = getattr(model.model.layers[0].self_attn, "hf_posenc", None)

    def turn() -> None:
        if scheme is None:
            new_q, new_k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(q, places))
        else:
            projected = scheme.project(Tokens(positions=Positions(places, places)), q, k, k)
            new_q, new_k = projected.q, projected.k
        torch.autograd.backward((new_q, new_k), (torch.ones_like(new_q), torch.ones_like(new_k)))

    return turn


def trainer(model: LlamaForCausalLM, ids: torch.Tensor) -> Callable[[], object]:
    """Return a training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()

    return step


def measure(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each action in each round; the order turns from round to round."""
    for action in actions.values():
        action()
    times: dict[str, list[float]] = {case: [] for case in actions}
    order = list(actions)
    for _ in range(rounds):
        for case in order:
            start = time.process_time()
            actions[case]()
            times[case].append(time.process_time() - start)
        order = order[1:] + order[:1]
    return times


if __name__ == "__main__":
    main()
