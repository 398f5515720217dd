"""`figures`: all pictures of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import LayerSelectionError, OptionError, suggest
from hf_posenc.patches import record
from hf_posenc.patches.architecture import Architecture, of_model
from hf_posenc.recipes.plots import (
    attention,
    bias,
    counts,
    decay,
    frequencies,
    gates,
    planes,
    remainder,
    series,
    states,
    style,
    tables,
)
from hf_posenc.recipes.plots.kind import Kind
from hf_posenc.recipes.plots.overview import overview
from hf_posenc.recipes.plots.subject import Part, Subject, patched

# In the order of a page: what a scheme is, then what it does on a text.
KINDS: dict[str, Kind] = {
    module.KIND.name: module.KIND
    for module in (bias, decay, frequencies, planes, series, tables, gates, counts, states, remainder, attention)
}
OVERVIEW = "overview"

# Names come back and things happen twice, so that heads which look for either have something to find.
PROMPT = "Once upon a time there was a cat. The cat sat on a mat. A dog came, and the dog sat on the mat too."
# An attention map of more tokens takes gigabytes in all heads.
_LONGEST = 1024
# Beyond this, distances are no numbers of 32 bits any more.
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
) -> dict[str, Figure]:
    """Draw what the schemes of a model have learned.

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
        queries: Positions of the queries for pictures of what is added by distance, each with all distances that
            there are; empty is the trained length, and others where it matters.

    Returns:
        Figures of matplotlib, by a name such as `"bias-decoder-fire"`.

    Raises:
        OptionError: There is no such kind of picture, or none that fits the model.
        LayerSelectionError: The model has no such layer or head.
        NotPatchedError: A stock model has an encoding that no scheme reproduces.
        WrappedModelError: The model is inside a wrapper.
    """
    wanted = _kinds(what)
    _check_positions(queries)
    with patched(model) as native, torch.no_grad():
        architecture = of_model(model)
        read = _inputs(architecture, model, tokenizer, prompt, inputs)
        strength = record.strengths_from_config(model.config).scheme
        subject = Subject(model, tokenizer, read, native, strength)
        parts = _chosen(subject, layers, heads, tuple(queries))
        named = dict(_draw(subject, parts, wanted, free=layers is None and heads is None))
    missing = [kind for kind in wanted if kind != OVERVIEW and not any(KINDS[kind].fits(part) for part in parts)]
    if what is not None and missing:
        raise OptionError(
            f"There is no picture {', '.join(map(repr, missing))} of {', '.join(sorted({part.name for part in parts}))}. "
            f"Such as there are: {', '.join([*fitting(parts), OVERVIEW])}."
        )
    return named


def kinds() -> dict[str, str]:
    """Return the kinds of pictures, with what they show."""
    return {name: kind.summary for name, kind in KINDS.items()} | {
        OVERVIEW: "all of these on one page, of a few layers"
    }


def fitting(parts: Sequence[Part]) -> list[str]:
    """Return the names of the kinds of pictures that there are of some parts."""
    return [name for name, kind in KINDS.items() if any(kind.fits(part) for part in parts)]


def _draw(
    subject: Subject, parts: Sequence[Part], wanted: Sequence[str], *, free: bool
) -> Iterator[tuple[str, Figure]]:
    for name in wanted:
        if name == OVERVIEW:
            yield name, overview(subject, parts, list(KINDS.values()))
            continue
        kind = KINDS[name]
        for part in parts:
            if not kind.fits(part):
                continue
            some = part.narrowed(kind.layers, kind.heads) if free else part
            for drawn in some.one_by_one() if kind.per_layer else [some]:
                width, height = kind.size(drawn)
                made = style.figure(width, height, f"{drawn.title}: {kind.title(drawn)}")
                kind.draw(style.at_the_left(made, width, made.get_figwidth()), drawn)
                yield _name(kind, drawn, parts), made


def _name(kind: Kind, part: Part, parts: Sequence[Part]) -> str:
    """Return the name of a figure, different from those of all others."""
    words = [kind.name, part.stack, part.name]
    if sum((other.stack, other.name) == (part.stack, part.name) for other in parts) > 1:
        words.append(str(part.group.id))
    if kind.per_layer:
        words.append(f"layer-{part.layers[0].index}")
    return "-".join(words)


# -- what was asked for ------------------------------------------------------------------------------------------------


def _kinds(what: str | Sequence[str] | None) -> list[str]:
    known = [OVERVIEW, *KINDS]
    if what is None:
        return known
    asked = [what] if isinstance(what, str) else list(what)
    for name in asked:
        if name not in known:
            raise OptionError(f"There is no kind of picture {name!r}. {suggest(str(name), known)}")
    if not asked:
        raise OptionError(f"Got no kind of picture to draw. {suggest('', known)}")
    return list(dict.fromkeys(asked))


def _check_positions(queries: Sequence[int]) -> None:
    for query in queries:
        if not isinstance(query, int) or isinstance(query, bool) or not 1 <= query <= _FARTHEST:
            raise OptionError(
                f"queries={list(queries)!r}: expected positions of queries, each an integer from 1 to {_FARTHEST:,}."
            )


def _chosen(
    subject: Subject, layers: Sequence[int] | None, heads: Sequence[int] | None, queries: tuple[int, ...]
) -> list[Part]:
    """Return the parts of a model with the layers and heads that were asked for."""
    found = []
    for part in subject.parts:
        own = part.layers if layers is None else tuple(layer for layer in part.layers if layer.index in layers)
        count = part.geometry.heads
        for head in heads or ():
            if not 0 <= head < count:
                raise LayerSelectionError(f"heads={list(heads or ())!r}: the {part.stack} has heads 0 to {count - 1}.")
        if own:
            shown = part.heads if heads is None else tuple(heads)
            found.append(replace(part, layers=own, heads=shown, queries=queries))
    there = {layer.index for part in subject.parts for layer in part.layers}
    unknown = sorted(set(layers or ()) - there)
    if unknown or not found or (heads is not None and not heads):
        raise LayerSelectionError(
            f"layers={layers!r}, heads={heads!r}: expected some of the layers that have a scheme, "
            f"{', '.join(map(str, sorted(there)))}, and at least one head."
        )
    return found


def _inputs(
    architecture: Architecture,
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str,
    inputs: Mapping[str, Tensor] | None,
) -> dict[str, dict[str, Tensor]]:
    """Return the arguments of a forward of each stack."""
    bodies = architecture.stacks(model)
    first, body = next(iter(bodies.items()))
    call = dict(architecture.example(body) if inputs is None else inputs)
    if inputs is None and "input_ids" in call and tokenizer is not None:
        call = {"input_ids": _read(tokenizer, prompt, call["input_ids"].device)}
    if "input_ids" not in call:
        return {first: call}
    ids = call["input_ids"]
    if ids.ndim != 2 or ids.shape[0] != 1 or not 1 < ids.shape[1] <= _LONGEST:
        raise OptionError(
            f"Got {list(ids.shape)} tokens to draw; expected [1, tokens] with 2 to {_LONGEST:,} of them. Give another prompt."
        )
    calls: dict[str, Any] = {first: {**call, "use_cache": False}}
    for stack in list(bodies)[1:]:
        # A decoder behind an encoder writes what that read, from its start token on.
        start = ids.new_full((1, 1), model.config.decoder_start_token_id or 0)
        calls[stack] = {"input_ids": torch.cat((start, ids[:, :-1]), dim=1), "use_cache": False}
    return calls


def _read(tokenizer: Any, prompt: str, device: torch.device) -> Tensor:
    ids: Tensor = tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]
    return ids.to(device, torch.long)
