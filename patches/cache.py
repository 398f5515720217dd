"""Per-token state in a transformers cache, next to keys and values: positions, and tensors that a scheme returns.

A cache layer is replaced by one with the same content and behaviour plus `token_state`, a dict of tensors that grows,
is reordered, cropped, repeated, selected and offloaded together with the keys; and `recent_state`, of which only the
last tokens are kept. Dynamic and static layers are covered, with a sliding window or without; any other kind
(quantised) raises before it is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_posenc.errors import CacheError

# Every state tensor has the batch first and the tokens second: [B, K, ...].
_TOKENS = 1
# Names of the cache among arguments and outputs: that of transformers 5.24, then that of older ones and of older code.
NAMES = ("cache", "past_key_values")
# The name of the state that all patched layers have.
POSITIONS = "positions"
# Joins the state of earlier tokens and the state of fresh ones, each `[B, S, ...]`.
_Join: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def _join(held: Tensor, fresh: Tensor) -> Tensor:
    return torch.cat([held, fresh], dim=_TOKENS)


class _TokenState(CacheLayerMixin):
    """State that follows the keys of a cache layer."""

    token_state: dict[str, Tensor]
    recent_state: dict[str, Tensor]
    # Later layers that may refuse a crop, by number: the first layer, which is cropped first, asks them.
    others: dict[int, _TokenState]

    def last_state(self, device: torch.device) -> dict[str, Tensor]:
        """Return the scheme's state of the last token, each `[B, 1, ...]`; empty or zeros if there is none."""
        last = {}
        for name, tensor in self.token_state.items():
            if name != POSITIONS and tensor.shape[_TOKENS]:
                last[name] = self._last_token(tensor).to(device)
        for name, tensor in self.recent_state.items():
            if tensor.shape[_TOKENS]:
                last[name] = tensor[:, -1:].to(device)
        return last

    def _last_token(self, tensor: Tensor) -> Tensor:
        return tensor[:, -1:]

    def _map_state(self, function: Callable[[Tensor], Tensor]) -> None:
        self.token_state = {name: function(tensor) for name, tensor in self.token_state.items()}
        self.recent_state = {name: function(tensor) for name, tensor in self.recent_state.items()}

    def append_recent(self, fresh: Mapping[str, Tensor], history: int) -> None:
        for name, new in fresh.items():
            old = self.recent_state.get(name)
            if old is not None:
                new = torch.cat([old.to(new.device), new], dim=_TOKENS)
            # A copy, or the view would keep all of a long prompt's tokens alive.
            self.recent_state[name] = _last(new, history).clone().to(self.keys.device)

    def crop(self, tokens_to_remove: int) -> None:
        removed = abs(tokens_to_remove)
        for layer in (self, *self.others.values()):
            known = min((tensor.shape[_TOKENS] for tensor in layer.recent_state.values()), default=removed + 1)
            if known <= removed < layer.get_seq_length():
                raise CacheError(
                    f"Cannot take {removed} tokens back from a cache that remembers what the scheme needs of the last "
                    f"{known} only. Give the scheme a longer shift_history, or start again with an empty cache."
                )
        # Static layers have it from transformers 5.24 on. There, what stands in free slots is written over.
        super().crop(tokens_to_remove)
        self.recent_state = {
            name: tensor[:, : max(0, tensor.shape[_TOKENS] - removed)] for name, tensor in self.recent_state.items()
        }

    def offload(self) -> None:
        super().offload()
        self._map_state(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        if self.is_initialized:
            self._map_state(lambda tensor: tensor.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_state(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))


class PosencDynamicLayer(_TokenState, DynamicLayer):
    """A growing cache layer with per-token state."""

    def append_state(self, fresh: Mapping[str, Tensor], shown: int, join: _Join) -> dict[str, Tensor]:
        """Append the state of the tokens that `update` just added; return that of all tokens, or of the
        `shown` last ones in a sliding layer."""
        full = {}
        for name, new in fresh.items():
            old = self.token_state.get(name)
            state = new if old is None else (join if name == POSITIONS else _join)(old.to(new.device), new)
            full[name] = _last(state, shown) if self.is_sliding else state
            kept = _last(state, self.keys.shape[-2]) if self.is_sliding else state
            # An offloaded layer keeps its state where its keys are.
            self.token_state[name] = kept.to(self.keys.device)
        return full

    def reset(self) -> None:
        # Before 5.20, transformers fills what the layer holds with zeros, and counts it all the same.
        self.__dict__.update(keys=None, values=None, is_initialized=False)
        super().reset()
        self.token_state, self.recent_state = {}, {}

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        kept = self.keys.shape[-2] if self.is_initialized else 0
        for name, tensor in self.token_state.items():
            left = max(0, tensor.shape[_TOKENS] - abs(tokens_to_remove))
            self.token_state[name] = _last(tensor[:, :left], kept)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_state(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_state(lambda tensor: tensor[indices])


class PosencDynamicSlidingLayer(PosencDynamicLayer, DynamicSlidingWindowLayer):
    """A cache layer that keeps the tokens of a window, with per-token state."""


class PosencStaticLayer(_TokenState, StaticLayer):
    """A preallocated cache layer with per-token state."""

    def append_state(self, fresh: Mapping[str, Tensor], shown: int, join: _Join) -> dict[str, Tensor]:
        """Write the state of the tokens that `update` just added; return that of all slots, filled or not."""
        full = {}
        for name, new in fresh.items():
            store = self.token_state.get(name)
            if store is None:
                shape = (new.shape[0], self.max_cache_len, *new.shape[2:])
                store = torch.zeros(shape, dtype=new.dtype, device=new.device)
            store = store.to(new.device)
            full[name] = self._write(store, new)
            self.token_state[name] = store.to(self.keys.device)
        return full

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        """Write fresh state into that of all slots; return the state of the tokens that `update` returned."""
        slots = torch.arange(new.shape[_TOKENS], device=new.device) + self.cumulative_length - new.shape[_TOKENS]
        return store.index_copy_(_TOKENS, slots, new)

    def _last_token(self, tensor: Tensor) -> Tensor:
        last = (self.cumulative_length - 1).clamp_min(0).reshape(1)
        return tensor.index_select(_TOKENS, last.to(tensor.device))

    def reset(self) -> None:
        super().reset()
        self._map_state(torch.zeros_like)


class PosencStaticSlidingLayer(PosencStaticLayer, StaticSlidingWindowLayer):
    """A preallocated cache layer that keeps the tokens of a window, with per-token state."""

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        size, count = self.max_cache_len, new.shape[_TOKENS]
        held = self.cumulative_length_int - count
        if held + count <= size:
            store[:, held : held + count] = new
            return store
        # One of the tokens that fill a window leaves it with the next query.
        full = torch.cat((store[:, 1:] if held >= size else store[:, :held], new), dim=_TOKENS)
        store.copy_(full[:, -size:])
        return full

    def _last_token(self, tensor: Tensor) -> Tensor:
        last = max(0, min(self.cumulative_length_int, self.max_cache_len) - 1)
        return tensor[:, last : last + 1]


_WITH_STATE: dict[type, type] = {
    DynamicLayer: PosencDynamicLayer,
    DynamicSlidingWindowLayer: PosencDynamicSlidingLayer,
    StaticLayer: PosencStaticLayer,
    StaticSlidingWindowLayer: PosencStaticSlidingLayer,
}


def _last(tensor: Tensor, count: int) -> Tensor:
    """Return the state of the last tokens; of all if they are no more."""
    return tensor[:, max(0, tensor.shape[_TOKENS] - count) :]


def cache_of(call: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments or the outputs of a forward; `None` without one."""
    return next((call[name] for name in NAMES if call.get(name) is not None), None)


def self_attention(cache: Any) -> Any:
    """Return the part of an encoder-decoder cache that self-attention uses; any other cache as it is."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def mark_packed(output: Any) -> None:
    """Remember that the rows of the cache among a model's outputs hold packed sequences.

    A traced graph says so of any rows with positions, and static caches, which cannot tell better later, are left out.
    """
    for value in output.values() if isinstance(output, Mapping) else output:
        if isinstance(value, Cache) and not (torch.compiler.is_compiling() and value.is_compileable):
            value.posenc_packed = True


def refuse_packed(cache: Cache | None) -> None:
    """Raise `CacheError` if a cache holds packed sequences: a new token would see all sequences of its row."""
    if cache is None or not getattr(cache, "posenc_packed", False):
        return
    if cache.get_seq_length():
        raise CacheError("The cache holds packed sequences, which cannot go on. Use a row for each sequence.")
    del cache.posenc_packed  # It was reset.


def past(cache: Cache | None, layer: int, device: torch.device) -> dict[str, Tensor]:
    """Return the scheme's state of the last token in a layer, each `[B, 1, ...]`; empty or zeros without one."""
    cache = self_attention(cache)
    if cache is None or layer >= len(cache.layers):
        return {}
    slot: Any = cache.layers[layer]
    return slot.last_state(device) if isinstance(slot, _TokenState) else {}


def update(
    cache: Cache,
    layer: int,
    k: Tensor,
    v: Tensor,
    state: Mapping[str, Tensor],
    recent: Mapping[str, Tensor] | None = None,
    history: int = 0,
    join: _Join = _join,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Add fresh tokens to one layer of a cache: keys and values `[B, G, new, D]`, and state, each `[B, new, ...]`.

    Returns keys, values and state of all tokens in the layer (of all slots, in a static cache). State that is `recent`
    is kept for the last tokens only, `history` of them. Positions are appended by `join`, which layers may share.
    """
    cache = self_attention(cache)
    if layer < len(cache.layers):
        _check_layer(cache.layers[layer])
    elif cache.layer_class_to_replicate is not None:
        _check_layer(cache.layer_class_to_replicate())
    keys, values = cache.update(k, v, layer)
    filled = _with_state(cache, layer)
    if recent and layer and type(cache.layers[0]) in (*_WITH_STATE, *_WITH_STATE.values()):
        _with_state(cache, 0).others[layer] = filled
    complete = filled.append_state(state, keys.shape[-2], join)
    filled.append_recent(recent or {}, history)
    for name, tensor in complete.items():
        if tensor.shape[_TOKENS] != keys.shape[2]:
            raise CacheError(
                f"Layer {layer} of the cache holds {keys.shape[2]} tokens but the {name} of {tensor.shape[_TOKENS]}: "
                "it was changed past its methods. Use crop, reorder_cache, batch_repeat_interleave and "
                "batch_select_indices."
            )
    return keys, values, complete


def _with_state(cache: Cache, layer: int) -> Any:
    """Return a layer of a cache, after replacing it by one with state."""
    slot: Any = cache.layers[layer]
    if isinstance(slot, _TokenState):
        return slot
    twin: Any = _WITH_STATE[type(slot)]
    # A compiler cannot trace a change of class.
    filled = cache.layers[layer] = twin.__new__(twin)
    filled.__dict__.update(slot.__dict__)
    filled.token_state, filled.recent_state, filled.others = {}, {}, {}
    return filled


def is_known(cache: Cache | None) -> bool:
    """Whether a patched model has written to a cache."""
    return cache is not None and any(isinstance(layer, _TokenState) for layer in self_attention(cache).layers)


def check(cache: Cache | None) -> None:
    """Raise if a patched model cannot use a cache, before anything is written to it."""
    if cache is not None and not is_known(cache):
        for layer in self_attention(cache).layers:
            _check_layer(layer)


def check_disabled(cache: Cache | None) -> None:
    """Raise `CacheError` if a cache holds tokens of the patched model, with which stock attention cannot go on."""
    if cache is not None and not torch.compiler.is_compiling() and is_known(cache) and cache.get_seq_length():
        raise CacheError(
            f"The cache holds {int(cache.get_seq_length())} tokens of the patched model, and the patch is disabled. "
            "Start with an empty cache."
        )


def _check_layer(layer: Any) -> None:
    if isinstance(layer, _TokenState):
        return
    if type(layer) not in _WITH_STATE:
        raise CacheError(
            f"A cache layer of type {type(layer).__name__} cannot hold the per-token state of a patched model. Use a "
            'dynamic or a static cache: generate(cache_implementation="dynamic" or "static").'
        )
    held = int(layer.get_seq_length())
    if held:
        raise CacheError(
            f"The cache holds {held} tokens without their positions: it was filled by an unpatched model, or by PEFT's "
            "prefix tuning. Start with an empty cache; instead of prefix tuning, use prompt tuning."
        )
