"""`explain`: how the attention of a patched model is computed, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_posenc import attention
from hf_posenc.errors import NotPatchedError, OptionError, PositionError
from hf_posenc.patches import record, surgery
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.modes import evaluating


@dataclass(frozen=True)
class LayerExecution:
    """The execution of one layer's attention.

    Attributes:
        stack: Name of the stack.
        layer: Index of the layer in it.
        scheme: Name of its scheme.
        sequence: The executor for a whole sequence, with the form in which positions enter in parentheses.
        step: The executor for one more token with a cache; `None` in encoders.
    """

    stack: str
    layer: int
    scheme: str
    sequence: str
    step: str | None


@dataclass(frozen=True)
class Explanation:
    """Result of `explain`.

    Attributes:
        layers: One entry per patched layer.
        length: Number of tokens in the sequence.
    """

    layers: tuple[LayerExecution, ...]
    length: int

    def __str__(self) -> str:
        lines = [f"{'layer':<16} {'scheme':<16} {f'{self.length} tokens':<28} one more token"]
        lines += [f"{f'{x.stack} {x.layer}':<16} {x.scheme:<16} {x.sequence:<28} {x.step or '-'}" for x in self.layers]
        return "\n".join(lines)


def explain(model: PreTrainedModel, *, length: int = 256) -> Explanation:
    """Say which executor computes the attention of each patched layer, by running the model once.

    The choice depends on the scheme, the length, the device, the dtype and the attention implementation of the model;
    padding, explicit positions or dropout may change it too. `model.set_attn_implementation("eager")` makes it dense.

    Args:
        model: A patched model.
        length: Tokens of the sequence to run. Images have their own length.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: The length is no positive number.
        PositionError: The model has no positions for that many tokens and one more.
    """
    if not surgery.is_patched(model):
        raise NotPatchedError(f"explain: the {type(model).__name__} is not patched. Call hf_posenc.patch first.")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise OptionError(f"explain: length={length!r}: expected a positive number of tokens.")
    architecture = of_model(model)
    groups = record.from_config(model.config)
    found: list[LayerExecution] = []
    try:
        with evaluating(model):
            for stack, body in architecture.stacks(model).items():
                schemes = {
                    layer: group.scheme
                    for group in groups
                    if stack in group.stacks
                    for layer in group.stacks[stack].layers
                }
                sequence, step = _run(body, architecture.example(body), length)
                found += [
                    LayerExecution(stack, layer, schemes[layer], str(whole), None if one is None else str(one))
                    for layer, whole, one in zip(sorted(schemes), sequence, step, strict=True)
                ]
    except PositionError as error:
        raise PositionError(
            f"explain: length={length} and one more token: {error} Or pass a smaller length."
        ) from error
    return Explanation(tuple(found), length)


def _run(
    body: Any, example: dict[str, Any], length: int
) -> tuple[list[attention.Choice], Sequence[attention.Choice | None]]:
    """Return what ran in each patched layer of a stack for a sequence, and for one more token."""
    tokens = example.get("input_ids")
    if tokens is not None:
        example = {**example, "input_ids": tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length]}
    with torch.no_grad(), attention.recorded() as sequence:
        body(**example)
    if tokens is None or not body.is_causal_stack():
        return sequence, [None] * len(sequence)
    with torch.no_grad():
        cache = body(**example, use_cache=True).past_key_values
        with attention.recorded() as step:
            body(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
    return sequence, step
