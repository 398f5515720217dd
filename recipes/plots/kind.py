"""What a kind of picture is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import FigureBase

from hf_posenc.recipes.plots.subject import Part


@dataclass(frozen=True)
class Kind:
    """A kind of picture.

    Attributes:
        name: Value of `--what`, and the beginning of file names.
        summary: Content of the picture, in a few words.
        fits: Whether there is such a picture of some layers.
        title: Title of the picture, behind the name of the schemes.
        size: Width and height in inches, the title included.
        draw: Draws it into a figure or a part of one, without the title.
        layers: Number of layers that are drawn unless some are chosen.
        heads: Number of heads, likewise.
        per_layer: Whether every layer has a figure of its own.
    """

    name: str
    summary: str
    fits: Callable[[Part], bool]
    title: Callable[[Part], str]
    size: Callable[[Part], tuple[float, float]]
    draw: Callable[[FigureBase, Part], None]
    layers: int = 12
    heads: int = 64
    per_layer: bool = False
