"""Pictures of what the schemes of a model have learned: of any patched model, and of stock ones.

for name, figure in hf_posenc.recipes.plots.figures(model, tokenizer).items():
    figure.savefig(f"{name}.png")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from hf_posenc.errors import LayerSelectionError, OptionError, suggest
from hf_posenc.patches.architecture import of_model
from hf_posenc.recipes.plots.pictures import Kind, all_kinds
from hf_posenc.recipes.plots.subject import Part, parts_of, patched, some

__all__ = ["PROMPT", "figures", "kinds"]

# Names come back and things happen twice, so that heads which look for either have something to find.
PROMPT = "Once upon a time there was a cat. The cat sat on a mat. A dog came, and the dog sat on the mat too."

# An attention map of more tokens takes gigabytes in all heads.
_LONGEST = 1024
# Larger positions are not exact in 32 bits.
_FARTHEST = 2**30


def figures(
    model: Any,
    tokenizer: Any = None,
    *,
    what: str | Sequence[str] | None = None,
    prompt: str = PROMPT,
    inputs: Mapping[str, Tensor] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    queries: Sequence[int] = (),
    name: str = "",
) -> dict[str, Figure]:
    """Draw what the schemes of a model have learned, by kind, stack and scheme, such as `"bias-decoder-alibi"`.

    A stock model is drawn as what it computes itself: its rotation, its table. The model is left as it was.

    Args:
        model: A model of transformers, patched or not, not inside any wrapper.
        tokenizer: Tokenizer that reads the prompt; without one the tokens are numbers.
        what: Kinds of pictures, see `kinds`; `None` is all that fit the model.
        prompt: The text for pictures of what a model does on one.
        inputs: Arguments of a forward instead of the prompt, batch 1, such as `pixel_values`; images are noise
            unless given.
        layers: Indices of the layers to draw; `None` is all, or some of many.
        heads: Indices of the query heads; likewise.
        queries: Positions of the queries for pictures by distance; empty is the trained length, and others where it
            matters.
        name: Name of the model or its run, for the titles.

    Raises:
        OptionError: There is no such kind of picture, or none that fits the model.
        LayerSelectionError: The model has no such layer or head.
        NotPatchedError: A stock model has an encoding that no scheme reproduces.
        WrappedModelError: The model is inside a wrapper.
    """
    known = all_kinds()
    wanted = [what] if isinstance(what, str) else list(known) if what is None else list(what)
    if not wanted:
        raise OptionError(f"Got no kind of picture to draw. {suggest('', known)}")
    for each in wanted:
        if each not in known:
            raise OptionError(f"There is no kind of picture {each!r}. {suggest(str(each), known)}")
    if not all(isinstance(query, int) and 1 <= query <= _FARTHEST for query in queries):
        raise OptionError(
            f"queries={list(queries)!r}: expected positions of queries, each an integer from 1 to {_FARTHEST:,}."
        )
    with patched(model) as native, torch.no_grad():
        every = parts_of(model, tokenizer, _inputs(model, tokenizer, prompt, inputs), native=native, name=name)
        parts = _chosen(every, layers, heads, tuple(queries))
        fitting = [kind for kind in known if any(map(known[kind].fits, parts))]
        missing = [each for each in wanted if each not in fitting]
        if what is not None and missing:
            raise OptionError(
                f"There is no picture {', '.join(map(repr, missing))} of "
                f"{', '.join(sorted({part.name for part in parts}))}. Available pictures: {', '.join(fitting)}."
            )
        narrow = layers is None and heads is None
        return {name: made for each in wanted for name, made in _of_kind(known[each], parts, narrow=narrow)}


def kinds() -> dict[str, str]:
    """Return the kinds of pictures, with what they show."""
    return {name: kind.summary for name, kind in all_kinds().items()}


def _of_kind(kind: Kind, parts: Sequence[Part], *, narrow: bool) -> Iterator[tuple[str, Figure]]:
    """Yield the figures of one kind, each with a name that no other figure has."""
    for part in filter(kind.fits, parts):
        words = [kind.name, part.stack, part.name]
        if sum((other.stack, other.name) == (part.stack, part.name) for other in parts) > 1:
            words.append(str(part.group.id))
        if narrow:
            part = replace(part, layers=some(part.layers, kind.layers), heads=some(part.heads, kind.heads))
        yield "-".join(words), kind.draw(part)


def _chosen(
    parts: Sequence[Part], layers: Sequence[int] | None, heads: Sequence[int] | None, queries: tuple[int, ...]
) -> list[Part]:
    there = {layer.index for part in parts for layer in part.layers}
    count = min(part.geometry.heads for part in parts)
    for asked, known in ((layers, there), (heads, set(range(count)))):
        if asked is not None and not set() < set(asked) <= known:
            raise LayerSelectionError(
                f"layers={layers!r}, heads={heads!r}: expected some of the layers that have a scheme, "
                f"{', '.join(map(str, sorted(there)))}, and of the heads 0 to {count - 1}."
            )
    chosen = (
        replace(
            part,
            layers=tuple(layer for layer in part.layers if layers is None or layer.index in layers),
            heads=part.heads if heads is None else tuple(heads),
            queries=queries,
        )
        for part in parts
    )
    return [part for part in chosen if part.layers]


def _inputs(
    model: Any, tokenizer: Any, prompt: str, inputs: Mapping[str, Tensor] | None
) -> dict[str, dict[str, Tensor]]:
    architecture = of_model(model)
    bodies = architecture.stacks(model)
    first, body = next(iter(bodies.items()))
    call = dict(architecture.example(body) if inputs is None else inputs)
    if "input_ids" not in call:
        return {first: call}
    ids = call["input_ids"]
    if inputs is None and tokenizer is not None:
        ids = tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"].to(ids.device, torch.long)
    if ids.ndim != 2 or ids.shape[0] != 1 or not 1 < ids.shape[1] <= _LONGEST:
        raise OptionError(
            f"Got {list(ids.shape)} tokens to draw; expected [1, tokens] with 2 to {_LONGEST:,} of them. Give another "
            "prompt."
        )
    calls: dict[str, Any] = {first: {**call, "input_ids": ids, "use_cache": False}}
    for stack in list(bodies)[1:]:
        # A decoder behind an encoder writes what that read, from its start token on.
        start = ids.new_full((1, 1), model.config.decoder_start_token_id or 0)
        calls[stack] = {"input_ids": torch.cat((start, ids[:, :-1]), dim=1), "use_cache": False}
    return calls
