"""The kinds of pictures: some for each family of schemes, those that schemes declare, and attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from torch import Tensor

from hf_posenc import registry
from hf_posenc.operands import Positions
from hf_posenc.pictures import Picture
from hf_posenc.recipes.plots.subject import Layer, Part, added, asked
from hf_posenc.recipes.reports import style

# Up to more than so many tokens, distances are on a logarithmic axis.
_FAR = 300
# More rows of a heat map could not be seen.
_ROWS = 1024


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of picture, by the name of `--what`, with the parts of a model that it fits and a function that draws one.

    No more than so many layers and heads are drawn unless some are chosen.
    """

    name: str
    summary: str
    fits: Callable[[Part], bool]
    draw: Callable[[Part], Figure]
    layers: int = 12
    heads: int = 64


def all_kinds() -> dict[str, Kind]:
    """Return all kinds by name: what a scheme is, then what it does on a text."""
    declared = {picture.name: picture for info in registry.schemes().values() for picture in info.cls.pictures}
    return {kind.name: kind for kind in (*_OF_SCHEMES, *map(_declared, declared.values()), _ATTENTION)}


def _is_of(*families: str) -> Callable[[Part], bool]:
    # A scheme that reads the places of patches in an image has no distances.
    return lambda part: registry.get(part.name).family in families and min(part.geometry.axes, part.scheme.axes) < 2


# -- by distance -------------------------------------------------------------------------------------------------------


def _draw_by_distance(what: str, key: Callable[[Layer], object], part: Part) -> Figure:
    """Draw what positions add to the logit of a mean query and a mean key, a line for each head.

    Products are linear in both, so what these two get at a distance is the mean over all pairs of a query and a key.
    Layers with the same key are drawn once.
    """
    layers, queries = part.distinct(key), _queries(part)
    cells = [(query, *layer) for query in queries for layer in layers]
    rows, columns = style.shape(len(cells))
    made = style.figure(1.0 + 2.5 * max(columns, 2), 0.5 + 2.1 * rows, f"{part.called}: {what}, by distance")
    ahead = "" if part.geometry.causal else "; below 0: ahead"
    x, y = f"distance to the key (tokens{ahead})", "logit, below its largest (nats)"
    drawn = style.grid(made, len(cells), x=x, y=y, share_x=False)
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
    return made


def _added(layer: Layer, query: int, far: Tensor) -> Tensor:
    """Return what positions add to the logits of a query at a position, by distance, float64 `[H, N]`."""
    far = far.to(layer.q.device)
    positions = Positions(torch.full((1, 1), query, device=far.device), query - far[None])
    return added(layer.scheme, layer.tokens, positions, layer.q[0].mean(1), layer.k[0].mean(1))[:, 0]


def _queries(part: Part) -> tuple[int, ...]:
    """Return the positions of queries to draw: those asked for, or the trained length, and others if it matters."""
    if part.queries:
        return part.queries
    near, layer = torch.arange(17), part.layers[0]
    here, there = (_added(layer, query, near) for query in (16, 16 * part.length))
    if torch.allclose(here, there, rtol=1e-4, atol=1e-4):
        return (part.length,)
    return tuple(sorted({min(128, part.length), part.length, 4 * part.length}))


# -- tables ------------------------------------------------------------------------------------------------------------


def _draw_table(part: Part) -> Figure:
    """Draw what is added to the embeddings, and the likeness of positions by it."""
    rows = min(part.scheme.facts().end or part.length, _ROWS)
    positions, coords = torch.arange(rows, device=part.layers[0].q.device)[None], None
    if part.scheme.axes:
        places = part.layers[0].tokens.positions
        positions, coords = places.key, places.key_coords
    shape = (1, positions.shape[1], part.geometry.hidden_size)
    none = torch.zeros(shape, dtype=torch.float64, device=positions.device)
    table = part.scheme.embed(none, positions, coords)[0].cpu()
    made = style.figure(9.5, 3.6, f"{part.called}: table of positions")
    left, right = made.subplots(1, 2, width_ratios=(1.6, 1))
    # A few large entries would leave the rest grey; torch takes quantiles of 16 million numbers at most.
    limit = float(table.abs().flatten()[:: 1 + table.numel() // 10**7].quantile(0.995)) or 1.0
    image = style.heat(left, table.T, style.SIGNED, aspect="auto", origin="lower", vmin=-limit, vmax=limit)
    style.bar(made, image, left, "added value", 10, extend="both")
    unit = torch.nn.functional.normalize(table, dim=-1)
    image = style.heat(right, unit @ unit.T, style.SIGNED, vmin=-1, vmax=1, origin="lower")
    style.bar(made, image, right, "cosine", 10)
    place = "patch (0 is the class token)" if part.geometry.axes > 1 else "position (tokens)"
    for axes, title, y in ((left, "added to the token embeddings", "channel"), (right, "likeness of positions", place)):
        style.caption(axes, title)
        axes.set_xlabel(place, fontsize=9)
        axes.set_ylabel(y, fontsize=9)
    return made


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

    def draw(part: Part) -> Figure:
        own = of(part)
        assert own is not None
        found = [_values(own, layer)[list(part.heads)] for layer in part.layers]
        scale = Normalize(0, own.high or max(float(values.max()) for values in found) or 1.0)
        return (_draw_strips if found[0].ndim == 2 else _draw_maps)(part, own.title, own.label, found, scale)

    return Kind(picture.name, f"{picture.title}, over a text", lambda part: of(part) is not None, draw, 4, 8)


def _values(picture: Picture, layer: Layer) -> Tensor:
    """Return the numbers of one layer, per head and token `[H, S]`, or per head, query and key `[H, S, S]`."""
    found: Tensor = picture.of(layer.scheme, *asked(layer.scheme, layer.tokens, layer.q, layer.k, layer.v))[0].cpu()
    # The query heads of a kv head share its numbers.
    return found.repeat_interleave(layer.q.shape[1] // found.shape[0], dim=0)


def _draw_strips(part: Part, title: str, label: str, found: Sequence[Tensor], scale: Normalize) -> Figure:
    """Draw numbers `[H, S]` of each layer as rows of heads over the tokens of a text."""
    side, strip = max(1.25 * style.side(part.text), 3), 0.3 + 0.11 * min(len(part.heads), 16)
    height = 0.9 + style.TOKEN_LABELS + strip * len(found)
    made = style.figure(1.3 + side, height, f"{part.called}: {title}")
    drawn = style.grid(made, len(found), 1, x="token", y="head", size=8)
    for axes, layer, values in zip(drawn, part.layers, found, strict=True):
        image = style.heat(axes, values, scale=scale, aspect="auto")
        style.caption(axes, f"layer {layer.index}")
        axes.set_yticks(range(len(part.heads)), [str(head) for head in part.heads], fontsize=7)
    style.token_ticks(drawn[-1], part.text, x=True)
    style.bar(made, image, drawn, label, fraction=0.04, format="%g")
    return made


def _draw_maps(part: Part, title: str, label: str, found: Sequence[Tensor], scale: Normalize) -> Figure:
    """Draw numbers `[H, S, S]` of each layer as queries over keys: a row of maps for each layer, one for each head."""
    columns, side = len(part.heads), style.side(part.text)
    width, height = 1.9 + columns * (side + 0.15), 0.5 + style.TOKEN_LABELS + len(found) * (side + 0.25)
    made = style.figure(width, height, f"{part.called}: {title}")
    cells = [(layer.index, head) for layer in part.layers for head in part.heads]
    drawn = style.grid(made, len(cells), columns, x="key", y="query", size=8)
    for place, (axes, (layer, head), values) in enumerate(zip(drawn, cells, torch.cat(list(found)), strict=True)):
        if part.geometry.causal:
            values = values.masked_fill(torch.ones_like(values).triu(1).bool(), math.nan)
        image = style.heat(axes, values, scale=scale)
        style.caption(axes, f"layer {layer}, head {head}")
        style.open_frame(axes)
        # Panels share their axes: labels of the outer ones are those of all.
        style.token_ticks(axes, part.text, x=place + columns >= len(drawn), y=place % columns == 0)
    style.bar(made, image, drawn, label, fraction=0.04, format="%g")
    return made


def _draw_attention(part: Part) -> Figure:
    found = [layer.weights[list(part.heads)].cpu() for layer in part.layers]
    # On one scale for all pictures, so that they can be compared.
    return _draw_maps(part, "attention weights", "weight (log scale)", found, LogNorm(1e-3, 1, clip=True))


_ATTENTION = Kind(
    "attention",
    "attention weights of each head over a text, with its tokens",
    lambda part: True,
    _draw_attention,
    3,
    4,
)
