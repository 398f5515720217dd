"""The kinds of pictures: some for each family of schemes, and those that schemes declare."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.figure import FigureBase
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from hf_posenc import registry
from hf_posenc.operands import Positions, Tokens
from hf_posenc.pictures import Numbers, Picture
from hf_posenc.recipes.plots.subject import Layer, Part, asked
from hf_posenc.recipes.reports import style

# Title of a picture, behind the name of the scheme, and its width and height in inches, the title included.
Drawn = tuple[str, float, float]

# Up to more than so many tokens, distances are on a logarithmic axis.
_FAR = 300
# Slower than this, in turns per token, is standing still, and left out.
_STILL = 1e-9
# More rows of a heat map could not be seen.
_ROWS = 1024
# Settings of a kind that shows queries and keys.
_ONE_LAYER: dict[str, Any] = {"per_layer": True, "layers": 4, "heads": 8}


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of picture.

    Attributes:
        name: Value of `--what`, and beginning of file names.
        summary: Content, for `kinds`.
        fits: Whether there is such a picture of some layers.
        draw: Function that draws some layers into a figure or a part of one, without the title.
        per_layer: Whether every layer has a figure of its own.
        layers: Number of layers that are drawn at most, unless some are chosen.
        heads: Number of heads, likewise.
    """

    name: str
    summary: str
    fits: Callable[[Part], bool]
    draw: Callable[[FigureBase, Part], Drawn]
    per_layer: bool = False
    layers: int = 12
    heads: int = 64


def all_kinds() -> dict[str, Kind]:
    """Return all kinds by name, in the order of a page: what a scheme is, then what it does on a text."""
    declared = {picture.name: picture for info in registry.schemes().values() for picture in info.cls.pictures}
    shown = map(_declared, sorted(declared.values(), key=lambda picture: picture.over == "pairs"))
    return {kind.name: kind for kind in (*_OF_SCHEMES, *shown, _ATTENTION)}


def _is_of(*families: str) -> Callable[[Part], bool]:
    return lambda part: registry.get(part.name).family in families


# -- by distance -------------------------------------------------------------------------------------------------------


def _draw_by_distance(what: str, key: Callable[[Layer], object], canvas: FigureBase, part: Part) -> Drawn:
    """Draw what positions add to the logit of a mean query and a mean key: lines, or maps over the patches of an image.

    Products are linear in both, so what these two get at a distance is the mean over all pairs of a query and a key.
    Layers with the same key are drawn once.
    """
    layers = part.distinct(key)
    if part.on_grid:
        return f"{what}, around the middle patch", *_draw_patches(canvas, part, layers)
    queries = _queries(part)
    cells = [(query, *layer) for query in queries for layer in layers]
    ahead = "" if part.geometry.causal else "; below 0: ahead"
    x, y = f"distance to the key (tokens{ahead})", "logit, below its largest (nats)"
    drawn, rows, columns = style.grid(canvas, len(cells), x=x, y=y, share_x=False)
    lowest = -0.1
    for axes, (query, name, layer) in zip(drawn, cells, strict=True):
        far = torch.arange(query + 1) if query <= 1024 else style.spread(query)
        far = far if part.geometry.causal else torch.cat((-far.flip(0)[:-1], far))
        values = _added(layer, query, far)[list(part.heads)]
        # The same for all keys of a query changes no weight, and may be large.
        values = values - values.amax(-1, keepdim=True)
        lowest = min(lowest, float(values.min()))
        style.lines(axes, far, values, part.heads, log=query > _FAR, width=1.5)
        style.caption(axes, f"{name}, query at {query}" if part.queries or len(queries) > 1 else name)
    lowest = max(lowest, style.FLOOR)
    drawn[0].set_ylim(1.05 * lowest, -0.05 * lowest)
    style.legend_beside(drawn[columns - 1], "head")
    return f"{what}, by distance", 1.0 + 2.5 * max(columns, 2), 0.5 + 2.1 * rows


def _draw_patches(canvas: FigureBase, part: Part, layers: list[tuple[str, Layer]]) -> tuple[float, float]:
    maps = torch.cat([_around_the_middle(layer)[list(part.heads)] for _, layer in layers])
    names = [f"{name}, head {head}" for name, _ in layers for head in part.heads]
    limit, (rows, columns) = float(maps.abs().max()) or 1.0, maps.shape[1:]
    left, top = -(columns // 2) - 0.5, -(rows // 2) - 0.5
    drawn, down, across = style.grid(
        canvas, len(names), len(part.heads), x="column (patches)", y="row (patches)", size=8
    )
    for axes, name, values in zip(drawn, names, maps, strict=True):
        extent = (left, left + columns, top + rows, top)
        image = style.heat(axes, values, style.SIGNED, vmin=-limit, vmax=limit, extent=extent)
        style.caption(axes, name)
    style.bar(canvas, image, drawn, "added to the logit (nats)")
    return 1.2 + 1.6 * across, 0.8 + 1.6 * down


def _added(layer: Layer, query: int, far: Tensor) -> Tensor:
    """Return what positions add to the logits of a query at a position, by distance, float64 `[H, N]`."""
    far = far.to(layer.q.device)
    return layer.added(Positions(torch.full((1, 1), query, device=far.device), query - far[None]))[:, 0]


def _around_the_middle(layer: Layer) -> Tensor:
    """Return what is added to the logits of the patch in the middle, for each patch, `[H, rows, columns]`."""
    there = layer.tokens.positions
    assert there.key_coords is not None
    patches = there.key_coords[0, 1:]  # the class token has no place
    rows, columns = (int(count) for count in patches.max(dim=0).values + 1)
    middle = slice(1 + rows // 2 * columns + columns // 2, 2 + rows // 2 * columns + columns // 2)
    places = Positions(there.query[:, middle], there.key[:, 1:], there.key_coords[:, middle], patches[None])
    return layer.added(places)[:, 0].view(-1, rows, columns)


def _queries(part: Part) -> tuple[int, ...]:
    """Return the positions of queries to draw: those asked for, or the trained length, and others if it matters."""
    if part.queries:
        return part.queries
    near, layer = torch.arange(17), part.layers[0]
    here, there = (_added(layer, query, near) for query in (16, 16 * part.length))
    if torch.allclose(here, there, rtol=1e-4, atol=1e-4):
        return (part.length,)
    return tuple(sorted({min(128, part.length), part.length, 4 * part.length}))


# -- rotations and tables ----------------------------------------------------------------------------------------------


def _draw_frequencies(canvas: FigureBase, part: Part) -> Drawn:
    """Draw how fast the planes turn: the eigenvalues of what a scheme does to channels at the first position."""
    layers = part.distinct(lambda layer: tuple(_frequencies(layer).flatten().tolist()))
    drawn, rows, columns = style.grid(canvas, len(layers), x="plane, fastest first", y="tokens per turn")
    native = part.geometry.inv_freq
    for axes, (name, layer) in zip(drawn, layers, strict=True):
        if native is not None:
            own = 2 * math.pi / native.double().cpu()[native.cpu() > 0]
            axes.plot(range(len(own)), own.numpy(), color="0.6", linewidth=4, alpha=0.6, label="native", zorder=0)
        for index, (label, found) in enumerate(_lines(layer).items()):
            colour, marker, _ = style.look(index + 1)
            turns = 2 * math.pi / found.masked_fill(found < 2 * math.pi * _STILL, math.nan)
            dots: dict[str, Any] = {"linestyle": "none", "marker": marker, "markersize": 4, "alpha": 0.8}
            axes.plot(range(len(found)), turns.numpy(), color=colour, label=label, **dots)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(style.thousands)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.axhline(part.length, color=style.GREY, linewidth=0.8, linestyle=":", label="trained length")
        style.caption(axes, name)
        style.open_frame(axes)
    style.legend_beside(drawn[columns - 1])
    return "how far apart tokens are for one turn of a plane", 1.4 + 2.5 * max(columns, 2), 0.5 + 2.4 * rows


def _lines(layer: Layer) -> dict[str, Tensor]:
    """Return the frequencies of a layer, by the label of their line."""
    found = _frequencies(layer)
    if torch.allclose(found, found[:1], rtol=1e-9, atol=0):
        return {"all heads": found[0]}
    return {f"kv head {group}": row for group, row in enumerate(found)}


def _frequencies(layer: Layer) -> Tensor:
    """Return the angles by which the planes of each kv head turn from token to token, float64 `[G, D / 2]`."""
    scheme, geometry, device = layer.scheme, layer.scheme.geometry, layer.q.device
    # Rows are channels, each turned by itself.
    channels = torch.eye(geometry.head_dim, dtype=torch.float64, device=device)
    ones = torch.ones(1, len(channels), dtype=torch.long, device=device)
    q, k = (channels.expand(1, heads, -1, -1) for heads in (geometry.heads, geometry.kv_heads))
    turned = scheme.project(Tokens(positions=Positions(ones, ones), common=layer.tokens.common), q, k, k).k[0]
    # Each plane has two eigenvalues, with angles of opposite sign.
    angles = torch.linalg.eigvals(turned.cpu()).angle().abs().sort(dim=-1, descending=True).values
    pairs: Tensor = angles[:, ::2]
    return pairs


def _draw_table(canvas: FigureBase, part: Part) -> Drawn:
    """Draw what is added to the embeddings, and the likeness of positions by it."""
    rows = min(part.scheme.facts().end or part.length, _ROWS)
    positions, coords = torch.arange(rows, device=part.layers[0].q.device)[None], None
    if part.scheme.axes:
        places = part.layers[0].tokens.positions
        positions, coords = places.key, places.key_coords
    shape = (1, positions.shape[1], part.geometry.hidden_size)
    none = torch.zeros(shape, dtype=torch.float64, device=positions.device)
    table = part.scheme.embed(none, positions, coords)[0].cpu()
    left, right = canvas.subplots(1, 2, width_ratios=(1.6, 1))
    # A few large entries would leave the rest grey; torch takes quantiles of 16 million numbers at most.
    limit = float(table.abs().flatten()[:: 1 + table.numel() // 10**7].quantile(0.995)) or 1.0
    image = style.heat(left, table.T, style.SIGNED, aspect="auto", origin="lower", vmin=-limit, vmax=limit)
    style.bar(canvas, image, left, "added value", 10, extend="both")
    unit = torch.nn.functional.normalize(table, dim=-1)
    image = style.heat(right, unit @ unit.T, style.SIGNED, vmin=-1, vmax=1, origin="lower")
    style.bar(canvas, image, right, "cosine", 10)
    place = "patch (0 is the class token)" if part.geometry.axes > 1 else "position (tokens)"
    for axes, title, y in (
        (left, "added to the token embeddings", "channel"),
        (right, "likeness of positions", place),
    ):
        style.caption(axes, title)
        axes.set_xlabel(place, fontsize=9)
        axes.set_ylabel(y, fontsize=9)
    return "table of positions", 9.5, 3.6


_OF_SCHEMES = (
    Kind(
        "bias",
        "what an additive scheme adds to the logits, by distance, head and layer",
        _is_of("additive"),
        partial(_draw_by_distance, "bias on the logits", lambda layer: id(layer.scheme)),
    ),
    Kind(
        "decay",
        "what positions add to the logit of a mean query and a mean key, by distance (rotary and content-relative "
        "schemes)",
        _is_of("rotary", "content-relative"),
        # Queries and keys also differ where layers share a scheme.
        partial(_draw_by_distance, "change of the mean logit", lambda layer: layer.index),
    ),
    Kind(
        "frequencies",
        "how fast the planes of a rotary scheme turn, next to those of the model's own rotation",
        lambda part: _is_of("rotary")(part) and not part.on_grid,
        _draw_frequencies,
    ),
    Kind(
        "table",
        "what an absolute scheme adds to the embeddings, and how alike positions are by it",
        lambda part: part.scheme.overrides("embed"),
        _draw_table,
    ),
)


# -- on a text ---------------------------------------------------------------------------------------------------------


def _declared(picture: Picture) -> Kind:
    """Return the kind for a picture that schemes declare; schemes that share its name each draw their own."""

    def of(part: Part) -> Picture | None:
        return next((own for own in part.scheme.pictures if own.name == picture.name), None)

    def draw(canvas: FigureBase, part: Part) -> Drawn:
        own = of(part)
        assert own is not None
        if own.over == "tokens":
            return _draw_strips(canvas, part, own)
        return _draw_maps(canvas, part, own.title, own.numbers[0], _values(own.numbers[0], part.layers[0]))

    form = _ONE_LAYER if picture.over == "pairs" else {}
    return Kind(picture.name, picture.summary, lambda part: of(part) is not None, draw, **form)


def _values(numbers: Numbers, layer: Layer) -> Tensor:
    """Return numbers of one layer, per head and token `[H, S]`, or per head, query and key `[H, S, S]`."""
    return numbers.of(layer.scheme, *asked(layer.scheme, layer.tokens, layer.q, layer.k, layer.v))[0].cpu()


def _draw_strips(canvas: FigureBase, part: Part, picture: Picture) -> Drawn:
    """Draw rows of heads over the tokens of a text, a strip for each layer; and several such columns side by side."""
    columns = picture.numbers
    drawn = canvas.subplots(len(part.layers), len(columns), squeeze=False, sharex=True, sharey=True)
    step = math.ceil(len(part.heads) / 8)
    for side, numbers in enumerate(columns):
        found = [_values(numbers, layer)[list(part.heads)] for layer in part.layers]
        title = numbers.title
        if found[0].ndim == 3:
            # In an encoder, gates ahead of the middle count, too.
            reader, which = (-1, "last") if part.geometry.causal else (found[0].shape[1] // 2, "middle")
            found, title = [values[:, reader] for values in found], f"{title} at the {which} token"
        scale = style.scale_of(numbers, found)
        for row, (layer, values) in enumerate(zip(part.layers, found, strict=True)):
            axes = drawn[row, side]
            image = style.heat(axes, values, scale=scale, aspect="auto")
            style.caption(axes, f"{title}, layer {layer.index}" if title and not row else f"layer {layer.index}")
            shown = part.heads[::step]
            axes.set_yticks(range(0, len(part.heads), step), [str(head) for head in shown], fontsize=7)
            if side == 0:
                axes.set_ylabel("head", fontsize=8)
        style.token_ticks(drawn[-1, side], part.text, x=True)
        drawn[-1, side].set_xlabel("token", fontsize=8)
        style.bar(canvas, image, drawn[:, side], numbers.label, fraction=0.04, format="%g")
    width, strip = len(columns) * max(1.25 * style.side(part.text), 3), 0.3 + 0.11 * min(len(part.heads), 16)
    return picture.title, 1.3 + width, 0.9 + style.TOKEN_LABELS + strip * len(part.layers)


def _draw_attention(canvas: FigureBase, part: Part) -> Drawn:
    """Draw the weights, on one scale for all pictures, so that they can be compared."""
    numbers = Numbers(lambda weights: weights, "weight (log scale)", log=True)
    return _draw_maps(canvas, part, "attention weights", numbers, part.layers[0].weights.cpu())


def _draw_maps(canvas: FigureBase, part: Part, title: str, numbers: Numbers, found: Tensor) -> Drawn:
    """Draw queries over keys, a map for each head of one layer, with the tokens at the outer edges."""
    found = found[list(part.heads)]
    if part.geometry.causal:
        found = found.masked_fill(found.new_ones(found.shape[-2:]).triu(1).bool(), math.nan)
    scale = style.scale_of(numbers, [found])
    drawn, rows, columns = style.grid(canvas, len(part.heads), 4, x="key", y="query", size=8)
    for place, (axes, head, values) in enumerate(zip(drawn, part.heads, found, strict=True)):
        image = style.heat(axes, values, scale=scale)
        style.caption(axes, f"head {head}")
        style.open_frame(axes)
        # Panels share their axes: labels of the outer ones are those of all.
        style.token_ticks(axes, part.text, x=place + columns >= len(drawn), y=place % columns == 0)
    style.bar(canvas, image, drawn, numbers.label, fraction=0.04, format="%g")
    side, title = style.side(part.text), f"{title}, layer {part.layers[0].index}"
    return title, 1.9 + columns * (side + 0.15), 0.5 + style.TOKEN_LABELS + rows * (side + 0.25)


_ATTENTION = Kind(
    "attention",
    "attention weights of each head over a text, with its tokens",
    lambda part: True,
    _draw_attention,
    **_ONE_LAYER,
)
