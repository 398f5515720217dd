"""Small vision transformers, trained on images of one size and tested on larger ones, by positional scheme.

    pip install scikit-learn matplotlib
    python benchmarks/vision.py --output benchmarks/results/vision.md

The images are the handwritten digits that come with scikit-learn (1,797 of 8 x 8 pixels). In training a digit takes
10 to 16 pixels, anywhere on 16 x 16, with patches of 2 x 2. Larger images come in two kinds: in enlarged ones the
digits grow with the image, in wider ones there is more room around digits as large as before. All models start from
the same weights and see the same batches; they differ in what takes the place of the learned table. A picture of the
table is drawn next to it.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from memory import machine
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification, set_seed
from transformers.utils import logging

import hf_posenc
from hf_posenc.patches.vit import grid_coords

SIDE, PATCH = 16, 2
SMALLEST = 10  # pixels that a digit takes at least in training
SIZES = (24, 32)
CASES = (("trained", SIDE), *((kind, size) for kind in ("enlarged", "wider") for size in SIZES))
TRAINED_ON, BATCH, RATE, DECAY = 1200, 64, 2e-3, 0.05

OFFICIAL: dict[str, Any] = {"init": "official"}
SCHEMES: dict[str, tuple[str, dict[str, Any]] | None] = {
    "learned table, interpolated": None,
    "rope2d, axial": ("rope2d", {"kind": "axial"}),
    "rope2d, mixed": ("rope2d", {"kind": "mixed"}),
    "liere": ("liere", OFFICIAL),
    "comrope_ap": ("comrope_ap", OFFICIAL),
    "comrope_ld": ("comrope_ld", OFFICIAL),
    "sinusoidal": ("sinusoidal", {"layout": "concat", "scale": 1.0}),
    "alibi": ("alibi", {}),
    "t5_clipped": ("t5_clipped", {}),
    "nope": ("nope", {}),
}


@dataclass(frozen=True)
class Row:
    """How often a model is right, by kind and size of the images, once per seed."""

    name: str
    right: dict[tuple[str, int], list[float]]

    def percent(self, kind: str, size: int) -> float:
        return 100 * statistics.mean(self.right[kind, size])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    began = time.process_time()
    runs = [(name, seed) for name in arguments.schemes for seed in range(arguments.seeds)]
    rows: dict[str, Row] = {}
    for name, seed in track(runs, description="training"):
        model = trained(name, seed, arguments.steps)
        for label, rate in tests(name, model):
            row = rows.setdefault(label, Row(label, {case: [] for case in CASES}))
            for case, seen in row.right.items():
                seen.append(right(model, *case, rate))
    minutes = (time.process_time() - began) / 60
    output = report(list(rows.values()), arguments, minutes)
    sys.stdout.write(output)
    if arguments.output:
        arguments.output.write_text(output, encoding="utf-8")
        draw(list(rows.values()), arguments.output.with_suffix(".png"))


def tests(name: str, model: PreTrainedModel) -> list[tuple[str, bool]]:
    """Return the ways in which a model is tested: with coordinates as they are, and squeezed into the trained range."""
    reads_coords = SCHEMES[name] is not None and 2 in model.vit.axes()
    return [(name, False), (f"{name}, squeezed", True)] if reads_coords else [(name, False)]


def trained(name: str, seed: int, steps: int) -> PreTrainedModel:
    """Return a model trained from scratch."""
    set_seed(seed)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=SIDE,
        patch_size=PATCH,
        num_channels=1,
        num_labels=10,
        initializer_range=0.1,
    )
    model = ViTForImageClassification(config)
    chosen = SCHEMES[name]
    if chosen is not None:
        hf_posenc.patch(model, chosen[0], **chosen[1])
    weights = [p for key, p in model.named_parameters() if key.endswith("weight") and "hf_posenc" not in key]
    decayed = {id(p) for p in weights if p.ndim > 1}
    groups: list[list[Tensor]] = [[], []]
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[id(parameter) in decayed].append(parameter)
    optimizer = torch.optim.AdamW([{"params": p, "weight_decay": d} for p, d in zip(groups, (0, DECAY), strict=True)])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    digits, labels = data()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen_ones = torch.randint(0, TRAINED_ON, (BATCH,), generator=generator)
        pixels = place(digits[chosen_ones], SIDE, SMALLEST, SIDE, generator)
        optimizer.zero_grad()
        model(pixels, labels=labels[chosen_ones]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def right(model: PreTrainedModel, kind: str, size: int, squeezed: bool) -> float:
    """Return the share of held-out digits that a model recognises on images of another size."""
    digits, labels = (x[TRAINED_ON:] for x in data())
    growth = size / SIDE if kind == "enlarged" else 1
    pixels = place(digits, size, SMALLEST * growth, SIDE * growth, torch.Generator().manual_seed(size))
    call: dict[str, Any] = {"interpolate_pos_encoding": True}  # read by the learned table only
    if squeezed:
        call["position_coords"] = grid_coords(*[size // PATCH] * 2, pixels.device) * SIDE / size
    guesses = [model(part, **call).logits.argmax(-1) for part in pixels.split(BATCH)]
    return float((torch.cat(guesses) == labels).float().mean())


def data() -> tuple[Tensor, Tensor]:
    """Return the digits `[N, 1, 8, 8]`, 0 to 1, in a fixed random order, and their labels `[N]`."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(digits.images).float()[order, None] / 16, torch.from_numpy(digits.target)[order]


def place(digits: Tensor, size: int, smallest: float, largest: float, generator: torch.Generator) -> Tensor:
    """Return images `[N, 1, size, size]` with a digit each, anywhere, of `smallest` to `largest` pixels; -1 to 1."""
    count = len(digits)
    width = smallest + (largest - smallest) * torch.rand(count, 1, generator=generator)
    corner = (size - width) * torch.rand(count, 2, generator=generator)
    # Maps places on the image, -1 to 1, to those on the digit.
    move = torch.zeros(count, 2, 3)
    move[:, 0, 0] = move[:, 1, 1] = size / width[:, 0]
    move[:, :, 2] = (size - 2 * corner) / width - 1
    grid = F.affine_grid(move, [count, 1, size, size], align_corners=False)
    return 2 * F.grid_sample(digits, grid, align_corners=False) - 1


def report(rows: list[Row], arguments: argparse.Namespace, minutes: float) -> str:
    """Return the table, with how it was made."""
    names = [f"{kind}, {size}" for kind, size in CASES]
    lines = [
        "# Digits at larger resolutions (ViT)",
        "",
        f"Digits recognised, % of {len(data()[0]) - TRAINED_ON} held out, mean of {arguments.seeds} seeds, by side of "
        "the image in "
        f"pixels. ViTs of 2 layers and 64 channels with patches of {PATCH} x {PATCH}, trained on {SIDE} x {SIDE} "
        "pixels from scratch for "
        f"{arguments.steps} steps of {BATCH} images; {SMALLEST} to {SIDE} pixels of these are the digit. In enlarged "
        "images digits "
        "grow with the image, in wider ones they stay as large. Coordinates are patches counted from the corner, or, "
        "squeezed, "
        f"the same times {SIDE} / side, which keeps them in the trained range; MAE's sinusoids and CROMA's ALiBi read "
        "them too. In "
        "alibi and t5_clipped the class token, from which the digit is told, is at no distance from any patch: it "
        "sees places only "
        "through what the patches have gathered in the layer before.",
        "",
        "| scheme | " + " | ".join(names) + " |",
        "|---|" + "---:|" * len(names),
        *("| " + " | ".join([row.name, *(f"{row.percent(*case):.1f}" for case in CASES)]) + " |" for row in rows),
        "",
        *([f"![The table as bars]({arguments.output.with_suffix('.png').name})", ""] if arguments.output else []),
        f"{machine()}, one thread, {minutes:.0f} minutes of processor time.",
        "",
        f"Command: `python {shlex.join(sys.argv)}`",
    ]
    return "\n".join(lines) + "\n"


def draw(rows: list[Row], path: Path) -> None:
    """Draw a bar for each scheme, with coordinates squeezed where there are any, and kind of image."""
    import matplotlib.pyplot as plt

    last = {row.name.removesuffix(", squeezed"): row for row in rows}
    shown = list(last.values())[::-1]
    cases = (("trained", SIDE), ("enlarged", SIZES[-1]), ("wider", SIZES[-1]))
    figure, panels = plt.subplots(
        1, len(cases), figsize=(10, 0.36 * len(shown) + 1.2), sharey=True, layout="constrained"
    )
    for panel, case in zip(panels, cases, strict=True):
        shares = [row.percent(*case) for row in shown]
        native = [SCHEMES[row.name.removesuffix(", squeezed")] is None for row in shown]
        bars = panel.barh([row.name for row in shown], shares, color=["tab:grey" if n else "tab:blue" for n in native])
        panel.bar_label(bars, fmt="%.0f", padding=3, fontsize=9)
        panel.axvline(10, color="black", linewidth=0.8, linestyle=":")
        panel.set(title=f"{case[0]}, {case[1]} x {case[1]}", xlim=(0, 110), xticks=range(0, 101, 20))
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("digits recognised, % (dotted: chance)", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
