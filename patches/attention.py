"""The patched behaviour of attention modules that all architectures share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor
from transformers.cache_utils import Cache

from hf_posenc.attention import Call, Mask, from_tensor, run
from hf_posenc.blend import Blended
from hf_posenc.errors import AttentionBackendError, NotPatchedError
from hf_posenc.operands import Positions, Projection, Tokens
from hf_posenc.patches import cache as token_cache
from hf_posenc.patches.cache import POSITIONS
from hf_posenc.patches.context import RUNNING, Context, Inputs, Mixin
from hf_posenc.patches.share import Share
from hf_posenc.patches.surgery import OWN
from hf_posenc.scheme import Scheme

# "eager" is the dense reference; under "sdpa" the executor is chosen by what the scheme needs. Models whose stock
# classes have nothing but "eager" (softcaps, sinks) choose too.
BACKENDS = ("eager", "sdpa")
# Attention functions of servers. The server's checks must admit a model first; else its forward raises.
_SERVERS = ("vllm", "paged|eager", "paged|sdpa")

# The name under which a cache keeps keys without the model's own rotation.
CONTENT = "content"

# The keyword under which the context travels from a body to its attention layers.
CONTEXT = "posenc"


def check_backend(name: str | None, *, chosen: bool = False) -> None:
    """Raise for an attention implementation that would ignore schemes.

    One that is `chosen`, and not running yet, may be that of a server.
    """
    if name is not None and name not in BACKENDS and not (chosen and name in _SERVERS):
        raise AttentionBackendError(
            # Callers look for this beginning of transformers' own message.
            f'Specified `attn_implementation="{name}"` is not supported: it would ignore the positional scheme. Use '
            "'sdpa' (fastest executor that fits the scheme) or 'eager' (dense, gives attention weights): "
            "model.set_attn_implementation('sdpa')."
        )


def arguments_of(stock: type) -> tuple[str, ...]:
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
    # The share of the model's own rotation that stays; `None` if all of it does.
    posenc_share: Share | None = None
    # Names of the arguments of the stock forward behind the first.
    posenc_arguments: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "posenc_stock" in vars(cls):
            cls.posenc_arguments = arguments_of(vars(cls)["posenc_stock"])[1:]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        call = dict(zip(self.posenc_arguments, args, strict=False)) | kwargs
        context: Context | None = call.pop(CONTEXT, RUNNING.context)
        if context is None:
            raise without_context(self)
        if context.inputs is None:
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
        context, inputs, kept = layer.context, layer.context.inputs, self.posenc_keeps_native
        assert inputs is not None
        if context.strength != 1:
            scheme = Blended(scheme, context.strength)
        operands: Any = layer.operands or self.project_heads(layer.hidden)
        past = {}
        if layer.cache is not None:
            assert layer.index is not None
            past = token_cache.past(layer.cache, layer.index, operands[0].device)
        tokens = Tokens(
            positions=inputs.places,
            hidden=layer.hidden,
            real=inputs.real,
            past=past,
            carried=None if context.passage is None else context.passage.carried,
            common=common,
            host=lambda x: self.project_heads(x)[:2],
        )
        if layer.outside is not None:
            there = scheme.project(tokens, *operands)
            assert context.outside is not None
            turned = (there.q, there.k) if layer.rotate is None or not kept else layer.rotate(there.q, there.k)
            keep = None if layer.index is None else context.outside.get(layer.index)
            given = (*turned, there.v) if keep is None else keep(scheme, *turned, there.v, inputs.places)
            return scheme.finish(layer.outside(*given)[..., : there.v.shape[-1]], layer.hidden), None
        call = Call.of(
            scheme,
            tokens,
            *operands,
            meet=functools.partial(self._meet, layer, inputs, scheme),
            reach=inputs.reach,
            scale=layer.scale,
            native_score=context.native.score if kept else None,
            parameters=(*(context.native.parameters if kept else ()), *(() if layer.sinks is None else (layer.sinks,))),
            softcap=layer.softcap,
            sinks=layer.sinks,
            dropout=layer.dropout,
            upcast=layer.upcast,
            need_weights=context.dense,
        )
        del operands  # only their projection is needed
        output, weights = run(call)
        if context.passage is not None:
            context.passage.carried, context.passage.scheme = scheme.carry(output, tokens), scheme
        return scheme.finish(output, layer.hidden), weights

    def _meet(self, layer: LayerCall, inputs: Inputs, scheme: Scheme, projected: Projection) -> Mapping[str, Any]:
        """Rotate and cache what the scheme projected; return the keys that the queries meet, as fields of `Call`."""
        q, keys, values, state = projected.q, projected.k, projected.v, projected.state
        content_q = content_k = None
        if layer.rotate is not None and self.posenc_keeps_native:
            content_q = q
            if scheme.reads_keys:
                state = {**state, CONTENT: keys.transpose(1, 2)}
            # Under autocast a rotation in float32 leaves its result so, which the fast executors do not take.
            q, keys = (turned.to(values.dtype) for turned in layer.rotate(q, keys))
        if layer.cache is None:
            positions = inputs.places
        else:
            assert layer.index is not None
            fresh = {POSITIONS: inputs.rows(q.shape[0]), **state}
            keys, values, state = token_cache.update(
                layer.cache, layer.index, keys, values, fresh, projected.recent, scheme.history, inputs.joined
            )
            # Only the positions of the keys are kept in a cache.
            positions = inputs.against(state.pop(POSITIONS))
        length = q.shape[2]
        if layer.causal and length > 1 and (layer.mask is None or inputs.packed is not None):
            # In transformers, no mask means: causal from the first key on (behind the queries, a static cache has
            # slots not filled yet). The keys are then the queries' own tokens, as they are in packed rows.
            keys, values = keys[:, :, :length], values[:, :, :length]
            state = {name: tensor[:, :length] for name, tensor in state.items()}
            positions = replace(positions, key=positions.query)
        if CONTENT in state:
            state = dict(state)
            content_k = state.pop(CONTENT).transpose(1, 2)
        return {
            "q": q,
            "k": keys,
            "v": values,
            "positions": positions,
            "mask": layer.visible(inputs, q, keys, positions, scheme.window),
            "state": state,
            "content_q": content_q,
            "content_k": content_k,
        }


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
        outside: Attention of a server, given queries, keys and values as they are cached; `None` is ours.
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
    outside: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def visible(self, inputs: Inputs, q: Tensor, k: Tensor, positions: Positions, window: int | None) -> Mask:
        """Return which keys are visible, cached ones included, given the window of the scheme."""
        (batch, heads, queries, _), keys = q.shape, k.shape[2]
        real, window = inputs.real, self.window if window is None else min(window, self.window or window)
        # A window that is longer than the sequence hides nothing.
        if window is not None and inputs.reach < window:
            window = None
        if self.mask is None or (self.causal and inputs.ruled and keys == queries):
            # Padding and the order of slots say the same as the mask that was made from them.
            rule: Literal["slots", "all"] = "slots" if self.causal and queries > 1 else "all"
            keep = None if real is None or self.mask is None else real[:, None, None]
            # A cache drops tokens by slots. Padding between tokens makes these distances longer than positions.
            span = self.window if keep is not None and rule == "slots" and keys > (self.window or keys) else None
            return Mask(rule, keep=keep, window=window, span=span)
        return replace(from_tensor(self.mask, "all", (batch, heads, queries, keys), window=window), real=real)
