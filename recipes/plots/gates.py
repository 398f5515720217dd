"""Forget gates of FoX over the tokens of a text, and what they leave."""

from __future__ import annotations

from functools import partial

import torch
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import FigureBase
from torch import Tensor

from hf_posenc.recipes.plots import over_tokens, style
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.probe import asked
from hf_posenc.recipes.plots.subject import Layer, Part
from hf_posenc.schemes.fox import FoX


@torch.no_grad()
def gates(part: Part, layer: Layer) -> Tensor:
    """Return the gate of each head at each token, from 0 (forget all before) to 1, `[H, S]`.

    In encoders it is the one that keys behind a query pass.
    """
    assert isinstance(layer.scheme, FoX)
    seen = part.seen(layer)
    sums = layer.scheme.sums(seen.tokens, seen.k)[0].T[: layer.scheme.geometry.heads]
    return sums.diff(dim=-1, prepend=torch.zeros_like(sums[:, :1])).exp()


def left(part: Part, layer: Layer) -> Tensor:
    """Return what the gates leave of each token at the reader's, as a factor, `[H, S]`.

    The reader is the last token of a text, or in encoders the one in the middle.
    """
    found = asked(part, layer)
    reader = -1 if part.geometry.causal else found.logits.shape[-1] // 2
    return (found.logits - found.content)[0, :, reader].exp()


def _draw(canvas: FigureBase, part: Part) -> None:
    reader = "last" if part.geometry.causal else "middle"
    over_tokens.draw_strips(
        canvas,
        part,
        [
            ("gate of each token", gates, style.GROWING, Normalize(0, 1), "kept at this token (factor)"),
            (
                f"left at the {reader} token",
                left,
                style.GROWING,
                LogNorm(1e-3, 1, clip=True),
                f"left at the {reader} token (factor)",
            ),
        ],
    )


KIND = Kind(
    name="gates",
    summary="forget gates of FoX over a text, with its tokens, and what they leave",
    fits=lambda part: isinstance(part.scheme, FoX),
    title=lambda part: "forget gates",
    size=partial(over_tokens.strips_size, columns=2),
    draw=_draw,
)
