"""Frequencies that FoPE mixes into each channel pair."""

from __future__ import annotations

import math

import torch
from matplotlib.figure import FigureBase
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from hf_posenc.recipes.plots import style
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.subject import Layer, Part
from hf_posenc.schemes.fope import FoPE

_COLUMNS = 5


@torch.no_grad()
def amplitudes(layer: Layer) -> Tensor:
    """Return the root mean square, over kv heads and sine and cosine, of the weights of each frequency in each pair.

    `[D, M]`, without the weight 1 of a pair's own frequency.
    """
    scheme = layer.scheme
    assert isinstance(scheme, FoPE)
    both = torch.stack([scheme.annealed(scheme.sin_coef), scheme.annealed(scheme.cos_coef)])
    return both.double().square().mean((0, 1)).sqrt().cpu()


def _draw(canvas: FigureBase, part: Part) -> None:
    layers = part.distinct()
    columns = min(len(layers), _COLUMNS)
    panels = canvas.subplots(math.ceil(len(layers) / columns), columns, squeeze=False, sharex=True, sharey=True)
    for axes in panels.flat[len(layers) :]:
        axes.set_visible(False)
    found = [amplitudes(layer) for _, layer in layers]
    most = max(float(values.max()) for values in found) or 1.0
    for place, ((name, _), values) in enumerate(zip(layers, found, strict=True)):
        axes = panels.flat[place]
        image = axes.imshow(
            values.numpy(), aspect="auto", cmap=style.GROWING, vmin=0, vmax=most, interpolation="nearest"
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
        style.caption(axes, name)
        if place % columns == 0:
            axes.set_ylabel("frequency, fastest first", fontsize=9)
        if place + columns >= len(layers):
            axes.set_xlabel("channel pair", fontsize=9)
    bar = canvas.colorbar(image, ax=panels, pad=0.01)
    bar.set_label("weight, where the own one is 1", fontsize=8)


def _size(part: Part) -> tuple[float, float]:
    layers = len(part.distinct())
    columns = min(layers, _COLUMNS)
    return 1.4 + 2.3 * max(columns, 2), 0.6 + 2.1 * math.ceil(layers / columns)


KIND = Kind(
    name="series",
    summary="the frequencies that FoPE mixes into each channel pair",
    fits=lambda part: isinstance(part.scheme, FoPE),
    title=lambda part: "weights of other frequencies in each channel pair",
    size=_size,
    draw=_draw,
)
