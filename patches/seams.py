"""The patched behaviour that all architectures share: of attention modules and of bodies."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from hf_posenc import cache as token_cache
from hf_posenc.attention import Mask, Task, from_tensor, run
from hf_posenc.errors import AttentionBackendError, NotPatchedError
from hf_posenc.patches.context import Context, resolve_positions, same_sequence, sequences
from hf_posenc.patches.surgery import OWN, SHARED
from hf_posenc.scheme import Positions, Scheme

# "eager" is the dense reference; under "sdpa" the executor is chosen by what the scheme needs.
BACKENDS = ("eager", "sdpa")

# The keyword under which the context travels from a body to its attention layers.
CONTEXT = "posenc"


def check_backend(name: str | None) -> None:
    """Raise unless the attention implementation honours schemes."""
    if name is not None and name not in BACKENDS:
        raise AttentionBackendError(
            f"attn_implementation={name!r} would ignore the positional scheme. Use 'sdpa' (fastest executor that fits the "
            "scheme) or 'eager' (dense, gives attention weights): model.set_attn_implementation('sdpa')."
        )


class PosencAttention:
    """Mixin of patched attention modules: runs the seams around whatever the architecture projects."""

    posenc_group: int
    posenc_keeps_native: bool
    if TYPE_CHECKING:  # the other base, a module of transformers, has the rest

        def __getattr__(self, name: str) -> Any: ...

    def take_context(self, kwargs: dict[str, Any]) -> Context:
        """Return the context that the body sent, which must be there: without it the layer would compute something else."""
        context = kwargs.pop(CONTEXT, None)
        if context is None:
            raise NotPatchedError(
                f"{type(self).__name__} was called without the positions that its patched model hands down. Call the model, "
                "not a layer of it; or hf_posenc.unpatch(model) first."
            )
        assert isinstance(context, Context)
        return context

    def attend_with_scheme(
        self,
        context: Context,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        *,
        layer: int | None,
        causal: bool,
        scale: float,
        dropout: float,
        backend: str | None,
        need_weights: bool = False,
        upcast: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer's scheme on fresh projections.

        Args:
            context: From the body.
            hidden: The hidden states that were projected, `[B, S, E]`.
            q: `[B, H, S, D]`.
            k: `[B, G, S, D]`.
            v: `[B, G, S, D]`.
            mask: As transformers prepared it: `None`, or 4-D bool or float.
            cache: The model's cache, if it uses one.
            layer: Index of the layer in the cache.
            causal: Whether the layer is causal.
            scale: Softmax scale of the layer.
            dropout: Probability in training, 0 otherwise.
            backend: The model's attention implementation.
            need_weights: Also return the weights.
            upcast: Multiply queries and keys in float32.

        Returns:
            The output `[B, S, H * D]`, and the weights `[B, H, S, K]` or `None`.
        """
        scheme = self._modules[OWN] if OWN in self._modules else getattr(context.shared, str(self.posenc_group))
        assert scheme is not None
        eager = backend == "eager"

        def attend(scheme: Scheme) -> tuple[Tensor, Tensor | None]:
            batch, heads, length, _ = q.shape
            assert context.positions is not None
            here = context.positions
            projected = scheme.project(hidden, q, k, v, Positions(here, here))
            keys, values, places, state = projected.k, projected.v, here, dict(projected.state)
            if cache is not None:
                assert layer is not None
                fresh = {"positions": here.expand(batch, -1), **state}
                keys, values, state = token_cache.update(cache, layer, keys, values, fresh)
                places = state.pop("positions")
                if places.stride(0) == 0:
                    places = places[:1]  # an empty cache hands the expanded row back: one bias serves all rows
            if mask is None and causal and length > 1:
                # What transformers means by no mask: causal from the first key on (behind the queries, a static cache has
                # slots not filled yet). The keys are then the queries' own tokens.
                keys, values, places = keys[:, :, :length], values[:, :, :length], here
                state = {name: tensor[:, :length] for name, tensor in state.items()}
                visible = Mask("slots")
            elif mask is None:
                visible = Mask("all")
            else:
                visible = from_tensor(mask, rule="all", batch=batch, heads=heads, q=length, k=keys.shape[2])
            task = Task(
                q=projected.q,
                k=keys,
                v=values,
                positions=Positions(here, places),
                reach=context.reach,
                scale=scale,
                hidden=hidden,
                state=state,
                native_score=context.native_score if self.posenc_keeps_native else None,
                parameters=context.native_parameters if self.posenc_keeps_native else (),
                dropout=dropout,
                upcast=upcast,
            )
            output, weights = run(
                scheme, task, visible, executor="dense" if eager else None, need_weights=eager or need_weights
            )
            return scheme.finish(output, hidden), weights

        output, weights = scheme(attend)
        return output.transpose(1, 2).reshape(*hidden.shape[:-1], -1), weights


class PosencBody:
    """Mixin of patched bodies: finds out positions, applies `embed`, and hands the context down."""

    if TYPE_CHECKING:  # the other base, a model of transformers, has the rest

        def __getattr__(self, name: str) -> Any: ...

    # `disabled` acts here.
    posenc_switch: ClassVar[bool] = True
    # Names of the arguments of the stock forward, in order.
    posenc_arguments: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "posenc_stock" not in vars(cls):
            return  # FSDP derives classes of its own from ours.
        stock = vars(cls)["posenc_stock"]
        cls.posenc_arguments = tuple(inspect.signature(stock.forward).parameters)[1:]
        forward = cls.forward

        # Trainers read from the signature which columns of a dataset a model takes.
        @functools.wraps(stock.forward)
        def with_stock_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        cls.forward = with_stock_signature  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = dict(zip(self.posenc_arguments, args, strict=False)) | kwargs
        if vars(self).get("posenc_disabled"):
            return super().forward(**call, **{CONTEXT: Context()})  # type: ignore[misc]
        check_backend(self.config._attn_implementation)
        return super().forward(**self.prepare(call))  # type: ignore[misc]

    def prepare(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the stock forward, with positions, embedded inputs and the context in them."""
        inputs = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
        if inputs is None or (call.get("input_ids") is not None and call.get("inputs_embeds") is not None):
            return call  # The stock forward says what is wrong.
        token_cache.check(call.get("past_key_values"))
        batch, length = inputs.shape[:2]
        given, mask, past = (
            self.given_positions(call),
            call.get("attention_mask"),
            tokens_in(call.get("past_key_values")),
        )
        positions = resolve_positions(given, mask, past, batch, length, inputs.device)
        if given is not None and mask is None and not int(past):
            call["attention_mask"] = self.mask_of(positions, batch)
        shared = self._modules.get(SHARED)
        for scheme in () if shared is None else shared.schemes():
            if embeds(scheme):
                if call.get("inputs_embeds") is None:
                    call["inputs_embeds"] = self.get_input_embeddings()(call.pop("input_ids"))
                call["inputs_embeds"] = scheme(_embed, call["inputs_embeds"], positions)
        context = Context(positions, int(positions.max()) if positions.numel() else 0, shared)
        return self.hand_down(call, context)

    def mask_of(self, positions: Tensor, batch: int) -> Tensor | None:
        """Return the mask that explicit positions of the first tokens ask for.

        transformers finds packed sequences only where no cache is made, and takes any jump for the start of one.
        """
        packed = sequences(positions)
        if packed is not None:
            return same_sequence(packed, packed, causal=self.is_causal_stack(), float_dtype=self.mask_dtype())
        if bool((positions.diff(dim=-1) != 1).any()):
            return torch.ones(batch, positions.shape[1], dtype=torch.long, device=positions.device)
        return None

    def mask_dtype(self) -> torch.dtype | None:
        """Return the dtype of the masks that the attention implementation adds; `None` if it takes booleans."""
        dtype: torch.dtype = self.get_input_embeddings().weight.dtype
        return dtype if self.config._attn_implementation == "eager" else None

    def is_causal_stack(self) -> bool:
        """Whether tokens see earlier ones only."""
        return True

    def given_positions(self, call: dict[str, Any]) -> Tensor | None:
        """Return the positions that the caller passed, if any."""
        return call.get("position_ids")

    def hand_down(self, call: dict[str, Any], context: Context) -> dict[str, Any]:
        """Put positions and context into the arguments of the stock forward."""
        return call | {"position_ids": context.positions, CONTEXT: context}


def embeds(scheme: Scheme) -> bool:
    """Whether a scheme acts on the input of the first layer."""
    return scheme.overrides("embed")


def _embed(scheme: Scheme, inputs: Tensor, positions: Tensor) -> Tensor:
    return scheme.embed(inputs, positions)


def tokens_in(cache: Cache | None) -> int | Tensor:
    """Return how many tokens a cache holds."""
    if cache is None:
        return 0
    held = (cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache).get_seq_length()
    # A static cache counts in a tensor that its layers are about to change.
    return held.clone() if isinstance(held, torch.Tensor) else held
