"""Similarity of two models' attention on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import ShapeError
from hf_posenc.recipes.evaluation.grid import Grid, Quantity
from hf_posenc.recipes.evaluation.measure import Measure, Workers
from hf_posenc.recipes.evaluation.perplexity import Corruption, check_corruption, spread_windows
from hf_posenc.recipes.evaluation.predictions import eager


class AttentionSimilarity(Measure):
    """Distance of a model's attention patterns from those of another, layer by layer.

    The comparison follows Kazemnejad et al. 2023 (arXiv 2305.19466). The distance of two heads is the Jensen-Shannon
    divergence of their attention weights, averaged over queries; the distance of two layers is the smallest one between
    any head of one and any head of the other. 0 bits means equal weights, 1 bit means disjoint keys. Where weights sum
    to less than one, the rest counts as one more key. For an encoder-decoder, the self-attention of both stacks is
    compared.

    Args:
        reference: The model that all others are compared with.
        ids: Token ids of a text, int64 `[tokens]`.
        length: Number of tokens read; the memory grows with its square.
        windows: Number of windows; one sample each.
        corrupt: Function that corrupts token ids `[B, n]` for an encoder; `None` for causal models.
        reference_name: Name of the reference in the report.

    Raises:
        ShapeError: The text is too short.
    """

    name = "attention"
    title = "Distance of attention patterns by layer"
    takes_masked = True

    def __init__(
        self,
        reference: Any,
        ids: Tensor,
        length: int,
        *,
        windows: int = 8,
        corrupt: Corruption | None = None,
        reference_name: str = "the first model",
    ) -> None:
        self._reference, self._corrupt = reference, corrupt
        self._rows = spread_windows(ids, length, windows, targets=1)
        self.tokens = 2 * self._rows.numel()
        self.note = (
            f"Jensen-Shannon divergence from {reference_name} of the most similar pair of heads, in bits (0 is equal, "
            f"1 is disjoint), on {windows} windows of {length} tokens."
        )

    def check(self, model: Any) -> None:
        check_corruption(type(self).__name__, model, self._corrupt)
        layers = _layers(model)
        if layers != _layers(self._reference):
            raise ShapeError(
                f"Got models of {len(layers)} and {len(_layers(self._reference))} layers; attention is compared layer "
                "by layer. Leave out the measure `attention`, or models of another shape."
            )

    def _measure(self, model: Any, workers: Workers) -> tuple[Grid, ...]:
        layers = _layers(model)

        def distances(rows: Tensor) -> Tensor:
            ours, theirs = (_patterns(one, rows, self._corrupt) for one in (model, self._reference))
            return torch.stack([_distance(*pair) for pair in zip(ours, theirs, strict=True)], dim=1)

        found = workers.map(distances, [(row,) for row in self._rows], len(layers))
        return (Grid(Quantity("divergence", "mean share", "bits"), {"layer": layers}, found.T),)


def _layers(model: Any) -> tuple[int, ...] | tuple[str, ...]:
    """Return the names of the layers with self-attention, in the order of `_patterns`."""
    config = model.config
    if not config.is_encoder_decoder:
        return tuple(range(1, config.num_hidden_layers + 1))
    stacks = {"encoder": config.num_hidden_layers, "decoder": config.num_decoder_layers}
    return tuple(f"{stack} {layer + 1}" for stack, count in stacks.items() for layer in range(count))


def _patterns(model: Any, rows: Tensor, corrupt: Corruption | None) -> Sequence[Tensor]:
    """Return the attention weights of all layers, each `[B, heads, Q, K]`."""
    rows = rows.to(model.device)
    with eager(model):
        read = rows if corrupt is None else corrupt(rows)
        if not model.config.is_encoder_decoder:
            found: Sequence[Tensor] = model(input_ids=read, output_attentions=True, use_cache=False).attentions
            return found
        written = model.prepare_decoder_input_ids_from_labels(rows)
        out = model(input_ids=read, decoder_input_ids=written, output_attentions=True, use_cache=False)
        return (*out.encoder_attentions, *out.decoder_attentions)


def _distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the smallest divergence between any head of one layer and any of another, in bits, float64 `[B]`."""
    ours, theirs = _whole(ours), _whole(theirs)
    own, other = _entropy(ours), _entropy(theirs)  # [B, heads, Q]
    divergences = [
        _entropy((ours + theirs[:, head, None]) / 2) - (own + other[:, head, None]) / 2
        for head in range(theirs.shape[1])
    ]
    # [B, heads, heads]: averaged over queries, then the nearest pair. Rounding can make it negative.
    return torch.stack(divergences, dim=1).mean(dim=3).flatten(1).min(dim=1).values.clamp(min=0).double().cpu()


def _whole(weights: Tensor) -> Tensor:
    """Return weights with one more column that makes rows sum to one, float32 `[B, heads, Q, K + 1]`."""
    weights = weights.float()
    left = (1 - weights.sum(dim=-1, keepdim=True)).clamp(min=0)
    # A tiny rest is a rounding error.
    return torch.cat([weights, left * (left > 1e-4)], dim=-1)


def _entropy(weights: Tensor) -> Tensor:
    nats: Tensor = -torch.special.xlogy(weights, weights).sum(dim=-1)
    return nats / math.log(2)
