"""Per-token state beside keys and values in a transformers cache: positions, and what a scheme hands out.

A cache layer is given the state by swapping its class for one with the same behaviour plus `token_state`, a dict of tensors
that grows, is reordered, cropped, repeated, selected and offloaded together with the keys. Both layer kinds that grow by
tokens are covered; any other (quantised, sliding) raises before it is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache, StaticLayer

from hf_posenc.errors import CacheError

# Every state tensor has the batch first and the tokens second: [B, K, ...].
_TOKENS = 1


class _TokenState(CacheLayerMixin):
    """State that follows the keys of a cache layer."""

    token_state: dict[str, Tensor]

    def _map_state(self, function: Callable[[Tensor], Tensor]) -> None:
        self.token_state = {name: function(tensor) for name, tensor in self.token_state.items()}

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

    def append_state(self, fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Append the state of the tokens that `update` just added; return that of all tokens."""
        full = {
            name: torch.cat([self.token_state[name].to(new.device), new], dim=_TOKENS)
            if name in self.token_state
            else new
            for name, new in fresh.items()
        }
        # An offloaded layer keeps its state where its keys are.
        self.token_state = {name: tensor.to(self.keys.device) for name, tensor in full.items()}
        return full

    def reset(self) -> None:
        super().reset()
        self.token_state = {}

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self._map_state(lambda tensor: tensor[:, :length])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_state(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_state(lambda tensor: tensor[indices])


class PosencStaticLayer(_TokenState, StaticLayer):
    """A preallocated cache layer with per-token state."""

    def append_state(self, fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write the state of the tokens that `update` just added; return that of all slots, filled or not."""
        full = {}
        for name, new in fresh.items():
            store = self.token_state.get(name)
            if store is None:
                shape = (new.shape[0], self.max_cache_len, *new.shape[2:])
                store = torch.zeros(shape, dtype=new.dtype, device=new.device)
            store = store.to(new.device)
            slots = torch.arange(new.shape[_TOKENS], device=new.device) + self.cumulative_length - new.shape[_TOKENS]
            store.index_copy_(_TOKENS, slots, new)
            full[name] = store
        self.token_state = {name: tensor.to(self.keys.device) for name, tensor in full.items()}
        return full

    def reset(self) -> None:
        super().reset()
        self._map_state(torch.zeros_like)


_WITH_STATE: dict[type, type] = {DynamicLayer: PosencDynamicLayer, StaticLayer: PosencStaticLayer}


def update(
    cache: Cache, layer: int, k: Tensor, v: Tensor, state: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Add fresh tokens to one layer of a cache.

    Args:
        cache: A dynamic or static cache; of an encoder-decoder cache, the self-attention part is used.
        layer: Index of the layer.
        k: Fresh keys `[B, G, new, D]`.
        v: Fresh values `[B, G, new, D]`.
        state: Fresh per-token state, each `[B, new, ...]`.

    Returns:
        Keys, values and state of all tokens in the layer (of all slots, in a static cache).

    Raises:
        CacheError: The kind of cache layer cannot hold state, or the layer was filled by another model.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if layer < len(cache.layers):
        _check_kind(cache.layers[layer])
        _check_empty(cache.layers[layer])
    elif cache.layer_class_to_replicate is not None:
        _check_kind(cache.layer_class_to_replicate())
    keys, values = cache.update(k, v, layer)
    slot = cache.layers[layer]
    if not isinstance(slot, _TokenState):
        slot.__class__ = _WITH_STATE[type(slot)]
        slot.token_state = {}
    filled: Any = slot
    complete = filled.append_state(state)
    for name, tensor in complete.items():
        if tensor.shape[_TOKENS] != keys.shape[2]:
            raise CacheError(
                f"Layer {layer} of the cache holds {keys.shape[2]} tokens but the {name} of {tensor.shape[_TOKENS]}: it was "
                "changed past its methods. Use crop, reorder_cache, batch_repeat_interleave and batch_select_indices."
            )
    return keys, values, complete


def check(cache: Cache | None) -> None:
    """Raise if a patched model cannot use a cache, before anything is written to it.

    Raises:
        CacheError: As for `update`.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if cache is None or any(isinstance(layer, _TokenState) for layer in cache.layers):
        return  # A patched model has been there already.
    for layer in cache.layers:
        _check_kind(layer)
    for layer in cache.layers[:1]:
        _check_empty(layer)


def _check_empty(layer: Any) -> None:
    if isinstance(layer, _TokenState):
        return
    held = int(layer.get_seq_length())
    if held:
        raise CacheError(
            f"The cache holds {held} tokens without their positions: it was filled by an unpatched model. Start with an "
            "empty cache."
        )


def _check_kind(layer: Any) -> None:
    if not isinstance(layer, _TokenState) and type(layer) not in _WITH_STATE:
        raise CacheError(
            f"A cache layer of type {type(layer).__name__} cannot hold the per-token state of a patched model. Use a "
            'dynamic or a static cache: generate(cache_implementation="dynamic" or "static").'
        )
