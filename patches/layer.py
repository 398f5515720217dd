"""The patched behaviour of layers: what a scheme carries from one to the next."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import ArchitectureError
from hf_posenc.patches.attention import CONTEXT, without_context
from hf_posenc.patches.context import RUNNING, Context, Mixin, Passage, is_this_thread, this_thread

# Names that stock layers give to the feed-forward; the last are behind one attention or two, and some have experts.
FEED_FORWARDS: tuple[str, ...] = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "output.dense", "fc2")
FEED_FORWARDS += ("layer.1.DenseReluDense", "layer.2.DenseReluDense", "layer.1.mlp", "layer.2.mlp")


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
        context: Context | None = kwargs.setdefault(CONTEXT, RUNNING.context)
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
            # A feed-forward may run on one chunk of the tokens after the other, or on all rows as one.
            carried = passage.scheme(
                type(passage.scheme).feed, carried, torch.cat(fed, dim=-2).view(hidden_states.shape)
            )
        return (*result, carried) if isinstance(result, tuple) else (result, carried)
