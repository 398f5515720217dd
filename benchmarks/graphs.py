"""Compiled and exported models: breaks in the graph, differences from the eager model, compilations and times.

    python benchmarks/graphs.py --output benchmarks/results/graphs.md

Each scheme is measured on a small random Llama. ONNX needs `onnx`, `onnxscript` and `onnxruntime`; without them its
column is empty. Speed is that of decoding with a static cache, compiled by inductor, which needs a C++ compiler: stock
and patched model take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory import machine
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import hf_posenc

STOCK = "stock"
EXPORTED = ("rotary", "absolute", "additive")
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 4}
CACHE = 256


def model_of(scheme: str, layers: int, sizes: dict[str, int]) -> Any:
    """Return a random Llama in eval mode, patched or stock."""
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, vocab_size=128, num_hidden_layers=layers, max_position_embeddings=512)
    model = LlamaForCausalLM(config).eval()
    return model if scheme == STOCK else hf_posenc.patch(model, scheme)


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(length))


def run(model: Any, call: Any, *, train: bool) -> list[Tensor]:
    """Return the logits of a forward pass that fills a cache, or the gradients of a training step."""
    model.train(train).zero_grad()
    with torch.set_grad_enabled(train):
        found = call(**inputs(train=train))
    if not train:
        return [found.logits]
    found.loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def inputs(*, train: bool) -> dict[str, Any]:
    return {"input_ids": tokens(2, 24), **({"labels": tokens(2, 24), "use_cache": False} if train else {})}


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest number of a tensor."""
    pairs = zip(got, want, strict=True)
    return max(float((g - w).abs().max() / w.abs().max().clamp_min(1e-9)) for g, w in pairs)


def graph(scheme: str, *, train: bool) -> dict[str, float]:
    """Return the number of breaks in a graph, its difference from the eager model, and the CPU time of tracing."""
    torch.compiler.reset()
    model = model_of(scheme, 2, SMALL)
    want = run(model, model, train=train)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    begin = time.process_time()
    try:
        got = run(model, whole, train=train)
        return {"breaks": 0, "difference": distance(got, want), "time": time.process_time() - begin}
    except torch._dynamo.exc.Unsupported:
        torch.compiler.reset()
        return {"breaks": torch._dynamo.explain(model)(**inputs(train=train)).graph_break_count}


def static_graphs(scheme: str) -> int:
    """Return how often a step of decoding with a static cache is compiled."""
    torch.compiler.reset()
    model, graphs = model_of(scheme, 2, SMALL), []

    def count(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    decode(model, torch.compile(model, backend=count), 8)
    return len(graphs)


def decode(model: Any, call: Any, steps: int) -> float:
    """Return the seconds of so many steps of greedy decoding after a prompt."""
    cache = StaticCache(model.config, max_cache_len=CACHE)
    with torch.no_grad():
        token = model(tokens(1, 8), past_key_values=cache).logits[:, -1:].argmax(-1)
        begin = time.perf_counter()
        for place in range(8, 8 + steps):
            at = torch.full((1, 1), place)
            token = call(token, past_key_values=cache, position_ids=at).logits[:, -1:].argmax(-1)
    return time.perf_counter() - begin


class Logits(nn.Module):
    """A model as exporters want it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return found


def operands(rows: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :2] = 0
    return {"input_ids": tokens(rows, length), "attention_mask": mask}


def exported(scheme: str, convert: Callable[[nn.Module, dict[str, Any]], Callable[..., Tensor]]) -> float | str:
    """Return the largest difference of an exported model at other sizes, or the name of the error."""
    model = Logits(model_of(scheme, 2, SMALL))
    sizes = {0: torch.export.Dim("rows", min=1, max=16), 1: torch.export.Dim("length", min=2, max=256)}
    call = operands(3, 40)
    real = call["attention_mask"].bool()
    try:
        program = convert(model, {name: dict(sizes) for name in call})
        with torch.no_grad():
            return distance([program(**call)[real]], [model(**call)[real]])
    except Exception as error:  # of any kind: the table says which
        return type(error).__name__


def by_torch(model: nn.Module, sizes: dict[str, Any]) -> Callable[..., Tensor]:
    program: Any = torch.export.export(model, (), operands(2, 12), dynamic_shapes=sizes, strict=False).module()
    return program  # type: ignore[no-any-return]


def by_onnx(model: nn.Module, sizes: dict[str, Any]) -> Callable[..., Tensor]:
    import onnxruntime

    program: Any = torch.onnx.export(model, (), kwargs=operands(2, 12), dynamic_shapes=sizes, dynamo=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        program.save(file)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda **call: torch.from_numpy(session.run(None, {name: x.numpy() for name, x in call.items()})[0])


def speeds(schemes: list[str], rounds: int) -> dict[str, tuple[float, float]]:
    """Return tokens/s of each scheme relative to stock: both compiled, and both eager; medians over rounds."""
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 64
    models = {scheme: model_of(scheme, 4, WIDE) for scheme in (STOCK, *schemes)}
    calls = {scheme: (torch.compile(model, fullgraph=True), model) for scheme, model in models.items()}
    found: dict[str, list[list[float]]] = {scheme: [[], []] for scheme in models}
    for scheme, model in models.items():
        decode(model, calls[scheme][0], 8)
    for _ in range(rounds):
        for scheme, model in models.items():
            for times, call in zip(found[scheme], calls[scheme], strict=True):
                times.append(decode(model, call, 64))

    def ratio(scheme: str, kind: int) -> float:
        pairs = zip(found[STOCK][kind], found[scheme][kind], strict=True)
        return statistics.median(stock / own for stock, own in pairs)

    return {scheme: (ratio(scheme, 0), ratio(scheme, 1)) for scheme in schemes}


def measure(scheme: str, onnx: bool) -> dict[str, Any]:
    """Return all figures of a scheme but its speed."""
    family = None if scheme == STOCK else hf_posenc.schemes()[scheme].family
    row: dict[str, Any] = {"scheme": scheme, "forward": graph(scheme, train=False), "step": graph(scheme, train=True)}
    row["static"] = static_graphs(scheme)
    row["export"] = exported(scheme, by_torch)
    if onnx and family in (None, *EXPORTED):
        row["onnx"] = exported(scheme, by_onnx)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=list(hf_posenc.schemes()))
    parser.add_argument("--speed", nargs="*", default=["rope", "kerple", "fox"], help="schemes whose decoding is timed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=Path, help="file of finished rows, to go on from")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        import onnxruntime  # noqa: F401

        onnx = True
    except ImportError:
        onnx = False
    rows = []
    if arguments.rows is not None and arguments.rows.exists():
        rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    for scheme in (STOCK, *arguments.schemes):
        if all(row["scheme"] != scheme for row in rows):
            rows.append(measure(scheme, onnx))
            if arguments.rows is not None:
                with arguments.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    lines = table(rows, speeds(arguments.speed, arguments.rounds) if arguments.speed else {})
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


def table(rows: list[dict[str, Any]], speed: dict[str, tuple[float, float]]) -> list[str]:
    """Return the page of results, by lines."""
    stock = next(row for row in rows if row["scheme"] == STOCK)

    def number(value: float | str | None) -> str:
        if value is None:
            return ""
        return value if isinstance(value, str) else "0" if value == 0 else f"{value:.0e}"

    lines = [
        "# Graphs",
        "",
        "A random Llama with 2 layers, hidden size 64, 4 heads on 2 kv heads, float32, batch 2, 24 tokens. Breaks: of "
        "`torch.compile` on a forward pass that fills a cache, and on a training step; 0 passes `fullgraph=True`. "
        "Differences are relative to the largest number of a tensor: of logits, of gradients, and of the logits of "
        "exported models at another batch and length than those of the export, with padding. Static: compilations of "
        "a step of decoding with a static cache, over 8 steps. Tracing: CPU time of tracing the forward pass and the "
        "step, relative to stock. An error stands where an export fails; an empty cell was not measured.",
        "",
        "| | breaks, forward | breaks, step | difference, logits | difference, gradients | static | `torch.export` "
        "| ONNX | tracing / stock |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        times = [sum(x[part].get("time", float("nan")) for part in ("forward", "step")) for x in (row, stock)]
        cells = [
            row["scheme"],
            str(row["forward"]["breaks"]),
            str(row["step"]["breaks"]),
            number(row["forward"].get("difference")),
            number(row["step"].get("difference")),
            str(row["static"]),
            number(row["export"]),
            number(row.get("onnx")),
            f"{times[0] / times[1]:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if speed:
        lines += [
            "",
            f"Decoding with a static cache of {CACHE} tokens, batch 1, 4 layers, hidden size 256: tokens/s relative to "
            "the stock model, medians of interleaved rounds.",
            "",
            "| | both compiled (inductor) | both eager |",
            "|---|---:|---:|",
            *(f"| {scheme} | {compiled:.2f} | {eager:.2f} |" for scheme, (compiled, eager) in speed.items()),
        ]
    return [*lines, "", machine(), "", f"Command: `python {' '.join(sys.argv)}`"]


if __name__ == "__main__":
    main()
