"""The same attention in other packages: transformers' decoders, and x-transformers where it is installed.

Each is called as its package calls it, with what comes before and behind attention left out: projections of tokens,
and dropout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

# Our name of the scheme, the package, its attention, and what it trains.
Peer = tuple[str, str, Callable[[], Tensor], list[nn.Parameter]]


def peers(layer: Any) -> Iterator[Peer]:
    """Yield all that are installed, for a `Layer` of speed.py."""
    (_, heads, length, head_dim), mask, scale = layer.q.shape, layer.mask(), layer.q.shape[-1] ** -0.5

    def bloom() -> Tensor:
        alibi = build_alibi_tensor(torch.ones(1, length), heads, layer.q.dtype)
        logits = alibi.baddbmm(layer.q[0], layer.k[0].mT, beta=1.0, alpha=scale) + mask
        weights = logits.softmax(-1, dtype=torch.float32).to(layer.q.dtype)
        return torch.bmm(weights, layer.v[0])[None]

    yield "alibi", "transformers' Bloom", bloom, []

    t5 = T5Attention(T5Config(d_model=heads * head_dim, d_kv=head_dim, num_heads=heads, is_decoder=True), True, 0)
    yield (
        "t5",
        "transformers' T5",
        lambda: layer.plain(t5.compute_bias(length, length).to(mask) + mask, scale=1.0),
        list(t5.relative_attention_bias.parameters()),
    )
    if importlib.util.find_spec("x_transformers"):
        yield from _x_transformers(layer)


def _x_transformers(layer: Any) -> Iterator[Peer]:
    from x_transformers import x_transformers as theirs
    from x_transformers.attend import Attend

    _, heads, length, head_dim = layer.q.shape
    plain, places = Attend(causal=True, flash=True), torch.arange(length)

    def peer(scheme: str, module: nn.Module, *given: Any) -> Peer:
        def run() -> Tensor:
            output: Tensor = plain(layer.q, layer.k, layer.v, attn_bias=module(*given))[0]
            return output

        return scheme, "x-transformers", run, list(module.parameters())

    rotary = theirs.RotaryEmbedding(head_dim)

    def rotated() -> Tensor:
        angles, _ = rotary(places)
        q, k = (theirs.apply_rotary_pos_emb(x, angles) for x in (layer.q, layer.k))
        output: Tensor = plain(q, k, layer.v)[0]
        return output

    yield "rope", "x-transformers", rotated, []
    yield peer("alibi", theirs.AlibiPositionalBias(heads), length, length)
    yield peer("t5", theirs.RelativePositionBias(1.0, causal=True, heads=heads), length, length)
    yield peer("fox", theirs.DataDependentAlibi(heads * head_dim, heads), layer.hidden)
    counting = Attend(causal=True, heads=heads, cope=theirs.CoPE(head_dim, heads, 64))
    yield "cope", "x-transformers", lambda: counting(layer.q, layer.k, layer.v)[0], list(counting.parameters())
