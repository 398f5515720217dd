"""The kinds of pictures: some for each family of schemes, and those that schemes declare."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from matplotlib.figure import FigureBase
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from hf_posenc import registry
from hf_posenc.operands import Positions, Tokens
from hf_posenc.recipes.plots import style
from hf_posenc.recipes.plots.subject import Layer, Part, asked
from hf_posenc.structures import Numbers, Picture


@dataclass(frozen=True, eq=False)
class Kind(ABC):
    """A kind of picture; its name is a value of `--what` and the beginning of file names."""

    name: str
    summary: str
    # What is drawn at most unless some are chosen.
    layers: ClassVar[int] = 12
    heads: ClassVar[int] = 64
    # Whether every layer has a figure of its own.
    per_layer: ClassVar[bool] = False

    @abstractmethod
    def fits(self, part: Part) -> bool:
        """Whether there is such a picture of some layers."""

    @abstractmethod
    def title(self, part: Part) -> str:
        """Return the title of the picture, behind the name of the scheme."""

    @abstractmethod
    def draw(self, canvas: FigureBase, part: Part) -> tuple[float, float]:
        """Draw the picture, without the title; return its width and height in inches, with the title."""


def all_kinds() -> dict[str, Kind]:
    """Return all kinds by name, in the order of a page: what a scheme is, then what it does on a text."""
    declared = {p.name: p for info in registry.schemes().values() for p in info.cls.pictures}
    forms: dict[str, type[Strips | Maps]] = {"tokens": Strips, "pairs": Maps}
    shown = [forms[form](p.name, p.summary) for form in forms for p in declared.values() if p.over == form]
    return {kind.name: kind for kind in (BIAS, DECAY, FREQUENCIES, TABLE, *shown, ATTENTION)}


# -- by distance -------------------------------------------------------------------------------------------------------

# Up to more than so many tokens, distances are on a logarithmic axis.
_FAR = 300


@dataclass(frozen=True, eq=False)
class ByDistance(Kind):
    """What positions add to the logit of a mean query and a mean key: lines, or maps over the patches of an image.

    Products are linear in both, so what these two get at a distance is the mean over all pairs of a query and a key.
    """

    families: tuple[str, ...]
    what: str
    # What tells layers apart.
    key: Callable[[Layer], object]

    def fits(self, part: Part) -> bool:
        return registry.get(part.name).family in self.families

    def title(self, part: Part) -> str:
        return f"{self.what}, {'around the middle patch' if part.on_grid else 'by distance'}"

    def draw(self, canvas: FigureBase, part: Part) -> tuple[float, float]:
        layers = part.distinct(self.key)
        if part.on_grid:
            return self._draw_maps(canvas, part, layers)
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
        return 1.0 + 2.5 * max(columns, 2), 0.5 + 2.1 * rows

    def _draw_maps(self, canvas: FigureBase, part: Part, layers: list[tuple[str, Layer]]) -> tuple[float, float]:
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


BIAS = ByDistance(
    "bias",
    "what an additive scheme adds to the logits, by distance, head and layer",
    ("additive",),
    "bias on the logits",
    lambda layer: id(layer.scheme),
)
DECAY = ByDistance(
    "decay",
    "what positions add to the logit of a mean query and a mean key, by distance (rotary and content-relative schemes)",
    ("rotary", "content-relative"),
    "change of the mean logit",
    # Queries and keys also differ where layers share a scheme.
    lambda layer: layer.index,
)


# -- rotations ---------------------------------------------------------------------------------------------------------

# Slower than this, in turns per token, is standing still, and left out.
_STILL = 1e-9


class Frequencies(Kind):
    """How fast the planes turn: the eigenvalues of what a scheme does to channels at the first position."""

    def fits(self, part: Part) -> bool:
        return registry.get(part.name).family == "rotary" and not part.on_grid

    def title(self, part: Part) -> str:
        return "how far apart tokens are for one turn of a plane"

    def draw(self, canvas: FigureBase, part: Part) -> tuple[float, float]:
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
        return 1.4 + 2.5 * max(columns, 2), 0.5 + 2.4 * rows


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


FREQUENCIES = Frequencies(
    "frequencies", "how fast the planes of a rotary scheme turn, next to those of the model's own rotation"
)


# -- tables ------------------------------------------------------------------------------------------------------------

# More rows of a heat map could not be seen.
_ROWS = 1024


class Table(Kind):
    """What is added to the embeddings, and the likeness of positions by it."""

    def fits(self, part: Part) -> bool:
        return part.scheme.overrides("embed")

    def title(self, part: Part) -> str:
        return "table of positions"

    def draw(self, canvas: FigureBase, part: Part) -> tuple[float, float]:
        rows = min(part.scheme.end_of_positions() or part.length, _ROWS)
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
        return 9.5, 3.6


TABLE = Table("table", "what an absolute scheme adds to the embeddings, and how alike positions are by it")


# -- pictures that schemes declare -------------------------------------------------------------------------------------


class Declared(Kind):
    """A kind of picture that schemes declare."""

    def fits(self, part: Part) -> bool:
        return any(picture.name == self.name for picture in part.scheme.pictures)

    def title(self, part: Part) -> str:
        return self.picture(part).title

    def picture(self, part: Part) -> Picture:
        """Return the picture of a scheme that declares one."""
        return next(picture for picture in part.scheme.pictures if picture.name == self.name)

    def values(self, numbers: Numbers, layer: Layer) -> Tensor:
        """Return numbers of one layer, per head and token `[H, S]`, or per head, query and key `[H, S, S]`."""
        return numbers.of(layer.scheme, *asked(layer.scheme, layer.tokens, layer.q, layer.k, layer.v))[0].cpu()


class Strips(Declared):
    """Rows of heads over the tokens of a text, a strip for each layer; and several such columns side by side."""

    def draw(self, canvas: FigureBase, part: Part) -> tuple[float, float]:
        columns = self.picture(part).numbers
        drawn = canvas.subplots(len(part.layers), len(columns), squeeze=False, sharex=True, sharey=True)
        step = math.ceil(len(part.heads) / 8)
        for side, numbers in enumerate(columns):
            found = [self.values(numbers, layer)[list(part.heads)] for layer in part.layers]
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
        return 1.3 + width, 0.9 + style.TOKEN_LABELS + strip * len(part.layers)


class Maps(Declared):
    """Queries over keys, a map for each head of one layer, with the tokens at the outer edges."""

    layers, heads, per_layer = 4, 8, True

    def title(self, part: Part) -> str:
        return f"{super().title(part)}, layer {part.layers[0].index}"

    def draw(self, canvas: FigureBase, part: Part) -> tuple[float, float]:
        (numbers,), tokens = self.picture(part).numbers, part.text
        found = self.values(numbers, part.layers[0])[list(part.heads)]
        if part.geometry.causal:
            found = found.masked_fill(found.new_ones(found.shape[-2:]).triu(1).bool(), math.nan)
        scale = style.scale_of(numbers, [found])
        drawn, rows, columns = style.grid(canvas, len(part.heads), 4, x="key", y="query", size=8)
        for place, (axes, head, values) in enumerate(zip(drawn, part.heads, found, strict=True)):
            image = style.heat(axes, values, scale=scale)
            style.caption(axes, f"head {head}")
            style.open_frame(axes)
            # Panels share their axes: labels of the outer ones are those of all.
            style.token_ticks(axes, tokens, x=place + columns >= len(drawn), y=place % columns == 0)
        style.bar(canvas, image, drawn, numbers.label, fraction=0.04, format="%g")
        side = style.side(tokens)
        return 1.9 + columns * (side + 0.15), 0.5 + style.TOKEN_LABELS + rows * (side + 0.25)


class Attention(Maps):
    """The weights, on one scale for all pictures, so that they can be compared; no scheme needs to declare it."""

    def fits(self, part: Part) -> bool:
        return True

    def picture(self, part: Part) -> Picture:
        weights = Numbers(lambda weights: weights, "weight (log scale)", log=True)
        return Picture(self.name, self.summary, "attention weights", "pairs", (weights,))

    def values(self, numbers: Numbers, layer: Layer) -> Tensor:
        return numbers.of(layer.weights).cpu()


ATTENTION = Attention("attention", "attention weights of each head over a text, with its tokens")
