"""A scheme at part of its strength, as in a handover from the native encoding."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hf_posenc.forms import Bias
from hf_posenc.operands import Block, Projection, Tokens
from hf_posenc.ops import grouped_matmul
from hf_posenc.scheme import Scheme


class Blended(Scheme):
    """A scheme whose effect at every seam is interpolated, from none (0) to full (1).

    It holds the scheme for one call; what a scheme hands to the cache or to the next layer is not blended.
    """

    def __init__(self, scheme: Scheme, strength: float) -> None:
        super().__init__(scheme.geometry)
        self.scheme, self.strength = scheme, strength
        self.name, self.directions = scheme.name, scheme.directions
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
