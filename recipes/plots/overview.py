"""One page about a model: what each of its schemes does, in the pictures that fit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from hf_posenc.recipes.plots import style
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.subject import Part, Subject, layer_names

_LAYERS, _HEADS = 4, 8
# Of maps, which are large.
_MAPS = 3
_MARGIN = 0.2


@dataclass(frozen=True)
class _Row:
    kind: Kind
    part: Part
    size: tuple[float, float]

    @property
    def title(self) -> str:
        return f"{self.part.title}: {self.kind.title(self.part)}"


def overview(subject: Subject, parts: Sequence[Part], kinds: Sequence[Kind]) -> Figure:
    """Draw one page: a row for each picture of each part, of a few layers and heads."""
    rows = []
    for part in parts:
        for kind in kinds:
            if kind.fits(part):
                few = part.narrowed(1, _MAPS) if kind.per_layer else part.narrowed(_LAYERS, _HEADS)
                rows.append(_Row(kind, few, kind.size(few)))
    head = _header(subject, parts)
    width = max(style.width_of(head), *(max(row.size[0], style.width_of(row.title)) for row in rows))
    heights = [row.size[1] + _MARGIN for row in rows]
    made = style.figure(width, sum(heights) + 0.2 * (1 + head.count("\n")), head)
    lines = made.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for line, row in zip(lines, rows, strict=True):
        row.kind.draw(style.at_the_left(line, row.size[0], width), row.part)
        style.entitle(line, row.title)
    return made


def _header(subject: Subject, parts: Sequence[Part]) -> str:
    kind = type(subject.model).__name__.removeprefix("Posenc")
    lines = [f"{kind}, {subject.model.num_parameters():,} parameters, trained on {parts[0].length:,} positions"]
    for stack, body in subject.architecture.stacks(subject.model).items():
        schemes = [
            f"{part.name}{' over the native encoding' if part.group.native == 'keep' else ''} in "
            f"{layer_names([layer.index for layer in part.layers])}"
            for part in subject.parts
            if part.stack == stack
        ]
        covered = {layer.index for part in subject.parts if part.stack == stack for layer in part.layers}
        others = sorted(set(range(len(subject.architecture.attentions(body)))) - covered)
        schemes += [f"no scheme in {layer_names(others)}"] if others else []
        lines.append(f"{stack}: {'; '.join(schemes)}")
    return "\n".join(lines)
