"""The patched behaviour of attention modules and bodies that all architectures share."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_posenc.attention import Call, Mask, from_tensor, run
from hf_posenc.errors import (
    ArchitectureError,
    AttentionBackendError,
    DirectionError,
    NotPatchedError,
    OptionError,
)
from hf_posenc.operands import LARGEST_COUNT, Block, Positions, Projection, Tokens, check_coords
from hf_posenc.ops import grouped_matmul
from hf_posenc.patches import cache as token_cache
from hf_posenc.patches.cache import POSITIONS
from hf_posenc.patches.context import (
    Context,
    Mixin,
    Passage,
    Switch,
    check_length,
    check_mask,
    check_tensors,
    counted_within,
    is_this_thread,
    real_tokens,
    resolve_positions,
    same_sequence,
    sequences,
    stated_samples,
    this_thread,
)
from hf_posenc.patches.surgery import OWN, SHARED
from hf_posenc.scheme import Scheme
from hf_posenc.structures import Bias

# "eager" is the dense reference; under "sdpa" the executor is chosen by what the scheme needs. Models whose stock
# classes have nothing but "eager" (softcaps, sinks) choose too.
BACKENDS = ("eager", "sdpa")

# Names that stock layers give to the feed-forward; the last are behind one attention or two, and some have experts.
FEED_FORWARDS: tuple[str, ...] = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "output.dense")
FEED_FORWARDS += ("layer.1.DenseReluDense", "layer.2.DenseReluDense", "layer.1.mlp", "layer.2.mlp")

# The name under which a cache keeps keys without the model's own rotation.
CONTENT = "content"

# The keyword under which the context travels from a body to its attention layers.
CONTEXT = "posenc"
# The keyword under which a step of generation says which of its tokens are no padding, where the mask does not.
REAL = "posenc_real"
# Keywords that stock modules hand on to attention functions, which read some of them.
FUNCTION_ARGUMENTS = frozenset(inspect.signature(sdpa_attention_forward).parameters) - {"attention_mask", "is_causal"}
FUNCTION_ARGUMENTS |= {"mask", "sliding_window", "softcap", "s_aux"}
# The keyword under which callers pass coordinates.
COORDS = "position_coords"


def check_backend(name: str | None) -> None:
    """Raise unless the attention implementation honours schemes."""
    if name is not None and name not in BACKENDS:
        raise AttentionBackendError(
            # Callers look for this beginning of transformers' own message.
            f'Specified `attn_implementation="{name}"` is not supported: it would ignore the positional scheme. Use '
            "'sdpa' (fastest executor that fits the scheme) or 'eager' (dense, gives attention weights): "
            "model.set_attn_implementation('sdpa')."
        )


def with_signature_of(stock: type, twin: type, name: str) -> None:
    """Give a method of a patched class the signature of the stock one."""
    method = getattr(twin, name)

    @functools.wraps(getattr(stock, name))
    def with_stock_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    setattr(twin, name, with_stock_signature)


def arguments_of(stock: type) -> tuple[str, ...]:
    """Return the names of the arguments of a stock forward, in order."""
    return tuple(inspect.signature(stock.forward).parameters)[1:]  # type: ignore[attr-defined]


def without_context(module: object) -> NotPatchedError:
    """Return the error for a layer that was called past the body of its model."""
    return NotPatchedError(
        f"{type(module).__name__} was called without the positions that its patched model hands down. Call the model, "
        "not a layer of it; or hf_posenc.unpatch(model) first."
    )


class PosencAttention(Mixin):
    """Mixin of patched attention modules: calls the scheme's seams around the architecture's projections."""

    posenc_group: int
    posenc_keeps_native: bool
    # Names of the arguments of the stock forward behind the first.
    posenc_arguments: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "posenc_stock" in vars(cls):
            cls.posenc_arguments = arguments_of(vars(cls)["posenc_stock"])[1:]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = dict(zip(self.posenc_arguments, args, strict=False)) | kwargs
        context: Context | None = call.pop(CONTEXT, None)
        if context is None:
            raise without_context(self)
        if context.positions is None:
            return super().forward(hidden_states, **call)  # type: ignore[misc, no-any-return]
        return self.attend(context, hidden_states, call)

    def attend(self, context: Context, hidden: Tensor, call: dict[str, Any]) -> tuple[Any, ...]:
        """Return what the stock forward returns, given its arguments by name, from `attend_with_scheme`."""
        raise NotImplementedError

    def project_heads(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[B, H, S, D]`, keys and values `[B, G, S, D]` of hidden `[B, S, E]`, without positions."""
        raise NotImplementedError

    def attend_with_scheme(self, layer: LayerCall) -> tuple[Tensor, Tensor | None]:
        """Project, and run the layer's scheme.

        Returns:
            The output `[B, S, H, D]`, as attention functions return it, and the weights `[B, H, S, K]` or `None`.
        """
        own: Any = self._modules.get(OWN)
        shared: Any = getattr(layer.context.shared, str(self.posenc_group), None)
        attend = functools.partial(self._attend, layer)
        if own is None:
            output, weights = shared(attend)
        elif shared is None:
            output, weights = own(attend)
        else:
            output, weights = shared(lambda common: own(attend, common))
        return output.transpose(1, 2).contiguous(), weights

    def _attend(self, layer: LayerCall, scheme: Scheme, common: Scheme | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the output `[B, H, S, D]` and the weights, given the scheme and its part that all layers share."""
        context = layer.context
        if context.strength != 1:
            scheme = Blended(scheme, context.strength)
        operands, past = layer.operands or self.project_heads(layer.hidden), {}
        if layer.cache is not None:
            assert layer.index is not None
            past = token_cache.past(layer.cache, layer.index, operands[0].device)
        assert context.positions is not None
        tokens = Tokens(
            positions=Positions(context.positions, context.positions, context.coords, context.coords),
            hidden=layer.hidden,
            real=context.real,
            past=past,
            carried=None if context.passage is None else context.passage.carried,
            common=common,
            host=lambda x: self.project_heads(x)[:2],
        )
        call = self._call(scheme, layer, scheme.project(tokens, *operands), tokens.positions)
        del operands  # only their projection is needed
        output, weights = run(call)
        if context.passage is not None:
            context.passage.carried, context.passage.scheme = scheme.carry(output, tokens), scheme
        return scheme.finish(output, layer.hidden), weights

    def _call(self, scheme: Scheme, layer: LayerCall, projected: Projection, positions: Positions) -> Call:
        """Return the call for the executors: rotate, cache and mask what the scheme projected."""
        context, kept = layer.context, self.posenc_keeps_native
        q, keys, values, state = projected.q, projected.k, projected.v, dict(projected.state)
        content_q = None
        if layer.rotate is not None and kept:
            content_q = q
            if scheme.reads_keys:
                state[CONTENT] = keys.transpose(1, 2)
            q, keys = layer.rotate(q, keys)
        if layer.cache is not None:
            assert layer.index is not None
            fresh = {POSITIONS: positions.query.expand(len(q), -1), **state}
            keys, values, state = token_cache.update(
                layer.cache, layer.index, keys, values, fresh, projected.recent, scheme.history
            )
            places = state.pop(POSITIONS)
            if places.stride(0) == 0:
                places = places[:1]  # an empty cache hands the expanded row back: one bias serves all rows
            # Only the positions of the keys are kept in a cache.
            positions = Positions(positions.query, places)
        length = q.shape[2]
        if layer.causal and length > 1 and (layer.mask is None or context.packed is not None):
            # In transformers, no mask means: causal from the first key on (behind the queries, a static cache has
            # slots not filled yet). The keys are then the queries' own tokens, as they are in packed rows.
            keys, values = keys[:, :, :length], values[:, :, :length]
            state = {name: tensor[:, :length] for name, tensor in state.items()}
            positions = replace(positions, key=positions.query)
        content_k = state.pop(CONTENT, None)
        return Call(
            scheme=scheme,
            q=q,
            k=scheme.recall(keys, state),
            v=values,
            positions=positions,
            reach=context.reach,
            scale=layer.scale,
            mask=layer.visible(q, keys, positions, scheme.window),
            state=state,
            own=projected.state,
            tables=projected.tables,
            content_q=content_q,
            content_k=None if content_k is None else content_k.transpose(1, 2),
            native_score=context.native_score if kept else None,
            parameters=(*(context.native_parameters if kept else ()), *(() if layer.sinks is None else (layer.sinks,))),
            softcap=layer.softcap,
            sinks=layer.sinks,
            dropout=layer.dropout,
            upcast=layer.upcast,
            need_weights=context.dense,
        )


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a patched attention module, as its architecture reads it from the stock module, see also `Call`.

    Attributes:
        hidden: Hidden states to project, `[B, S, E]`.
        mask: Mask as transformers prepared it: `None`, or 4-D bool or float.
        rotate: The model's own rotation of queries and keys, used where it is kept. It comes after the scheme's
            projection.
        operands: Queries, keys and values, if they are projected already; `None` calls `project_heads`.
        window: The model's own distance from which keys are hidden; `None` hides none.
    """

    context: Context
    hidden: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    dropout: float
    cache: Cache | None = None
    index: int | None = None
    upcast: bool = False
    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    operands: tuple[Tensor, Tensor, Tensor] | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def visible(self, q: Tensor, k: Tensor, positions: Positions, window: int | None) -> Mask:
        """Return the visibility of all keys, those of the cache included; `window` is that of the scheme."""
        (batch, heads, queries, _), keys = q.shape, k.shape[2]
        real, window = self.context.real, self.window if window is None else min(window, self.window or window)
        # A window that is longer than the sequence hides nothing.
        if window is not None and self.context.reach < window:
            window = None
        if self.mask is None or (self.causal and self.context.ruled and keys == queries):
            # Padding and the order of slots say the same as the mask that was made from them.
            rule: Literal["slots", "all"] = "slots" if self.causal and queries > 1 else "all"
            keep = None if real is None or self.mask is None else real[:, None, None]
            # A cache drops tokens by slots. Padding between tokens makes these distances longer than positions.
            span = self.window if keep is not None and rule == "slots" and keys > (self.window or keys) else None
            return Mask(rule, keep=keep, window=window, span=span)
        return replace(from_tensor(self.mask, "all", (batch, heads, queries, keys), window=window), real=real)


class PosencLayer(Mixin):
    """Mixin of patched decoder or encoder layers: threads what a scheme carries from layer to layer.

    That goes in as the second positional argument of `forward` and comes out as the last result, so that gradient
    checkpointing of either kind sees it; between layers it waits in the context.
    """

    posenc_group: int

    @staticmethod
    def posenc_feed_forward(layer: Any) -> nn.Module:
        """Return the module of a layer, patched or stock, whose output `Scheme.feed` gets."""
        parts: dict[str, nn.Module] = dict(layer.named_modules())
        found = [parts[name] for name in FEED_FORWARDS if name in parts]
        if not found:
            names = ", ".join(FEED_FORWARDS)
            raise ArchitectureError(f"Found no feed-forward in {type(layer).__name__}: none of {names}.")
        return found[0]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        context: Context | None = kwargs.get(CONTEXT)
        if context is None:
            raise without_context(self)
        group = self.posenc_group
        *result, context.carried[group] = super().__call__(  # type: ignore[misc]
            hidden_states, context.carried.get(group), *args, **kwargs
        )
        return result[0] if len(result) == 1 else tuple(result)

    def forward(self, hidden_states: Tensor, carried: Tensor | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        passage = Passage(None if carried is None else carried.to(hidden_states.device))
        fed: list[Tensor] = []
        thread = this_thread()

        def take(module: nn.Module, args: Any, output: Tensor) -> None:
            # Other threads run the same module, with hooks of their own.
            if is_this_thread(thread):
                fed.append(output[0] if isinstance(output, tuple) else output)

        module = self.posenc_feed_forward(self)
        hooks = module._forward_hooks
        handle = None
        if torch.compiler.is_compiling():
            # A graph has one thread, and no handles of hooks.
            module._forward_hooks = OrderedDict({**hooks, 0: take})
        else:
            handle = module.register_forward_hook(take)
        try:
            kwargs[CONTEXT] = replace(kwargs[CONTEXT], passage=passage)
            result = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        finally:
            if handle is None:
                module._forward_hooks = OrderedDict(hooks)
            else:
                handle.remove()
        carried = passage.carried
        if passage.scheme is not None and carried is not None:
            # A feed-forward may run on one chunk of the tokens after the other.
            carried = passage.scheme(type(passage.scheme).feed, carried, torch.cat(fed, dim=1))
        return (*result, carried) if isinstance(result, tuple) else (result, carried)


class PosencBody(Switch):
    """Mixin of patched bodies: finds out positions, applies `embed`, and hands the context down."""

    # Names of the arguments of the stock forward, in order.
    posenc_arguments: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "posenc_stock" not in vars(cls):
            return  # FSDP derives classes of its own from ours.
        stock = vars(cls)["posenc_stock"]
        cls.posenc_arguments = arguments_of(stock)
        # Trainers read from the signature which columns of a dataset a model takes.
        with_signature_of(stock, cls, "forward")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(self.posenc_arguments, args, strict=False)) | kwargs
        if self.is_disabled():
            token_cache.check_disabled(token_cache.cache_of(call))
            call = {name: value for name, value in call.items() if name not in (REAL, COORDS)}
            return super().forward(**call, **{CONTEXT: Context()})  # type: ignore[misc]
        check_backend(self.config._attn_implementation)
        check_tensors(call)
        self.check_keywords(call)
        call = self.prepare(call)
        output = self.run(call)
        context: Context | None = call.get(CONTEXT)
        if context is not None and context.packed is not None:
            token_cache.mark_packed(output)
        return output

    def check_keywords(self, call: Mapping[str, Any]) -> None:
        """Raise if a keyword would go through all modules to the attention function, and change what that computes.

        Raises:
            DirectionError: It says that an encoder is causal, or a decoder is not.
            OptionError: It is another argument of attention functions.
        """
        for name in FUNCTION_ARGUMENTS - {*self.posenc_arguments}:
            if call.get(name) is not None:
                raise OptionError(
                    f"Got {name}, an argument of attention functions; patched models take it from their config. Leave "
                    "it out."
                )
        given, stated = call.get("is_causal"), getattr(self.config, "is_causal", None)
        if given is None and stated is False and self.is_causal_stack():
            given = stated
        if given is not None and bool(given) != self.is_causal_stack():
            kind = "encoders are not" if given else "decoders are"
            raise DirectionError(f"Got is_causal={given}; patched {kind} causal. Leave it out, or use the stock model.")

    def run(self, call: dict[str, Any]) -> Any:
        """Call the stock forward with the arguments that `prepare` returned."""
        return super().forward(**call)  # type: ignore[misc]

    def prepare(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the stock forward, with positions, embedded inputs and the context in them."""
        coords: Tensor | None = call.pop(COORDS, None)
        inputs = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
        if inputs is None or (call.get("input_ids") is not None and call.get("inputs_embeds") is not None):
            return call  # The stock forward says what is wrong.
        cache = token_cache.cache_of(call)
        if not token_cache.is_known(cache) and any(isinstance(module, PosencAttention) for module in self.modules()):
            token_cache.check(cache)  # not of a stack that was left out
        batch, length = inputs.shape[:2]
        given = self.given_positions(call)
        # A dict has the masks of generation, one for each type of layer.
        mask = None if isinstance(call.get("attention_mask"), dict) else call.get("attention_mask")
        past = tokens_in(cache)
        check_mask(mask)
        check_length(mask, past, batch, length, counts=given is None)
        stated = stated_samples(call, mask, past, batch, length, inputs.device)
        real = call.pop(REAL, None)
        if real is None:
            real = real_tokens(mask, past, length)
        counted = given
        if counted is None and stated:
            counted = counted_within(next(iter(stated.values())), real)
        elif counted is None:
            counted = self.counted_positions(call, past)
        positions = resolve_positions(counted, mask, past, batch, length, inputs.device)
        if coords is not None:
            coords = check_coords(coords, self.axes(), batch, length, inputs.device)
        traced = torch.compiler.is_compiling()  # A graph has no numbers: none exceeds the largest count.
        reach = LARGEST_COUNT if traced else int(positions.max()) if positions.numel() else 0
        ruled = call.get("attention_mask") is None or (mask is not None and mask.ndim == 2)
        context = self.context(call, positions, reach, real, coords, ruled=ruled)
        token_cache.refuse_packed(cache)
        # A graph cannot read how much a static cache holds, and takes rows with a mask for padded.
        readable = not traced or (isinstance(past, int) and mask is None)
        if ruled and (given is not None or stated) and length > 1 and readable and bool(past == 0):
            packed = sequences(positions, real, stated)
            if packed is not None:
                mask = same_sequence(packed, packed, causal=self.is_causal_stack(), float_dtype=self.mask_dtype())
                call["attention_mask"] = self.masks_of_packed(mask)
                context = replace(context, packed=packed, ruled=False)
            elif mask is None and bool((positions.diff(dim=-1) != 1).any()):
                # transformers takes any jump for the start of a sequence, unless there is a mask.
                call["attention_mask"] = torch.ones(batch, length, dtype=torch.long, device=positions.device)
        if self.embedders():
            if call.get("inputs_embeds") is None:
                call["inputs_embeds"] = self.get_input_embeddings()(call.pop("input_ids"))
            call["inputs_embeds"] = self.embedded(call["inputs_embeds"], context)
        return self.hand_down(call, context)

    def context(
        self,
        call: Mapping[str, Any],
        positions: Tensor,
        reach: int,
        real: Tensor | None,
        coords: Tensor | None,
        *,
        ruled: bool = False,
    ) -> Context:
        """Return what the layers get to know of the new tokens, see `Context`."""
        shared = self._modules.get(SHARED)
        config = self.config
        # A model that has no other implementation than eager was not asked to be dense.
        eager = config._attn_implementation == "eager" and bool(self._supports_sdpa or config.output_attentions)
        # Some bodies do not pass `output_attentions` on to their layers.
        dense = eager or bool(call.get("output_attentions"))
        strength = self.posenc_strengths.scheme
        return Context(positions, reach, shared, strength, real=real, coords=coords, ruled=ruled, dense=dense)

    def embedders(self) -> list[Scheme]:
        """Return the schemes that act on the input of the first layer."""
        shared: Any = self._modules.get(SHARED)
        return [] if shared is None else [scheme for scheme in shared.schemes() if scheme.overrides("embed")]

    def embedded(self, inputs: Tensor, context: Context) -> Tensor:
        """Return what these schemes make of the embeddings of the tokens, `[B, S, E]`."""
        for scheme in self.embedders():
            inputs = scheme(_embed, inputs, context)
        return inputs

    def axes(self) -> set[int]:
        """Return how many coordinates of a token the schemes of this body read."""
        return {module.axes for module in self.modules() if isinstance(module, Scheme)}

    def mask_dtype(self) -> torch.dtype | None:
        """Return the dtype of the masks that the attention implementation adds; `None` if it takes booleans."""
        dtype: torch.dtype = self.get_input_embeddings().weight.dtype
        return dtype if self.config._attn_implementation == "eager" else None

    def masks_of_packed(self, mask: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the masks for the layers, given that of packed sequences, `[B|1, 1, S, S]`."""
        return mask

    def is_causal_stack(self) -> bool:
        """Whether tokens see earlier ones only."""
        attention = next(module for module in self.modules() if hasattr(module, "is_causal"))
        return bool(attention.is_causal)

    def given_positions(self, call: dict[str, Any]) -> Tensor | None:
        """Return the positions that the caller passed, if any."""
        return call.get("position_ids")

    def counted_positions(self, call: dict[str, Any], past: int | Tensor) -> Tensor | None:
        """Return the positions of the new tokens, where the model counts them in a way of its own."""
        return None

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        """Put positions and context into the arguments of the stock forward."""
        return call | {"position_ids": context.positions, CONTEXT: context}


def _embed(scheme: Scheme, inputs: Tensor, context: Context) -> Tensor:
    assert context.positions is not None
    acting = scheme if context.strength == 1 else Blended(scheme, context.strength)
    return acting.embed(inputs, context.positions, context.coords)


def tokens_in(cache: Cache | None) -> int | Tensor:
    """Return how many tokens a cache holds."""
    if cache is None:
        return 0
    held: int | Tensor = token_cache.self_attention(cache).get_seq_length()
    # A static cache counts in a tensor that its layers are about to change.
    return held.clone() if isinstance(held, torch.Tensor) else held


class Blended(Scheme):
    """A scheme whose effect at every seam is interpolated, from none (0) to full (1).

    It holds the scheme for one call; what a scheme hands to the cache or to the next layer is not blended.
    """

    def __init__(self, scheme: Scheme, strength: float) -> None:
        super().__init__(scheme.geometry)
        self.scheme, self.strength = scheme, strength
        self.name, self.directions = scheme.name, scheme.directions  # type: ignore[misc]
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
