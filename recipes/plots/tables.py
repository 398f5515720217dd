"""What absolute schemes add to the embeddings, and how alike positions are by it."""

from __future__ import annotations

import torch
from matplotlib.figure import FigureBase
from torch import Tensor

from hf_posenc.recipes.plots import style
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.subject import Part

# A heat map has no more rows than this that could be seen.
_MOST = 1024


@torch.no_grad()
def table(part: Part) -> Tensor:
    """Return what is added to the embeddings of the tokens, by position, float64 `[S, E]`."""
    device = next((parameter.device for parameter in part.scheme.parameters()), torch.device("cpu"))
    width, positions, coords = part.geometry.hidden_size, torch.arange(_length(part), device=device)[None], None
    if part.scheme.axes:
        places = part.seen(part.layers[0]).tokens.positions
        positions, coords = places.key, places.key_coords
    none = torch.zeros(1, positions.shape[1], width, dtype=torch.float64, device=positions.device)
    return part.scheme.embed(none, positions, coords)[0].cpu()


def _length(part: Part) -> int:
    rows = part.scheme.end_of_positions() or part.length
    return min(rows, max(part.queries, default=rows - 1) + 1, _MOST)


def likeness(rows: Tensor) -> Tensor:
    """Return the cosine of the angle between each two rows `[S, E]`, `[S, S]`; 0 where one is zero."""
    unit = torch.nn.functional.normalize(rows, dim=-1)
    return unit @ unit.T


def _draw(canvas: FigureBase, part: Part) -> None:
    added = table(part)
    left, right = canvas.subplots(1, 2, width_ratios=(1.6, 1))
    # A few large entries would leave the rest grey.
    limit = float(added.abs().flatten().quantile(0.995)) if added.numel() < 10**7 else float(added.abs().max())
    image = left.imshow(
        added.T.numpy(),
        aspect="auto",
        origin="lower",
        cmap=style.SIGNED,
        vmin=-(limit or 1.0),
        vmax=limit or 1.0,
        interpolation="nearest",
    )
    place = "patch (0 is the class token)" if part.geometry.axes > 1 else "position (tokens)"
    style.caption(left, "added to the token embeddings")
    left.set_xlabel(place, fontsize=9)
    left.set_ylabel("channel", fontsize=9)
    canvas.colorbar(image, ax=left, pad=0.01, label="added value", extend="both")
    image = right.imshow(
        likeness(added).numpy(), cmap=style.SIGNED, vmin=-1, vmax=1, origin="lower", interpolation="nearest"
    )
    style.caption(right, "likeness of positions")
    right.set_xlabel(place, fontsize=9)
    right.set_ylabel(place, fontsize=9)
    canvas.colorbar(image, ax=right, pad=0.01, label="cosine")


KIND = Kind(
    name="table",
    summary="what an absolute scheme adds to the embeddings, and how alike positions are by it",
    fits=lambda part: part.scheme.overrides("embed"),
    title=lambda part: "table of positions",
    size=lambda part: (9.5, 3.6),
    draw=_draw,
)
