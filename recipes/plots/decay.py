"""How the logit of a trained model's queries and keys changes with their distance."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from hf_posenc.operands import Tokens
from hf_posenc.recipes.plots import by_distance
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.subject import Layer, Part, layer_names


def operands(part: Part, layer: Layer) -> tuple[Tensor, Tensor, Tokens | None]:
    """Return the mean query and the mean key of each head on what the model reads.

    Products are linear in both, so what these two get at a distance is the mean over all pairs of a query and a key.
    """
    seen = part.seen(layer)
    return seen.q[0].mean(1), seen.k[0].mean(1), replace(seen.tokens, common=layer.common)


def _each(part: Part) -> list[tuple[str, Layer]]:
    # Queries and keys differ also where layers share a scheme.
    return [(layer_names([layer.index]), layer) for layer in part.layers]


KIND = Kind(
    name="decay",
    summary="what positions add to the logit of a mean query and a mean key, by distance (rotary and content-relative schemes)",
    fits=lambda part: part.info.family in ("rotary", "content-relative"),
    title=lambda part: (
        "change of the mean logit, " + ("around the middle patch" if by_distance.on_grid(part) else "by distance")
    ),
    size=partial(by_distance.size, operands=operands, layers=_each),
    draw=partial(by_distance.draw, operands=operands, layers=_each),
)
