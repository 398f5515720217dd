"""GPT-2: a learned table of positions, added to the token embeddings by the body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Block, GPT2Model

from hf_posenc.operands import Geometry, NativeTable
from hf_posenc.patches.architecture import Architecture, embedding_rms, register_architecture, weight_of
from hf_posenc.patches.context import Context
from hf_posenc.patches.seams import LayerCall, PosencAttention, PosencBody, PosencLayer
from hf_posenc.patches.table import PosencPositionTable, check_reach
from hf_posenc.patches.twins import Twins, models_in


class PosencGPT2Attention(PosencAttention, GPT2Attention):
    posenc_stock = GPT2Attention

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        context = self.take_context(kwargs)
        if context.positions is None:
            stock: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states,
                past_key_values=past_key_values,
                attention_mask=attention_mask,
                output_attentions=output_attentions,
                **kwargs,
            )
            return stock
        layer = LayerCall(
            context,
            hidden_states,
            attention_mask,
            causal=True,
            scale=self.scaling,
            dropout=self.attn_dropout.p if self.training else 0.0,
            need_weights=output_attentions,
            cache=past_key_values,
            index=self.layer_idx,
            upcast=self.reorder_and_upcast_attn and self.config._attn_implementation == "eager",
        )
        output, weights = self.attend_with_scheme(layer)
        return self.resid_dropout(self.c_proj(output)), weights

    def project_heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        q, k, v = (x.view(shape).transpose(1, 2) for x in self.c_attn(hidden).split(self.split_size, dim=2))
        return q, k, v


class PosencGPT2Block(PosencLayer, GPT2Block):
    posenc_stock = GPT2Block

    def feed_forward(self) -> nn.Module:
        module: nn.Module = self.mlp
        return module


class GPT2Body(PosencBody):
    """Mixin of the patched body."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(self.posenc_arguments, args, strict=False)) | kwargs
        ids = call.get("input_ids")
        if ids is None or ids.ndim <= 2:
            return super().forward(**call)
        # Several choices per example (the double heads model): positions and caches see one row per choice.
        leading = ids.shape[:-1]
        for name in ("input_ids", "position_ids", "token_type_ids", "attention_mask"):
            value = call.get(name)
            if value is not None and value.ndim == ids.ndim:
                call[name] = value.reshape(-1, value.shape[-1])
        coords = call.get("position_coords")
        if coords is not None and coords.ndim == ids.ndim + 1:
            call["position_coords"] = coords.reshape(-1, *coords.shape[-2:])
        output = super().forward(**call)
        hidden = output[0].view(*leading, -1, output[0].shape[-1])
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        check_reach(self.wpe, context.reach, self.wpe.num_embeddings)
        return super().hand_down(call, context)


twins = Twins("gpt2", globals(), GPT2Config, ("activation_function", "requires hf_posenc"))
twins |= {GPT2Attention: PosencGPT2Attention, GPT2Block: PosencGPT2Block, nn.Embedding: PosencPositionTable}
twins.add_body(GPT2Model, GPT2Body)
twins.add_heads(models_in(modeling_gpt2))


class GPT2(Architecture):
    """GPT-2 models with any head. The table enters once, before the first layer, so all layers have it or none."""

    name = "gpt2"
    attention = GPT2Attention
    native = "learned table of positions"
    native_per_layer = False
    native_fades = True
    twins = twins

    def stacks(self, model: nn.Module) -> dict[str, nn.Module]:
        return {"decoder": next(module for module in model.modules() if isinstance(module, GPT2Model))}

    def attentions(self, body: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(body, GPT2Model)
        return [block.attn for block in body.h]

    def layers(self, body: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(body, GPT2Model)
        return list(body.h)

    def projections(self, attention: nn.Module) -> Mapping[str, nn.Module | None]:
        return {name: getattr(attention, name, None) for name in ("c_attn", "c_proj")}

    def native_parameters(self, body: nn.Module) -> Sequence[nn.Parameter]:
        assert isinstance(body, GPT2Model)
        return [body.wpe.weight]

    def swapped(self, body: nn.Module) -> Sequence[nn.Module]:
        assert isinstance(body, GPT2Model)
        return [body.wpe]

    def geometry(self, body: nn.Module, layer: int) -> Geometry:
        assert isinstance(body, GPT2Model)
        config, attention = body.config, body.h[layer].attn
        return Geometry(
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_dim=attention.head_dim,
            hidden_size=config.hidden_size,
            scale=attention.scaling,
            layer=layer,
            causal=True,
            max_positions=config.max_position_embeddings,
            native=NativeTable("learned", weight_of(body.wpe)),
            embedding_rms=embedding_rms(weight_of(body.wte)),
        )


register_architecture(GPT2())
