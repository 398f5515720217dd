"""Which channels the planes of learned rotations are made of."""

from __future__ import annotations

import math

from matplotlib.figure import FigureBase
from torch import Tensor

from hf_posenc.recipes.plots import style
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.subject import Layer, Part
from hf_posenc.schemes.families.block_rotary import BlockRotary

_COLUMNS = 5


def shares(layer: Layer) -> Tensor:
    """Return the share of each channel in each plane, float64 `[G, D, D / 2]`: columns sum to 1."""
    assert isinstance(layer.scheme, BlockRotary)
    _, basis = layer.scheme.spectrum()
    first, second = basis.cpu().chunk(2, dim=-1)
    return (first.square() + second.square()) / 2


def _draw(canvas: FigureBase, part: Part) -> None:
    layers = part.distinct()
    columns = min(len(layers), _COLUMNS)
    panels = canvas.subplots(math.ceil(len(layers) / columns), columns, squeeze=False, sharex=True, sharey=True)
    for axes in panels.flat[len(layers) :]:
        axes.set_visible(False)
    for place, (name, layer) in enumerate(layers):
        axes = panels.flat[place]
        # Heads side by side, with a gap between.
        heads = shares(layer)
        width = heads.shape[-1] + 1
        gapped = heads.new_full((heads.shape[1], len(heads), width), math.nan)
        gapped[:, :, :-1] = heads.transpose(0, 1)
        image = axes.imshow(
            gapped.flatten(1)[:, :-1].numpy(),
            aspect="auto",
            cmap=style.GROWING,
            vmin=0,
            vmax=0.5,
            interpolation="nearest",
        )
        axes.set_xticks([width * head + (width - 2) / 2 for head in range(len(heads))], range(len(heads)), fontsize=8)
        style.caption(axes, name)
        if place % columns == 0:
            axes.set_ylabel("channel", fontsize=9)
        if place + columns >= len(layers):
            axes.set_xlabel("planes of each kv head", fontsize=9)
    bar = canvas.colorbar(image, ax=panels, pad=0.01, extend="max")
    bar.set_label("share of the channel", fontsize=8)


def _size(part: Part) -> tuple[float, float]:
    layers = len(part.distinct())
    columns = min(layers, _COLUMNS)
    return 1.4 + 2.5 * max(columns, 2), 0.6 + 2.1 * math.ceil(layers / columns)


KIND = Kind(
    name="planes",
    summary="which channels the planes of a learned rotation are made of (LieRE, ComRoPE)",
    # With several axes in an image there is no plane that all places share.
    fits=lambda part: (
        isinstance(part.scheme, BlockRotary) and part.geometry.axes == 1 and part.geometry.head_dim % 2 == 0
    ),
    title=lambda part: "channels that turn together",
    size=_size,
    draw=_draw,
)
