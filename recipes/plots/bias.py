"""The bias of additive schemes, by distance."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from hf_posenc.operands import Tokens
from hf_posenc.recipes.plots import by_distance
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.probe import nothing
from hf_posenc.recipes.plots.subject import Layer, Part


def operands(part: Part, layer: Layer) -> tuple[Tensor, Tensor, Tokens | None]:
    """Return queries and keys of zeros, to which a bias is all that is added."""
    device = next((parameter.device for parameter in layer.scheme.parameters()), "cpu")
    q, k = nothing(layer.scheme.geometry)
    return q.to(device), k.to(device), None


KIND = Kind(
    name="bias",
    summary="what an additive scheme adds to the logits, by distance, head and layer",
    fits=lambda part: part.info.family == "additive",
    title=lambda part: (
        "bias on the logits, " + ("around the middle patch" if by_distance.on_grid(part) else "by distance")
    ),
    size=partial(by_distance.size, operands=operands, layers=Part.distinct),
    draw=partial(by_distance.draw, operands=operands, layers=Part.distinct),
)
