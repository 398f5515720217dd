"""Pictures of what positions add to logits: lines over the distance, or maps over the patches of an image."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from hf_posenc.operands import Positions, Tokens
from hf_posenc.recipes.plots import style
from hf_posenc.recipes.plots.probe import added
from hf_posenc.recipes.plots.subject import Layer, Part
from hf_posenc.scheme import Scheme

# Gives the query of each head `[H, D]`, the key of each kv head `[G, D]`, and whatever else a scheme needs.
Operands = Callable[[Part, Layer], tuple[Tensor, Tensor, Tokens | None]]
# Gives the layers that are drawn, each with its name.
Panels = Callable[[Part], list[tuple[str, Layer]]]

_COLUMNS, _WIDTH, _HEIGHT = 5, 2.5, 2.1
# From here on distances are on a logarithmic axis.
_FAR = 300


def distances(part: Part, query: int) -> Tensor:
    """Return the distances that are drawn of a query at a position, ascending: to all keys behind it, and as many ahead."""
    behind = torch.arange(query + 1) if query <= 1024 else style.spread(query)
    return behind if part.geometry.causal else torch.cat((-behind.flip(0)[:-1], behind))


def curves(part: Part, layer: Layer, query: int, operands: Operands) -> Tensor:
    """Return what positions add to the logits of a query at a position, by distance, float64 `[H, N]`."""
    q, k, tokens = operands(part, layer)
    return _at(layer.scheme, q, k, tokens, query, distances(part, query))


def _at(scheme: Scheme, q: Tensor, k: Tensor, tokens: Tokens | None, query: int, far: Tensor) -> Tensor:
    far = far.to(q.device)
    places = Positions(torch.full((1, 1), query, device=q.device), query - far[None])
    return added(scheme, places, q, k, tokens)[:, 0]


def sees_position(part: Part, operands: Operands) -> bool:
    """Whether what is added depends on the position of the query, and not on the distance only."""
    near = torch.arange(17)

    def at(query: int) -> Tensor:
        return _at(part.scheme, q, k, tokens, query, near)

    q, k, tokens = operands(part, part.layers[0])
    return not torch.allclose(at(16), at(16 * part.length), rtol=1e-4, atol=1e-4)


def queries(part: Part, operands: Operands) -> tuple[int, ...]:
    """Return the positions of queries to draw: those asked for, or the trained length, and others if it matters."""
    if part.queries:
        return part.queries
    if not sees_position(part, operands):
        return (part.length,)
    return tuple(sorted({min(128, part.length), part.length, 4 * part.length}))


def on_grid(part: Part) -> bool:
    """Whether what is drawn depends on the places of patches in an image."""
    return part.geometry.axes > 1 and part.scheme.axes > 1


def size(part: Part, operands: Operands, layers: Panels) -> tuple[float, float]:
    """Return width and height in inches."""
    if on_grid(part):
        return 1.2 + 1.25 * len(part.heads), 0.6 + 1.35 * len(layers(part))
    rows, columns = _shape(len(layers(part)), len(queries(part, operands)))
    return 1.0 + _WIDTH * max(columns, 2), 0.5 + _HEIGHT * rows


def _shape(layers: int, wanted: int) -> tuple[int, int]:
    columns = min(layers, _COLUMNS)
    return math.ceil(layers / columns) * wanted, columns


def draw(canvas: FigureBase, part: Part, operands: Operands, layers: Panels) -> None:
    """Draw small multiples over layers: one line per head, or, in images, one map per head."""
    if on_grid(part):
        _draw_maps(canvas, part, operands, layers(part))
        return
    wanted, shown = queries(part, operands), layers(part)
    rows, columns = _shape(len(shown), len(wanted))
    panels = canvas.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in panels.flat:
        axes.set_visible(False)
    lowest = -0.1
    for row, query in enumerate(wanted):
        for place, (name, layer) in enumerate(shown):
            # All layers of one query first, in as many rows as that takes.
            axes = panels[row * (rows // len(wanted)) + place // columns, place % columns]
            axes.set_visible(True)
            values = curves(part, layer, query, operands)[list(part.heads)]
            # The same for all keys of a query changes no weight, and may be large.
            values = values - values.amax(-1, keepdim=True)
            lowest = min(lowest, float(values.min()))
            _lines(axes, part, distances(part, query), values)
            style.caption(axes, f"{name}, query at {query}" if part.queries or len(wanted) > 1 else name)
            if query == wanted[-1] and place + columns >= len(shown):
                ahead = "" if part.geometry.causal else "; below 0: ahead"
                axes.set_xlabel(f"distance to the key (tokens{ahead})", fontsize=9)
            if place % columns == 0:
                axes.set_ylabel("logit, below its largest (nats)", fontsize=9)
    lowest = max(lowest, style.FLOOR)
    panels[0, 0].set_ylim(1.05 * lowest, -0.05 * lowest)
    style.legend_of_heads(panels[0, columns - 1], part.heads)


def _lines(axes: Axes, part: Part, far: Tensor, values: Tensor) -> None:
    for head, value, (colour, line) in zip(part.heads, values, style.line_styles(len(part.heads)), strict=True):
        axes.plot(far.numpy(), value.numpy(), color=colour, linestyle=line, linewidth=1.5, label=f"{head}")
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    if int(far.max()) > _FAR:
        style.log_distance(axes)
    axes.set_xlim(int(far.min()), max(1, int(far.max())))
    axes.tick_params(labelsize=8)
    style.open_frame(axes)


def grid_values(part: Part, layer: Layer, operands: Operands) -> Tensor:
    """Return what is added to the logits of the patch in the middle of an image, for each patch, `[H, rows, columns]`."""
    seen = part.seen(layer).tokens.positions
    assert seen.key_coords is not None
    patches = seen.key_coords[0, 1:]  # the class token stands nowhere
    rows, columns = (int(count) for count in patches.max(dim=0).values + 1)
    middle = 1 + rows // 2 * columns + columns // 2
    places = Positions(
        seen.query[:, middle : middle + 1], seen.key[:, 1:], seen.key_coords[:, middle : middle + 1], patches[None]
    )
    q, k, tokens = operands(part, layer)
    return added(layer.scheme, places, q, k, tokens)[:, 0].view(-1, rows, columns)


def _draw_maps(canvas: FigureBase, part: Part, operands: Operands, layers: list[tuple[str, Layer]]) -> None:
    panels = canvas.subplots(len(layers), len(part.heads), squeeze=False, sharex=True, sharey=True)
    maps = [grid_values(part, layer, operands)[list(part.heads)] for _, layer in layers]
    limit = max(float(values.abs().max()) for values in maps) or 1.0
    for line, ((name, _), values) in enumerate(zip(layers, maps, strict=True)):
        rows, columns = values.shape[1:]
        across = (-(columns // 2) - 0.5, columns - columns // 2 - 0.5)
        down = (rows - rows // 2 - 0.5, -(rows // 2) - 0.5)
        for axes, head, value in zip(panels[line], part.heads, values, strict=True):
            image = axes.imshow(
                value.numpy(),
                cmap=style.SIGNED,
                vmin=-limit,
                vmax=limit,
                extent=(*across, *down),
                interpolation="nearest",
            )
            axes.tick_params(labelsize=7)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(5, integer=True))
            if line == 0:
                style.caption(axes, f"head {head}")
        panels[line, 0].set_ylabel(f"{name}\nrow (patches)", fontsize=8)
    for axes in panels[-1]:
        axes.set_xlabel("column (patches)", fontsize=8)
    bar = canvas.colorbar(image, ax=panels, pad=0.01)
    bar.set_label("added to the logit (nats)", fontsize=8)
