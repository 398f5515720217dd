"""A model as pictures see it: its schemes, what its layers compute on one text or image, and what schemes add there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import registry
from hf_posenc.attention import reach
from hf_posenc.errors import NotPatchedError
from hf_posenc.operands import Block, Geometry, Positions, Tokens
from hf_posenc.ops.softmax import grouped_matmul
from hf_posenc.patches import record, surgery
from hf_posenc.patches.architecture import Architecture, of_model
from hf_posenc.patches.patch import evaluating, patch, unpatch
from hf_posenc.patches.preparation import native_scheme, refuse_wrapped
from hf_posenc.patches.seams import CONTEXT
from hf_posenc.recipes.evaluation.predictions import eager, hooked
from hf_posenc.scheme import Scheme

# Assumed length of a model that states none, in tokens.
_LENGTH = 512
# Queries at the end of a long text whose attention is drawn, and the longest text: maps grow with the square.
LAST, _LONGEST_TEXT = 16, 2048


@dataclass(frozen=True, eq=False)
class Seen:
    """What one layer computes; batch 1, float64.

    Attributes:
        tokens: Tokens as the scheme gets them.
        q: Queries as projected, without any position, `[1, H, S, D]`.
        k: Keys likewise, `[1, G, S, D]`.
        v: Values, `[1, G, S, D]`.
        weights: Attention weights as the model used them, `[H, S, S]`.
    """

    tokens: Tokens
    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer with a scheme.

    Attributes:
        index: Index of the layer in its stack.
        scheme: Its scheme, which other layers may share.
        common: The part of the scheme that all layers share, if it has one.
    """

    index: int
    scheme: Scheme
    common: Scheme | None


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
        """Name of the scheme."""
        return self.group.scheme

    @property
    def family(self) -> str:
        """Family of the scheme."""
        return registry.get(self.name).family

    @property
    def scheme(self) -> Scheme:
        """Scheme of the first layer."""
        return self.layers[0].scheme

    @property
    def geometry(self) -> Geometry:
        """Shape of the first layer."""
        return self.scheme.geometry

    @property
    def length(self) -> int:
        """Trained length, in tokens."""
        return self.geometry.max_positions or _LENGTH

    @property
    def on_grid(self) -> bool:
        """Whether the scheme reads the places of patches in an image."""
        return self.geometry.axes > 1 and self.scheme.axes > 1

    @property
    def title(self) -> str:
        """Beginning of the title of a picture."""
        native = " over the native encoding" if self.group.native == "keep" else ""
        share = self.subject.strength
        faded = f" (drawn in full; at {share:.0%} of its strength now)" if share != 1 else ""
        return f"{self.name}{' (native)' if self.subject.native else native}, {self.stack}{faded}"

    def narrowed(self, layers: int, heads: int) -> Part:
        """Return the same with at most so many layers and heads, evenly spread."""
        return replace(self, layers=_some(self.layers, layers), heads=_some(self.heads, heads))

    def each(self) -> list[tuple[str, Layer]]:
        """Return each layer with its name."""
        return [(layer_names([layer.index]), layer) for layer in self.layers]

    def distinct(self, key: Callable[[Layer], object] = lambda layer: id(layer.scheme)) -> list[tuple[str, Layer]]:
        """Return a layer for each different key, by default each scheme, with the names of all layers that have it."""
        users: dict[object, list[Layer]] = {}
        for layer in self.layers:
            users.setdefault(key(layer), []).append(layer)
        return [(layer_names([user.index for user in found]), found[0]) for found in users.values()]

    def seen(self, layer: Layer) -> Seen:
        """Return what a layer computes on the text or image."""
        seen = self.subject.seen[self.stack, layer.index]
        return replace(seen, tokens=replace(seen.tokens, common=layer.common))

    @property
    def tokens(self) -> list[str]:
        """The tokens of the text that this stack reads, as they are written along axes."""
        ids, tokenizer = self.subject.inputs[self.stack].get("input_ids"), self.subject.tokenizer
        if ids is None or tokenizer is None:
            return [str(i) for i in (range(self.seen(self.layers[0]).q.shape[2]) if ids is None else ids[0].tolist())]
        return [_readable(piece) for piece in tokenizer.convert_ids_to_tokens(ids[0].tolist())]


@dataclass(frozen=True, eq=False)
class Subject:
    """A patched model, and what it reads.

    Attributes:
        model: The model.
        tokenizer: Tokenizer of the model; without one, tokens are written as numbers.
        inputs: Arguments of a forward of each stack, batch 1. A decoder behind an encoder gets the encoder's output
            too.
        native: Whether it was a stock model, drawn as what it computes itself.
        strength: Strength of its schemes, see `hf_posenc.set_strength`.
        text: Token ids of a text for pictures of long ones, int64 `[tokens]`.
        name: Name of the model or its run, for titles.
    """

    model: PreTrainedModel
    tokenizer: Any
    inputs: Mapping[str, Mapping[str, Tensor]]
    native: bool = False
    strength: float = 1.0
    text: Tensor | None = None
    name: str = ""
    _longer: dict[int, dict[tuple[str, int], Seen]] = field(default_factory=dict)

    @cached_property
    def architecture(self) -> Architecture:
        """Architecture of the model."""
        return of_model(self.model)

    @cached_property
    def seen(self) -> dict[tuple[str, int], Seen]:
        """What each patched layer computes on the inputs, by stack and index."""
        return _see(self.architecture, self.model, self.inputs)

    def can_read(self, length: int, part: Part) -> bool:
        """Whether there is a text of so many tokens, and a scheme and a model that read it."""
        if self.text is None or length > min(len(self.text), _LONGEST_TEXT) or not part.geometry.causal:
            return False
        ends = [layer.scheme.end_of_positions() for layer in part.layers]
        has_table = part.group.native == "keep" and part.geometry.inv_freq is None and length > part.length
        return len(self.inputs) == 1 and not has_table and all(end is None or end >= length for end in ends)

    def seen_in(self, length: int) -> dict[tuple[str, int], Seen]:
        """Return what each patched layer computes at the last tokens of a text of so many tokens."""
        if length not in self._longer:
            assert self.text is not None
            (stack,) = self.inputs
            inputs: dict[str, dict[str, Any]] = {stack: {"input_ids": self.text[None, :length], "use_cache": False}}
            self._longer[length] = _see(self.architecture, self.model, inputs, last=LAST)
        return self._longer[length]

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
        return Layer(index, shared if own is None else own, None if own is None else shared)


@contextlib.contextmanager
def patched(model: Any) -> Iterator[bool]:
    """Set a model to evaluation, and make a stock one compute by a scheme, for a while; yield whether it is stock.

    Raises:
        WrappedModelError: The model is inside a wrapper.
        ArchitectureError: It is of no known architecture.
        NotPatchedError: A stock model has an encoding that no scheme reproduces.
    """
    refuse_wrapped(model, "Draw the plain model: an adapter is merged by model.merge_and_unload().")
    if surgery.is_patched(model):
        with evaluating(model):
            yield False
        return
    name = native_scheme(model)
    if name is None:
        raise NotPatchedError(
            f"The {type(model).__name__} is not patched, and no scheme computes its own encoding. Call hf_posenc.patch "
            "first."
        )
    patch(model, name)
    try:
        with evaluating(model):
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


def _readable(piece: str | None) -> str:
    """Return a piece of a vocabulary with its marks of spaces and line ends as they are commonly drawn."""
    # SentencePiece and byte-level vocabularies have different marks.
    marks = str.maketrans({"\u2581": "\N{OPEN BOX}", "\u0120": "\N{OPEN BOX}", "\u010a": "\\n", "\n": "\\n"})
    return str(piece).translate(marks).replace("<0x0A>", "\\n")


# -- what layers compute -----------------------------------------------------------------------------------------------


@torch.no_grad()
def _see(
    architecture: Architecture,
    model: PreTrainedModel,
    inputs: Mapping[str, Mapping[str, Tensor]],
    last: int = 0,
) -> dict[tuple[str, int], Seen]:
    """Run every stack of a patched model once; return what its patched layers computed, by stack and index.

    Only the weights of the `last` queries are kept, or those of all.
    """
    bodies = architecture.stacks(model)
    found: dict[tuple[str, int], Seen] = {}
    encoded: dict[str, Tensor] = {}
    places = {attention: (stack, index) for stack, _, index, attention in surgery.patched_layers(architecture, model)}

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        context = kwargs[CONTEXT]

        def host(x: Tensor) -> tuple[Tensor, Tensor]:
            q, k, _ = module.project_heads(x.to(hidden.dtype))
            return q.double(), k.double()

        q, k, v = (x.double() for x in module.project_heads(hidden))
        tokens = Tokens(
            positions=Positions(context.positions, context.positions, context.coords, context.coords),
            hidden=hidden.double(),
            # Read now: the layer replaces it by what it hands on.
            carried=None if context.passage is None else context.passage.carried,
            host=host,
        )
        found[places[module]] = Seen(tokens, q, k, v, q.new_empty(0))

    def after(module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        place = places[module]
        found[place] = replace(found[place], weights=output[-1][0, :, -last:].double())

    with hooked(places, before, after), eager(model):
        for stack, body in bodies.items():
            output = body(**inputs[stack], **encoded, output_attentions=True)
            if stack == "encoder" and "decoder" in bodies:
                encoded = {"encoder_hidden_states": output.last_hidden_state}
    return found


# -- what schemes compute ----------------------------------------------------------------------------------------------


@torch.no_grad()
def asked(part: Part, layer: Layer) -> tuple[Tensor, Tensor, Tensor, Block]:
    """Return the arguments of `score` of a layer, on the text or image that the model reads; all float64."""
    seen = part.seen(layer)
    return _ask(layer.scheme, seen.tokens, seen.q, seen.k, seen.v)


@torch.no_grad()
def added(scheme: Scheme, tokens: Tokens, positions: Positions, q: Tensor, k: Tensor) -> Tensor:
    """Return what positions add to the logits of queries and keys that are the same everywhere, float64 `[H, Q, K]`.

    Args:
        scheme: The scheme.
        tokens: Further state that the scheme needs.
        positions: Positions of Q queries and K keys.
        q: The query of each head `[H, D]`.
        k: The key of each kv head `[G, D]`.
    """
    queries = q.double()[None, :, None].expand(1, -1, positions.query.shape[1], -1)
    keys = k.double()[None, :, None].expand(1, -1, positions.key.shape[1], -1)
    logits = scheme.score(*_ask(scheme, replace(tokens, positions=positions, hidden=None), queries, keys, keys))
    assert scheme.geometry.scale is not None
    return (logits - scheme.geometry.scale * grouped_matmul(queries, keys.mT))[0].cpu()


def _ask(scheme: Scheme, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Block]:
    """Run `project` and `recall` of a scheme, without the model's own encoding; return the arguments of `score`.

    Tokens are those of the K keys; the Q queries are the last of them.
    """
    assert scheme.geometry.scale is not None
    projected = scheme.project(tokens, q, k, v)
    keys = scheme.recall(projected.k, projected.state)
    places = tokens.positions
    block = Block(
        positions=places,
        reach=reach(places),
        keep=places.key[:, None, None] <= places.query[:, None, :, None] if scheme.geometry.causal else None,
        values=projected.v,
        state=projected.state,
        own={name: tensor[:, k.shape[2] - q.shape[2] :] for name, tensor in projected.state.items()},
        tables=projected.tables,
    )
    return scheme.geometry.scale * grouped_matmul(projected.q, keys.mT), projected.q, keys, block
