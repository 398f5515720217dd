"""Llama: rotary encoding, computed once by the body and applied by every attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

from hf_posenc.operands import Geometry
from hf_posenc.patches.architecture import Architecture, embedding_rms, register_architecture, weight_of
from hf_posenc.patches.checkpoint import PosencConfig
from hf_posenc.patches.context import Context
from hf_posenc.patches.generation import PosencGenerator
from hf_posenc.patches.models import PosencModel
from hf_posenc.patches.rotary import frequency_limit, long_frequencies, native_frequencies
from hf_posenc.patches.seams import LayerCall, PosencAttention, PosencBody, PosencLayer


class PosencLlamaConfig(PosencConfig, LlamaConfig):
    posenc_stock = LlamaConfig
    model_type = "hf_posenc_llama"
    posenc: dict[str, Any] | None = None
    posenc_lock = ("rope_parameters", {"rope_type": "hf_posenc", "rope_theta": 10000.0})


class PosencLlamaAttention(PosencAttention, LlamaAttention):
    posenc_stock = LlamaAttention

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        context = self.take_context(kwargs)
        if context.positions is None:
            stock: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
            )
            return stock

        def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            cos_sin = context.native_rotation or position_embeddings
            assert cos_sin is not None
            turned: tuple[Tensor, Tensor] = modeling_llama.apply_rotary_pos_emb(q, k, *cos_sin)
            return turned

        layer = LayerCall(
            context,
            hidden_states,
            attention_mask,
            causal=True,
            scale=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            need_weights=bool(kwargs.get("output_attentions")),
            cache=past_key_values,
            index=self.layer_idx,
            rotate=rotate,
        )
        output, weights = self.attend_with_scheme(layer)
        return self.o_proj(output), weights

    def project_heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden).view(shape).transpose(1, 2)
        k = self.k_proj(hidden).view(shape).transpose(1, 2)
        v = self.v_proj(hidden).view(shape).transpose(1, 2)
        return q, k, v


class PosencLlamaDecoderLayer(PosencLayer, LlamaDecoderLayer):
    posenc_stock = LlamaDecoderLayer

    def feed_forward(self) -> nn.Module:
        module: nn.Module = self.mlp
        return module


class PosencLlamaModel(PosencBody, PosencModel, LlamaModel):
    posenc_stock = LlamaModel
    config_class = PosencLlamaConfig

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        native = self.strengths().native
        if native != 1:
            # Passed separately, since layers without a scheme need the rotation at full strength.
            assert context.positions is not None
            cos, sin = self.rotary_emb(self.inputs_of(call), context.positions * native)
            # Some types of rotation (YaRN) also make queries and keys longer.
            whole = self.rotary_emb.attention_scaling
            length = (1 + native * (whole - 1)) / whole
            context = replace(context, native_rotation=(cos * length, sin * length))
        return super().hand_down(call, context)


class PosencLlamaForCausalLM(PosencGenerator, LlamaForCausalLM):
    posenc_stock = LlamaForCausalLM
    config_class = PosencLlamaConfig


class PosencLlamaForSequenceClassification(PosencModel, LlamaForSequenceClassification):
    posenc_stock = LlamaForSequenceClassification
    config_class = PosencLlamaConfig


class PosencLlamaForTokenClassification(PosencModel, LlamaForTokenClassification):
    posenc_stock = LlamaForTokenClassification
    config_class = PosencLlamaConfig


class PosencLlamaForQuestionAnswering(PosencModel, LlamaForQuestionAnswering):
    posenc_stock = LlamaForQuestionAnswering
    config_class = PosencLlamaConfig


class Llama(Architecture):
    """Llama models with any head; grouped queries and attention biases included."""

    name = "llama"
    attention = LlamaAttention
    native = "rotary encoding (RoPE)"
    native_fades = True
    twins = {
        LlamaConfig: PosencLlamaConfig,
        LlamaAttention: PosencLlamaAttention,
        LlamaDecoderLayer: PosencLlamaDecoderLayer,
        LlamaModel: PosencLlamaModel,
        LlamaForCausalLM: PosencLlamaForCausalLM,
        LlamaForSequenceClassification: PosencLlamaForSequenceClassification,
        LlamaForTokenClassification: PosencLlamaForTokenClassification,
        LlamaForQuestionAnswering: PosencLlamaForQuestionAnswering,
    }

    def stacks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"decoder": next(module for module in model.modules() if isinstance(module, LlamaModel))}

    def attentions(self, body: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(body, LlamaModel)
        return [layer.self_attn for layer in body.layers]

    def layers(self, body: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(body, LlamaModel)
        return list(body.layers)

    def projections(self, attention: nn.Module) -> Mapping[str, nn.Module | None]:
        return {name: getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}

    def geometry(self, body: nn.Module, layer: int) -> Geometry:
        assert isinstance(body, LlamaModel)
        config = body.config
        inv_freq, scaling = native_frequencies(config, type(body.rotary_emb))
        return Geometry(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=body.layers[layer].self_attn.head_dim,
            hidden_size=config.hidden_size,
            scale=body.layers[layer].self_attn.scaling,
            layer=layer,
            causal=True,
            inv_freq=inv_freq,
            max_positions=config.max_position_embeddings,
            rotary_scaling=scaling,
            rotary_limit=frequency_limit(config),
            inv_freq_long=long_frequencies(config),
            embedding_rms=embedding_rms(weight_of(body.embed_tokens)),
        )


register_architecture(Llama())
