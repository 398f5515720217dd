"""T5: buckets of the distance, a table owned by the first layer of each stack and used by all of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import (
    T5Attention,
    T5Block,
    T5EncoderModel,
    T5ForConditionalGeneration,
    T5ForQuestionAnswering,
    T5ForSequenceClassification,
    T5ForTokenClassification,
    T5Model,
    T5Stack,
)

from hf_posenc.operands import Block, Geometry, NativeTable
from hf_posenc.patches.architecture import Architecture, embedding_rms, register_architecture, weight_of
from hf_posenc.patches.checkpoint import PosencConfig
from hf_posenc.patches.context import Context, same_sequence, sequences
from hf_posenc.patches.generation import PosencGenerator
from hf_posenc.patches.models import PosencModel
from hf_posenc.patches.seams import CONTEXT, LayerCall, PosencAttention, PosencBody, PosencLayer, tokens_in
from hf_posenc.patches.surgery import is_patched
from hf_posenc.schemes.families.additive import Buckets


class PosencT5Config(PosencConfig, T5Config):
    posenc_stock = T5Config
    model_type = "hf_posenc_t5"
    posenc: dict[str, Any] | None = None
    posenc_lock = ("feed_forward_proj", "requires-hf_posenc-package")


class PosencT5Attention(PosencAttention, T5Attention):
    posenc_stock = T5Attention

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        context = self.take_context(kwargs)
        if context.positions is None:
            stock: tuple[Tensor, Tensor | None, Tensor | None] = super().forward(
                hidden_states, mask, key_value_states, position_bias, past_key_values=past_key_values, **kwargs
            )
            return stock
        length, seen = hidden_states.shape[1], tokens_in(past_key_values)
        layer = LayerCall(
            context,
            hidden_states,
            mask,
            causal=self.is_decoder,
            scale=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            need_weights=bool(kwargs.get("output_attentions")),
            cache=past_key_values,
            index=self.layer_idx,
        )
        output, weights = self.attend_with_scheme(layer)
        if context.passes_native_bias and self.has_relative_attention_bias:
            keys = length
            if past_key_values is not None:
                cache = getattr(past_key_values, "self_attention_cache", past_key_values)
                keys = cache.layers[self.layer_idx].keys.shape[-2]
            position_bias = self.compute_bias(length, keys, device=hidden_states.device, past_seen_tokens=seen)
        return self.o(output), position_bias, weights

    def project_heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (*hidden.shape[:-1], -1, self.key_value_proj_dim)
        q, k, v = (project(hidden).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
        return q, k, v


class PosencT5Block(PosencLayer, T5Block):
    posenc_stock = T5Block

    def feed_forward(self) -> nn.Module:
        module: nn.Module = self.layer[-1].DenseReluDense
        return module


class PosencT5Stack(PosencBody, PosencModel, T5Stack):
    posenc_stock = T5Stack
    config_class = PosencT5Config

    def given_positions(self, call: dict[str, Any]) -> Tensor | None:
        return call.get("decoder_position_ids" if self.is_decoder else "position_ids")

    def given_coords(self, call: dict[str, Any]) -> Tensor | None:
        # Both stacks get the keywords of the model's forward, as they do for positions.
        encoder, decoder = call.pop("position_coords", None), call.pop("decoder_position_coords", None)
        coords: Tensor | None = decoder if self.is_decoder else encoder
        return coords

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        # Both stacks get the keywords of the model's forward: position_ids are those of the encoder's tokens.
        encoder, decoder = call.pop("position_ids", None), call.pop("decoder_position_ids", None)
        if (
            self.is_decoder
            and encoder is not None
            and decoder is not None
            and call.get("encoder_attention_mask") is None
        ):
            own, others = context.packed, sequences(encoder)
            if own is not None and others is not None:
                call["encoder_attention_mask"] = same_sequence(own, others, causal=False, float_dtype=self.mask_dtype())
        owner = self.block[0].layer[0].SelfAttention
        table = owner.relative_attention_bias
        buckets = Buckets(
            num_buckets=table.num_embeddings,
            max_distance=self.config.relative_attention_max_distance,
            causal=self.is_decoder,
        )
        native_score = functools.partial(_native_score, table, buckets, self.strengths().native)
        # Unpatched layers wait for the matrix that the first layer hands sideways.
        passes = is_patched(owner) and any(not is_patched(block.layer[0].SelfAttention) for block in self.block)
        return call | {
            CONTEXT: replace(
                context, native_score=native_score, native_parameters=(table.weight,), passes_native_bias=passes
            )
        }

    def is_causal_stack(self) -> bool:
        return bool(self.is_decoder)


def _native_score(table: nn.Embedding, buckets: Buckets, strength: float, logits: Tensor, block: Block) -> Tensor:
    """Add T5's own bias to a block of logits, at part of its strength."""
    bias: Tensor = table(buckets(block.distance()).to(table.weight.device))  # [B|1, q, K, H]
    return logits + strength * bias.permute(0, 3, 1, 2).to(logits)


class PosencT5Model(PosencModel, T5Model):
    posenc_stock = T5Model
    config_class = PosencT5Config


class PosencT5ForConditionalGeneration(PosencGenerator, T5ForConditionalGeneration):
    posenc_stock = T5ForConditionalGeneration
    config_class = PosencT5Config


class PosencT5EncoderModel(PosencModel, T5EncoderModel):
    posenc_stock = T5EncoderModel
    config_class = PosencT5Config


class PosencT5ForSequenceClassification(PosencModel, T5ForSequenceClassification):
    posenc_stock = T5ForSequenceClassification
    config_class = PosencT5Config


class PosencT5ForTokenClassification(PosencModel, T5ForTokenClassification):
    posenc_stock = T5ForTokenClassification
    config_class = PosencT5Config


class PosencT5ForQuestionAnswering(PosencModel, T5ForQuestionAnswering):
    posenc_stock = T5ForQuestionAnswering
    config_class = PosencT5Config


class T5(Architecture):
    """T5 1.0 and 1.1 with any head, the encoder alone included. Cross-attention has no positions and stays as it is."""

    name = "t5"
    attention = T5Attention
    parts = (T5Stack,)
    other_stacks = ("decoder",)
    native = "learned bias of distance buckets"
    native_fades = True
    twins = {
        T5Config: PosencT5Config,
        T5Attention: PosencT5Attention,
        T5Block: PosencT5Block,
        T5Stack: PosencT5Stack,
        T5Model: PosencT5Model,
        T5ForConditionalGeneration: PosencT5ForConditionalGeneration,
        T5EncoderModel: PosencT5EncoderModel,
        T5ForSequenceClassification: PosencT5ForSequenceClassification,
        T5ForTokenClassification: PosencT5ForTokenClassification,
        T5ForQuestionAnswering: PosencT5ForQuestionAnswering,
    }

    def stacks(self, model: nn.Module) -> dict[str, nn.Module]:
        bodies = [module for module in model.modules() if isinstance(module, T5Stack)]
        return {"decoder" if body.is_decoder else "encoder": body for body in bodies}

    def attentions(self, body: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(body, T5Stack)
        return [block.layer[0].SelfAttention for block in body.block]

    def layers(self, body: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(body, T5Stack)
        return list(body.block)

    def projections(self, attention: nn.Module) -> Mapping[str, nn.Module | None]:
        return {name: getattr(attention, name, None) for name in ("q", "k", "v", "o")}

    def native_parameters(self, body: nn.Module) -> Sequence[nn.Parameter]:
        assert isinstance(body, T5Stack)
        return [body.block[0].layer[0].SelfAttention.relative_attention_bias.weight]

    def geometry(self, body: nn.Module, layer: int) -> Geometry:
        assert isinstance(body, T5Stack)
        config, attention = body.config, body.block[layer].layer[0].SelfAttention
        table = weight_of(body.block[0].layer[0].SelfAttention.relative_attention_bias)
        return Geometry(
            heads=config.num_heads,
            kv_heads=config.num_heads,
            head_dim=config.d_kv,
            hidden_size=config.d_model,
            scale=attention.scaling,
            layer=layer,
            causal=body.is_decoder,
            # T5 has no longest input; its checkpoints were trained on this many tokens.
            max_positions=getattr(config, "n_positions", 512),
            native=NativeTable("t5", table, config.relative_attention_max_distance),
            embedding_rms=embedding_rms(weight_of(body.embed_tokens)),
        )


register_architecture(T5())
