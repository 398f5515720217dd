"""A model as pictures see it: its schemes, what its layers compute on one text or image, and what schemes add there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.attention import Call, Mask
from hf_posenc.attention.dense import logits_of
from hf_posenc.errors import NotPatchedError
from hf_posenc.operands import Block, Geometry, Positions, Tokens
from hf_posenc.ops import grouped_matmul
from hf_posenc.patches import record, surgery
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.attention import CONTEXT
from hf_posenc.patches.inspection import eager, hooked
from hf_posenc.patches.patch import evaluating, native_scheme, patch, refuse_wrapped, unpatch
from hf_posenc.scheme import Scheme

# Assumed length of a model that states none, in tokens.
_LENGTH = 512


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer with a scheme, which others may share, and what it computes on a text or image; batch 1, float64.

    Queries `[1, H, S, D]`, keys and values `[1, G, S, D]` are as projected, without any position; weights `[H, S, S]`
    are those of attention as the model used them.
    """

    index: int
    scheme: Scheme
    tokens: Tokens
    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """The layers of one stack that have one scheme, and the heads and positions of queries to draw.

    Titles begin with what it is `called`; the text is the tokens that it reads. Without queries, a picture chooses.
    """

    stack: str
    group: record.Group
    called: str
    text: Sequence[str]
    layers: tuple[Layer, ...]
    heads: tuple[int, ...]
    queries: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.group.scheme

    @property
    def scheme(self) -> Scheme:
        return self.layers[0].scheme

    @property
    def geometry(self) -> Geometry:
        return self.scheme.geometry

    @property
    def length(self) -> int:
        return self.geometry.max_positions or _LENGTH

    def distinct(self, key: Callable[[Layer], object]) -> list[tuple[str, Layer]]:
        """Return a layer for each different key, with the names of all layers that have it."""
        users: dict[object, list[Layer]] = {}
        for layer in self.layers:
            users.setdefault(key(layer), []).append(layer)
        return [(layer_names([user.index for user in found]), found[0]) for found in users.values()]


def parts_of(
    model: PreTrainedModel, tokenizer: Any, inputs: Mapping[str, Mapping[str, Tensor]], *, native: bool, name: str
) -> list[Part]:
    """Return all there is to draw of a patched model, in the order of layers; without a tokenizer, tokens are numbers.

    Inputs are the arguments of a forward of each stack, batch 1. A `native` model was a stock one, and is drawn as what
    it computes itself. The name of the model begins the titles.
    """
    found, strength = [], record.strengths_from_config(model.config).scheme
    faded = f" (drawn in full; at {strength:.0%} of its strength now)" if strength != 1 else ""
    seen = _see(model, inputs)
    for group in record.from_config(model.config):
        state = " (native encoding)" if native else " over the native encoding" if group.native == "keep" else ""
        for stack, share in group.stacks.items():
            if stack in inputs:
                layers = tuple(seen[stack, index] for index in share.layers)
                text = _written(tokenizer, inputs[stack].get("input_ids"), layers[0].q.shape[2])
                heads = tuple(range(layers[0].scheme.geometry.heads))
                called = f"{name}: " * bool(name) + f"{group.scheme}{state}, {stack}{faded}"
                found.append(Part(stack, group, called, text, layers, heads))
    return sorted(found, key=lambda part: (list(inputs).index(part.stack), part.layers[0].index))


@contextlib.contextmanager
def patched(model: Any) -> Iterator[bool]:
    """Set a model to evaluation, and make a stock one compute by a scheme, for a while; yield whether it is stock."""
    refuse_wrapped(model, "Draw the plain model: an adapter is merged by model.merge_and_unload().")
    is_stock = not surgery.is_patched(model)
    if is_stock:
        name = native_scheme(model)
        if name is None:
            raise NotPatchedError(
                f"The {type(model).__name__} is not patched, and no scheme computes its own encoding. Call "
                "hf_posenc.patch first."
            )
        patch(model, name)
    try:
        with evaluating(model):
            yield is_stock
    finally:
        if is_stock:
            unpatch(model)


def layer_names(indices: Sequence[int]) -> str:
    """Return `"layer 2"`, `"layers 0-4"` or `"layers 0, 2, 5"`."""
    if len(indices) == 1:
        return f"layer {indices[0]}"
    if len(indices) > 2 and list(indices) == list(range(indices[0], indices[-1] + 1)):
        return f"layers {indices[0]}-{indices[-1]}"
    return f"layers {', '.join(map(str, indices))}"


def some(things: tuple[Any, ...], most: int) -> tuple[Any, ...]:
    """Return at most so many of some things, evenly spread, the first and the last among them."""
    if len(things) <= most:
        return things
    return tuple(things[round(place * (len(things) - 1) / (most - 1))] for place in range(most))


def _written(tokenizer: Any, ids: Tensor | None, count: int) -> list[str]:
    """Return tokens with their marks of spaces and line ends as they are commonly drawn; numbers without a text."""
    if ids is None or tokenizer is None:
        return [str(i) for i in (range(count) if ids is None else ids[0].tolist())]
    # SentencePiece and byte-level vocabularies have different marks.
    marks = str.maketrans({"\u2581": "\N{OPEN BOX}", "\u0120": "\N{OPEN BOX}", "\u010a": "\\n", "\n": "\\n"})
    pieces = tokenizer.convert_ids_to_tokens(ids[0].tolist())
    return [str(piece).translate(marks).replace("<0x0A>", "\\n") for piece in pieces]


def _see(model: PreTrainedModel, inputs: Mapping[str, Mapping[str, Tensor]]) -> dict[tuple[str, int], Layer]:
    """Run every stack of a patched model once; return its patched layers by stack and index."""
    architecture = of_model(model)
    found: dict[tuple[str, int], Layer] = {}
    encoded: dict[str, Tensor] = {}
    layers = {layer[-1]: layer for layer in surgery.Sites.of(model).patched()}

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack, body, index, _ = layers[module]
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        context = kwargs[CONTEXT]

        def host(x: Tensor) -> tuple[Tensor, Tensor]:
            q, k, _ = module.project_heads(x.to(hidden.dtype))
            return q.double(), k.double()

        q, k, v = (x.double() for x in module.project_heads(hidden))
        scheme = surgery.scheme_of(body, module)
        shared: Any = getattr(body._modules.get(surgery.SHARED), str(module.posenc_group), None)
        tokens = Tokens(
            positions=context.inputs.places,
            hidden=hidden.double(),
            # Read now: the layer replaces it by what it hands on.
            carried=None if context.passage is None else context.passage.carried,
            common=None if shared is scheme else shared,
            host=host,
        )
        found[stack, index] = Layer(index, scheme, tokens, q, k, v, q.new_empty(0))

    def after(module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        stack, _, index, _ = layers[module]
        found[stack, index] = replace(found[stack, index], weights=output[-1][0].double())

    with hooked(layers, before, after), eager(model):
        for stack, body in architecture.stacks(model).items():
            output = body(**inputs[stack], **encoded, output_attentions=True)
            if stack == "encoder" and "decoder" in inputs:
                encoded = {"encoder_hidden_states": output.last_hidden_state}
    return found


# -- what schemes compute ----------------------------------------------------------------------------------------------


def added(scheme: Scheme, tokens: Tokens, positions: Positions, q: Tensor, k: Tensor) -> Tensor:
    """Return what positions add to the logits of queries and keys that are the same everywhere, float64 `[H, Q, K]`.

    These are one query for each head `[H, D]` and one key for each kv head `[G, D]`, at Q and K positions.
    """
    queries = q.double()[None, :, None].expand(1, -1, positions.query.shape[1], -1)
    keys = k.double()[None, :, None].expand(1, -1, positions.key.shape[1], -1)
    logits = scheme.score(*asked(scheme, replace(tokens, positions=positions, hidden=None), queries, keys, keys))
    assert scheme.geometry.scale is not None
    return (logits - scheme.geometry.scale * grouped_matmul(queries, keys.mT))[0].cpu()


def asked(scheme: Scheme, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Block]:
    """Run `project` and `recall` of a scheme, without the model's own encoding; return the arguments of `score`.

    Tokens are those of the K keys; the Q queries are the last of them.
    """
    call = Call.of(scheme, tokens, q, k, v, mask=Mask("positions" if scheme.geometry.causal else "all"))
    block = call.block(call.mask.seen(call.positions)[0])
    return (*logits_of(call, block), block)
