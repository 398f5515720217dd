"""The same attention in other packages: transformers' own models, and x-transformers where it is installed.

Each is called as its package calls it, with what comes before and behind attention left out: projections of tokens,
and dropout.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DebertaV2Config, T5Config, Wav2Vec2BertConfig, Wav2Vec2ConformerConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deberta_v2 import modeling_deberta_v2 as deberta
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as wav2vec2_bert
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as conformer


@dataclass(frozen=True)
class Operands:
    """Of causal attention: queries, keys and values `[B, H, S, D]`, and what they are made of, `[B, S, H * D]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    hidden: Tensor

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]

    @property
    def length(self) -> int:
        return self.q.shape[2]

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def mask(self) -> Tensor:
        """Return the causal mask to be added to logits, `[1, 1, S, S]`."""
        return torch.full((self.length, self.length), torch.finfo(self.q.dtype).min).triu(1)[None, None].to(self.q)


@dataclass(frozen=True)
class Peer:
    """What another package does for a scheme.

    Attributes:
        scheme: Our name of it.
        package: Name of the package.
        run: Returns the output.
        parameters: Trained parameters.
        options: Options of our scheme that give the same result.
    """

    scheme: str
    package: str
    run: Callable[[], Tensor]
    parameters: list[nn.Parameter]
    options: dict[str, object]


def peers(of: Operands) -> Iterator[Peer]:
    """Yield all that are installed."""
    yield from _transformers(of)
    if importlib.util.find_spec("x_transformers"):
        yield from _x_transformers(of)


def _transformers(of: Operands) -> Iterator[Peer]:
    width, heads, mask = of.heads * of.head_dim, of.heads, of.mask()

    def bloom() -> Tensor:
        alibi = build_alibi_tensor(torch.ones(len(of.q), of.length), heads, of.q.dtype)
        q, k, v = (x.flatten(0, 1) for x in (of.q, of.k, of.v))
        logits = alibi.baddbmm(q, k.mT, beta=1.0, alpha=of.scale).view(len(of.q), heads, of.length, -1) + mask
        weights = F.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(weights.flatten(0, 1), v).view_as(of.q)

    yield Peer("alibi", "transformers' Bloom", bloom, [], {})

    t5 = T5Attention(T5Config(d_model=width, d_kv=of.head_dim, num_heads=heads, is_decoder=True), True, 0)
    yield Peer(
        "t5",
        "transformers' T5",
        lambda: F.scaled_dot_product_attention(
            of.q, of.k, of.v, attn_mask=t5.compute_bias(of.length, of.length) + mask, scale=1.0
        ),
        list(t5.relative_attention_bias.parameters()),
        {},
    )

    bert = wav2vec2_bert.Wav2Vec2BertSelfAttention(
        Wav2Vec2BertConfig(
            hidden_size=width,
            num_attention_heads=heads,
            position_embeddings_type="relative_key",
            left_max_position_embeddings=16,
            right_max_position_embeddings=16,
        )
    )
    yield Peer(
        "shaw",
        "transformers' Wav2Vec2-BERT (keys only)",
        lambda: _with_bias(bert, of, wav2vec2_bert._apply_relative_key_position_encoding(bert, of.q, of.k), mask),
        list(bert.distance_embedding.parameters()),
        {"values": False},
    )

    config = Wav2Vec2ConformerConfig(hidden_size=width, num_attention_heads=heads, position_embeddings_type="relative")
    speech, places = (
        conformer.Wav2Vec2ConformerSelfAttention(config),
        conformer.Wav2Vec2ConformerRelPositionalEmbedding(config),
    )
    yield Peer(
        "transformer_xl",
        "transformers' Conformer",
        lambda: _with_bias(
            speech,
            of,
            conformer._apply_relative_position_encoding(speech, of.q, of.k, places(of.hidden)),
            mask,
        ),
        [speech.pos_bias_u, speech.pos_bias_v, speech.linear_pos.weight],
        {},
    )

    both = deberta.DisentangledSelfAttention(
        DebertaV2Config(
            hidden_size=width,
            num_attention_heads=heads,
            pos_att_type=["c2p", "p2c"],
            relative_attention=True,
            max_relative_positions=512,
            hidden_dropout_prob=0.0,
        )
    )
    table = nn.Parameter(torch.randn(1024, width))

    def disentangled() -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (of.q, of.k, of.v))
        logits = torch.bmm(q, k.mT / math.sqrt(3 * of.head_dim))
        logits = logits + both.disentangled_attention_bias(q, k, None, table, 3)
        logits = logits.view(len(of.q), heads, of.length, -1).masked_fill(mask != 0, torch.finfo(q.dtype).min)
        return torch.bmm(F.softmax(logits, dim=-1).flatten(0, 1), v).view_as(of.q)

    learned = [table, *both.pos_key_proj.parameters(), *both.pos_query_proj.parameters()]
    yield Peer("disentangled", "transformers' DeBERTa-v2", disentangled, learned, {})


def _with_bias(module: nn.Module, of: Operands, made: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    q, bias = made
    output: Tensor = sdpa_attention_forward(module, q, of.k, of.v, mask, scaling=of.scale, position_bias=bias)[0]
    return output.transpose(1, 2)


def _x_transformers(of: Operands) -> Iterator[Peer]:
    from x_transformers import x_transformers as theirs
    from x_transformers.attend import Attend

    width, heads = of.heads * of.head_dim, of.heads
    plain, places = Attend(causal=True, flash=True), torch.arange(of.length)

    def peer(scheme: str, module: nn.Module, bias: Callable[[], Tensor]) -> Peer:
        return Peer(
            scheme,
            "x-transformers",
            lambda: plain(of.q, of.k, of.v, attn_bias=bias())[0],
            list(module.parameters()),
            {},
        )

    rotary = theirs.RotaryEmbedding(of.head_dim)

    def rotated() -> Tensor:
        angles, _ = rotary(places)
        q, k = (theirs.apply_rotary_pos_emb(x, angles) for x in (of.q, of.k))
        output: Tensor = plain(q, k, of.v)[0]
        return output

    yield Peer("rope", "x-transformers", rotated, [], {"layout": "interleaved"})
    slopes = theirs.AlibiPositionalBias(heads)
    yield peer("alibi", slopes, lambda: slopes(of.length, of.length))
    table = theirs.RelativePositionBias(1.0, causal=True, heads=heads)
    yield peer("t5", table, lambda: table(of.length, of.length))
    gates = theirs.DataDependentAlibi(width, heads)
    yield peer("fox", gates, lambda: gates(of.hidden))
    counting = Attend(causal=True, heads=heads, cope=theirs.CoPE(of.head_dim, heads, 64))
    yield Peer("cope", "x-transformers", lambda: counting(of.q, of.k, of.v)[0], list(counting.parameters()), {})
