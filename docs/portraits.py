"""Portraits of schemes: what each one does to attention, drawn from its own code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor, nn

from hf_posenc import registry
from hf_posenc.attention import Call, Mask, run
from hf_posenc.operands import Geometry, Positions, Tokens
from hf_posenc.recipes.plots.subject import added
from hf_posenc.recipes.reports import style
from hf_posenc.scheme import Scheme

_SEED = 0
_HEAD_DIM = 64
_WOKEN = "\n(parameters that start at zero are drawn at random for this picture)"
_CHANGE = "logit, minus that at distance 0 (nats)"


@dataclass(frozen=True)
class Portrait:
    """Settings of a picture, which the page of a scheme has as JSON in a comment.

    Attributes:
        variants: Options to build the scheme with, one panel or line for each.
        heads: Number of heads that are drawn as lines; `None` lets the picture choose.
        span: Largest distance in a picture by distance.
        log: Whether distances are on a log scale.
        noise: Standard deviation of parameters that start at zero; `None` leaves them where that shows something.
    """

    variants: tuple[Mapping[str, Any], ...] = ({},)
    heads: int | None = None
    span: int = 256
    log: bool = False
    noise: float | None = None


def portrait(name: str, **options: Any) -> Figure:
    """Draw what a scheme does: its bias, its encoding, its decay or its attention weights, by its family.

    Everything is computed by the scheme itself, with seeded parameters and operands; the caller's random state is left
    alone.

    Args:
        name: A registered scheme.
        **options: Its options; without any, those that show it best.

    Returns:
        A figure of 1000 x 420 pixels.
    """
    info = registry.get(name)
    look = replace(_settings(name), variants=(options,)) if options else _settings(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_SEED)
        if info.family == "absolute":
            return _encoding(name, look) if info.cls.embed is not Scheme.embed else _uniform(name, look)
        if info.family in ("additive", "content-relative"):
            return _bias(name, look, content=info.family == "content-relative")
        return _decay(name, look) if info.family == "rotary" else _attention(name, look)


def _settings(name: str) -> Portrait:
    page = Path(__file__).parent / "schemes" / f"{name}.md"
    found = re.search(r"<!-- portrait: (.*) -->", page.read_text(encoding="utf-8")) if page.exists() else None
    return Portrait(**json.loads(found[1])) if found else Portrait()


# -- kinds of picture --------------------------------------------------------------------------------------------------


def _encoding(name: str, look: Portrait) -> Figure:
    """A heat map of what is added to the embeddings, over positions and channels."""
    positions = torch.arange(160)[None]
    geometry = Geometry(heads=1, kv_heads=1, head_dim=48, hidden_size=48, max_positions=positions.shape[1])
    schemes = [_build(name, geometry, options) for options in look.variants]
    figure = _figure(f"{name}: what is added to the token embeddings{_state(schemes[0])}")
    for axes, scheme, options in zip(_row(figure, len(schemes)), schemes, look.variants, strict=True):
        table = scheme.embed(torch.zeros(1, positions.shape[1], geometry.hidden_size), positions)[0].T
        limit = float(table.abs().max())
        image = style.heat(axes, table, "cividis", aspect="auto", origin="lower", vmin=-limit, vmax=limit)
        figure.colorbar(image, ax=axes, label="added value", pad=0.01)
        _label(axes, "position (tokens)", "channel", _given(options))
    return figure


def _bias(name: str, look: Portrait, *, content: bool) -> Figure:
    """Lines of what positions add to the logits of a query, over the distance to the key."""
    heads = look.heads or (3 if content else 8)
    # All keys are equal, so that logits differ by what positions do to them only.
    q, k = (torch.randn(heads, _HEAD_DIM, dtype=torch.float64) * content for _ in range(2))
    distances = torch.arange(look.span + 1)
    schemes = [_build(name, _geometry(heads), options) for options in look.variants]

    def curves() -> list[Tensor]:
        return [_logits(scheme, q, k, look.span, distances) for scheme in schemes]

    found, note = curves(), _state(schemes[0])
    if look.noise is not None or not any(bool(curve.any()) for curve in found):
        _wake(schemes, look)
        found, note = curves(), _WOKEN
    what = "change of the logits of a random query" if content else "bias on the logits"
    elsewhere = _logits(schemes[0], q, k, 16 * look.span, distances)
    if not torch.allclose(found[0], elsewhere, equal_nan=True, rtol=1e-5, atol=1e-5):
        return _bias_by_query(f"{name}: {what}, by distance and query position{note}", schemes[0], q, k)
    figure = _figure(f"{name}: {what}, by distance{note}")
    drawn = _row(figure, len(schemes))
    for axes, options, curve in zip(drawn, look.variants, found, strict=True):
        style.lines(axes, distances, curve, range(1, heads + 1), log=look.log, width=1.8)
        _label(axes, "distance to the key (tokens)", "" if axes is not drawn[0] else _CHANGE, _given(options))
    if min(float(curve.min()) for curve in found) < style.FLOOR:
        drawn[0].set_ylim(style.FLOOR, max(0.5, *(float(curve.max()) for curve in found)))
    _legend(drawn[-1], "head")
    return figure


def _bias_by_query(title: str, scheme: Scheme, q: Tensor, k: Tensor) -> Figure:
    """Three heads of a bias that also depends on the position of the query: one line per query position."""
    figure = _figure(title)
    drawn = _row(figure, 3)
    queries = (256, 1024, 4096, 16384)
    for query, colour in zip(queries, style.ramp(len(queries)), strict=True):
        distances = style.spread(query)
        for axes, curve in zip(drawn, _logits(scheme, q, k, query, distances), strict=False):
            axes.plot(distances, curve, color=colour, linewidth=1.8, label=f"{query}")
            axes.plot(distances[-1:], curve[-1:], color=colour, marker="o", markersize=4)
    for head, axes in enumerate(drawn):
        style.frame(axes, torch.tensor([0, 2 * queries[-1]]), log=True)
        _label(axes, "distance to the key (tokens)", "" if head else _CHANGE, f"head {head + 1}")
    _legend(drawn[-1], "query at")
    return figure


def _decay(name: str, look: Portrait) -> Figure:
    """The logit of a query and a key that are equal before they are encoded, over the distance: mean and spread."""
    figure = _figure(f"{name}: logit of a query and a key that are equal, by distance (64 random vectors)")
    axes = figure.subplots()
    distances = style.spread(8192)
    # One head per vector.
    vectors = torch.randn(64, 128, dtype=torch.float64)
    geometry = Geometry(heads=64, kv_heads=64, head_dim=128, hidden_size=64 * 128)
    for options, (colour, line) in zip(look.variants, cycle(style.STYLES), strict=False):
        curves = _logits(_build(name, geometry, options), vectors, vectors, int(distances[-1]), distances)
        low, high = curves.quantile(0.1, dim=0), curves.quantile(0.9, dim=0)
        axes.fill_between(distances, low, high, color=colour, alpha=0.18, linewidth=0)
        given = _given(options) or "mean"
        axes.plot(distances, curves.mean(0), color=colour, linestyle=line, linewidth=1.8, label=given)
    style.frame(axes, distances, log=True)
    _label(axes, "distance (tokens)", _CHANGE)
    axes.legend(title="mean; band: 10 to 90 %", loc="lower left", frameon=False, fontsize=9)
    return figure


def _uniform(name: str, look: Portrait) -> Figure:
    """The weights when no content tells tokens apart: what the scheme and the causal mask do alone."""
    length = 48
    weights = _weights([_build(name, _geometry(1), look.variants[0])], torch.zeros(1, length, _HEAD_DIM))[0]
    figure = _figure(f"{name}: attention weights when all tokens have equal content")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.4), gridspec_kw={"wspace": 0.12})
    _heat(figure, left, [left], weights, "")
    left.set_ylabel("query (position)")
    queries = (5, 11, 23, length - 1)
    for query, colour in zip(queries, style.ramp(len(queries)), strict=True):
        right.step(range(query + 1), weights[query, : query + 1], where="mid", color=colour, linewidth=1.8, label=query)
    right.set_ylim(0)
    _label(right, "key (position)", "weight")
    right.legend(title="query at", frameon=False, fontsize=9)
    return figure


def _attention(name: str, look: Portrait) -> Figure:
    """Heat maps of the weights on content with topics that come back, next to those without any scheme."""
    geometry = _geometry(2)
    content = _topics(geometry.hidden_size)
    plain = _weights([Scheme(geometry)], content)
    layers, where = [_build(name, geometry, look.variants[0])], ""
    if layers[0].overrides("carry"):
        # What one layer makes acts in the next one.
        shapes = (replace(geometry, last=False), replace(geometry, layer=1, first=False))
        layers, where = [_build(name, shape, look.variants[0]) for shape in shapes], " in the second layer"
    weights, note = _weights(layers, content), _state(layers[0])
    if look.noise is not None or torch.allclose(weights, plain, atol=1e-6):
        _wake(layers, look)
        weights, note = _weights(layers, content), _WOKEN
    figure = _figure(f"{name}: attention weights{where} on random content of four topics that come back{note}")
    drawn = _row(figure, 1 + geometry.heads)
    titles = ("no scheme, head 1", *(f"{name}, head {head + 1}" for head in range(geometry.heads)))
    for axes, values, title in zip(drawn, (plain[0], *weights), titles, strict=True):
        _heat(figure, axes, drawn if axes is drawn[-1] else [], values, title)
    drawn[0].set_ylabel("query (position)")
    return figure


# -- what schemes compute ----------------------------------------------------------------------------------------------


def _geometry(heads: int) -> Geometry:
    return Geometry(heads=heads, kv_heads=heads, head_dim=_HEAD_DIM, hidden_size=heads * _HEAD_DIM, max_positions=32768)


def _build(name: str, geometry: Geometry, options: Mapping[str, Any]) -> Scheme:
    torch.manual_seed(_SEED)
    return registry.build(name, geometry, **options).eval()


def _wake(schemes: Sequence[Scheme], look: Portrait) -> None:
    """Give values to the parameters that start at zero."""
    for scheme in schemes:
        torch.manual_seed(_SEED)
        for parameter in scheme.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=1.0 if look.noise is None else look.noise)


def _logits(scheme: Scheme, q: Tensor, k: Tensor, query: int, distances: Tensor) -> Tensor:
    """Return the logits of a query against equal keys, minus that at the first distance: `[H, distances]`.

    Args:
        scheme: The scheme.
        q: The query of each head, `[H, D]`.
        k: The key of each head, `[H, D]`.
        query: Position of the query.
        distances: Query minus key, ascending from 0.
    """
    places = Positions(torch.tensor([[query]]), query - distances[None])
    logits = added(scheme, Tokens(positions=places, common=scheme.common), places, q, k)[:, 0]
    return logits - logits[:, :1]


def _weights(layers: Sequence[Scheme], hidden: Tensor) -> Tensor:
    """Return the weights `[H, S, S]` of the last of some layers that all see the same hidden states `[1, S, E]`.

    Queries, keys and values of a token are its hidden state, and so is the output of the feed-forward.
    """
    places = torch.arange(hidden.shape[1])[None]
    carried, weights = None, None
    for scheme in layers:
        operand = hidden.view(1, hidden.shape[1], scheme.geometry.heads, -1).transpose(1, 2)
        tokens = Tokens(positions=Positions(places, places), hidden=hidden, carried=carried, common=scheme.common)
        call = Call.of(scheme, tokens, operand, operand, operand, mask=Mask("positions"), need_weights=True)
        output, weights = run(call)
        carried = scheme.carry(output, tokens)
        if carried is not None:
            carried = scheme.feed(carried, hidden)
    assert weights is not None
    return weights[0]


def _topics(width: int) -> Tensor:
    """Return hidden states `[1, 48, width]` of eight segments, each on one of four topics."""
    generator = torch.Generator().manual_seed(_SEED)
    topics = torch.randn(4, width, generator=generator)
    order = torch.tensor([0, 1, 0, 2, 1, 3, 0, 2]).repeat_interleave(6)
    noise = torch.randn(len(order), width, generator=generator)
    return (0.55 * topics[order] + 0.45 * noise)[None]


# -- how it looks ------------------------------------------------------------------------------------------------------


def _figure(title: str) -> Figure:
    return style.figure(8, 3.36, title, dpi=125)


def _row(figure: Figure, count: int) -> list[Axes]:
    return list(figure.subplots(1, count, squeeze=False, sharey=True)[0])


def _state(scheme: Scheme) -> str:
    """Return the second line of a title: whether the picture is of something that training will change."""
    return "\n(parameters at their start; training changes them)" if any(True for _ in scheme.parameters()) else ""


def _label(axes: Axes, x: str, y: str, title: str = "") -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    style.caption(axes, title)
    style.open_frame(axes)


def _legend(axes: Axes, title: str) -> None:
    axes.legend(title=title, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)


def _given(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


def _heat(figure: Figure, axes: Axes, neighbours: Sequence[Axes], weights: Tensor, title: str) -> None:
    """Draw one matrix of weights; the colour bar goes next to the given axes, if any."""
    hidden = torch.ones_like(weights).triu(1).bool()
    # One scale for all pictures, so that they can be compared.
    image = style.heat(axes, weights.masked_fill(hidden, float("nan")), scale=LogNorm(1e-3, 1, clip=True))
    _label(axes, "key (position)", "", title)
    if len(neighbours):
        figure.colorbar(image, ax=list(neighbours), label="weight", pad=0.01, format="%g")
