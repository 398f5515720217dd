"""Logits of a scheme with and without positions, on queries and keys of any origin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_posenc.attention import reach
from hf_posenc.operands import Block, Positions, Tokens
from hf_posenc.ops.linear import grouped_matmul
from hf_posenc.recipes.plots.subject import Layer, Part
from hf_posenc.scheme import Scheme


@dataclass(frozen=True, eq=False)
class Asked:
    """One layer's logits with and without positions; all float64.

    Attributes:
        content: Scaled products of queries and keys as `score` gets them (rotary schemes have rotated them), `[B, H, Q,
            K]`.
        plain: The same of queries and keys as they were projected.
        logits: Result of `score`, unmasked.
        q: Queries as `score` gets them, `[B, H, Q, D]`.
        k: Keys likewise, `[B, G | H, K, D]`.
        block: Block that `score` gets.
    """

    content: Tensor
    plain: Tensor
    logits: Tensor
    q: Tensor
    k: Tensor
    block: Block


@torch.no_grad()
def asked(part: Part, layer: Layer) -> Asked:
    """Ask a layer about the text or image that the model reads."""
    seen = part.seen(layer)
    return _ask(layer.scheme, seen.tokens, seen.q, seen.k, seen.v)


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
    answer = _ask(scheme, replace(tokens, positions=positions, hidden=None), queries, keys, keys)
    return (answer.logits - answer.plain)[0].cpu()


@torch.no_grad()
def _ask(scheme: Scheme, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor) -> Asked:
    """Run `project`, `recall` and `score` of a scheme, without the model's own encoding.

    Args:
        scheme: The scheme.
        tokens: The keys' tokens; the queries' are the last of them.
        q: Queries `[B, H, Q, D]`.
        k: Keys `[B, G, K, D]`.
        v: Values `[B, G, K, D]`.
    """
    scale = scheme.geometry.scale
    assert scale is not None
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
    content = scale * grouped_matmul(projected.q, keys.mT)
    logits = scheme.score(content, projected.q, keys, block)
    return Asked(content, scale * grouped_matmul(q, k.mT), logits, projected.q, keys, block)
