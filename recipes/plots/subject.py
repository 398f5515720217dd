"""What there is to draw in a model: its schemes, and what they do on one text or image."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import registry
from hf_posenc.errors import NotPatchedError, WrappedModelError
from hf_posenc.operands import Geometry
from hf_posenc.patches import record, surgery
from hf_posenc.patches.architecture import Architecture, of_model
from hf_posenc.patches.patch import patch, unpatch
from hf_posenc.patches.preparation import refuse_wrapped
from hf_posenc.recipes.plots.record import Seen, see
from hf_posenc.scheme import Scheme

# What a model that states no length is drawn for, in tokens.
_LENGTH = 512
# Scheme that computes what a stock model does, by the kind of its own table.
_NATIVE = {"learned": "learned", "t5": "t5"}


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer with a scheme.

    Attributes:
        index: Index of the layer in its stack.
        scheme: Its scheme, which other layers may share.
        common: The part of the scheme that all layers share, if it has one.
        attention: The patched attention module.
    """

    index: int
    scheme: Scheme
    common: Scheme | None
    attention: Any


@dataclass(frozen=True, eq=False)
class Part:
    """The layers of one stack that have one scheme: what a picture is of.

    Attributes:
        subject: The model.
        stack: `"decoder"` or `"encoder"`.
        group: Group of the config.
        layers: Layers that are drawn.
        heads: The query heads that are drawn.
        queries: Positions of queries, where a picture is of one; empty lets the picture choose.
    """

    subject: Subject
    stack: str
    group: record.Group
    layers: tuple[Layer, ...]
    heads: tuple[int, ...]
    queries: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name of the scheme."""
        return self.group.scheme

    @property
    def info(self) -> registry.SchemeInfo:
        """What the registry knows of it."""
        return registry.get(self.group.scheme)

    @property
    def scheme(self) -> Scheme:
        """The scheme of the first layer."""
        return self.layers[0].scheme

    @property
    def geometry(self) -> Geometry:
        """The shape of the first layer."""
        return self.scheme.geometry

    @property
    def length(self) -> int:
        """The trained length, in tokens."""
        return self.geometry.max_positions or _LENGTH

    @property
    def title(self) -> str:
        """What the title of a picture begins with."""
        native = " over the native encoding" if self.group.native == "keep" else ""
        share = self.subject.strength
        faded = f" (drawn in full; at {share:.0%} of its strength now)" if share != 1 else ""
        return f"{self.name}{' (native)' if self.subject.native else native}, {self.stack}{faded}"

    def narrowed(self, layers: int, heads: int) -> Part:
        """Return the same with at most so many layers and heads, evenly spread."""
        return replace(self, layers=_some(self.layers, layers), heads=_some(self.heads, heads))

    def one_by_one(self) -> Iterator[Part]:
        """Yield a part for each layer."""
        return (replace(self, layers=(layer,)) for layer in self.layers)

    def distinct(self) -> list[tuple[str, Layer]]:
        """Return each different scheme once, with what its layers are called."""
        users: dict[int, list[Layer]] = {}
        for layer in self.layers:
            users.setdefault(id(layer.scheme), []).append(layer)
        return [(layer_names([user.index for user in found]), found[0]) for found in users.values()]

    def seen(self, layer: Layer) -> Seen:
        """Return what a layer computes on the text or image."""
        return self.subject.seen[self.stack, layer.index]

    @property
    def tokens(self) -> list[str]:
        """The tokens of the text that this stack reads, as they are written along axes."""
        ids = self.subject.read[self.stack]
        if ids is None:
            return [str(place) for place in range(self.seen(self.layers[0]).q.shape[2])]
        return self.subject.written(ids)


@dataclass(frozen=True, eq=False)
class Subject:
    """A patched model, and what it reads.

    Attributes:
        model: The model.
        tokenizer: Tokenizer of the model; without one, tokens are written as numbers.
        inputs: Arguments of a forward of each stack, batch 1.
        native: Whether it was a stock model, drawn as what it computes itself.
        strength: Strength of its schemes, see `hf_posenc.set_strength`.
    """

    model: PreTrainedModel
    tokenizer: Any
    inputs: Mapping[str, Mapping[str, Tensor]]
    native: bool = False
    strength: float = 1.0
    architecture: Architecture = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "architecture", of_model(self.model))

    @property
    def read(self) -> dict[str, Tensor | None]:
        """What each stack reads: ids of tokens `[S]`, or `None` for an image."""
        return {stack: call["input_ids"][0] if "input_ids" in call else None for stack, call in self.inputs.items()}

    @cached_property
    def seen(self) -> dict[tuple[str, int], Seen]:
        """What each patched layer computes on the inputs, by stack and index."""
        return see(self.architecture, self.model, self.inputs)

    @cached_property
    def parts(self) -> list[Part]:
        """All there is to draw, in the order of layers."""
        found = []
        bodies = self.architecture.stacks(self.model)
        for group in record.from_config(self.model.config):
            for stack, share in group.stacks.items():
                if stack in bodies:
                    layers = tuple(self._layer(bodies[stack], index) for index in share.layers)
                    heads = tuple(range(layers[0].scheme.geometry.heads))
                    found.append(Part(self, stack, group, layers, heads))
        return sorted(found, key=lambda part: (list(bodies).index(part.stack), part.layers[0].index))

    def _layer(self, body: nn.Module, index: int) -> Layer:
        attention: Any = self.architecture.attentions(body)[index]
        shared: Any = getattr(body._modules.get(surgery.SHARED), str(attention.posenc_group), None)
        own: Any = attention._modules.get(surgery.OWN)
        return Layer(index, shared if own is None else own, None if own is None else shared, attention)

    def written(self, ids: Tensor) -> list[str]:
        """Return how ids are written along axes."""
        if self.tokenizer is None:
            return [str(id_) for id_ in ids.tolist()]
        pieces: list[str | None] = self.tokenizer.convert_ids_to_tokens(ids.tolist())
        return [
            _readable(str(id_) if piece is None else piece) for piece, id_ in zip(pieces, ids.tolist(), strict=True)
        ]


@contextlib.contextmanager
def patched(model: Any) -> Iterator[bool]:
    """Make a stock model compute what it does by a scheme, for a while; yield whether it was a stock one.

    Raises:
        WrappedModelError: The model is inside a wrapper.
        ArchitectureError: It is of no known architecture.
        NotPatchedError: A stock model has an encoding that no scheme reproduces.
    """
    try:
        refuse_wrapped(model)
    except WrappedModelError as error:
        raise WrappedModelError(
            f"{str(error).split('. ')[0]}. Draw the plain model: an adapter is merged by model.merge_and_unload()."
        ) from None
    architecture = of_model(model)
    if surgery.is_patched(model):
        yield False
        return
    body = next(iter(architecture.stacks(model).values()))
    geometry = architecture.geometry(body, 0)
    name = "rope" if geometry.inv_freq is not None else _NATIVE.get(geometry.native.kind if geometry.native else "")
    if name is None:
        raise NotPatchedError(
            f"The {type(model).__name__} is not patched, and no scheme computes its own encoding. Call hf_posenc.patch first."
        )
    patch(model, name)
    try:
        yield True
    finally:
        unpatch(model)


def layer_names(indices: Sequence[int]) -> str:
    """Return `"layer 2"`, `"layers 0-4"` or `"layers 0, 2, 5"`."""
    if len(indices) == 1:
        return f"layer {indices[0]}"
    if len(indices) > 2 and list(indices) == list(range(indices[0], indices[-1] + 1)):
        return f"layers {indices[0]}\N{EN DASH}{indices[-1]}"
    return f"layers {', '.join(map(str, indices))}"


def _some(things: tuple[Any, ...], most: int) -> tuple[Any, ...]:
    """Return at most so many of some things, evenly spread, the first and the last among them."""
    if len(things) <= most:
        return things
    if most == 1:
        return (things[len(things) // 2],)
    return tuple(things[round(place * (len(things) - 1) / (most - 1))] for place in range(most))


def _readable(piece: str) -> str:
    """Return a piece of a vocabulary with its marks of spaces and line ends as they are commonly drawn."""
    # Of SentencePiece, and of byte-level vocabularies.
    for mark, drawn in (("\u2581", "\N{OPEN BOX}"), ("\u0120", "\N{OPEN BOX}"), ("\u010a", "\\n"), ("\n", "\\n")):
        piece = piece.replace(mark, drawn)
    return piece.replace("<0x0A>", "\\n")
