"""How fast the planes of rotary schemes turn."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from matplotlib.figure import FigureBase
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor

from hf_posenc.operands import Positions
from hf_posenc.recipes.plots import style
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.subject import Layer, Part, layer_names
from hf_posenc.schemes.families.rotary import RotaryScheme

# Of a token or patch; angles stay below half a turn, so that they can be told from their cosine and sine.
_STEP = 1 / 16
_COLUMNS, _WIDTH, _HEIGHT = 5, 2.5, 2.4
_MARKERS = ("o", "s", "^", "D", "v", "P")
# Slower than this, in turns per token, is standing still.
_STILL = 1e-9


@torch.no_grad()
def frequencies(part: Part, layer: Layer, axis: int | None = None) -> Tensor:
    """Return the angles by which the planes of each kv head turn from one position to the next, float64 `[G, D / 2]`.

    They are those of the eigenvalues of the scheme's own rotation, the fastest first.

    Args:
        part: The layers.
        layer: One of them.
        axis: Axis of an image along which a step is made; `None` in a text.
    """
    scheme = layer.scheme
    if isinstance(scheme, RotaryScheme):
        found = scheme.frequencies(torch.zeros(1, dtype=torch.float64)).abs().sort(descending=True).values
        idle = found.new_zeros(scheme.geometry.head_dim // 2 - len(found))
        return torch.cat((found, idle)).expand(scheme.geometry.kv_heads, -1)
    device = next((parameter.device for parameter in scheme.parameters()), torch.device("cpu"))
    width, groups = scheme.geometry.head_dim, scheme.geometry.kv_heads
    one = torch.ones(1, width, dtype=torch.long, device=device)
    if scheme.axes:
        coords = torch.full((1, width, scheme.axes), _STEP, dtype=torch.float64, device=device)
        if axis is not None:
            coords *= torch.arange(scheme.axes, device=device) == axis
        positions, step = Positions(one, one, coords, coords), _STEP
    else:
        positions, step = Positions(one, one), 1.0
    # Rows are channels, each turned by itself.
    channels = torch.eye(width, dtype=torch.float64, device=device)
    keys = channels.expand(1, groups, -1, -1)
    tokens = replace(part.seen(layer).tokens, positions=positions, hidden=None, common=layer.common)
    turned = scheme.project(tokens, channels.expand(1, scheme.geometry.heads, -1, -1), keys, keys).k[0]
    angles = torch.linalg.eigvals(turned.cpu()).angle().abs()
    # Each plane has two eigenvalues, with angles of opposite sign.
    pairs: Tensor = angles.sort(dim=-1, descending=True).values[:, ::2]
    return pairs / step


def _draw(canvas: FigureBase, part: Part) -> None:
    layers = _distinct(part)
    columns = min(len(layers), _COLUMNS)
    panels = canvas.subplots(math.ceil(len(layers) / columns), columns, squeeze=False, sharex=True, sharey=True)
    for axes in panels.flat[len(layers) :]:
        axes.set_visible(False)
    native = part.geometry.inv_freq
    still, images = False, _in_image(part)
    for place, (name, lines) in enumerate(layers):
        axes = panels.flat[place]
        if native is not None:
            own = native.double().cpu()[native.cpu() > 0]
            axes.plot(
                range(len(own)), _turns(own).numpy(), color="0.6", linewidth=4, alpha=0.6, label="native", zorder=0
            )
        for index, (label, found) in enumerate(lines.items()):
            turning = found > 2 * math.pi * _STILL
            still |= not bool(turning.all())
            axes.plot(
                torch.arange(len(found))[turning].numpy(),
                _turns(found[turning]).numpy(),
                linestyle="none",
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=4,
                alpha=0.8,
                color=style.line_styles(max(len(lines), 2))[index][0],
                label=label,
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: style.thousands(value)))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if not images:
            axes.axhline(part.length, color=style.GREY, linewidth=0.8, linestyle=":", label="trained length")
        style.caption(axes, name)
        axes.tick_params(labelsize=8)
        style.open_frame(axes)
        if place % columns == 0:
            axes.set_ylabel(f"{'patches' if images else 'tokens'} per turn", fontsize=9)
        if place + columns >= len(layers):
            axes.set_xlabel("plane, fastest first", fontsize=9)
    corner = panels[0, columns - 1]
    if corner.get_legend_handles_labels()[0]:
        corner.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)
    if still:
        style.caption(panels[0, 0], f"{layers[0][0]} (planes that stand still are left out)")


def _in_image(part: Part) -> bool:
    return part.geometry.axes > 1 and part.scheme.axes > 1


def _distinct(part: Part) -> list[tuple[str, dict[str, Tensor]]]:
    """Return the frequencies of the layers, those that have the same together, by what they are called."""
    groups: list[tuple[list[int], dict[str, Tensor]]] = []
    for layer in part.layers:
        lines = _lines(part, layer)
        for indices, known in groups:
            if known.keys() == lines.keys() and all(torch.equal(known[name], lines[name]) for name in lines):
                indices.append(layer.index)
                break
        else:
            groups.append(([layer.index], lines))
    return [(layer_names(indices), lines) for indices, lines in groups]


def _lines(part: Part, layer: Layer) -> dict[str, Tensor]:
    if _in_image(part):
        names = ("row to row", "column to column")
        return {name: frequencies(part, layer, axis).mean(0) for axis, name in enumerate(names)}
    found = frequencies(part, layer)
    if bool((found == found[:1]).all()):
        return {"all heads": found[0]}
    return {f"kv head {group}": row for group, row in enumerate(found)}


def _turns(angles: Tensor) -> Tensor:
    return 2 * math.pi / angles


def _size(part: Part) -> tuple[float, float]:
    layers = len(_distinct(part))
    columns = min(layers, _COLUMNS)
    return 1.4 + _WIDTH * max(columns, 2), 0.5 + _HEIGHT * math.ceil(layers / columns)


KIND = Kind(
    name="frequencies",
    summary="how fast the planes of a rotary scheme turn, next to those of the model's own rotation",
    fits=lambda part: part.info.family == "rotary",
    title=lambda part: f"how far apart {'patches' if _in_image(part) else 'tokens'} are for one turn of a plane",
    size=_size,
    draw=_draw,
)
