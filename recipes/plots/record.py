"""What every patched layer of a model computes on one text or image."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.operands import Positions, Tokens
from hf_posenc.patches import surgery
from hf_posenc.patches.architecture import Architecture
from hf_posenc.patches.patch import evaluating
from hf_posenc.patches.seams import CONTEXT


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


@torch.no_grad()
def see(
    architecture: Architecture, model: PreTrainedModel, inputs: Mapping[str, Mapping[str, Tensor]]
) -> dict[tuple[str, int], Seen]:
    """Run every stack of a patched model once; return what its patched layers saw and did, by stack and index.

    Args:
        architecture: Architecture of the model.
        model: The model.
        inputs: Arguments of a forward of each stack, batch 1. A decoder behind an encoder gets the encoder's output
            too.
    """
    bodies = architecture.stacks(model)
    observers: dict[tuple[str, int], _Observer] = {}
    handles = []
    for stack, body in bodies.items():
        for index, attention in enumerate(architecture.attentions(body)):
            if surgery.is_patched(attention):
                observer = observers[stack, index] = _Observer()
                handles.append(attention.register_forward_pre_hook(observer.before, with_kwargs=True))
                handles.append(attention.register_forward_hook(observer.after))
    try:
        with _giving_weights(model):
            encoded: dict[str, Tensor] = {}
            for stack, body in bodies.items():
                output = body(**inputs[stack], **encoded)
                if stack == "encoder" and "decoder" in bodies:
                    encoded = {"encoder_hidden_states": output.last_hidden_state}
    finally:
        for handle in handles:
            handle.remove()
    return {place: observer.seen for place, observer in observers.items() if observer.seen is not None}


@contextlib.contextmanager
def _giving_weights(model: PreTrainedModel) -> Iterator[None]:
    """Let attention hand out its weights, without dropout."""
    before = model.config._attn_implementation
    with evaluating(model):
        model.set_attn_implementation("eager")
        try:
            yield
        finally:
            model.set_attn_implementation(before)


class _Observer:
    """Hooks of one attention module: looks at what goes in and at the weights that come out."""

    def __init__(self) -> None:
        self.seen: Seen | None = None

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        context = kwargs[CONTEXT]
        dtype = hidden.dtype

        def host(x: Tensor) -> tuple[Tensor, Tensor]:
            q, k, _ = module.project_heads(x.to(dtype))
            return q.double(), k.double()

        q, k, v = (x.double() for x in module.project_heads(hidden))
        tokens = Tokens(
            positions=Positions(context.positions, context.positions, context.coords, context.coords),
            hidden=hidden.double(),
            # Read now: the layer replaces it by what it hands on.
            carried=None if context.passage is None else context.passage.carried,
            host=host,
        )
        self.seen = Seen(tokens, q, k, v, q.new_empty(0))

    def after(self, module: Any, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        assert self.seen is not None
        self.seen = replace(self.seen, weights=output[-1][0].double())
