"""Encoders and decoders with learned biases for buckets of the distance, read from the code of transformers.

T5 and mT5 have a table in the first layer of each stack, which all its layers use; UMT5 has one in each layer.
Cross-attention has no positions and stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from hf_posenc.errors import ArchitectureError
from hf_posenc.operands import Block, Geometry, NativeTable
from hf_posenc.patches.architecture import refuse_changed, weight_of
from hf_posenc.patches.attention import CONTEXT, LayerCall, PosencAttention
from hf_posenc.patches.body import COORDS, PosencBody, tokens_in
from hf_posenc.patches.cache import cache_of, self_attention
from hf_posenc.patches.context import Context, Native, read, refuse_samples, resolve_positions, same_sequence, sequences
from hf_posenc.patches.family import Code, Family, built_by, names_of
from hf_posenc.patches.surgery import is_patched
from hf_posenc.schemes.families.additive import Buckets


class BucketAttention(PosencAttention):
    """Mixin of patched attentions."""

    def attend(self, context: Context, hidden: Tensor, call: dict[str, Any]) -> tuple[Tensor | None, ...]:
        cache, length = cache_of(call), hidden.shape[1]
        seen = tokens_in(cache)
        if self.has_relative_attention_bias:
            context = with_native_score(context, self)
        layer = LayerCall(
            context,
            hidden,
            call.get("mask", call.get("attention_mask")),
            causal=self.is_decoder,
            scale=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            cache=cache,
            index=self.layer_idx,
        )
        output, weights = self.attend_with_scheme(layer)
        output = output.flatten(2)
        if "position_bias" not in self.posenc_arguments:
            return self.o(output), weights
        bias = call.get("position_bias")
        if context.native.passes_bias and self.has_relative_attention_bias:
            keys = length
            if cache is not None:
                keys = self_attention(cache).layers[self.layer_idx].keys.shape[-2]
            bias = self.compute_bias(length, keys, device=hidden.device, past_seen_tokens=seen)
        return self.o(output), bias, weights

    def project_heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (*hidden.shape[:-1], -1, self.key_value_proj_dim)
        q, k, v = (project(hidden).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
        return q, k, v


class BucketBody(PosencBody):
    """Mixin of patched stacks. Both stacks get the keywords of the model's forward; some belong to one of them."""

    def given_positions(self, call: dict[str, Any]) -> Tensor | None:
        return call.get("decoder_position_ids" if self.is_decoder else "position_ids")

    def prepare(self, call: dict[str, Any]) -> dict[str, Any]:
        if self.config.is_encoder_decoder:
            refuse_samples(call, "expected position_ids and decoder_position_ids, or masks of numbers, for two stacks.")
        if self.is_decoder:
            call.pop(COORDS, None)
        return super().prepare(call)

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        encoder, mask = call.pop("position_ids", None), call.get("encoder_attention_mask")
        call.pop("decoder_position_ids", None)
        assert context.inputs is not None
        packed = context.inputs.packed
        if self.is_decoder and packed is not None and (mask is None or mask.ndim == 2):
            others = numbers_of(encoder, mask)
            if others is not None:
                call["encoder_attention_mask"] = same_sequence(
                    packed, others, causal=False, float_dtype=self.mask_dtype()
                )
        first, *rest = [block.layer[0].SelfAttention for block in self.block]
        # Unpatched layers wait for the matrix that the first layer hands sideways.
        passes = is_patched(first) and any(not is_patched(attention) for attention in rest)
        context = replace(context, native=Native(self.posenc_strengths.native, passes_bias=passes))
        return call | {CONTEXT: with_native_score(context, first)}


def numbers_of(positions: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Return the numbers of the samples that are packed in the encoder, as `sequences` does."""
    given = mask if positions is None else positions
    if given is None:
        return None
    arguments = {"attention_mask": mask}
    request = read(arguments, given if mask is None else mask, 0, positions)
    return sequences(resolve_positions(request), request.real, request.samples) if request.placed else None


def with_native_score(context: Context, owner: Any) -> Context:
    """Return a context whose layers add the biases of the table that an attention owns."""
    table = owner.relative_attention_bias
    buckets = Buckets(
        num_buckets=table.num_embeddings, max_distance=owner.relative_attention_max_distance, causal=owner.is_decoder
    )
    score = functools.partial(_native_score, table, buckets, context.native.strength)
    return replace(context, native=replace(context.native, score=score, parameters=(table.weight,)))


def _native_score(table: nn.Embedding, buckets: Buckets, strength: float, logits: Tensor, block: Block) -> Tensor:
    """Add the model's own bias to a block of logits, at part of its strength."""
    bias: Tensor = table(buckets(block.distance()).to(table.weight.device))  # [B|1, q, K, H]
    return logits + strength * bias.permute(0, 3, 1, 2).to(logits)


class BucketFamily(Family):
    """Models with any head, the encoder alone included."""

    other_stacks = ("decoder",)
    native = "learned bias of distance buckets"
    native_fades = True
    attending = BucketAttention
    acting = BucketBody

    @classmethod
    def fits(cls, code: Code) -> bool:
        return code.body.__name__.endswith("Stack")

    @classmethod
    def read(cls, code: Code) -> Code:
        """Return the classes of a family with the attention that makes the biases; others are around it."""
        (_, layer), *_ = code.stacks
        inside = [kind for kind in built_by(layer) if "relative_attention_bias" in names_of(kind)]
        if len(inside) != 1:
            found = ", ".join(kind.__name__ for kind in inside) or "none"
            raise ArchitectureError(
                f"{layer.__name__} has no one class of attention with a relative_attention_bias (found: {found}), "
                "so it is no family that can be read from its code. Write an architecture by hand, see "
                "docs/own_architecture.md."
            )
        return replace(code, attention=inside[0])

    @property
    def parts(self) -> tuple[type, ...]:
        return (self.body,)

    @classmethod
    def lock(cls, config: type, rotary: type | None) -> tuple[str, Any]:
        field, value = "feed_forward_proj", "requires-hf_posenc-package"
        try:
            config(**{field: value})
        except Exception:  # of any kind: the code is not ours
            return field, value
        # Some configs have the field and do not check it.
        return super().lock(config, rotary)

    def owners(self, body: nn.Module) -> list[Any]:
        return [attention for attention in self.attentions(body) if cast(Any, attention).has_relative_attention_bias]

    def attributes(self, body: nn.Module, layer: int) -> Mapping[str, Any]:
        return {}

    def attentions(self, body: nn.Module) -> Sequence[nn.Module]:
        for module in body.modules():
            if hasattr(module, "relative_attention_bias") and not isinstance(module, self.attention):
                raise ArchitectureError(
                    f"Cannot patch {type(body).__name__}: {type(module).__name__} makes biases, too, not "
                    f"{self.attention.__name__} alone. Write an architecture by hand, see docs/own_architecture.md."
                )
        return super().attentions(body)

    def native_parameters(self, body: nn.Module) -> Sequence[nn.Parameter]:
        return [owner.relative_attention_bias.weight for owner in self.owners(body)]

    def check_native(self, body: Any) -> None:
        config = body.config
        for owner in self.owners(body):
            live = (owner.relative_attention_bias.num_embeddings, owner.relative_attention_max_distance)
            stated = (config.relative_attention_num_buckets, config.relative_attention_max_distance)
            if live != stated:
                refuse_changed(body, f"it has buckets and a largest distance of {live}, and its config states {stated}")

    def geometry(self, body: Any, layer: int) -> Geometry:
        config, attention, owners = body.config, cast(Any, self.attentions(body)[layer]), self.owners(body)
        owner = attention if attention in owners else owners[0]
        table = weight_of(owner.relative_attention_bias)
        return Geometry(
            heads=config.num_heads,
            kv_heads=config.num_heads,
            head_dim=config.d_kv,
            hidden_size=config.d_model,
            scale=attention.scaling,
            layer=layer,
            causal=body.is_decoder,
            # These models have no longest input; their checkpoints were trained on this many tokens.
            max_positions=getattr(config, "n_positions", 512),
            native=NativeTable(
                "t5", table, config.relative_attention_max_distance, shared=len(owners) < len(body.block)
            ),
        )
