"""A scheme and a model's own encoding at part of their strength, while one takes over from the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.errors import OptionError
from hf_posenc.operands import Block, Projection, Tokens
from hf_posenc.ops.softmax import grouped_matmul
from hf_posenc.patches import belonging, record, surgery
from hf_posenc.patches.architecture import of_model
from hf_posenc.patches.record import Group, Strengths
from hf_posenc.scheme import Scheme
from hf_posenc.structures import Bias


def set_strength(model: PreTrainedModel, *, native: float = 1.0, scheme: float = 1.0) -> None:
    """Set the strengths of a kept native encoding and of the schemes over it, in place.

    Strength scales the angles of a rotary encoding, and the values of a table or a bias; a scheme's effect at each seam
    is interpolated from none to full. Layers without a scheme keep the encoding at full strength, except for a table
    that enters before the first layer. The strengths are saved and loaded with the model.

    Args:
        model: A model patched with `native="keep"`.
        native: Strength of the model's own encoding, from 0 to 1.
        scheme: Strength of the schemes, from 0 to 1.

    Raises:
        NotPatchedError: The model is not patched.
        OptionError: A strength is out of range, or the model's own encoding was removed.
    """
    groups = _groups(model, "set_strength")
    for name, value in (("native", native), ("scheme", scheme)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise OptionError(f"set_strength: {name}={value!r}: expected a number from 0 to 1.")
    if any(group.native == "remove" for group in groups):
        raise OptionError(
            "set_strength: the model's own encoding was removed, so there is nothing to hand over from. Patch with "
            "native='keep'."
        )
    architecture = of_model(model)
    if native != 1 and not architecture.native_fades:
        raise OptionError(
            f"set_strength: the {architecture.native} of {architecture.name} cannot be at part of its strength, got "
            f"native={native!r}. Leave it at 1, or teach the architecture to (Architecture.native_fades)."
        )
    _write(model, groups, Strengths(float(native), float(scheme)))


def drop_native(model: PreTrainedModel) -> None:
    """Remove a kept native encoding, in place; the schemes stay, at full strength.

    After `set_strength(model, native=0)` this changes no output. The result is that of `patch(..., native="remove")`,
    except for the options and the training of the schemes.

    Args:
        model: A patched model.

    Raises:
        NotPatchedError: The model is not patched.
    """
    groups = [replace(group, native="remove") for group in _groups(model, "drop_native")]
    architecture = of_model(model)
    with surgery.all_or_nothing(model):
        for _, _, _, attention in surgery.patched_layers(architecture, model):
            attention.posenc_keeps_native = False
        surgery.settle_native(architecture, model)
        _write(model, groups, record.FULL)


def _groups(model: PreTrainedModel, caller: str) -> list[Group]:
    surgery.check_patched(caller, model)
    belonging.refuse_part(of_model(model), model)
    return record.from_config(model.config)


def _write(model: PreTrainedModel, groups: list[Group], strengths: Strengths) -> None:
    with surgery.all_or_nothing(model):
        surgery.set_strengths(of_model(model), model, strengths)
        belonging.rename(model)
        surgery.write_record(model, groups, strengths)


class Blended(Scheme):
    """A scheme whose effect at every seam is interpolated, from none (0) to full (1).

    It holds the scheme for one call; what a scheme hands to the cache or to the next layer is not blended.
    """

    def __init__(self, scheme: Scheme, strength: float) -> None:
        super().__init__(scheme.geometry)
        self.scheme, self.strength = scheme, strength
        self.reads_keys, self.history, self.window = scheme.reads_keys, scheme.history, scheme.window

    def overrides(self, seam: str) -> bool:
        return self.scheme.overrides(seam)

    def embed(self, inputs: Tensor, positions: Tensor, coords: Tensor | None = None) -> Tensor:
        return self._between(inputs, self.scheme.embed(inputs, positions, coords))

    def project(self, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Projection:
        there = self.scheme.project(tokens, q, k, v)
        return replace(there, q=self._between(q, there.q), k=self._between(k, there.k), v=self._between(v, there.v))

    def recall(self, k: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        there = self.scheme.recall(k, state)
        if there is k:
            return k
        # A scheme whose keys differ by query head has more of them.
        return self._between(k.repeat_interleave(there.shape[1] // k.shape[1], dim=1), there)

    def score(self, logits: Tensor, q: Tensor, k: Tensor, block: Block) -> Tensor:
        return self._between(logits, self.scheme.score(logits, q, k, block))

    def weigh(self, logits: Tensor, block: Block) -> Tensor:
        keys = logits.shape[-1]
        weights = self.scheme.weigh(logits, block)
        here = self._between(super().weigh(logits, block), weights[..., :keys])
        return torch.cat((here, self.strength * weights[..., keys:]), dim=-1) if weights.shape[-1] > keys else here

    def mix(self, weights: Tensor, v: Tensor, block: Block) -> Tensor:
        there, width = self.scheme.mix(weights, v, block), v.shape[-1]
        here = self._between(grouped_matmul(weights[..., : v.shape[2]], v), there[..., :width])
        return torch.cat((here, there[..., width:]), dim=-1) if there.shape[-1] > width else here

    def added(self) -> Bias | None:
        there = self.scheme.added()
        return None if there is None else there.scaled(self.strength)

    def carry(self, output: Tensor, tokens: Tokens) -> Tensor | None:
        return self.scheme.carry(output, tokens)

    def finish(self, output: Tensor, hidden: Tensor | None) -> Tensor:
        return self._between(output[..., : self.geometry.head_dim], self.scheme.finish(output, hidden))

    def feed(self, carried: Tensor, fed: Tensor) -> Tensor:
        return self.scheme.feed(carried, fed)

    def _between(self, nothing: Tensor, there: Tensor) -> Tensor:
        return there if there is nothing else torch.lerp(nothing.to(there), there, self.strength)
